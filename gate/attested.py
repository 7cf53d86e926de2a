"""The files of a release, each in a private copy, once all is known that needs no index."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidSdistFilename, parse_sdist_filename
from packaging.version import Version

from gate import audit as auditing
from gate.build import build
from gate.errors import EvidenceRejected, UsageFailure, WheelRejected
from gate.evidence import Verified, suite_digest, verify
from gate.policy import Policy, PublishPolicy
from gate.repository import Repository
from gate.statement import Statement
from gate.wheels import Wheel, locate, read_chunks, resolve, sha256_of

SDIST = ".tar.gz"


@dataclass(frozen=True, kw_only=True)
class File:
    """A file to publish.

    Attributes:
        name: its file name.
        project: normalised name of the distribution.
        version: its version.
        sha256: digest of the bytes in ``copy``, in hexadecimal.
        copy: a private copy called ``name``; later changes to the user's file do not reach it.
        statements: those that cover it; none for an sdist.
    """

    name: str
    project: str
    version: Version
    sha256: str
    copy: Path
    statements: tuple[Statement, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Release:
    """What decides whether files may be published.

    Attributes:
        repository: the checkout that is released; its regressions are the ones that count.
        rules: its ``[tool.gate]``.
        target: what the index requires of evidence.
        evidence: the evidence folder.
        base: directory that relative files count from.
        scratch: an empty private folder for the copies.
    """

    repository: Repository
    rules: Policy
    target: PublishPolicy
    evidence: Path
    base: Path
    scratch: Path

    def wheels(self, paths: Sequence[Path]) -> list[tuple[Wheel, Verified]]:
        """Copy wheels that evidence covers, made in a clean checkout of their version's tag.

        Raises:
            EvidenceRejected: it does not, or the checkout is not clean or not at that tag.
            WheelRejected: one is not a wheel.
        """
        # First what the user has: a damaged file is above all one without evidence.
        self._verify(paths)
        wheels = resolve(
            [str(path) for path in paths],
            base=self.base,
            workdir=self.scratch / "wheels",
            option="WHEEL",
        )
        verified = self._verify(wheels)
        heads = [self.repository.demand_release(wheel.version) for wheel in wheels]
        self._demand_made_at(heads[0], verified)
        return list(zip(wheels, verified, strict=True))

    def audit(self, wheels: Sequence[Wheel]) -> None:
        """Audit wheels, and compare their contents with the checkout.

        Raises:
            WheelRejected: with all findings on the first that is refused.
        """
        for wheel in wheels:
            own = self.rules.audit_of(wheel.name)
            repository = self.repository
            auditing.audit(wheel, own, source=repository.root, runner=repository.runner)

    def sdists(self, paths: Sequence[Path], wheels: Sequence[File]) -> list[File]:
        """Copy sdists that this checkout builds, byte for byte, together with attested wheels.

        Raises:
            EvidenceRejected: it builds another sdist, or another wheel from it.
            WheelRejected: one is not called as sdists are.
            BuildFailed: the checkout cannot be built.
        """
        folders = [self.scratch / f"sdist{number}" for number in range(len(paths))]
        sdists = list(map(_sdist, paths, folders))
        findings = [line for sdist in sdists for line in _unlike(sdist, wheels, None)]
        if not findings:
            built = self.scratch / "built"
            build(self.repository, built, self.repository.runner)
            digests = {path.name: sha256_of(path) for path in built.iterdir()}
            findings = [line for sdist in sdists for line in _unlike(sdist, wheels, digests)]
        if findings:
            raise EvidenceRejected(
                "Evidence is about wheels; an sdist counts where it is built with one of them",
                findings=findings,
                next_step="publish both files that `python -m gate build` left in dist/",
            )
        return sdists

    def _verify(self, wheels: Sequence[Path | Wheel]) -> list[Verified]:
        root = self.repository.root
        return verify(
            wheels,
            evidence=self.evidence,
            require=self.target.profiles,
            suite_digest=suite_digest(root / "tests" / "regression"),
            signers=self.target.signers,
            allowed_signers=root / "ci" / "allowed_signers",
            runner=self.repository.runner,
        )

    def _demand_made_at(self, head: str, verified: Sequence[Verified]) -> None:
        """Check that the gate that made the evidence is the one that is released, unchanged."""
        findings, again = [], ""
        for each in verified:
            made = {
                statement.profile
                for statement in each.statements
                if statement.commit == head and statement.environment.get("dirty") is False
            }
            if not made or not made.issuperset(self.target.profiles):
                lacking = sorted(set(self.target.profiles or each.profiles) - made)
                findings.append(f"{each.filename}: profile {', '.join(lacking)}")
                again = again or f"{shlex.quote(str(each.path))} --profile {lacking[0]}"
        if findings:
            raise EvidenceRejected(
                f"Evidence was not made in a clean checkout of {head[:12]}, which is released",
                findings=findings,
                next_step=f"gate these bytes there: python -m gate run --wheel {again}",
            )


def attested(files: Sequence[str], release: Release) -> list[File]:
    """Find the files, and accept them if each is a gated wheel or an sdist built with one.

    Raises:
        UsageFailure: a file is missing, or two have the same name.
        GateError: as the methods of :class:`Release`.
    """
    paths = locate(files, base=release.base, option="WHEEL")
    sdists = list(dict.fromkeys(path for path in paths if path.name.endswith(SDIST)))
    wheel_paths = [path for path in paths if path not in sdists]
    if not wheel_paths:
        raise EvidenceRejected(
            "Evidence is about wheels: an sdist is published together with its wheel.",
            next_step="name the wheel as well",
        )
    wheels = release.wheels(wheel_paths)
    found = [_file(wheel, verified) for wheel, verified in wheels]
    _demand_one_each(found)
    release.audit([wheel for wheel, _ in wheels])
    if sdists:
        found += release.sdists(sdists, found)
        _demand_one_each(found)
    return found


def _demand_one_each(files: Sequence[File]) -> None:
    names = [file.name for file in files]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise UsageFailure(
            f"Two files are called {', '.join(double)}.",
            next_step="name the one that is to be published",
        )


def _file(wheel: Wheel, verified: Verified) -> File:
    return File(
        name=wheel.filename,
        project=wheel.name,
        version=wheel.version,
        sha256=wheel.sha256,
        copy=wheel.copy,
        statements=verified.statements,
    )


def _sdist(path: Path, folder: Path) -> File:
    try:
        project, version = parse_sdist_filename(path.name)
    except InvalidSdistFilename as error:
        raise WheelRejected(f"not an sdist: {error}") from error
    folder.mkdir(mode=0o700)
    copy = folder / path.name
    with copy.open("xb") as file:
        for chunk in read_chunks(path):
            file.write(chunk)
    return File(
        name=path.name, project=project, version=version, sha256=sha256_of(copy), copy=copy
    )


def _unlike(sdist: File, wheels: Sequence[File], built: Mapping[str, str] | None) -> list[str]:
    """What speaks against an sdist, given the digests of what the checkout builds if known."""
    release = (sdist.project, sdist.version)
    mates = [file for file in wheels if (file.project, file.version) == release]
    if not mates:
        return [f"{sdist.name}: its wheel is not among the files"]
    if built is None:
        return []
    other = [file.name for file in (sdist, *mates) if built.get(file.name) != file.sha256]
    return [f"{sdist.name}: this checkout builds another {name}" for name in other]
