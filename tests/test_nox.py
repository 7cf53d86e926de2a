"""The two commands, as typed: ci/nox on its own, and the gate through it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.gate.index_server import answer, stub_server

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
# Nothing is installed: the gate runs in the environment of these tests.
ADDED = """
nox.options.default_venv_backend = "none"

def install(session, *requirements):
    pass

@nox.session(venv_backend="none")
def show(session):
    print("seen", session.posargs, session.invoked_from)

@nox.session(venv_backend="none")
def fail(session):
    session.error("on purpose")
"""


def call(
    script: Path, *arguments: str, cwd: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script, *arguments],
        cwd=cwd,
        env={**os.environ, **variables, "PIP_USER": "1", "PIP_TARGET": str(cwd / "target")},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ci/nox in a checkout of its own, whose path has a space, with two more sessions."""
    root = tmp_path_factory.mktemp("a b")
    for folder in ("ci", "gate", "tests/regression"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    shutil.copyfile(ROOT / "pyproject.toml", root / "pyproject.toml")
    (root / "noxfile.py").write_text((ROOT / "noxfile.py").read_text() + ADDED)
    return root / "ci" / "nox"


def test_nox_is_installed_on_first_use_only(script: Path, tmp_path: Path) -> None:
    first = call(script, "-s", "show", "--", "x y", "--wheel", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert f"seen ['x y', '--wheel'] {tmp_path}" in first.stdout
    assert "first use" in first.stderr
    assert not (tmp_path / "target").exists()

    second = call(script, "-s", "fail", cwd=tmp_path)
    assert second.returncode == 1
    assert "on purpose" in second.stderr
    assert "first use" not in second.stderr
    assert len(list((script.parent.parent / ".nox").glob("bootstrap-*"))) == 1


def search_path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def gate(script: Path, *arguments: str, cwd: Path) -> str:
    """What the gate says when a session of nox runs it on a command line that is wrong."""
    done = call(script, "-s", "gate", "--", *arguments, cwd=cwd, PATH=search_path())
    assert done.returncode == 2, done.stderr
    return done.stdout + done.stderr


def test_the_gate_knows_where_the_user_is(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "some where"
    folder.mkdir()
    said = gate(script, "--wheel", "absent.whl", cwd=folder)
    assert f"looked for {folder / 'absent.whl'}" in said
    # What it advises to type works from there.
    typed = os.path.relpath(script, folder)
    assert f"Usage: '{typed}' -s gate -- verify " in gate(script, "verify", cwd=folder)
    assert (folder / typed).samefile(script)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_gate_ends_with_nox(number: signal.Signals, script: Path, tmp_path: Path) -> None:
    asked, released = threading.Event(), threading.Event()

    def hang(request: BaseHTTPRequestHandler) -> None:
        asked.set()
        released.wait(120)
        answer(request, 404)

    with stub_server(hang) as url:
        options = ("v9.9", "--no-tag-check", "--from", url, "--evidence", str(tmp_path))
        process = subprocess.Popen(
            [sys.executable, script, "-s", "gate", "--", *options],
            env={**os.environ, "PATH": search_path()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            assert asked.wait(240)
            process.send_signal(number)
            # Ends when nobody holds the other end any more.
            said, _ = process.communicate(timeout=60)
        released.set()
    assert process.returncode == -number
    assert "Interrupted by SIGTERM" in said
