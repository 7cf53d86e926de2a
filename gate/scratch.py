"""Temporary folders that outlive nobody: what a killed gate left is removed by the next one."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gate.errors import EnvironmentFailed

LOW_DISK = 2**20
_NAME = re.compile(r"gate-[a-z]+-[a-z0-9_]{8}")


@contextmanager
def scratch(purpose: str) -> Iterator[Path]:
    """Make a private folder below TMPDIR, and remove it afterwards.

    Args:
        purpose: one word of small letters, part of the folder's name.

    Raises:
        EnvironmentFailed: TMPDIR cannot be used.
    """
    folder, handle = _locked_folder(purpose)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def sweep() -> None:
    """Remove the folders of gates that are gone.

    Nobody else's: a folder must carry a name of ours, belong to this user, and be locked by no
    living process.
    """
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).iterdir():
            if _NAME.fullmatch(path.name):
                with suppress(OSError):
                    _remove_if_abandoned(path)


def low_on_disk(folder: Path) -> str:
    """Return a sentence where less than 1 MiB is left for files below ``folder``, or ""."""
    free = shutil.disk_usage(folder).free
    return f"only {free >> 10} KiB are free in {folder}" if free < LOW_DISK else ""


def unwritable(folder: Path) -> str:
    """Return why nothing can be written into ``folder``, made if it is not there, or ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def demand_plain(path: Path, what: str) -> None:
    """Refuse a path that an environment cannot lie below.

    Raises:
        EnvironmentFailed: it holds a colon or a line break.
    """
    if set(str(path)) & {os.pathsep, "\n"}:
        raise EnvironmentFailed(
            f"{what} is {str(path)!r}: no environment works in a folder with ':' or a line break"
            " in its path.",
            next_step=f"set {what} to another directory",
        )


def _locked_folder(purpose: str) -> tuple[Path, int]:
    """A new folder, and the open handle whose lock says that its owner lives."""
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"gate-{purpose}-")).resolve()
        except OSError as error:
            raise EnvironmentFailed(
                f"No temporary folder can be made: {error.strerror}.",
                next_step="free some space or set TMPDIR to a directory that can be written",
            ) from error
        try:
            demand_plain(folder.parent, "TMPDIR")
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        except BaseException:
            folder.rmdir()
            raise
        with suppress(OSError):  # without locks, as on some network disks, nothing is swept
            fcntl.flock(handle, fcntl.LOCK_EX)
        # Another gate may have taken it for abandoned just before it was locked.
        if os.fstat(handle).st_nlink:
            return folder, handle
        os.close(handle)


def _remove_if_abandoned(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)
