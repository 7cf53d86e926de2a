"""Find the wheels that ``--wheel`` means and take a private copy of each."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from gate import distinfo
from gate.archive import BadArchive, open_archive, printable
from gate.errors import EnvironmentFailed, UsageFailure, WheelRejected

MAX_WHEEL_BYTES = 4 * 1024**3
_CHUNK = 1024 * 1024
_METADATA_BYTES = 32 * 1024**2
_SDIST_SUFFIXES = (".tar.gz", ".zip", ".tar.bz2", ".tgz")


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel under test.

    Attributes:
        path: where the user has it, as typed (links not followed).
        filename: the name it is installed and published under.
        name: normalised name of the distribution.
        version: its version.
        sha256: digest of the bytes in ``copy``, in hexadecimal.
        copy: a private copy called ``filename``; later changes to ``path`` do not reach it.
    """

    path: Path
    filename: str
    name: str
    version: Version
    sha256: str
    copy: Path


def resolve(
    values: Sequence[str], *, base: Path, workdir: Path, option: str = "--wheel"
) -> list[Wheel]:
    """Find, copy and identify the wheels that the values name.

    Args:
        values: wheel files, directories or globs, as in :func:`locate`.
        base: the directory that relative values count from.
        workdir: a private directory for the copies; made if it does not exist.
        option: the option or argument to name in messages.

    Returns:
        The wheels in the order given. The same bytes under the same name come once.

    Raises:
        UsageFailure: a value is missing or finds nothing, or a file cannot be read.
        WheelRejected: something found is not a wheel, or its name disagrees with its metadata.
        EnvironmentFailed: the copies cannot be written.
    """
    wheels: list[Wheel] = []
    findings: list[str] = []
    seen: set[tuple[str, str]] = set()
    for number, path in enumerate(locate(values, base=base, option=option)):
        try:
            wheel = _wheel(path, workdir / str(number))
        except WheelRejected as error:
            findings.extend(error.findings)
            continue
        if (wheel.sha256, wheel.filename) in seen:
            wheel.copy.unlink()
            continue
        seen.add((wheel.sha256, wheel.filename))
        wheels.append(wheel)
    if findings:
        raise WheelRejected(
            "not installable as a wheel",
            findings=findings,
            next_step="build the wheel again; a wheel keeps the name its build gave it",
        )
    return wheels


def locate(values: Sequence[str], *, base: Path, option: str = "--wheel") -> list[Path]:
    """Expand wheel files, directories (all ``*.whl`` directly in them) and globs.

    Relative values count from ``base``; ``~`` and ``~user`` are expanded; what exists literally
    is taken literally, also where its name looks like a pattern. The contents are not looked at.

    Raises:
        UsageFailure: a value is missing, or finds nothing, or cannot be read.
        WheelRejected: a directory carries the name of a wheel.
    """
    if not values:
        raise UsageFailure(f"{option} needs a wheel: a file, a directory or a glob")
    return [path for value in values for path in _located(value, base, option)]


def _located(value: str, base: Path, option: str) -> list[Path]:
    _refuse_non_values(value, option)
    path = base / os.path.expanduser(value)  # noqa: PTH111 - Path.expanduser raises for no user
    problem = _why_not(path)
    if problem is None:
        return _wheels_in(path, value, option) if path.is_dir() else [path]
    if problem == errno.ENOENT and glob.has_magic(value):
        return _matches(value, base, option)
    reason = os.strerror(problem)
    if problem == errno.ENOENT and path.is_symlink():
        reason = f"a link to {printable(str(path.readlink()))}, which does not exist"
    hint = "pass a wheel file, a directory of wheels or a glob in quotes"
    if value.startswith("~") and path == base / value:
        hint = f"there is no user {value.partition('/')[0][1:]!r}; ./{value} names a file"
    if "://" in value:
        hint = "download it first, as with: pip download --no-deps"
    looked_for = printable(str(path))
    raise UsageFailure(f"{option} {value!r}: {reason} (looked for {looked_for})", next_step=hint)


def _refuse_non_values(value: str, option: str) -> None:
    if not value.strip():
        raise UsageFailure(
            f"{option} has an empty value", next_step="pass a wheel file, a directory or a glob"
        )
    if value.startswith("-"):
        raise UsageFailure(
            f"{option} lacks its value: {value!r} looks like an option",
            next_step="a file whose name starts with a dash is written ./-odd.whl",
        )
    if "\0" in value:
        raise UsageFailure(f"{option} {value!r}: a path has no NUL character")


def _why_not(path: Path) -> int | None:
    """The error number that following ``path`` gives, or None where something is there."""
    try:
        path.stat()
    except OSError as error:
        # A component that is a file or too long may still be a pattern that matches.
        missing = error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG) and glob.has_magic(str(path))
        return errno.ENOENT if missing else error.errno
    return None


def _wheels_in(folder: Path, value: str, option: str) -> list[Path]:
    if folder.suffix == ".whl":
        raise _rejected(folder, "is a directory, not a wheel")
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError as error:
        raise UsageFailure(f"{option} {value!r}: cannot list it: {error.strerror}") from error
    wheels = [name for name in names if name.endswith(".whl") and not name.startswith(".")]
    if not wheels:
        raise UsageFailure(
            f"{option} {value!r}: no *.whl among the {len(names)} entries of the directory",
            next_step="build one: ./ci/nox -s build",
        )
    return [path for name in wheels for path in _plain(folder / name)]


def _plain(path: Path) -> list[Path]:
    if path.is_dir():
        raise _rejected(path, "is a directory, not a wheel")
    return [path]


def _matches(value: str, base: Path, option: str) -> list[Path]:
    home, _, rest = value.partition("/") if value.startswith("~") else ("", "", value)
    start = base / os.path.expanduser(home)  # noqa: PTH111 - Path.expanduser raises for no user
    if rest.startswith("/"):
        start = Path("/")
    paths = [start]
    for part in rest.split("/"):
        paths = [found for path in paths for found in _step(path, part)]
    wheels = [path for path in paths if path.name.endswith(".whl")]
    if not wheels:
        found = f"{len(paths)} other entries" if paths else "nothing"
        raise UsageFailure(
            f"{option} {value!r}: the pattern matches {found}, no *.whl (below {start})",
            next_step="quote the pattern and end it with *.whl",
        )
    return [plain for path in wheels for plain in _plain(path)]


def _step(folder: Path, part: str) -> list[Path]:
    """What one component of a pattern stands for below a folder."""
    if part in ("", ".", "..") or os.path.lexists(folder / part):
        return [folder / part] if folder.is_dir() else []
    if part == "**":
        return [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
    hidden = part.startswith(".")
    return [
        folder / name
        for name in _names(folder)
        if fnmatchcase(name, part) and name.startswith(".") == hidden
    ]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def _wheel(path: Path, workdir: Path) -> Wheel:
    filename = _filename(path)
    copy = workdir / filename
    sha256 = _copied(path, copy)
    name, version, _, _ = parse_wheel_filename(filename)
    for problem in _content_problems(filename, copy):
        raise _rejected(path, problem)
    return Wheel(
        path=path, filename=filename, name=name, version=version, sha256=sha256, copy=copy
    )


def _filename(path: Path) -> str:
    """The wheel's own name: the link's, or its target's where only that is a wheel's name."""
    problem = ""
    for name in (path.name, path.resolve().name):
        try:
            parse_wheel_filename(name)
            return name
        except InvalidWheelFilename as error:
            problem = problem or str(error)
    if path.name.endswith(_SDIST_SUFFIXES):
        problem = "is a source distribution, not a wheel"
    elif not path.name.endswith(".whl"):
        problem = "is not called *.whl"
    raise _rejected(path, problem)


def _copied(path: Path, copy: Path) -> str:
    """Copy a file, and return the digest of what was copied."""
    digest = hashlib.sha256()
    try:
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        copy.unlink(missing_ok=True)
        with copy.open("xb") as file:
            for chunk in read_chunks(path):
                digest.update(chunk)
                file.write(chunk)
        copy.chmod(0o444)
    except OSError as error:
        raise EnvironmentFailed(
            f"cannot copy {printable(str(path))} to {copy.parent}: {error.strerror}",
            next_step="free some space or set TMPDIR to a larger disk",
        ) from error
    return digest.hexdigest()


def read_chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a regular file, in chunks; never waits for a pipe or a device.

    Raises:
        UsageFailure: the file cannot be read.
        WheelRejected: it is a pipe, device or directory, or larger than 4 GiB.
    """
    total = 0
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _rejected(path, "is a pipe, a device or a directory, not a file")
            while chunk := file.read(_CHUNK):
                total += len(chunk)
                if total > MAX_WHEEL_BYTES:
                    raise _rejected(path, f"is larger than {MAX_WHEEL_BYTES} bytes")
                yield chunk
    except OSError as error:
        raise UsageFailure(f"cannot read {printable(str(path))}: {error.strerror}") from error


def sha256_of(path: Path) -> str:
    """Digest of a regular file, in hexadecimal; errors as for :func:`read_chunks`."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def _content_problems(filename: str, copy: Path) -> Iterator[str]:
    try:
        with open_archive(copy) as archive:
            found = [m for m in archive.members if _is_metadata(m.name)]
            if not found:
                yield "has no *.dist-info/METADATA; this is no wheel"
            for member in found[:1]:
                data = archive.read(member, _METADATA_BYTES)
                problem = distinfo.disagreement(
                    filename, *distinfo.identity_of(data), "its METADATA"
                )
                if problem:
                    yield problem
    except BadArchive as error:
        yield f"broken archive: {error}"


def _is_metadata(name: str) -> bool:
    folder, _, rest = name.partition("/")
    return folder.endswith(".dist-info") and rest == "METADATA"


def _rejected(path: Path, problem: str) -> WheelRejected:
    finding = f"{printable(path.name)}: {printable(problem)}"
    return WheelRejected(f"not a wheel: {finding}", findings=[finding])
