from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gate import archive, scan
from gate.audit import audit
from tests.gate.wheel_builder import (
    POLICY,
    WheelBuilder,
    as_wheel,
    central,
    findings,
    flip,
    local,
    patch,
    rejects,
)

INIT = "demo/__init__.py"


def test_zip64_and_many_members_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # zipfile then writes the zip64 end record that it needs from 65536 members on.
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 100)
    builder = WheelBuilder()
    for number in range(2_000):
        builder.add(f"demo/{number}.py", b"")
    path = builder.write(tmp_path)
    assert b"PK\6\6" in path.read_bytes()
    assert audit(as_wheel(path), POLICY).members == 2_006


def test_streamed_members_pass(tmp_path: Path) -> None:
    """A writer that cannot seek puts sizes and CRC into data descriptors behind the data."""

    class Pipe:
        def __init__(self, path: Path) -> None:
            self.file = path.open("wb")

        def write(self, data: bytes) -> int:
            return self.file.write(data)

        def flush(self) -> None:
            self.file.flush()

    builder = WheelBuilder()
    plain = builder.write(tmp_path / "plain")
    path = tmp_path / builder.filename
    pipe = Pipe(path)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(pipe, "w") as target:
        for info in source.infolist():
            target.writestr(info, source.read(info))
    pipe.file.close()
    assert b"PK\7\10" in path.read_bytes()
    assert audit(as_wheel(path), POLICY).notes == ()
    size = local(path, "demo/__init__.py") + 22
    audit(as_wheel(patch(path, size, "<L", len(b"answer = 42\n"))), POLICY)
    rejects(patch(path, size, "<L", 5), "central directory disagree on size or CRC")
    patch(path, size, "<L", 0)
    offset = path.read_bytes().index(b"PK\7\10")
    rejects(flip(path, offset + 6), "its data descriptor is missing or disagrees")


def test_bytes_that_are_no_zip(tmp_path: Path) -> None:
    for data in (b"", b"PK", b"not a zip" * 100, b"\x1f\x8b" + bytes(100)):
        path = tmp_path / "demo-1.0-py3-none-any.whl"
        path.write_bytes(data)
        assert len(findings(path)) == 1


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    data = WheelBuilder().write(tmp_path).read_bytes()
    path = tmp_path / "demo-1.0-py3-none-any.whl"
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        (finding,) = findings(path)
        assert "cut off" in finding or length < 4


def test_bytes_around_the_archive(tmp_path: Path) -> None:
    path = WheelBuilder().write(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data + b"\0")
    rejects(path, "zip: bytes follow the end of the archive")
    path.write_bytes(b"#!/bin/sh\n" + data)
    rejects(path, "zip: the central directory is not where the end record says it is")
    path.write_bytes(data + data)
    rejects(path, "zip: the central directory is not where the end record says it is")
    with zipfile.ZipFile(path, "w") as archive_:
        archive_.comment = b"hello"
    rejects(path, "zip: bytes follow the end of the archive")
    path.write_bytes(data[:-2] + struct.pack("<H", len(data)) + data)
    rejects(path, "zip: the central directory is not where the end record says it is")


def test_bytes_between_members(tmp_path: Path) -> None:
    path = WheelBuilder().write(tmp_path)
    data = path.read_bytes()
    start = struct.unpack_from("<L", data, len(data) - 6)[0]
    padded = bytearray(data[:start] + b"hidden" + data[start:])
    struct.pack_into("<L", padded, len(padded) - 6, start + 6)
    path.write_bytes(padded)
    rejects(path, "zip: bytes that belong to no member after demo-1.0.dist-info/RECORD")


def test_a_member_without_a_directory_entry(tmp_path: Path) -> None:
    path = WheelBuilder().write(tmp_path)
    data = path.read_bytes()
    start = struct.unpack_from("<L", data, len(data) - 6)[0]
    first = central(path, INIT)
    second = central(path, "demo/py.typed")
    less = bytearray(data[:first] + data[second:])
    count = struct.unpack_from("<H", data, len(data) - 12)[0] - 1
    length = len(data) - 22 - start - (second - first)
    struct.pack_into("<HHLL", less, len(less) - 14, count, count, length, start)
    path.write_bytes(less)
    rejects(path, "zip: demo/py.typed: bytes that belong to no member after the start")


def test_members_that_share_bytes(tmp_path: Path) -> None:
    """The bombs that unpack to more than any ratio allows let members overlap."""
    path = WheelBuilder().write(tmp_path)
    offset = central(path, "demo/py.typed") + 42
    patch(path, offset, "<L", local(path, INIT))
    rejects(path, "zip: demo/py.typed: its local header has another name, b'demo/__init__.py'")


HEADER_LIES = {
    "name": (30, "<B", 0x5A, "has another name"),
    "needed": (4, "<H", 45, "local header and central directory disagree"),
    "encrypted": (6, "<H", 1, "local header and central directory disagree"),
    "method": (8, "<H", 0, "local header and central directory disagree"),
    "time": (10, "<H", 1, "local header and central directory disagree"),
    "date": (12, "<H", 1, "local header and central directory disagree"),
    "crc": (14, "<L", 1, "disagree on size or CRC"),
    "compressed": (18, "<L", 1, "disagree on size or CRC"),
    "size": (22, "<L", 1, "disagree on size or CRC"),
}


@pytest.mark.parametrize("field", HEADER_LIES)
def test_local_header_that_contradicts_the_directory(tmp_path: Path, field: str) -> None:
    offset, layout, value, expected = HEADER_LIES[field]
    path = WheelBuilder().write(tmp_path)
    rejects(patch(path, local(path, INIT) + offset, layout, value), expected)


BOTH_HEADERS = {
    "encrypted": (8, 6, "<H", 1, "zip: demo/__init__.py: is encrypted"),
    "strongly": (8, 6, "<H", 0x41, "is encrypted"),
    "patch": (8, 6, "<H", 0x20, "unknown flags 0x0020"),
    "bzip2": (10, 8, "<H", 12, "compression method 12"),
    "lzma": (10, 8, "<H", 14, "compression method 14"),
}


@pytest.mark.parametrize("feature", BOTH_HEADERS)
def test_features_a_wheel_may_not_use(tmp_path: Path, feature: str) -> None:
    in_central, in_local, layout, value, expected = BOTH_HEADERS[feature]
    path = WheelBuilder().write(tmp_path)
    patch(path, central(path, INIT) + in_central, layout, value)
    patch(path, local(path, INIT) + in_local, layout, value)
    rejects(path, expected)


def test_damaged_data(tmp_path: Path) -> None:
    builder = WheelBuilder()
    builder.entries[0].method = zipfile.ZIP_STORED
    path = builder.write(tmp_path)
    flip(path, local(path, INIT) + 30 + len(INIT) + 3)
    assert f"zip: {INIT}: CRC mismatch, the bytes are damaged" in findings(path)


def test_a_member_larger_than_declared_is_not_unpacked(tmp_path: Path) -> None:
    builder = WheelBuilder().add("demo/zeros.bin", bytes(40_000_000))
    path = builder.write(tmp_path)
    for offset in (central(path, "demo/zeros.bin") + 24, local(path, "demo/zeros.bin") + 22):
        patch(path, offset, "<L", 1000)
    assert "zip: demo/zeros.bin: more than the 1000 bytes declared" in findings(path)


def test_too_much_once_unpacked(tmp_path: Path) -> None:
    path = WheelBuilder().write(tmp_path)
    for offset in (central(path, INIT) + 24, local(path, INIT) + 22):
        patch(path, offset, "<L", archive.MAX_TOTAL)
    rejects(path, "bytes once unpacked, more than the 2147483648 allowed")


def test_too_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_MEMBERS", 5)
    rejects(WheelBuilder().write(tmp_path), "zip: 6 members, more than the 5 allowed")


def test_a_second_name_in_an_extra_field(tmp_path: Path) -> None:
    path = tmp_path / "demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive_:
        info = zipfile.ZipInfo(INIT)
        name = b"evil/__init__.py"
        body = struct.pack("<BL", 1, zlib.crc32(INIT.encode())) + name
        info.extra = struct.pack("<HH", 0x7075, len(body)) + body
        archive_.writestr(info, b"")
    rejects(path, "has a second name in an extra field")


def test_unused_bits_of_compressed_data(tmp_path: Path) -> None:
    """They change the digest, and neither CRC nor RECORD sees them."""
    path = WheelBuilder().write(tmp_path)
    with zipfile.ZipFile(path) as archive_:
        size = archive_.getinfo(INIT).compress_size
    flip(path, local(path, INIT) + 30 + len(INIT) + size - 1, 0x80)
    with zipfile.ZipFile(path) as archive_:
        assert archive_.testzip() is None
    assert f"zip: {INIT}: unused bits of the compressed data are set" in findings(path)


@settings(deadline=None)
@given(st.binary(max_size=2000), st.integers(0, 9), st.booleans())
def test_unused_bits_are_told_from_used_ones(data: bytes, level: int, repeat: bool) -> None:
    data = data * 50 if repeat else data
    stream = zlib.compressobj(level, zlib.DEFLATED, -15)
    packed = stream.compress(data) + stream.flush()
    reader = zlib.decompressobj(-15)
    reader.decompress(packed[:-1])
    assert not archive._padding_is_set(reader, packed[-1])


END_RECORD = {4: "one part of several", 6: "one part of several", 8: "the end record counts 7"}


@pytest.mark.parametrize("offset", END_RECORD)
def test_the_end_record(tmp_path: Path, offset: int) -> None:
    path = WheelBuilder().write(tmp_path)
    size = path.stat().st_size
    value = struct.unpack_from("<H", path.read_bytes(), size - 22 + offset)[0]
    patch(path, size - 22 + offset, "<H", value + 1)
    rejects(path, END_RECORD[offset])


def test_every_byte_of_the_zip64_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    path = WheelBuilder().write(tmp_path)
    data = path.read_bytes()
    for offset in range(data.index(b"PK\6\6"), len(data)):
        for mask in (1, 0x80):
            flip(path, offset, mask)
            assert len(findings(path)) == 1, (offset, mask)
            path.write_bytes(data)


def test_sizes_repeated_in_a_zip64_field(tmp_path: Path) -> None:
    """As bazel writes them, in the local header only, although the plain fields have room."""
    path = tmp_path / "demo-1.0-py3-none-any.whl"
    plain = WheelBuilder().write(tmp_path / "plain")
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w") as target:
        for info in source.infolist():
            info.extra = struct.pack("<HH", 0x9999, 16) + bytes(16)
            target.writestr(info, source.read(info))
        sizes = target.getinfo(INIT).file_size, target.getinfo(INIT).compress_size
    field = local(path, INIT) + 30 + len(INIT)
    audit(as_wheel(patch(path, field, "<HHQQ", 1, 16, *sizes)))
    patch(path, field, "<HHQQ", 1, 16, sizes[0] + 1, sizes[1])
    rejects(path, f"{INIT}: the zip64 extra field contradicts the header", policy=None)
    rejects(patch(path, field + 2, "<H", 12), "malformed", policy=None)


def test_a_member_smaller_than_declared(tmp_path: Path) -> None:
    path = WheelBuilder().write(tmp_path)
    for offset in (central(path, INIT) + 24, local(path, INIT) + 22):
        patch(path, offset, "<L", 13)
    assert f"zip: {INIT}: unpacks to 12 bytes, 13 declared" in findings(path)


def test_documents_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "DOCUMENT_BYTES", 10)
    found = findings(WheelBuilder().write(tmp_path))
    assert any("METADATA: 46 bytes, more than the 10 allowed" in one for one in found), found


def raw_member(tmp_path: Path, packed: bytes, data: bytes) -> Path:
    """A wheel with a member whose compressed bytes are exactly ``packed``."""
    name = "demo/raw.bin"
    path = WheelBuilder().add(name, packed, method=zipfile.ZIP_STORED).write(tmp_path)
    crc = zlib.crc32(data)
    for start, offset in ((central(path, name), 10), (local(path, name), 8)):
        patch(path, start + offset, "<H", zipfile.ZIP_DEFLATED)
        patch(path, start + offset + 6, "<LLL", crc, len(packed), len(data))
    return path


def test_compressed_data_must_end_where_the_member_ends(tmp_path: Path) -> None:
    data = b"some text, some text, some text"
    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    unfinished = stream.compress(data) + stream.flush(zlib.Z_SYNC_FLUSH)
    finished = unfinished + stream.flush()
    path = raw_member(tmp_path, finished, data)
    with zipfile.ZipFile(path) as archive_:
        assert archive_.read("demo/raw.bin") == data
    assert "zip: " not in "".join(findings(path))
    found = findings(raw_member(tmp_path, unfinished, data))
    assert "zip: demo/raw.bin: the compressed data is cut off" in found
    for extra in (b"\0", b"hidden"):
        found = findings(raw_member(tmp_path, finished + extra, data))
        assert any("has no end or goes on after it" in one for one in found), found
    found = findings(raw_member(tmp_path, b"", b""))
    assert any("has no end or goes on after it" in one for one in found), found


@pytest.mark.parametrize("extra", [b"\1", b"\1\0\2", b"\x99\x99\x08\0abc"])
def test_malformed_extra_fields(tmp_path: Path, extra: bytes) -> None:
    path = tmp_path / "demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive_:
        info = zipfile.ZipInfo(INIT)
        info.extra = extra
        archive_.writestr(info, b"")
    rejects(path, f"zip: {INIT}: malformed extra field")
