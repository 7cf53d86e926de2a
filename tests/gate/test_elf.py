from __future__ import annotations

import pytest

from gate import elf
from tests.gate.wheel_builder import cubin, ptx

# Read with readelf from what NVRTC 12.9 and nvcc 13.0 made of one small kernel.
MEASURED = [
    (0x4B054B, 7, "sm_75"),
    (0x500550, 7, "sm_80"),
    (0x5A055A, 7, "sm_90"),
    (0x5A0D5A, 7, "sm_90a"),
    (0x6006402, 8, "sm_100"),
    (0x600640A, 8, "sm_100a"),
    (0x6006702, 8, "sm_103"),
    (0x6007802, 8, "sm_120"),
    (0x6007902, 8, "sm_121"),
    (0x6004B04, 8, "sm_75"),
    (0x6005A04, 8, "sm_90"),
]


@pytest.mark.parametrize(("flags", "abi", "arch"), MEASURED)
def test_architecture_of_a_cubin(flags: int, abi: int, arch: str) -> None:
    assert elf.cubin_arch(cubin(flags, abi)) == arch


def test_what_is_no_cubin() -> None:
    whole = cubin(0x5A055A, 7)
    for head in (b"", whole[:40], b"\x7fELF", bytes(64), whole[:18] + b"\x3e\0" + whole[20:]):
        assert elf.cubin_arch(head) is None
    assert elf.ptx_arch(ptx("sm_121")) == "compute_121"
    assert elf.ptx_arch(b".version 8.8\n") is None
