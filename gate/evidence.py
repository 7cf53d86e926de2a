"""Evidence folders: write, revoke and verify statements about wheels."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mimetypes
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gate import signature
from gate.archive import printable
from gate.errors import EnvironmentFailed, EvidenceRejected, UsageFailure, WheelRejected
from gate.runner import Runner
from gate.statement import BadSignature, BadStatement, Statement, descriptor, document, parse
from gate.wheels import Wheel, sha256_of

FOLDER = "statements"
SUFFIX = ".intoto.json"
_MAX_NAME_BYTES = 255 - len(signature.SUFFIX)
_MAX_ID = 60
_MAX_STATEMENT_BYTES = 64 * 1024**2
_MAX_SIGNATURE_BYTES = 64 * 1024
_CACHES = ("__pycache__", ".pytest_cache", ".hypothesis")


def suite_digest(folder: Path) -> str:
    """Digest, in hexadecimal, of the names and contents of all files of a regression suite.

    Caches are left out; otherwise two folders have the same digest if they hold the same files.

    Raises:
        UsageFailure: the folder holds no file.
    """
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )
    names = [name for name in names if not set(name.split("/")) & set(_CACHES)]
    if not names:
        raise UsageFailure(f"no regression suite in {folder}")
    lines = (f"{sha256_of(folder / name)} {json.dumps(name)}\n" for name in names)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def environment_id(environment: Mapping[str, Any]) -> str:
    """A short name for an environment: its ``id``, or its versions of torch and Python."""
    versions = f"torch{environment.get('torch', '')}-py{environment.get('python', '')}"
    text = str(environment.get("id") or versions)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "_", text)
    if slug == text and len(text) <= _MAX_ID:
        return text
    return f"{slug[:_MAX_ID]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def write_statement(
    directory: Path,
    *,
    wheel: Wheel,
    profile: str,
    environment: Mapping[str, Any],
    suite_digest: str,
    commit: str | None,
    executed_archs: Iterable[str],
    embedded_archs: Iterable[str],
    passed_tests: Sequence[str],
    files: Sequence[Path],
    started: str,
    finished: str,
    sign: Callable[[bytes], bytes] | None = None,
) -> Path:
    """Write, in one step, the statement that all tests passed against a wheel.

    Args:
        directory: the evidence folder.
        profile: what was run: cpu, gpu or multi-gpu.
        environment: JSON-compatible facts (torch, python, driver, gpus, ...).
        suite_digest: :func:`suite_digest` of the tests that were run.
        commit: git commit of the checkout, or None outside one.
        executed_archs: GPU architectures whose code ran.
        embedded_archs: GPU architectures that the wheel carries.
        passed_tests: ids of all tests; all of them passed.
        files: reports and logs inside ``directory`` to bind by their digest.
        started, finished: when the run began and when it ended, in RFC 3339.
        sign: makes the signature to put beside the statement, which is unsigned without.

    Returns:
        The path of the statement, below ``directory / "statements"``.

    Raises:
        ValueError: there is no test or one comes twice, or a file lies outside the folder.
        EnvironmentFailed: the statement cannot be written.
    """
    if not passed_tests or len(set(passed_tests)) != len(passed_tests):
        raise ValueError("a statement needs the ids of the tests that passed, each once")
    run = {
        "profile": profile,
        "environment": dict(environment),
        "environmentId": environment_id(environment),
        "executedArchs": sorted(executed_archs),
        "embeddedArchs": sorted(embedded_archs),
        "started": started,
        "finished": finished,
    }
    text = document(
        filename=wheel.filename,
        sha256=wheel.sha256,
        run=run,
        others=[*_sources(suite_digest, commit), *(_bound(directory, path) for path in files)],
        passed_tests=passed_tests,
    )
    path = statement_path(directory, wheel, profile, environment)
    _publish(path, text.encode(), sign)
    return path


def _sources(suite_digest: str, commit: str | None) -> list[dict[str, Any]]:
    suite = descriptor("tests/regression", {"sha256": suite_digest}, "suite")
    return [suite, *([descriptor("source", {"gitCommit": commit}, "source")] if commit else [])]


def _publish(path: Path, text: bytes, sign: Callable[[bytes], bytes] | None) -> None:
    """Remove an earlier statement; put the signature in place, then what it signs."""
    signed = sign(text) if sign else None
    _remove(path)
    if signed:
        write_file(_signature_path(path), signed)
    write_file(path, text)


def _signature_path(statement: Path) -> Path:
    return statement.with_name(statement.name + signature.SUFFIX)


def _bound(directory: Path, path: Path) -> dict[str, Any]:
    name = path.resolve().relative_to(directory.resolve()).as_posix()
    bound = descriptor(name, {"sha256": sha256_of(path)}, "file")
    media_type = mimetypes.guess_type(name)[0]
    return {**bound, "mediaType": media_type} if media_type else bound


def statement_path(
    directory: Path, wheel: Wheel, profile: str, environment: Mapping[str, Any]
) -> Path:
    """Where the statement on a wheel, a profile and an environment goes.

    The digest is part of the name, so that evidence of two builds of one version can coexist.
    """
    tail = f".{wheel.sha256[:12]}.{profile}.{environment_id(environment)}{SUFFIX}"
    stem = wheel.filename
    while len((stem + tail).encode()) > _MAX_NAME_BYTES:
        stem = stem[:-1]
    return directory / FOLDER / (stem + tail)


def revoke(directory: Path, *, wheel: Wheel, profile: str, environment: Mapping[str, Any]) -> None:
    """Remove what an earlier run stated on the same wheel, profile, environment, and who signed.

    Raises:
        EnvironmentFailed: it is there and cannot be removed.
    """
    _remove(statement_path(directory, wheel, profile, environment))


def _remove(statement: Path) -> None:
    for path in (statement, _signature_path(statement)):
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
        except OSError as error:
            raise EnvironmentFailed(f"cannot remove {path}: {error.strerror}") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other gates, which may run on the same wheel, from writing meanwhile."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_file(path: Path, data: bytes) -> None:
    """Write a file so that it is there completely or not at all, even if the power fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        try:
            with open(handle, "wb") as file:  # noqa: PTH123 - a descriptor
                file.write(data)
                file.flush()
                os.fchmod(handle, 0o644)
                os.fsync(handle)
            Path(part).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(part).unlink()
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise EnvironmentFailed(
            f"cannot write {path}: {error.strerror}",
            next_step="free some space or choose another folder with --evidence",
        ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A wheel whose evidence holds.

    Attributes:
        path: the file that was verified.
        filename: the name that the evidence is about.
        sha256: digest of its bytes, in hexadecimal.
        statements: the statements that hold, sorted by profile and environment.
    """

    path: Path
    filename: str
    sha256: str
    statements: tuple[Statement, ...]

    @property
    def profiles(self) -> frozenset[str]:
        """The profiles that passed against these bytes."""
        return frozenset(statement.profile for statement in self.statements)


@dataclass(frozen=True, kw_only=True)
class _Demands:
    """What statements must be for a wheel to be covered; see :func:`verify`."""

    require: Sequence[str] = ()
    suite_digest: str | None = None
    signers: Sequence[str] = ()
    signed_by: Callable[[bytes, bytes], tuple[str, ...]] = lambda _message, _signature: ()

    def meets(self, statement: Statement) -> bool:
        return not self.signers or not set(self.signers).isdisjoint(statement.signed_by)


@dataclass(frozen=True, kw_only=True)
class _Folder:
    """What an evidence folder holds."""

    path: Path
    statements: tuple[Statement, ...]
    broken: tuple[tuple[Path, BadStatement], ...]


def verify(
    wheels: Sequence[Path | Wheel],
    *,
    evidence: Path,
    require: Sequence[str] = (),
    suite_digest: str | None = None,
    signers: Sequence[str] = (),
    allowed_signers: Path = signature.ALLOWED,
    runner: Runner | None = None,
) -> list[Verified]:
    """Check that the evidence folder covers exactly these bytes.

    Only the bytes and the name of a wheel are looked at, so a damaged one is refused as well.

    Args:
        wheels: files, or resolved wheels (of which the private copy is read again).
        evidence: the evidence folder.
        require: profiles that each wheel needs; with none, any statement is enough.
        suite_digest: digest of today's tests; statements on other tests are stale. None accepts
            all.
        signers: only statements that one of these signed count; with none, unsigned ones do too.
        allowed_signers: the keys of all who may sign. A signature by anyone else is refused, also
            where none is needed.
        runner: starts ssh-keygen, where there are signatures.

    Raises:
        EvidenceRejected: with one reason for each wheel that lacks evidence.
        UsageFailure: there is no wheel, or one cannot be read.
        EnvironmentFailed: there is a signature, and no ssh-keygen.
    """
    demands = _Demands(
        require=require,
        suite_digest=suite_digest,
        signers=signers,
        signed_by=partial(signature.signers, allowed=allowed_signers, runner=runner or Runner()),
    )
    return _verify(wheels, evidence, demands)


def sign_statements(
    wheels: Sequence[Path | Wheel],
    *,
    evidence: Path,
    suite_digest: str,
    sign: Callable[[bytes], bytes],
) -> list[Path]:
    """Sign all that is stated on these wheels, in place of signatures that are there.

    Args:
        wheels: as in :func:`verify`, which must accept them, their signatures aside.
        evidence: the evidence folder.
        suite_digest: digest of today's tests.
        sign: makes a signature.

    Returns:
        The statements that were signed.

    Raises:
        EvidenceRejected, UsageFailure: as in :func:`verify`.
        EnvironmentFailed: a signature cannot be written.
    """
    demands = _Demands(suite_digest=suite_digest)
    verified = _verify(wheels, evidence, demands)
    statements = [statement for wheel in verified for statement in wheel.statements]
    for statement in statements:
        write_file(_signature_path(statement.path), sign(statement.data))
    return [statement.path for statement in statements]


def _verify(wheels: Sequence[Path | Wheel], evidence: Path, demands: _Demands) -> list[Verified]:
    if not wheels:
        raise UsageFailure("there is no wheel to verify")
    folder = _read_folder(evidence)
    verified: list[Verified] = []
    findings: list[str] = []
    steps: list[str] = []
    for wheel in wheels:
        path = wheel.path if isinstance(wheel, Wheel) else wheel
        try:
            verified.append(_verified(wheel, folder, demands))
        except BadStatement as error:
            findings.append(printable(f"{path.name}: {error.reason}"))
            steps.append(_next_step(path, error))
    if findings:
        raise EvidenceRejected(
            f"evidence in {evidence} does not cover {len(findings)} of {len(wheels)} wheels",
            findings=findings,
            next_step=steps[0],
        )
    return verified


def _next_step(wheel: Path, error: BadStatement) -> str:
    name = shlex.quote(str(wheel))
    if isinstance(error, BadSignature):
        return f"have its statements signed: python -m gate sign {name} --key KEY"
    profile = f" --profile {error.profiles[0]}" if error.profiles else ""
    return f"gate these bytes: python -m gate run --wheel {name}{profile}"


def _read_folder(evidence: Path) -> _Folder:
    statements: list[Statement] = []
    broken: list[tuple[Path, BadStatement]] = []
    for path in sorted((evidence / FOLDER).glob(f"*{SUFFIX}")):
        try:
            statements.append(parse(path, _bytes_of(path, _MAX_STATEMENT_BYTES)))
        except BadStatement as error:
            broken.append((path, error))
    statements.sort(key=lambda s: (s.profile, s.environment_id, s.path))
    return _Folder(path=evidence, statements=tuple(statements), broken=tuple(broken))


def statements_in(evidence: Path) -> tuple[Statement, ...]:
    """Return the statements of an evidence folder that can be read, whether or not they hold."""
    return _read_folder(evidence).statements


def signature_of(statement: Statement, signers: Callable[[bytes, bytes], tuple[str, ...]]) -> str:
    """Say who signed a statement, or why its signature does not count."""
    try:
        names = _signed_by(statement, _Demands(signed_by=signers))
    except (BadSignature, EnvironmentFailed) as error:
        return f"signature not accepted: {error}"
    return replace(statement, signed_by=names).signature()


def _bytes_of(path: Path, limit: int) -> bytes:
    try:
        if not path.is_file() or path.stat().st_size > limit:
            raise BadStatement("is no file of a sensible size")
        return path.read_bytes()
    except OSError as error:
        raise BadStatement(f"cannot be read: {error.strerror}") from error


def _verified(wheel: Path | Wheel, folder: _Folder, demands: _Demands) -> Verified:
    """Verify one wheel; the reason against it is raised as a BadStatement."""
    names: tuple[str, ...]
    if isinstance(wheel, Wheel):
        path, names, digest = wheel.path, (wheel.filename,), sha256_of(wheel.copy)
    else:
        path, names, digest = wheel, (wheel.name, wheel.resolve().name), sha256_of(wheel)
    for broken, error in folder.broken:
        if error.claimed == digest or f".{digest[:12]}." in broken.name:
            raise BadStatement(f"{broken.name} {error.reason}")
    mine = [statement for statement in folder.statements if statement.sha256 == digest]
    if not mine:
        raise BadStatement(_none_found(folder, names, digest))
    for statement in mine:
        for problem in _problems(statement, folder.path, names):
            raise BadStatement(f"{statement.path.name} {problem}")
    mine = [replace(statement, signed_by=_signed_by(statement, demands)) for statement in mine]
    suite = demands.suite_digest
    fresh = [s for s in mine if suite is None or s.suite_digest == suite]
    holding = [statement for statement in fresh if demands.meets(statement)]
    covered = {statement.profile for statement in holding}
    missing = [profile for profile in demands.require if profile not in covered]
    if missing or not holding:
        raise _not_covered(mine, fresh, missing, demands)
    return Verified(path=path, filename=mine[0].filename, sha256=digest, statements=tuple(holding))


def _signed_by(statement: Statement, demands: _Demands) -> tuple[str, ...]:
    path = _signature_path(statement.path)
    if not path.exists() and not path.is_symlink():
        return ()
    try:
        data = _bytes_of(path, _MAX_SIGNATURE_BYTES)
    except BadStatement as error:
        raise BadSignature(f"{path.name} {error.reason}") from error
    try:
        return demands.signed_by(statement.data, data)
    except BadSignature as error:
        raise BadSignature(f"{statement.path.name} {error.reason}") from error


def _none_found(folder: _Folder, names: Sequence[str], digest: str) -> str:
    if not folder.path.is_dir():
        return f"no evidence: {folder.path} does not exist"
    others = sorted({s.sha256 for s in folder.statements if s.filename in names})
    if others:
        return (
            f"evidence is for other bytes: this file has sha256 {digest}, "
            f"evidence is for {', '.join(others)}"
        )
    unreadable = f", and {len(folder.broken)} unreadable statements" if folder.broken else ""
    return f"no evidence for sha256 {digest}{unreadable}"


def _not_covered(
    mine: Sequence[Statement],
    fresh: Sequence[Statement],
    missing: Sequence[str],
    demands: _Demands,
) -> BadStatement:
    needed = missing or sorted({statement.profile for statement in mine})
    reasons = []
    if absent := [p for p in needed if not any(s.profile == p for s in mine)]:
        there = sorted({statement.profile for statement in mine})
        reasons.append(f"lacks profile {', '.join(absent)} (there is {', '.join(there)})")
    current = {statement.profile for statement in fresh}
    if old := [p for p in needed if p not in current and p not in absent]:
        reasons.append(f"stale for profile {', '.join(old)}: the tests changed since")
    if reasons:
        return BadStatement("; ".join(reasons), profiles=[*absent, *old])
    for statement in fresh:
        if statement.profile in needed and not demands.meets(statement):
            wanted = f"{' or '.join(demands.signers)} must sign it"
            reasons.append(f"profile {statement.profile} is {statement.signature()}; {wanted}")
    return BadSignature("; ".join(reasons))


def _problems(statement: Statement, evidence: Path, names: Sequence[str]) -> Iterator[str]:
    if statement.filename not in names:
        yield f"is for a file called {statement.filename}"
    for name, expected in statement.files.items():
        path = evidence / name
        if _leads_out(name, path, evidence):
            yield f"binds {name}, which lies outside the evidence folder"
            continue
        try:
            if sha256_of(path) != expected:
                yield f"binds {name}, which was altered"
        except (UsageFailure, WheelRejected):
            yield f"binds {name}, which is missing or cannot be read"


def _leads_out(name: str, path: Path, evidence: Path) -> bool:
    if "\\" in name or "\0" in name or name.startswith("/") or ".." in name.split("/"):
        return True
    return not path.resolve().is_relative_to(evidence.resolve())
