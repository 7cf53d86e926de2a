"""The two commands, as typed: ci/nox on its own, and the gate through it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
NOXFILE = """\
import nox

@nox.session(venv_backend="none")
def show(session):
    print("seen", session.posargs, session.invoked_from)

@nox.session(venv_backend="none")
def fail(session):
    session.error("on purpose")
"""


def call(script: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script, *arguments],
        cwd=cwd,
        env={**os.environ, "PIP_USER": "1", "PIP_TARGET": str(cwd / "target")},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ci/nox in a checkout of its own, whose path has a space."""
    root = tmp_path_factory.mktemp("a b")
    shutil.copytree(ROOT / "ci", root / "ci")
    (root / "noxfile.py").write_text(NOXFILE)
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


def test_a_relative_wheel_counts_from_where_the_user_is(tmp_path: Path) -> None:
    folder = tmp_path / "some where"
    folder.mkdir()
    done = call(ROOT / "ci" / "nox", "-s", "gate", "--", "--wheel", "absent.whl", cwd=folder)
    assert done.returncode != 0
    assert f"looked for {folder / 'absent.whl'}" in done.stdout + done.stderr
