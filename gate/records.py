"""Read and keep what a test process left behind: files that its code may have tampered with."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

Kind = TypeVar("Kind")

SIZE_LIMIT = 64 * 2**20


def read(path: Path) -> bytes | None:
    """Return a regular file's first 64 MiB; None for anything else, without ever waiting."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        return None
    with os.fdopen(handle, "rb") as file:
        return file.read(SIZE_LIMIT)


def read_text(path: Path) -> str:
    """Return a text file's content; "" where there is none."""
    return (read(path) or b"").decode("utf-8", "replace")


def read_json(path: Path, kind: type[Kind]) -> Kind | None:
    """Return a JSON file's content if it is a ``kind``, else None."""
    try:
        content = json.loads(read(path) or b"")
    except ValueError:
        return None
    return content if isinstance(content, kind) else None


def files(folder: Path) -> Iterator[Path]:
    """Every regular file below ``folder``; links are not followed."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield path


def size(folder: Path) -> int:
    """Bytes of all files below ``folder``."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(parent, name).lstat().st_size
            except FileNotFoundError:
                continue
    return total


def keep(folder: Path, target: Path) -> None:
    """Copy the regular files below ``folder``, but what is larger than 64 MiB only in part."""
    for path in files(folder):
        copy = target / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(read(path) or b"")
