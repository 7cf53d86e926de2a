"""Read a zip archive strictly: every byte belongs to exactly one place, or the archive is bad.

``zipfile`` is made to read what it is given; it skips over bytes in front, accepts local headers
that contradict the central directory and comments that hide another archive. Two readers then
see two different wheels. Here one reading is left (APPNOTE.TXT 6.3.10, sections 4.3 and 4.4).
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STORED, DEFLATED = 0, 8
MAX_MEMBERS = 200_000
MAX_TOTAL = 2 * 1024**3
CHUNK = 1024 * 1024
_SLICE = 64 * 1024

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2BH2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s2B5H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_UTF8_FLAG, _ENCRYPTED_FLAGS, _DESCRIPTOR_FLAG = 0x800, 0x2041, 0x8
# Bits 1 and 2 say how hard the compressor tried.
_KNOWN_FLAGS = _UTF8_FLAG | _DESCRIPTOR_FLAG | 0x6
_METHODS = (STORED, DEFLATED)
_ZIP64_EXTRA, _UNICODE_PATH_EXTRA = 0x0001, 0x7075


class BadArchive(Exception):
    """The bytes are not one well-formed zip archive; the text says where and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


def printable(text: str) -> str:
    """The text with control and other invisible characters escaped: names come from strangers."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, kw_only=True)
class Member:
    """One entry of the central directory, in agreement with its local header."""

    name: str
    made_by: int
    system: int
    needed: int
    flags: int
    method: int
    crc: int
    compressed: int
    size: int
    internal: int
    external: int
    extra: bytes
    offset: int
    start: int

    @property
    def mode(self) -> int:
        """Unix file type and permissions."""
        return self.external >> 16

    @property
    def is_folder(self) -> bool:
        """Whether the entry stands for a directory."""
        return self.name.endswith("/")


@dataclass(frozen=True, kw_only=True)
class Archive:
    """The members of a zip file, in the order of its central directory."""

    members: tuple[Member, ...]
    size: int
    data: mmap.mmap

    def read(self, member: Member, limit: int) -> bytes:
        """All bytes of a member that must not be larger than ``limit`` bytes."""
        if member.size > limit:
            raise BadArchive(f"{member.name}: {member.size} bytes, more than the {limit} allowed")
        return b"".join(self.stream(member))

    def stream(self, member: Member) -> Iterator[bytes]:
        """The member's bytes in bounded chunks; length and CRC are checked at the end."""
        inflate = member.method == DEFLATED
        chunks = _inflate(member, self.data) if inflate else _stored(member, self.data)
        size = crc = 0
        for chunk in chunks:
            size += len(chunk)
            if size > member.size:
                raise BadArchive(f"{member.name}: more than the {member.size} bytes declared")
            crc = zlib.crc32(chunk, crc)
            yield chunk
        if size != member.size:
            raise BadArchive(f"{member.name}: unpacks to {size} bytes, {member.size} declared")
        if crc != member.crc:
            raise BadArchive(f"{member.name}: CRC mismatch, the bytes are damaged")


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Map a zip file and check its structure.

    Raises:
        BadArchive: the file is no zip, is cut off, or its parts contradict each other.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            raise BadArchive("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                members = _members(data, size)
            except struct.error as error:
                raise BadArchive(f"cut off in the middle of a record ({error})") from error
            yield Archive(members=members, size=size, data=data)


def _members(data: mmap.mmap, size: int) -> tuple[Member, ...]:
    count, start, end = _directory(data, size)
    if count > MAX_MEMBERS:
        raise BadArchive(f"{count} members, more than the {MAX_MEMBERS} allowed")
    members, position = [], start
    for _ in range(count):
        member, position = _member(data, position, end)
        members.append(member)
    if position != end:
        raise BadArchive(
            f"{end - position} bytes between the central directory and its end record"
        )
    total = sum(member.size for member in members)
    if total > MAX_TOTAL:
        raise BadArchive(f"{total} bytes once unpacked, more than the {MAX_TOTAL} allowed")
    _tile(data, members, start)
    return tuple(members)


def _directory(data: mmap.mmap, size: int) -> tuple[int, int, int]:
    """How many members there are, and where their directory starts and ends."""
    position = size - _END.size
    if position < 0 or data[position : position + 4] != b"PK\5\6":
        raise BadArchive(_no_end_record(data))
    _, disk, first_disk, here, count, length, start, comment = _END.unpack_from(data, position)
    if comment:
        raise BadArchive("the archive has a comment or is cut off")
    if (disk, first_disk) != (0, 0):
        raise BadArchive("the archive is one part of several")
    classic = (here, count, length, start)
    locator = position - _LOCATOR64.size
    if locator >= 0 and data[locator : locator + 4] == b"PK\6\7":
        position, classic = _directory64(data, locator, classic)
    here, count, length, start = classic
    if here != count:
        raise BadArchive(f"the end record counts {here} and {count} members")
    if start + length != position:
        raise BadArchive("the central directory is not where the end record says it is")
    return count, start, position


def _no_end_record(data: mmap.mmap) -> str:
    if data[:4] not in (b"PK\3\4", b"PK\5\6"):
        return "this is no zip archive"
    if 0 <= data.rfind(b"PK\5\6") <= len(data) - _END.size:
        return "bytes follow the end of the archive"
    return "the archive is cut off: its end record is missing"


def _directory64(
    data: mmap.mmap, locator: int, classic: tuple[int, ...]
) -> tuple[int, tuple[int, int, int, int]]:
    _, disk, position, disks = _LOCATOR64.unpack_from(data, locator)
    if (disk, disks) != (0, 1) or position + _END64.size != locator:
        raise BadArchive("the zip64 end record is not where its locator says it is")
    sig, length, made_by, system, *rest = _END64.unpack_from(data, position)
    needed, disk, first_disk, *large = rest
    fits = (sig, length, disk, first_disk) == (b"PK\6\6", _END64.size - 12, 0, 0)
    if not fits or needed != 45 or made_by not in range(45, 64) or system not in (0, 3):
        raise BadArchive("the zip64 end record is malformed")
    full = (_FULL16, _FULL16, _FULL32, _FULL32)
    for small, limit, true in zip(classic, full, large, strict=True):
        if small not in (min(limit, true), limit):
            raise BadArchive("the two end records contradict each other")
    here, count, size, start = large
    return position, (here, count, size, start)


def _member(data: mmap.mmap, position: int, end: int) -> tuple[Member, int]:
    fields = _CENTRAL.unpack_from(data, position)
    sig, made_by, system, needed, flags, method, time, date = fields[:8]
    crc, compressed, size, name_length, extra_length, comment, disk = fields[8:15]
    internal, external, offset = fields[15:]
    names = position + _CENTRAL.size
    after = names + name_length + extra_length
    if sig != b"PK\1\2" or after > end:
        raise BadArchive("the central directory is damaged")
    raw, extra = data[names : names + name_length], data[names + name_length : after]
    name = _decoded(raw, flags)
    if comment or disk:
        raise BadArchive(f"{name}: has a comment or lies in another part")
    size, compressed, offset = _large(name, extra, [size, compressed, offset])
    local = _Local.read(data, name, offset)
    if local.name != raw:
        raise BadArchive(f"{name}: its local header has another name, {local.name!r}")
    if local.header != (needed, flags, method, time, date):
        raise BadArchive(f"{name}: local header and central directory disagree")
    if not local.agrees(flags, crc, compressed, size):
        raise BadArchive(f"{name}: local header and central directory disagree on size or CRC")
    if local.start + compressed > len(data):
        raise BadArchive(f"{name}: runs past the end of the file")
    _refuse_features(name, flags, method, extra + local.extra)
    return Member(
        name=name,
        made_by=made_by,
        system=system,
        needed=needed,
        flags=flags,
        method=method,
        crc=crc,
        compressed=compressed,
        size=size,
        internal=internal,
        external=external,
        extra=extra + local.extra,
        offset=offset,
        start=local.start,
    ), after


def _refuse_features(name: str, flags: int, method: int, extra: bytes) -> None:
    if flags & _ENCRYPTED_FLAGS:
        raise BadArchive(f"{name}: is encrypted")
    if flags & ~_KNOWN_FLAGS:
        raise BadArchive(f"{name}: unknown flags {flags:#06x}")
    if method not in _METHODS:
        raise BadArchive(f"{name}: compression method {method}; wheels may be stored or deflated")
    if _UNICODE_PATH_EXTRA in dict(_extras(name, extra)):
        raise BadArchive(f"{name}: has a second name in an extra field")


def _decoded(raw: bytes, flags: int) -> str:
    try:
        return raw.decode("utf-8" if flags & _UTF8_FLAG else "ascii")
    except UnicodeDecodeError:
        raise BadArchive(f"{raw!r}: the name is not UTF-8 or does not say that it is") from None


def _extras(name: str, extra: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(extra):
        if position + 4 > len(extra):
            raise BadArchive(f"{name}: malformed extra field")
        kind, length = struct.unpack_from("<2H", extra, position)
        position += 4 + length
        if position > len(extra):
            raise BadArchive(f"{name}: malformed extra field")
        yield kind, extra[position - length : position]


def _large(name: str, extra: bytes, values: list[int]) -> list[int]:
    """Replace saturated 32-bit values by those of the zip64 extra field."""
    content = dict(_extras(name, extra)).get(_ZIP64_EXTRA)
    if content is None:
        return values
    saturated = [index for index, value in enumerate(values) if value == _FULL32]
    # Some builders repeat all values, also those that fit.
    given = range(len(values)) if len(content) == 8 * len(values) else saturated
    if len(content) != 8 * len(given):
        raise BadArchive(f"{name}: malformed zip64 extra field")
    result = list(values)
    for index, large in zip(given, struct.unpack(f"<{len(given)}Q", content), strict=True):
        if values[index] not in (_FULL32, large):
            raise BadArchive(f"{name}: the zip64 extra field contradicts the header")
        result[index] = large
    return result


@dataclass(frozen=True, kw_only=True)
class _Local:
    """What a local header says."""

    name: bytes
    header: tuple[int, ...]
    crc: int
    compressed: int
    size: int
    extra: bytes
    start: int

    @classmethod
    def read(cls, data: mmap.mmap, name: str, offset: int) -> _Local:
        if data[offset : offset + 4] != b"PK\3\4":
            raise BadArchive(f"{name}: its local header is missing")
        fields = _LOCAL.unpack_from(data, offset)
        crc, compressed, size, name_length, extra_length = fields[6:]
        names = offset + _LOCAL.size
        start = names + name_length + extra_length
        extra = data[names + name_length : start]
        size, compressed = _large(name, extra, [size, compressed])
        return cls(
            name=data[names : names + name_length],
            header=fields[1:6],
            crc=crc,
            compressed=compressed,
            size=size,
            extra=extra,
            start=start,
        )

    def agrees(self, flags: int, crc: int, compressed: int, size: int) -> bool:
        mine, true = (self.crc, self.compressed, self.size), (crc, compressed, size)
        if not flags & _DESCRIPTOR_FLAG:
            return mine == true
        # What a tool did not know yet is 0: Info-ZIP knows the size of what it packs.
        return all(own in (0, right) for own, right in zip(mine, true, strict=True))


def _tile(data: mmap.mmap, members: list[Member], directory: int) -> None:
    """Members must follow each other without gap or overlap up to the central directory."""
    position, before = 0, "the start of the file"
    for member in sorted(members, key=lambda member: member.offset):
        if member.offset != position:
            kind = "bytes that belong to no member" if member.offset > position else "overlap"
            raise BadArchive(f"{member.name}: {kind} after {before}")
        position, before = member.start + member.compressed, member.name
        if member.flags & _DESCRIPTOR_FLAG:
            position += _descriptor(data, member, position)
    if position != directory:
        raise BadArchive(f"bytes that belong to no member after {before}")


def _descriptor(data: mmap.mmap, member: Member, position: int) -> int:
    """Length of the data descriptor that repeats CRC and sizes after the data."""
    for sizes in ("<3L", "<L2Q"):
        plain = struct.pack(sizes, member.crc, member.compressed, member.size)
        for expected in (b"PK\7\10" + plain, plain):
            if data[position : position + len(expected)] == expected:
                return len(expected)
    raise BadArchive(f"{member.name}: its data descriptor is missing or disagrees")


def _stored(member: Member, data: mmap.mmap) -> Iterator[bytes]:
    yield from _slices(data, member.start, member.start + member.compressed)


def _slices(data: mmap.mmap, start: int, end: int) -> Iterator[bytes]:
    for position in range(start, end, _SLICE):
        yield data[position : min(position + _SLICE, end)]


def _inflate(member: Member, data: mmap.mmap) -> Iterator[bytes]:
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    # The last byte is fed alone, so that its unused bits can be looked at.
    last = member.start + member.compressed - 1
    try:
        for compressed in _slices(data, member.start, last):
            yield from _drain(stream, compressed)
        if stream.eof or last < member.start:
            raise BadArchive(f"{member.name}: its compressed data has no end or goes on after it")
        if _padding_is_set(stream, data[last]):
            raise BadArchive(f"{member.name}: unused bits of the compressed data are set")
        yield from _drain(stream, data[last : last + 1])
    except zlib.error as error:
        raise BadArchive(f"{member.name}: the compressed data is damaged ({error})") from error
    if not stream.eof or stream.unused_data:
        raise BadArchive(f"{member.name}: the compressed data is cut off")


def _drain(stream: zlib._Decompress, compressed: bytes) -> Iterator[bytes]:
    while True:
        chunk = stream.decompress(compressed, CHUNK)
        if chunk:
            yield chunk
        compressed = stream.unconsumed_tail
        if not compressed and len(chunk) < CHUNK:
            return


def _padding_is_set(stream: zlib._Decompress, last: int) -> bool:
    """Whether bits after the end-of-block code are set; a CRC cannot see them.

    The last used bit is the last of the end-of-block code: flipping it never leaves the result
    as it was. So the bits from the top that may be flipped without effect are the unused ones.
    """

    def result(byte: int) -> tuple[bool, bytes]:
        trial = stream.copy()
        try:
            output = trial.decompress(bytes([byte]), CHUNK)
        except zlib.error:
            return False, b""
        return trial.eof, output

    if last == 0:
        return False
    expected = result(last)
    for bit in range(7, last.bit_length() - 2, -1):
        if not expected[0] or result(last ^ (1 << bit)) != expected:
            return False
    return True
