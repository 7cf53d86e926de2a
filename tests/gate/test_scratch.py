from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gate.errors import EnvironmentFailed
from gate.scratch import scratch, sweep
from tests.gate.conftest import ROOT

KEEPER = """
import sys, tempfile
from gate.scratch import scratch
with scratch("environment") as folder:
    (folder / "file").write_text("")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def keeper(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", KEEPER],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_private_and_removed(temporary: Path) -> None:
    with scratch("wheels") as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("")
    assert not list(temporary.iterdir())


def test_what_a_killed_gate_left_is_removed_and_what_a_living_one_uses_is_not(
    temporary: Path,
) -> None:
    process, folder = keeper(temporary)
    with process:
        sweep()
        assert (folder / "file").exists()
        process.kill()
    assert (folder / "file").exists()
    sweep()
    assert not list(temporary.iterdir())


def test_only_folders_of_the_gate_are_removed(temporary: Path, tmp_path: Path) -> None:
    others = [temporary / name for name in ("gate-", "gate-work", "gate-wheels-notes", "x")]
    others.append(temporary / "gate-wheels-abcdefgh.bak")
    shared = temporary / "gate-wheels-shared__"  # the right name, but others may use it
    for folder in [*others, shared]:
        folder.mkdir(mode=0o755)
    (temporary / "gate-wheels-afile___").write_text("")
    (tmp_path / "target").mkdir(mode=0o700)
    (temporary / "gate-wheels-alink___").symlink_to(tmp_path / "target")
    before = sorted(temporary.iterdir())
    sweep()
    assert sorted(temporary.iterdir()) == before
    assert (tmp_path / "target").exists()


def test_a_folder_that_was_taken_for_abandoned_is_replaced(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = fcntl.flock, []

    def flock(handle: int, kind: int) -> None:
        if not taken:  # another gate sweeps between the making of the folder and its lock
            taken.extend(temporary.iterdir())
            taken[0].rmdir()
        real(handle, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    with scratch("wheels") as folder:
        assert folder.exists()
        assert folder != taken[0]


def test_where_folders_cannot_be_locked_nothing_is_swept(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_handle: int, _kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with scratch("wheels") as folder:
        sweep()
        assert folder.exists()
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("name", ["a:b", "a\nb"])
def test_a_folder_that_no_environment_can_lie_in_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    with pytest.raises(EnvironmentFailed, match="set TMPDIR to another"), scratch("wheels"):
        pass
    assert not list((tmp_path / name).iterdir())


def test_a_temporary_directory_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(EnvironmentFailed, match="No such file"), scratch("wheels"):
        pass
    sweep()
