"""Sessions of the release pipeline; each is a thin call, the logic lives in gate/ and ci/."""

from __future__ import annotations

import nox

nox.needs_version = ">=2026.10"
nox.options.error_on_missing_interpreters = True
nox.options.error_on_external_run = True
nox.options.stop_on_first_error = True
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "tests"]

PINS = ("-c", "ci/constraints.txt")


def install(session: nox.Session, *requirements: str) -> None:
    """Install at the pinned versions, into the session's own environment only."""
    if session.virtual_env is None or not session.virtual_env.is_sandboxed:
        session.error("this session needs its own environment: run nox without --no-venv")
    session.install("--quiet", *PINS, *requirements)


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel twice, compare them byte for byte, check them, write dist/."""
    install(session, "build", "hatchling", "twine")
    session.run("python", "ci/build.py", *session.posargs)


@nox.session
def gate(session: nox.Session) -> None:
    """Gate wheels (built first unless --wheel is given); arguments go to `gate run`."""
    install(session, "click", "packaging", "tomli", "build", "hatchling", "twine")
    env = {"GATE_INVOKED_FROM": session.invoked_from}
    session.run("python", "-m", "gate", "run", "--build", *session.posargs, env=env)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the test suite."""
    install(session, "torch", "numpy", "pytest", "hypothesis", "click", "packaging", "tomli")
    install(session, "build", "hatchling", "twine", "editables")
    session.install("--quiet", "--no-deps", "--no-build-isolation", "--editable", ".")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style (ruff) and types (mypy)."""
    install(session, "ruff", "mypy", "torch", "numpy", "click", "packaging", "nox")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
