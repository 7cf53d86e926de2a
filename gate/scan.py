"""Read a wheel once, front to back, and keep what the audit's rules need to know."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from packaging.metadata import Metadata
from packaging.tags import Tag
from packaging.utils import BuildTag, parse_wheel_filename

from gate import distinfo, elf
from gate.archive import Archive, BadArchive, Member
from gate.policy import AuditPolicy
from gate.wheels import Wheel

HEAD_BYTES = 8192
MANIFEST = "/manifest.json"
MODULES = (".py", ".pyw")
# What rules read whole, with a bound in bytes for each file and one for all of a wheel.
KEPT = {".py": 4 << 20, ".pyw": 4 << 20, MANIFEST: 4 << 20, ".cubin": 64 << 20, ".ptx": 64 << 20}
KEPT |= {".cu": 4 << 20, ".cuh": 4 << 20}
KEPT_BYTES = 256 << 20
LICENCE_BYTES = 1 << 20
DOCUMENT_BYTES = 32 * 1024**2
DOCUMENTS = ("METADATA", "WHEEL", "RECORD", "entry_points.txt")
SCHEMES = ("purelib", "platlib", "headers", "scripts", "data")


@dataclass(frozen=True, kw_only=True)
class Content:
    """One file of the wheel: its size in bytes, its hash as RECORD writes it, its first bytes."""

    name: str
    size: int
    digest: str
    head: bytes

    @property
    def arch(self) -> str | None:
        """The GPU architecture of a cubin or PTX file."""
        if self.name.endswith(".ptx"):
            return elf.ptx_arch(self.head)
        return elf.cubin_arch(self.head)


@dataclass(kw_only=True)
class Facts:
    """What one pass over the wheel found.

    Attributes:
        contents: every regular file by its name in the archive.
        infos: the names of all ``.dist-info`` folders.
        info: the folder that belongs to the wheel, or None.
        documents: METADATA, WHEEL, RECORD and entry_points.txt of ``info``, as far as present.
        rows: RECORD's rows.
        kept: what rules read whole, by its name in the archive.
        problems: findings made on the way, by rule.
        notes: what is unusual and harmless, by rule.
    """

    wheel: Wheel
    policy: AuditPolicy | None
    source: Path | None
    build: BuildTag
    tags: frozenset[Tag]
    members: tuple[Member, ...]
    file_size: int
    contents: dict[str, Content] = field(default_factory=dict)
    infos: tuple[str, ...] = ()
    info: str | None = None
    documents: dict[str, bytes] = field(default_factory=dict)
    metadata: Metadata | None = None
    rows: Mapping[str, distinfo.Row] = field(default_factory=dict)
    entry_points: frozenset[str] = frozenset()
    kept: dict[str, bytes] = field(default_factory=dict)
    kept_bytes: int = 0
    problems: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)

    def problem(self, rule: str, *what: str) -> None:
        """Note findings of a rule."""
        self.problems.setdefault(rule, []).extend(what)

    def note(self, rule: str, *what: str) -> None:
        """Note what speaks against a wheel no more than that it is unusual."""
        self.notes.setdefault(rule, []).extend(what)

    def judged(self, rule: str, *what: str) -> Iterator[str]:
        """Findings; notes without a policy, where nobody knows whether they matter."""
        if self.policy:
            yield from what
        elif what:
            self.note(rule, *what)

    @property
    def unpacked(self) -> int:
        """Bytes of all files once unpacked."""
        return sum(content.size for content in self.contents.values())

    @cached_property
    def sources(self) -> dict[str, bytes]:
        """The Python modules of the wheel, by their names in the archive."""
        return {name: data for name, data in self.kept.items() if name.endswith(MODULES)}

    @cached_property
    def archs(self) -> tuple[str, ...]:
        """The GPU architectures embedded in the wheel, sorted."""
        return tuple(sorted({c.arch for c in self.contents.values() if c.arch}, key=arch_key))

    @cached_property
    def installed(self) -> dict[str, str]:
        """Where each file goes in site-packages, by its name in the archive.

        Files of ``.data`` that go elsewhere are left out.
        """
        places = {name: _place(name) for name in self.contents}
        return {name: place for name, place in places.items() if place is not None}

    @cached_property
    def top_levels(self) -> tuple[str, ...]:
        """What the wheel puts directly into site-packages, dist-info aside, sorted."""
        first = {place.partition("/")[0] for place in self.installed.values()}
        return tuple(sorted(first - set(self.infos)))


def arch_key(arch: str) -> tuple[str, int, str]:
    """Sort key that puts sm_90 before sm_100."""
    kind, _, number = arch.partition("_")
    digits = number.rstrip("af")
    return "" if kind == "sm" else kind, int(digits), number


def data_scheme(name: str) -> tuple[str, str, str] | None:
    """Split a member of ``*.data`` into folder, scheme and the path below; None for others."""
    folder, _, rest = name.partition("/")
    if not folder.lower().endswith(".data") or not rest:
        return None
    scheme, _, path = rest.partition("/")
    return folder, scheme, path


def _place(name: str) -> str | None:
    split = data_scheme(name)
    if split is None:
        return name
    _, scheme, path = split
    return path if scheme in ("purelib", "platlib") else None


def scan(wheel: Wheel, archive: Archive, policy: AuditPolicy | None, source: Path | None) -> Facts:
    """Read every member once: hash it, keep its first bytes, parse the documents."""
    _, _, build, tags = parse_wheel_filename(wheel.filename)
    facts = Facts(
        wheel=wheel,
        policy=policy,
        source=source,
        build=build,
        tags=tags,
        members=archive.members,
        file_size=archive.size,
    )
    first = {member.name.partition("/")[0] for member in archive.members if "/" in member.name}
    facts.infos = tuple(sorted(name for name in first if name.lower().endswith(".dist-info")))
    facts.info = _own_info(facts)
    by_name = {member.name: member for member in archive.members}
    _documents(facts, archive, by_name)
    for member in archive.members:
        if not member.is_folder:
            try:
                facts.contents[member.name] = _content(facts, archive, member)
            except BadArchive as error:
                facts.problem("zip", str(error))
                facts.damaged.add(member.name)
    return facts


def _own_info(facts: Facts) -> str | None:
    own = [
        info
        for info in facts.infos
        if not distinfo.disagreement(facts.wheel.filename, *info_identity(info), info)
    ]
    return next(iter(own or facts.infos), None)


def info_identity(folder: str) -> tuple[str, str]:
    """Name and version in the name of a dist-info or data folder."""
    name, _, version = PurePosixPath(folder).stem.partition("-")
    return name, version


def _documents(facts: Facts, archive: Archive, by_name: Mapping[str, Member]) -> None:
    for document in DOCUMENTS:
        member = by_name.get(f"{facts.info}/{document}")
        if member is None:
            continue
        try:
            facts.documents[document] = archive.read(member, DOCUMENT_BYTES)
        except BadArchive as error:
            facts.problem("zip", str(error))
    if "METADATA" in facts.documents:
        metadata = distinfo.metadata_of(facts.documents["METADATA"])
        facts.metadata, findings, newer = metadata
        facts.problem("metadata", *findings)
        if newer:
            facts.note("metadata", *newer)
    if "RECORD" in facts.documents:
        record = facts.documents["RECORD"]
        facts.rows, findings = distinfo.record_rows(record, f"{facts.info}/RECORD")
        facts.problem("record", *findings)
    if "entry_points.txt" in facts.documents:
        points = facts.documents["entry_points.txt"]
        facts.entry_points, findings = distinfo.entry_points_of(points)
        facts.problem("entry-points", *findings)


def _content(facts: Facts, archive: Archive, member: Member) -> Content:
    algorithm = distinfo.algorithm_of(facts.rows.get(member.name))
    digest, size, head = hashlib.new(algorithm), 0, b""
    bound = _bound(facts, member)
    parts = []
    for chunk in _chunks(facts, archive, member):
        digest.update(chunk)
        size += len(chunk)
        if len(head) < HEAD_BYTES:
            head += chunk[: HEAD_BYTES - len(head)]
        if size <= bound:
            parts.append(chunk)
    if 0 < bound < size:
        what = f"{member.name}: {size} bytes, too large to be looked at"
        facts.problem("size", *facts.judged("size", what))
    elif bound:
        facts.kept[member.name] = b"".join(parts)
        facts.kept_bytes += size
    encoded = distinfo.encoded(algorithm, digest.digest())
    return Content(name=member.name, size=size, digest=encoded, head=head)


def _bound(facts: Facts, member: Member) -> int:
    """How many bytes of a file rules want to read; 0 for none."""
    if member.name.startswith(f"{facts.info}/") and _document(facts, member.name) is None:
        bound = LICENCE_BYTES
    else:
        bound = next((most for end, most in KEPT.items() if member.name.endswith(end)), 0)
    return bound and max(1, min(bound, KEPT_BYTES - facts.kept_bytes))


def _document(facts: Facts, name: str) -> bytes | None:
    folder, _, document = name.rpartition("/")
    return facts.documents.get(document) if folder == facts.info else None


def _chunks(facts: Facts, archive: Archive, member: Member) -> Iterator[bytes]:
    document = _document(facts, member.name)
    if document is not None:
        yield document
    else:
        yield from archive.stream(member)
