"""Wheels whose GPU code is not what their sources give, although all their lists agree."""

from __future__ import annotations

import struct
from typing import Any

from gate import elf
from tests.gate.corpus.case import Table
from tests.gate.corpus.kernels import IMAGES, edit, edit_manifest
from tests.gate.corpus.package import Package

TABLE = Table([])
broken = TABLE.add


def within(data: bytes, section: str, change: bytes | None = None) -> bytes:
    """Fill a section of a cubin with zeros, or put something into its middle."""
    content = dict(elf.sections(data))[section]
    start = data.index(content)
    middle = len(content) // 2
    new = bytes(len(content)) if change is None else content[:middle] + change
    return data[:start] + new + data[start + len(new) :]


@broken(
    "audit", "compiled: gefen/kernels/cubin/sm_90.cubin: is not what the sources in the wheel give"
)
def patched_instruction(package: Package) -> None:
    edit(package, "sm_90.cubin", lambda data: within(data, ".text.momentum", b"\x5a"))


@broken("audit", "compiled: gefen/kernels/cubin/compute_75.ptx: is not what the sources")
def patched_ptx(package: Package) -> None:
    edit(package, "compute_75.ptx", lambda data: data.replace(b"%tid.x;", b"%tid.y;", 1))


@broken(
    "audit",
    "compiled: gefen/kernels/cubin/sm_75.cubin: is not what the sources in the wheel",
    seconds=180.0,  # all is compiled
)
def images_of_other_sources(package: Package) -> None:
    edit(package, "probe.cu", lambda data: data.replace(b"{", b"{ if (items < 0) return;", 1))


@broken("audit", "code: gefen/kernels/cubin/sm_80.cubin: .text.momentum holds nothing but zeros")
def kernel_of_zeros(package: Package) -> None:
    edit(package, "sm_80.cubin", lambda data: within(data, ".text.momentum"))


@broken("audit", "code: gefen/kernels/cubin/sm_80.cubin: .nv.constant2.factor_sums holds nothing")
def table_of_zeros(package: Package) -> None:
    edit(package, "sm_80.cubin", lambda data: within(data, ".nv.constant2.factor_sums"))


@broken("audit", "code: gefen/kernels/cubin/sm_121.cubin: has no kernel momentum")
def kernel_under_another_name(package: Package) -> None:
    edit(package, "sm_121.cubin", lambda data: data.replace(b".momentum\0", b".momentun\0"))


@broken("audit", "code: gefen/kernels/cubin/sm_86.cubin: its table of sections is damaged")
def damaged_sections(package: Package) -> None:
    def change(data: bytes) -> bytes:
        (table,) = struct.unpack_from("<Q", data, 40)
        return data[: table + 64 + 24] + b"\xff" * 8 + data[table + 64 + 32 :]

    edit(package, "sm_86.cubin", change)


@broken("audit", "code: gefen/kernels/cubin/compute_75.ptx: has version 9.0; CUDA 12.9 writes 8.8")
def ptx_of_another_version(package: Package) -> None:
    edit(package, "compute_75.ptx", lambda data: data.replace(b".version 8.8", b".version 9.0"))


@broken("audit", "code: gefen/kernels/cubin/compute_75.ptx: does not end where its code does")
def ptx_that_is_cut_short(package: Package) -> None:
    edit(package, "compute_75.ptx", lambda data: data[: len(data) - 2000])


@broken("audit", "code: gefen/kernels/cubin/compute_75.ptx: has no kernel store")
def ptx_without_the_last_kernel(package: Package) -> None:
    edit(package, "compute_75.ptx", lambda data: data[: data.index(b"\t// .globl\tstore")])


@broken("audit", "manifest.json: has options ['--use_fast_math'], the package asks for [")
def compiled_with_other_options(package: Package) -> None:
    edit_manifest(package, lambda listed: listed.update(options=["--use_fast_math"]))


@broken("audit", "manifest.json: does not name the compiler")
def manifest_without_a_compiler(package: Package) -> None:
    edit_manifest(package, lambda listed: listed.pop("compiler"))


@broken("audit", f"manifest.json: lists other kernels of {IMAGES}/sm_90.cubin than it has")
def list_without_a_kernel(package: Package) -> None:
    def change(listed: dict[str, Any]) -> None:
        del listed["files"]["sm_90.cubin"]["kernels"]["store"]

    edit_manifest(package, change)


@broken("audit", "code: gefen/kernels/cubin: no module names the kernel factor_roots")
def kernel_that_is_never_launched(package: Package) -> None:
    package.edit("gefen/kernels/launch.py", b'"factor_roots"', b'"factor_root"')


@broken("audit", "code: gefen/kernels/cubin: has no kernel prob, which is launched")
def launch_of_a_kernel_that_is_not_there(package: Package) -> None:
    package.edit("gefen/kernels/launch.py", b'launch("probe"', b'launch("prob"')
