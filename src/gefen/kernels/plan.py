"""The launches of an operation and their tables: made once, repeated while its tensors stay.

A step repeats what the step before did, on other gradients and with other scalars, so only
these are written anew. Tables hold addresses, no tensors: nothing is kept alive by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gefen.kernels.packing import FACTORS, HEADER, TASK, WIDTH, Factors, Rows, Task

WORD = 8

_BUFFER, _OFFSET = 44, (1 << 44) - 1
"""Scratch memory is told by the number of its buffer and an offset, until there are buffers."""

_SCRATCH = ("row_root", "column_root", "peaks", "before", "row_parts", "column_parts")

Numbers: TypeAlias = npt.NDArray[Any]
Device: TypeAlias = Mapping[str, Tensor]
"""Scalars that only the device knows, by field: a value for each task."""


@dataclass(slots=True, eq=False)
class Part:
    """One launch: views of its table in the plan's memory."""

    kernel: str
    tasks: Numbers | slice
    """Positions among the operation's tasks of those that it works on."""
    items: int
    start: int
    """Of its table, in words."""
    header: Rows
    rows: Rows
    scratch: dict[str, Numbers]
    """For each field: buffers and offsets."""

    @property
    def words(self) -> int:
        """Size of the table."""
        return (self.header.nbytes + self.rows.nbytes) // WORD + len(self.rows)


class Plan:
    """Made by :class:`gefen.kernels.launch.Launch`."""

    def __init__(
        self,
        planned: Sequence[tuple[str, list[int], Sequence[Task | Factors], list[int]]],
        buffers: Sequence[int],
        constants: int,
        flags: Numbers,
    ) -> None:
        """planned: (kernel, positions of its tasks, entries, items of each) for each launch.

        buffers: words of 64 bits; constants: float64 numbers that the tables are followed by;
        flags: those of each task that stay.
        """
        self.flags = flags
        self._buffers, self._bases = buffers, np.zeros(0, dtype=np.int64)
        sizes = [
            HEADER.itemsize + len(entries) * (WORD + _dtype(entries).itemsize)
            for _, _, entries, _ in planned
        ]
        self._memory = bytearray(sum(sizes) + WORD * constants)
        self.constants = np.frombuffer(self._memory, "<f8", constants, sum(sizes))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.parts = [self._part(start, *p) for start, p in zip(starts, planned, strict=True)]

    def _part(
        self,
        start: int,
        kernel: str,
        tasks: list[int],
        entries: Sequence[Task | Factors],
        items: list[int],
    ) -> Part:
        count, dtype = len(entries), _dtype(entries)
        header = np.frombuffer(self._memory, HEADER, 1, start)
        ends = np.frombuffer(self._memory, "<i8", count, start + HEADER.itemsize)
        at = start + HEADER.itemsize + ends.nbytes
        rows = np.frombuffer(self._memory, dtype, count, at)
        header["tasks"] = count
        np.cumsum(items, out=ends)
        rows[:] = np.array([entry.fields() for entry in entries], dtype=dtype)
        scratch = {name: rows[name].copy() for name in _SCRATCH if name in (dtype.names or ())}
        used = {name: places for name, places in scratch.items() if places.any()}
        every = count == len(self.flags)
        positions = slice(None) if every else np.asarray(tasks)
        return Part(kernel, positions, int(ends[-1]), start // WORD, header, rows, used)

    def place(self, views: Mapping[str, Numbers], book: int, counts: int) -> None:
        """Point to tensors by the fields' names, to the codebook and to the histogram's counts."""
        for part in self.parts:
            part.header["codebook"], part.header["counts"] = book, counts
            for name in views.keys() & set(part.rows.dtype.names or ()):
                view = part.rows[name]
                view["data"] = data = views[name][part.tasks]
                view["aligned"] = (view["inner"] == 0) & (data % (2 * WIDTH) == 0)

    def write(self, columns: Mapping[str, Numbers]) -> None:
        """Set fields, one value for each task, in all tables that have them."""
        with np.errstate(over="ignore"):  # infinity is what float32 makes of larger numbers
            for part in self.parts:
                names = part.rows.dtype.names or ()
                for name in columns.keys() & set(names):
                    part.rows[name] = columns[name][part.tasks]

    def scratch(self, device: torch.device) -> list[Tensor]:
        """Memory for the launches that follow, which must live until these are under way."""
        buffers = [torch.empty(words, dtype=torch.int64, device=device) for words in self._buffers]
        bases = np.array([buffer.data_ptr() for buffer in buffers], dtype=np.int64)
        if not np.array_equal(bases, self._bases):
            self._bases = bases
            for part in self.parts:
                for name, places in part.scratch.items():
                    used = places != 0
                    part.rows[name][used] = bases[(places[used] >> _BUFFER) - 1] + (
                        places[used] & _OFFSET
                    )
        return buffers

    @property
    def content(self) -> bytearray:
        """All tables, and the constants after them."""
        return self._memory

    def tables(self, memory: Tensor, scalars: Device) -> Iterator[tuple[Part, Tensor]]:
        """Each launch and its table in ``memory``, int64 on the device, which has the content."""
        for part in self.parts:
            table = memory[part.start : part.start + part.words]
            # Launches for some of the tasks find peaks, and need none of these.
            every = isinstance(part.tasks, slice)
            for name in scalars.keys() & set(part.rows.dtype.names or ()) if every else ():
                _column(table, part, name).copy_(scalars[name])
            yield part, table


def place(buffer: int, offset: int) -> int:
    """Scratch memory at a byte of a buffer, as entries of a table name it."""
    return (buffer + 1) << _BUFFER | offset


def _dtype(entries: Sequence[Task | Factors]) -> np.dtype[Any]:
    return TASK if isinstance(entries[0], Task) else FACTORS


def _column(table: Tensor, part: Part, name: str) -> Tensor:
    """A field of all entries of a table that lies on the device."""
    fields = part.rows.dtype.fields
    assert fields is not None
    kind, offset = fields[name][:2]
    dtype = {"<f4": torch.float32, "<u8": torch.int64}[kind.str]
    rows = table[-(part.rows.nbytes // WORD) :].view(dtype)
    return rows.view(len(part.rows), -1)[:, offset // kind.itemsize]
