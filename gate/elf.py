"""What a cubin or PTX file was compiled for, and how long it is, read from its first bytes."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

ELF_MAGIC = b"\x7fELF"
_EM_CUDA = 190
_NOBITS = 8
_ELF64_LITTLE = bytes([2, 1, 1])
# e_flags by ELF ABI version. Up to 7 (CUDA 12, up to sm_90) the architecture is in the low byte
# and an "a" suffix is bit 11; from 8 (sm_100 on, everything from CUDA 13) they are the second
# byte and bit 3. Found by compiling for each architecture with NVRTC 12.9 and nvcc 13.0, whose
# sm_90a sets no suffix bit when a kernel uses nothing specific to it.
_OLD_ABI = 7
_PTX_TARGET = re.compile(rb"^\.target\s+sm_(\d+[af]?)\b", re.MULTILINE)
_ELF_MACHINES = {3: "x86", 40: "arm", 62: "x86-64", 183: "aarch64", 243: "riscv"}


def cubin_arch(head: bytes) -> str | None:
    """The architecture of a cubin, such as ``"sm_90"``; None where the bytes are no cubin.

    Args:
        head: at least the first 64 bytes of the file.
    """
    if machine(head) != _EM_CUDA or len(head) < 64 or head[4:7] != _ELF64_LITTLE:
        return None
    (flags,) = struct.unpack_from("<I", head, 48)
    old = head[8] <= _OLD_ABI
    number = flags & 0xFF if old else flags >> 8 & 0xFF
    specific = flags & (0x800 if old else 0x8)
    return f"sm_{number}{'a' if specific else ''}"


def extent(head: bytes) -> int:
    """How many bytes a cubin has at least: up to the end of its tables of headers."""
    programs, sections = struct.unpack_from("<QQ", head, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", head, 54)
    tables = (programs + program_size * program_count, sections + section_size * section_count)
    return int(max(tables))


def sections(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each section of a cubin; empty for those without bytes in the file.

    Raises:
        struct.error, ValueError: the table of sections is damaged.
    """
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<3H", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    if not headers:
        return
    start, length = headers[names if names < count else 0][4:]
    strings = data[start : start + length]
    for name, kind, _, _, offset, extent in headers:
        if kind != _NOBITS and offset + extent > len(data):
            raise ValueError("a section runs past the end")
        content = b"" if kind == _NOBITS else data[offset : offset + extent]
        yield strings[name : strings.index(b"\0", name)].decode(), content


def kernels(data: bytes) -> list[str]:
    """The names of a cubin's kernels; none where its table of sections is damaged."""
    prefix = ".text."
    try:
        return [n.removeprefix(prefix) for n, _ in sections(data) if n.startswith(prefix)]
    except (struct.error, ValueError):
        return []


def ptx_arch(head: bytes) -> str | None:
    """The target of a PTX file, such as ``"compute_121"``; None where there is none."""
    match = _PTX_TARGET.search(head)
    return f"compute_{match[1].decode()}" if match else None


def machine(head: bytes) -> int | None:
    """The ELF machine number; None where the bytes are no ELF file."""
    if not head.startswith(ELF_MAGIC) or len(head) < 20:
        return None
    order = "<" if head[5] == 1 else ">"
    return int(struct.unpack_from(f"{order}H", head, 18)[0])


def host_machine(head: bytes) -> str | None:
    """The processor of an ELF file that is no cubin, for messages."""
    number = machine(head)
    if number is None or number == _EM_CUDA:
        return None
    return _ELF_MACHINES.get(number, f"ELF machine {number}")
