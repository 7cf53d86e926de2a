"""Wheels whose zip archive is not one, or is two at once."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

from gate.archive import MAX_MEMBERS
from tests.gate.corpus.case import Table
from tests.gate.corpus.package import Package

TABLE = Table([])
broken = TABLE.add

INIT = "gefen/__init__.py"
CENTRAL, LOCAL = b"PK\1\2", b"PK\3\4"
# Where a header of the directory has its fields: flags, method, sizes, name's length.
FLAGS, METHOD, SIZES, NAME, MODE = 8, 10, 20, 46, 38


def central(data: bytes, name: str) -> int:
    """Offset of a member's header in the central directory."""
    return data.index(name.encode(), data.index(CENTRAL)) - NAME


def local(data: bytes, name: str) -> int:
    """Offset of a member's local header."""
    return data.index(name.encode()) - 30


def patched(data: bytes, offset: int, layout: str, *values: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(layout, changed, offset, *values)
    return bytes(changed)


def everywhere(data: bytes, name: str, field: int, layout: str, *values: int) -> bytes:
    """Patch a field of a member's central and local header alike."""
    data = patched(data, central(data, name) + field, layout, *values)
    return patched(data, local(data, name) + field - 2, layout, *values)


def inserted(data: bytes, more: bytes) -> bytes:
    """Bytes between the last member and the central directory, which is moved accordingly."""
    start = struct.unpack_from("<L", data, len(data) - 6)[0]
    moved = data[:start] + more + data[start:]
    return patched(moved, len(moved) - 6, "<L", start + len(more))


@broken("audit", "zip: gefen/__init__.py", "damaged")
def flipped_byte(package: Package) -> None:
    def flip(data: bytes) -> bytes:
        offset = local(data, INIT) + 30 + len(INIT) + 12
        return patched(data, offset, "<B", data[offset] ^ 0x55)

    package.edit_archive = flip


@broken("audit", "zip: gefen/py.typed: CRC mismatch")
def wrong_crc(package: Package) -> None:
    package.edit_archive = lambda data: everywhere(data, "gefen/py.typed", 16, "<L", 1)


@broken("resolve", "broken archive: bytes follow the end of the archive")
def data_after_the_end(package: Package) -> None:
    package.edit_archive = lambda data: data + b"import os\n"


@broken("resolve", "broken archive: bytes follow the end of the archive")
def script_hidden_after_the_end(package: Package) -> None:
    package.edit_archive = lambda data: data + b"\n#!/bin/sh\ncurl example.invalid\n" * 4000


@broken("resolve", "broken archive")
def second_archive_after_the_end(package: Package) -> None:
    def append(data: bytes) -> bytes:
        other = io.BytesIO()
        with zipfile.ZipFile(other, "w") as archive:
            archive.writestr(INIT, "answer = 41\n")
        return data + other.getvalue()

    package.edit_archive = append


@broken("resolve", "broken archive: the central directory is not where the end record says")
def data_before_the_start(package: Package) -> None:
    package.edit_archive = lambda data: b"#!/usr/bin/env python3\n" + data


@broken("resolve", "broken archive: bytes follow the end of the archive")
def comment(package: Package) -> None:
    package.edit_archive = lambda data: data[:-2] + struct.pack("<H", 7) + b"comment"


@broken("resolve", "broken archive: bytes that belong to no member")
def data_between_members(package: Package) -> None:
    package.edit_archive = lambda data: inserted(data, b"hidden" * 100)


@broken("resolve", "broken archive: the archive is cut off")
def cut_off(package: Package) -> None:
    package.edit_archive = lambda data: data[: len(data) * 2 // 3]


@broken("resolve", "broken archive: the file is empty")
def empty_file(package: Package) -> None:
    package.edit_archive = lambda data: b""


@broken("resolve", "broken archive: this is no zip archive")
def not_a_zip(package: Package) -> None:
    package.edit_archive = lambda data: b"<!doctype html><title>404</title>\n" * 40


@broken("resolve", "its local header has another name")
def two_names_of_one_member(package: Package) -> None:
    def rename(data: bytes) -> bytes:
        offset = local(data, INIT) + 30
        return data[:offset] + INIT.replace("init", "evil").encode() + data[offset + len(INIT) :]

    package.edit_archive = rename


@broken("resolve", "overlap")
def overlapping_members(package: Package) -> None:
    """Each entry of the directory unpacks the same bytes again: a bomb for 50 bytes a piece."""

    def again(data: bytes) -> bytes:
        entry = data[central(data, INIT) : central(data, INIT) + NAME + len(INIT)]
        count, length = struct.unpack_from("<HL", data, len(data) - 12)
        data = data[:-22] + entry + data[-22:]
        return patched(data, len(data) - 14, "<HHL", count + 1, count + 1, length + len(entry))

    package.edit_archive = again


@broken("audit", "zip: gefen/base.py: more than the 10 bytes declared")
def bomb_that_declares_little(package: Package) -> None:
    package.edit_archive = lambda data: everywhere(data, "gefen/base.py", 24, "<L", 10)


@broken("resolve", "bytes once unpacked, more than the")
def bomb(package: Package) -> None:
    """What it declares; the bytes need not be there for it to be refused."""
    package.edit_archive = lambda data: everywhere(data, "gefen/base.py", 24, "<L", 0xFFFFFFF0)


@broken("audit", "bytes, more than the 33554432 allowed")
def bomb_in_record(package: Package) -> None:
    """A document that is read as a whole."""
    package.edit_record = lambda record: record + b"\n" * (40 * 2**20)


@broken("resolve", f"members, more than the {MAX_MEMBERS} allowed")
def too_many_members(package: Package) -> None:
    def repeat(data: bytes) -> bytes:
        start = struct.unpack_from("<L", data, len(data) - 6)[0]
        record = data[central(data, INIT) : central(data, INIT) + NAME + len(INIT)]
        count = MAX_MEMBERS + 1
        directory = record * count
        end64 = struct.pack(
            "<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start
        )
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, start + len(directory), 1)
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
        return data[:start] + directory + end64 + locator + end

    package.edit_archive = repeat


@broken("resolve", "is encrypted")
def encrypted_member(package: Package) -> None:
    package.edit_archive = lambda data: everywhere(data, INIT, FLAGS, "<H", 1)


@broken("resolve", "compression method 12; wheels may be stored or deflated")
def other_compression(package: Package) -> None:
    package.methods[INIT] = zipfile.ZIP_BZIP2


@broken("audit", "zip: gefen/errors.py: its compressed data has no end or goes on after it")
def data_inside_a_member(package: Package) -> None:
    """Bytes after the end of the compressed stream, which readers skip."""
    text = package.files["gefen/errors.py"]
    package.methods["gefen/errors.py"] = zipfile.ZIP_STORED
    squeezer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    stream = squeezer.compress(text) + squeezer.flush() + b"#!/bin/sh\nhidden\n"
    package.swapped["gefen/errors.py"] = stream

    def declare(data: bytes) -> bytes:
        data = everywhere(data, "gefen/errors.py", METHOD, "<H", zipfile.ZIP_DEFLATED)
        data = everywhere(data, "gefen/errors.py", 16, "<L", zlib.crc32(text))
        return everywhere(data, "gefen/errors.py", 24, "<L", len(text))

    package.edit_archive = declare


@broken("audit", "names: gefen/__init__.py: is in the archive more than once")
def duplicate_member(package: Package) -> None:
    package.add(INIT, b"answer = 41\n", listed=False)


@broken("audit", "names: ../gefen/evil.py: leads out of the installation directory")
def path_that_leads_up(package: Package) -> None:
    package.add("../gefen/evil.py", b"x = 1\n")


@broken("audit", "names: gefen/../../evil.py: leads out of the installation directory")
def path_that_leads_up_and_down(package: Package) -> None:
    package.add("gefen/../../evil.py", b"x = 1\n")


@broken("audit", "names: /etc/cron.d/evil: leads out of the installation directory")
def absolute_path(package: Package) -> None:
    package.add("/etc/cron.d/evil", b"* * * * * root true\n")


@broken("audit", "a backslash or a colon")
def backslash_in_a_path(package: Package) -> None:
    package.add("gefen/X..Xevil.py", b"x = 1\n")
    package.edit_archive = lambda data: data.replace(b"gefen/X..Xevil", b"gefen/\\..\\evil")


@broken("audit", "names: C:/evil.py: has a backslash or a colon")
def drive_letter(package: Package) -> None:
    package.add("C:/evil.py", b"x = 1\n")


@broken("audit", "has control characters in its name")
def name_that_is_written_backwards(package: Package) -> None:
    package.add("gefen/\u202eyp.tpircs", b"x = 1\n")


@broken("audit", "ends in a space or a dot")
def name_that_ends_in_a_dot(package: Package) -> None:
    package.add("gefen/base.py.", b"x = 1\n")


@broken("audit", "names: gefen/base.py: is the same path as gefen/Base.py")
def two_spellings_of_one_file(package: Package) -> None:
    package.files["gefen/Base.py"] = b"x = 1\n"


@broken("audit", "gefen/kernels: is a file and a directory at once")
def file_that_is_a_directory(package: Package) -> None:
    package.add("gefen/kernels", b"x = 1\n")


@broken("audit", "permissions: gefen/link.py: is a symbolic link")
def symbolic_link(package: Package) -> None:
    package.add("gefen/link.py", b"/etc/passwd")
    package.modes["gefen/link.py"] = 0o120777


@broken("audit", "permissions: gefen/errors.py: is a symbolic link")
def symbolic_link_in_place_of_a_module(package: Package) -> None:
    package.files["gefen/errors.py"] = b"../../../../tmp/evil.py"
    package.modes["gefen/errors.py"] = 0o120777


@broken("audit", "permissions: gefen/base.py: is not readable by everyone (mode 0o600)")
def private_file(package: Package) -> None:
    package.modes["gefen/base.py"] = 0o100600


@broken("audit", "permissions: gefen/base.py: is setuid or writable by everyone (mode 0o666)")
def file_that_all_may_write(package: Package) -> None:
    package.modes["gefen/base.py"] = 0o100666


@broken("audit", "permissions: gefen/base.py: is setuid or writable by everyone (mode 0o4755)")
def setuid_file(package: Package) -> None:
    package.modes["gefen/base.py"] = 0o104755


@broken("audit", "permissions: gefen/pipe: is a special file")
def named_pipe(package: Package) -> None:
    package.add("gefen/pipe", b"")
    package.modes["gefen/pipe"] = 0o010644
