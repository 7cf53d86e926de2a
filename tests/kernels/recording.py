"""Records launches and all memory they can reach, for a program that replays them."""

from __future__ import annotations

import gc
import struct
from pathlib import Path

import torch
from torch import Tensor


class Recorder:
    """A driver that keeps what it is asked to run, and runs nothing."""

    def __init__(self) -> None:
        self._alive: list[Tensor] = []
        self._found: dict[tuple[int, int], int] = {}
        self._contents: list[bytes] = []
        self._launches: list[bytes] = []
        self._storages: list[tuple[Tensor, int, int]] = []

    def launch(self, kernel: str, grid: int, table: Tensor, items: int) -> None:
        content = bytes(table.numpy().tobytes())
        self._contents.append(content)
        number = len(self._contents) - 1
        addresses = []
        self._storages = [
            (tensor, tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            for tensor in gc.get_objects()
            if type(tensor) is Tensor and tensor.layout is torch.strided and tensor.numel()
        ]
        for word, value in enumerate(struct.unpack(f"<{len(content) // 8}q", content)):
            home = self._home(value) if value > 1 << 32 else None
            if home is not None:
                addresses.append((word, *home))
        head = kernel.encode().ljust(64, b"\0") + _words(grid, items, number, len(addresses))
        self._launches.append(head + b"".join(_words(*address) for address in addresses))

    def write(self, path: Path) -> None:
        """Write the recording that emulator/replay.cpp reads."""
        parts = [_words(len(self._contents))]
        for content in self._contents:
            parts += [_words(len(content)), content, b"\0" * (-len(content) % 8)]
        path.write_bytes(b"".join([*parts, _words(len(self._launches)), *self._launches]))

    def _home(self, address: int) -> tuple[int, int] | None:
        """The recorded memory that an address lies in, and where in it."""
        for (start, size), number in self._found.items():
            if start <= address < start + size:
                return number, address - start
        for tensor, start, size in self._storages:
            if start <= address < start + size:
                self._alive.append(tensor)
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._contents.append(whole.numpy().tobytes())
                self._found[start, size] = len(self._contents) - 1
                return len(self._contents) - 1, address - start
        return None


def _words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
