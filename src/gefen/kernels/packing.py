"""Lays out tasks as the tables that table.cuh describes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gefen.codebook import SIZE, Quantizer
from gefen.kernels.tasks import shrink

WIDTH = 8
"""Elements of a vector, as in vector.cuh."""

SECTORS = 4096
"""Cells of the codebook's index, as in quantise.cuh."""

PANEL = 128
"""Rows of a panel, as in factored_step.cu."""

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

NESTEROV, STOCHASTIC, ALIGNED, DECAYS, ROUNDS = 1, 2, 4, 8, 16

VIEW = np.dtype(
    [
        *((name, "<i8") for name in ("data", "inner", "outer_stride", "inner_stride")),
        *((name, "<i4") for name in ("kind", "aligned")),
    ]
)
"""``struct View``."""

TASK = np.dtype(
    [
        *((name, VIEW) for name in ("grad", "param")),
        *((name, "<i8") for name in ("index", "magnitude", "v", "row_root", "column_root")),
        *((name, "<i8") for name in ("peaks", "before")),
        *((name, "<i8") for name in ("n", "period", "span", "chunks", "columns", "offset")),
        *((name, "<u8") for name in ("step", "parameter", "round_step", "round_parameter")),
        *((name, "<f4") for name in ("mix", "beta2", "share", "root2", "eps", "rate", "reach")),
        *((name, "<f4") for name in ("keep", "scale", "rest")),
        ("flags", "<i4"),
    ],
    align=True,
)
"""``struct Task``."""

FACTORS = np.dtype(
    [
        ("grad", VIEW),
        *((name, "<i8") for name in ("row", "column", "row_root", "column_root")),
        *((name, "<i8") for name in ("row_parts", "column_parts", "column_mean")),
        *((name, "<i8") for name in ("rows", "columns", "strips", "panels")),
        *((name, "<f4") for name in ("beta2", "row_share", "column_share", "correction2")),
        ("scale", "<f4"),
    ],
    align=True,
)
"""``struct Factors``."""

HEADER = np.dtype([(name, "<i8") for name in ("tasks", "codebook", "counts")])
"""``struct Header``."""

Rows: TypeAlias = npt.NDArray[Any]
"""An array of one of these."""


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


def unit(count: Any) -> Any:
    """The power of two, between 1/count and 0.5/count, that tables multiply sums of squares by."""
    return np.ldexp(1.0, -np.frexp(count - 1)[1])


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
    """What of ``struct Task`` stays while the tensors stay where they are."""

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
    flags: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of the tensor."""
        return self.n // self.period

    @property
    def items(self) -> int:
        """Work items of the task."""
        return self.blocks * self.chunks if self.chunks > 1 else -(-self.n // self.span)

    def fields(self) -> tuple[Any, ...]:
        """Fields in order; those that change with every step are neutral."""
        return (
            *(self.grad, self.param),
            *(self.index, self.magnitude, self.v, self.row_root, self.column_root),
            *(self.peaks, self.before),
            *(self.n, self.period, self.span, self.chunks, self.columns),
            *(0, 0, 0, 0, 0),
            *(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
            *(shrink(self.period), unit(self.period) / shrink(self.period)),
            self.flags,
        )


@dataclass
class Factors:
    """Likewise of ``struct Factors``."""

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

    def fields(self) -> tuple[Any, ...]:
        """In order; those that change with every step are zero."""
        return (
            self.grad,
            *(self.row, self.column, self.row_root, self.column_root),
            *(self.row_parts, self.column_parts, 0),
            *(self.rows, self.columns, self.strips, self.panels),
            *(0.0, 0.0, 0.0, 0.0),
            shrink(max(self.rows, self.columns)),
        )


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
    # A number's sector is one product, rounded once, as in quantise.cuh; none is above infinity.
    reach = SECTORS // 2 - 1
    home = (thresholds.double() * reach).round_().clamp_(-reach, reach).int() + SECTORS // 2
    home = home.masked_fill_(thresholds.isinf(), SECTORS)[: SIZE - 1].contiguous()
    sectors = torch.arange(SECTORS, dtype=torch.int32, device=device)
    low = torch.searchsorted(home, sectors)
    count = torch.searchsorted(home, sectors, right=True) - low
    bounds = torch.stack([low, count], dim=1).to(torch.uint8)
    following = torch.searchsorted(entries, entries, right=True).clamp_(max=SIZE - 1)
    parts = (
        entries.view(torch.uint8),
        thresholds.view(torch.uint8),
        bounds.view(-1),
        following.to(torch.uint8),
    )
    return torch.cat(parts)
