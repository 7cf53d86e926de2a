"""Builds the CPU emulator of the kernels and drives it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from gefen.kernels import launch
from gefen.kernels.cuda import PAYLOAD
from gefen.kernels.launch import Kernels
from gefen.kernels.packing import Geometry

HERE = Path(__file__).parent / "emulator"
SOURCES = Path(launch.__file__).parent / "src"

SMALL = Geometry(threads=64, warp=8)
REAL = Geometry()

# As NVRTC compiles: no contraction, no fast mathematics. -march brings fmaf as one instruction.
FLAGS = (
    *("-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing"),
    # Emulators of several geometries live in one process.
    *("-fvisibility=hidden", "-fno-gnu-unique"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
)


def build(
    geometry: Geometry, *options: str, main: str = "kernels.cpp", sources: Path = SOURCES
) -> Path:
    """Compile the emulator once for these sources and options; the path of the result."""
    flags = [*FLAGS, f"-DTHREADS={geometry.threads}", f"-DWARP={geometry.warp}", *options]
    digest = hashlib.sha256(repr((flags, main)).encode())
    for path in sorted([*HERE.iterdir(), *sources.glob("*.cu*")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"gefen-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    result = folder / digest.hexdigest()[:32]
    if not result.exists():
        made = result.with_suffix(f".{os.getpid()}")
        command = ["g++", *flags, f"-I{HERE}", f"-I{sources}", str(HERE / main), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        made.replace(result)
    return result


class Emulator:
    """A driver that runs kernels on CPU tensors and counts its launches."""

    def __init__(self, geometry: Geometry = SMALL) -> None:
        library = ctypes.CDLL(str(build(geometry, "-fPIC", "-shared")))
        self._emulate, self.size = library.emulate, library.sizes
        whole = ctypes.c_longlong
        self._emulate.argtypes = (ctypes.c_char_p, whole, whole, ctypes.c_void_p, whole)
        self._store = library.emulate_store
        self._store.argtypes = (ctypes.c_void_p, whole, ctypes.c_char_p)
        self.launches: Counter[str] = Counter()

    def launch(self, kernel: str, grid: int, table: Tensor, items: int) -> None:
        assert 0 < grid <= items
        assert table.is_contiguous()
        assert table.dtype == torch.int64
        self.run(kernel, 0, grid, table, items)
        self.launches[kernel] += 1

    def store(self, table: Tensor, content: bytes | bytearray) -> None:
        assert table.numel() * 8 == len(content)
        for start in range(0, len(content), PAYLOAD):
            piece = bytes(content[start : start + PAYLOAD])
            to = table.data_ptr() + start
            self._store(to, len(piece) // 8, ctypes.create_string_buffer(piece, PAYLOAD))
            self.launches["store"] += 1

    def run(self, kernel: str, first: int, grid: int, table: Tensor, items: int) -> None:
        """Launch, but run only the blocks from ``first`` on."""
        assert self._emulate(kernel.encode(), first, grid, table.data_ptr(), items) == 0, kernel


def kernels(emulator: Emulator, geometry: Geometry = SMALL, processors: int = 1) -> Kernels:
    return Kernels(emulator, torch.device("cpu"), processors, geometry)
