"""Lays out tasks as the tables that table.cuh describes."""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gefen.codebook import SIZE, Quantizer

WIDTH = 8
"""Elements of a vector, as in vector.cuh."""

SECTORS = 2048
"""Cells of the codebook's index, as in quantise.cuh."""

PANEL = 128
"""Rows of a panel, as in factored_step.cu."""

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

NESTEROV, STOCHASTIC, ALIGNED, DECAYS = 1, 2, 4, 8

_VIEW = "qqqqii"
_TASK = struct.Struct(f"<{_VIEW}{_VIEW}7q5q2Q7fi")
_FACTORS = struct.Struct(f"<{_VIEW}6q4q4f")
_HEADER = struct.Struct("<qqq")
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Geometry:
    """How kernels were compiled: threads of a block and of a warp."""

    threads: int = 256
    warp: int = 32

    @property
    def tile(self) -> int:
        """Elements that a block of threads keeps in shared memory."""
        return 2 * self.threads * WIDTH

    @property
    def strip(self) -> int:
        """Columns of a panel."""
        return 4 * self.warp * WIDTH

    def cut(self, period: int) -> tuple[int, int]:
        """(elements of a work item, items of a block if it is cut, else 1)."""
        capacity = self.tile if period >= WIDTH else 4 * self.threads
        blocks = capacity // period
        if period % WIDTH and blocks >= WIDTH:
            blocks -= blocks % WIDTH  # items begin at whole vectors
        elif period % WIDTH:
            blocks = (capacity - WIDTH + 1) // period
        if blocks:
            return blocks * period, 1
        if period <= 8 * self.tile:
            return period, 1
        span = -(-period // (4 * self.threads))
        span = -(-span // self.tile) * self.tile
        return span, -(-period // span)


View = tuple[int, int, int, int, int, int]
NO_VIEW: View = (0, 0, 0, 0, 0, 0)


def view(tensor: Tensor) -> View | None:
    """Where a tensor's elements lie, or None if it has more than two strides."""
    kind, at = KINDS[tensor.dtype], tensor.data_ptr()
    if tensor.is_contiguous():
        return at, 0, 0, 0, kind, at % 16 == 0
    dims: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > 2:
        return None
    (_, outer), (inner, stride) = [(1, 0), *dims][-2:]
    return at, inner, outer, stride, kind, 0


@dataclass
class Task:
    """One entry of a table: ``struct Task`` with its defaults."""

    grad: View
    n: int
    period: int
    span: int
    chunks: int
    param: View = NO_VIEW
    index: int = 0
    magnitude: int = 0
    v: int = 0
    row_root: int = 0
    column_root: int = 0
    peaks: int = 0
    before: int = 0
    columns: int = 0
    seed: tuple[int, int] = (0, 0)
    mix: float = 0.0
    beta2: float = 0.0
    share: float = 0.0
    root2: float = 0.0
    eps: float = 0.0
    rate: float = 0.0
    keep: float = 1.0
    flags: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of the tensor."""
        return self.n // self.period

    @property
    def items(self) -> int:
        """Work items of the task."""
        return self.blocks * self.chunks if self.chunks > 1 else -(-self.n // self.span)

    def packed(self) -> bytes:
        """The entry's bytes."""
        step, parameter = self.seed
        return _packed(
            _TASK,
            (
                *self.grad,
                *self.param,
                *(self.index, self.magnitude, self.v, self.row_root, self.column_root),
                *(self.peaks, self.before),
                *(self.n, self.period, self.span, self.chunks, self.columns),
                *(step % (1 << 64), parameter % (1 << 64)),
                *(self.mix, self.beta2, self.share, self.root2, self.eps, self.rate, self.keep),
                self.flags,
            ),
        )


@dataclass
class Factors:
    """One entry of a table: ``struct Factors``."""

    grad: View
    row: int
    column: int
    row_root: int
    column_root: int
    row_parts: int
    column_parts: int
    rows: int
    columns: int
    strips: int
    panels: int
    beta2: float
    correction2: float

    def packed(self) -> bytes:
        """The entry's bytes."""
        share = 1 - self.beta2
        return _packed(
            _FACTORS,
            (
                *self.grad,
                *(self.row, self.column, self.row_root, self.column_root),
                *(self.row_parts, self.column_parts),
                *(self.rows, self.columns, self.strips, self.panels),
                *(self.beta2, share / self.columns, share / self.rows, self.correction2),
            ),
        )


def _packed(layout: struct.Struct, values: tuple[int | float, ...]) -> bytes:
    try:
        return layout.pack(*values)
    except OverflowError:  # float32 cannot hold it
        return layout.pack(*(_single(x) if isinstance(x, float) else x for x in values))


def _single(x: float) -> float:
    """``x``, or infinity where float32 cannot hold it."""
    return x if abs(x) <= _LARGEST or not math.isfinite(x) else math.copysign(math.inf, x)


def table(
    entries: Sequence[Task | Factors], items: Sequence[int], codebook: int = 0, counts: int = 0
) -> bytes:
    """A table of ``entries`` with so many work items each."""
    ends, total = [], 0
    for count in items:
        total += count
        ends.append(total)
    head = _HEADER.pack(len(entries), codebook, counts) + struct.pack(f"<{len(ends)}q", *ends)
    return head + b"".join(entry.packed() for entry in entries)


_codebooks: weakref.WeakKeyDictionary[Quantizer, Tensor] = weakref.WeakKeyDictionary()


def codebook(quantizer: Quantizer) -> Tensor:
    """``struct Codebook`` as bytes on the quantizer's device, made once."""
    known = _codebooks.get(quantizer)
    if known is None:
        known = _codebooks[quantizer] = _codebook(quantizer)
    return known


def _codebook(quantizer: Quantizer) -> Tensor:
    entries, device = quantizer.codebook, quantizer.codebook.device
    padding = torch.full((1,), torch.inf, dtype=torch.float32, device=device)
    thresholds = torch.cat([quantizer.thresholds, padding])
    home = (thresholds * (SECTORS / 2) + SECTORS / 2).clamp_(0, SECTORS - 1).int()[: SIZE - 1]
    sectors = torch.arange(SECTORS, dtype=torch.int32, device=device)
    low = torch.searchsorted(home, sectors)
    high = torch.searchsorted(home, sectors, right=True)
    bounds = torch.stack([low, high], dim=1).to(torch.uint8)
    following = torch.searchsorted(entries, entries, right=True).clamp_(max=SIZE - 1)
    parts = (
        entries.view(torch.uint8),
        thresholds.view(torch.uint8),
        bounds.view(-1),
        following.to(torch.uint8),
    )
    return torch.cat(parts)
