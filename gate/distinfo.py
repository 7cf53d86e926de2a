"""Check a wheel's ``.dist-info``: METADATA, WHEEL, RECORD and entry points.

Sources: the binary distribution format, core metadata, recording installed projects and entry
points specifications at packaging.python.org.
"""

from __future__ import annotations

import configparser
import csv
import hashlib
import io
import re
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Iterator, Mapping
from email.parser import BytesParser
from email.policy import compat32
from pathlib import Path

from packaging.errors import ExceptionGroup
from packaging.metadata import Metadata
from packaging.tags import Tag, parse_tag
from packaging.utils import BuildTag, InvalidName, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

HASHES = ("sha256", "sha384", "sha512")
UNLISTED = ("RECORD.jws", "RECORD.p7s")
_SIZE = re.compile(r"0|[1-9][0-9]*")


def metadata_of(data: bytes) -> tuple[Metadata | None, list[str], list[str]]:
    """Parse METADATA; what is wrong with it comes second, what is unusual third.

    Fields newer than the Metadata-Version are no more than that: build tools write them, and
    indexes take them.
    """
    try:
        return Metadata.from_email(data, validate=True), [], []
    except ExceptionGroup as group:
        problems = sorted(_flat(str(error)) for error in group.exceptions)
    except (ValueError, UnicodeDecodeError) as error:
        problems = [_flat(str(error))]
    if all("introduced in metadata version" in problem for problem in problems):
        return Metadata.from_email(data, validate=False), [], problems
    return None, problems, []


def _flat(text: str) -> str:
    return " ".join(text.split())


def identity_of(data: bytes) -> tuple[str | None, str | None]:
    """The first Name and Version that METADATA gives, unchecked."""
    message = BytesParser(policy=compat32).parsebytes(data, headersonly=True)
    name, version = message.get("Name"), message.get("Version")
    return name and str(name).strip(), version and str(version).strip()


def disagreement(filename: str, name: str | None, version: str | None, where: str) -> str | None:
    """How a name and version differ, normalised, from those of a wheel's file name."""
    file_name, file_version, _, _ = parse_wheel_filename(filename)
    try:
        same_name = name is not None and canonicalize_name(name, validate=True) == file_name
        same_version = version is not None and Version(version) == file_version
    except (InvalidName, InvalidVersion) as error:
        return f"{where}: {error}"
    if same_name and same_version:
        return None
    return f"{where} is of {name} {version}, the file name says {file_name} {file_version}"


def wheel_findings(data: bytes, build: BuildTag, tags: frozenset[Tag]) -> Iterator[str]:
    """What is wrong with the WHEEL file, given what the file name says."""
    message = BytesParser(policy=compat32).parsebytes(data, headersonly=True)
    fields: dict[str, list[str]] = {}
    for key, value in message.items():
        fields.setdefault(key.lower(), []).append(str(value).strip())
    if message.defects or any(not value for values in fields.values() for value in values):
        yield "WHEEL is malformed"
    for key in ("wheel-version", "root-is-purelib"):
        if len(fields.get(key, [])) != 1:
            yield f"WHEEL must have one {key.title()}, not {len(fields.get(key, []))}"
    wheel_version = fields.get("wheel-version", ["1.0"])[0]
    if not re.fullmatch(r"1\.[0-9]+", wheel_version):
        yield f"Wheel-Version is {wheel_version!r}, installers know 1.x"
    yield from _build_findings(fields.get("build", []), build)
    yield from _tag_findings(fields.get("tag", []), tags)
    yield from _purelib_findings(fields.get("root-is-purelib", ["?"])[0], tags)


def _build_findings(given: list[str], build: BuildTag) -> Iterator[str]:
    expected = ["".join(map(str, build))] if build else []
    if [value.lstrip("0") or value for value in given] != [v.lstrip("0") or v for v in expected]:
        yield f"WHEEL has Build {given or 'none'}, the file name {expected or 'none'}"


def _tag_findings(given: list[str], tags: frozenset[Tag]) -> Iterator[str]:
    listed = [str(tag) for value in given for tag in _parsed_tag(value)]
    for tag, count in Counter(listed).items():
        if count > 1:
            yield f"WHEEL has Tag {tag} {count} times"
    expected = {str(tag) for tag in tags}
    for tag in sorted(set(listed) - expected):
        yield f"WHEEL has Tag {tag}, the file name does not"
    for tag in sorted(expected - set(listed)):
        yield f"the file name has tag {tag}, WHEEL does not"


def _parsed_tag(value: str) -> list[Tag | str]:
    """The tags a value stands for; some builders leave them compressed."""
    try:
        return list(parse_tag(value))
    except ValueError:
        return [value]


def _purelib_findings(value: str, tags: frozenset[Tag]) -> Iterator[str]:
    pure = value.lower()
    if pure not in ("true", "false"):
        yield f"Root-Is-Purelib is {value!r}, not true or false"
    if pure == "true" and all(tag.abi != "none" for tag in tags):
        yield "Root-Is-Purelib is true, but the tags name an ABI"
    if pure == "false" and all(tag.platform == "any" for tag in tags):
        yield "Root-Is-Purelib is false, but the tags fit any platform"


Row = tuple[str, str]


def record_rows(data: bytes, name: str) -> tuple[dict[str, Row], list[str]]:
    """Parse RECORD (called ``name`` in the archive) into {path: (hash, size)}, and findings."""
    rows: dict[str, Row] = {}
    findings: list[str] = []
    try:
        text = data.decode("utf-8")
        parsed = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        return {}, [f"{name} cannot be parsed: {error}"]
    for number, row in enumerate(parsed, 1):
        if len(row) != 3:
            findings.append(f"{name}, line {number}: {len(row)} fields, not 3")
            continue
        path, digest, size = row
        problem = _row_problem(path, digest, size, name)
        if path in rows:
            problem = "is listed twice"
        if problem:
            findings.append(f"{path}: {problem}")
        rows.setdefault(path, (digest, size))
    if name not in rows:
        findings.append(f"{name} does not list itself")
    return rows, findings


def _row_problem(path: str, digest: str, size: str, record: str) -> str | None:
    if path == record:
        return "lists a hash or size of itself" if digest or size else None
    if path in {record.removesuffix("RECORD") + name for name in UNLISTED}:
        return "must not be listed with a hash" if digest else None
    if path.endswith("/"):
        return "is a directory; RECORD lists files"
    if path.startswith("/") or any(part in ("", ".", "..") for part in path.split("/")):
        return "is not a normalised relative path"
    algorithm, _, value = digest.partition("=")
    if algorithm not in HASHES or not value:
        return f"has hash {digest!r}; RECORD takes {', '.join(HASHES)}"
    if not _SIZE.fullmatch(size):
        return f"has size {size!r}"
    return None


def algorithm_of(row: Row | None) -> str:
    """The hash that a member must be checked with."""
    algorithm = row[0].partition("=")[0] if row else ""
    return algorithm if algorithm in HASHES else "sha256"


def encoded(algorithm: str, digest: bytes) -> str:
    """A hash as RECORD writes it."""
    return f"{algorithm}={urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def digest_of(path: Path, algorithm: str) -> str:
    """The hash of a file on disk, as RECORD writes it."""
    digest = hashlib.new(algorithm)
    with path.open("rb") as file:
        while chunk := file.read(1024 * 1024):
            digest.update(chunk)
    return encoded(algorithm, digest.digest())


def record_findings(
    rows: Mapping[str, Row], found: Mapping[str, tuple[str, int]], name: str
) -> Iterator[str]:
    """Compare RECORD's rows with the {path: (hash, size)} of the files that are there."""
    folder = name.removesuffix("RECORD")
    free = {name, *(folder + other for other in UNLISTED)}
    for path, (digest, size) in found.items():
        if path in free:
            continue
        if path not in rows:
            yield f"{path}: is not listed in RECORD"
            continue
        listed_digest, listed_size = rows[path]
        if listed_digest != digest:
            yield f"{path}: its hash is not the one in RECORD"
        if listed_size != str(size):
            yield f"{path}: is {size} bytes, RECORD says {listed_size or 'nothing'}"
    for path in rows:
        if path not in found and path not in free and not path.endswith("/"):
            yield f"{path}: is listed in RECORD but missing from the wheel"


def entry_points_of(data: bytes) -> tuple[frozenset[str], list[str]]:
    """Parse entry_points.txt into {"group:name"}, and findings."""
    parser = configparser.ConfigParser(
        delimiters=("=",), interpolation=None, default_section="", strict=True
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(data.decode("utf-8"))
    except (UnicodeDecodeError, configparser.Error) as error:
        return frozenset(), [f"entry_points.txt cannot be parsed: {_flat(str(error))}"]
    return frozenset(
        f"{group}:{name}" for group in parser.sections() for name in parser[group]
    ), []
