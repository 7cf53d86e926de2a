"""Blocks: the period that cuts each row of a parameter into equal, contiguous runs.

A block shares one magnitude and, in the block form, one second moment. It never crosses a row,
which is everything under one index of dimension 0; a vector is one row. The period is chosen once
per parameter, from its first gradient that is not all zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gefen.flat import flat_slice

UNDECIDED = 0
"""The period of a parameter whose gradients have all been zero."""

SMALLEST = 8
"""Periods below this many elements are not worth their per-block state."""

LARGEST_VECTOR_FALLBACK = 2048
"""Upper bound of the period of a vector whose gradient shows no block structure."""

LARGEST_ROW_FALLBACK = 16384
"""Likewise of other parameters, whose period is a whole row up to there.

Rows of models' matrices are no longer; those of stacked experts and of transposed heads are, and
one magnitude for tens of millions of elements would round most of them to zero.
"""

CHUNK = 1 << 19
"""Elements that :func:`block_sums` holds in float64 at a time on the CPU."""

_DEVICE_CHUNK = 1 << 22
_FIRST_SCORE = 1e-12
_ZERO_VARIANCE = 2.0**-40  # relative to the mean of g⁴: below it, rounding decides


def row_length(shape: Sequence[int]) -> int:
    """Elements of a row: those under one index of dimension 0, all of a vector."""
    return math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)


def divisors(n: int) -> list[int]:
    """All divisors of ``n`` ≥ 1 in ascending order, ``n`` included."""
    small, large = [], []
    d = 1
    while d * d <= n:
        if n % d == 0:
            small.append(d)
            if d * d != n:
                large.append(n // d)
        d += 1
    return small + large[::-1]


def candidates(shape: Sequence[int]) -> list[int]:
    """Periods to choose from, ascending: divisors of a row, without itself for a vector."""
    found = divisors(max(row_length(shape), 1))
    return found if len(shape) > 1 or len(found) == 1 else found[:-1]


def find_period(grad: Tensor, deterministic: bool = False) -> int:
    """Choose the block length of a parameter from a whole gradient.

    ``grad`` has any shape, any floating dtype and any strides. The result divides the length of
    a row; :data:`UNDECIDED` where all elements are zero. Non-finite gradients count as without
    structure.

    Work is the sum of n over the candidates (one strided difference of a prefix sum each), in
    float64. Temporary memory is a few chunks of fixed size, whatever the tensor's size.
    On CUDA the sums stay on the device, except with ``deterministic`` or under
    ``torch.use_deterministic_algorithms`` (its float prefix sum is not deterministic there).

    Source: arXiv 2606.13894, block partition; the fallback keeps the state near one byte per
    parameter.
    """
    return choose_period(block_sums(grad, candidates(grad.shape), deterministic), grad.shape)


def choose_period(sums: Sequence[float], shape: Sequence[int]) -> int:
    """The period by the :func:`block_sums` of all rows of a parameter of this shape."""
    count, total, *squares = sums
    if not math.prod(shape):
        return _fallback(shape)
    if count == 0:
        return UNDECIDED
    periods, n = candidates(shape), math.prod(shape)
    variances = [(total - s / p) / n for s, p in zip(squares, periods, strict=True)]
    if not all(map(math.isfinite, (total, *variances))):
        return _fallback(shape)
    variances[0] = 0.0
    floor = _ZERO_VARIANCE * total / n
    period = periods[_largest_drop([v**0.5 if v > floor else 0.0 for v in variances])]
    return period if period >= SMALLEST else _fallback(shape)


def _largest_drop(errors: list[float]) -> int:
    """Index of the candidate whose error falls most below the one before; ties: the first."""
    scores = [_FIRST_SCORE] + [b - a for a, b in pairwise(errors)]
    return min(range(len(scores)), key=scores.__getitem__)


def _fallback(shape: Sequence[int]) -> int:
    """The period without block structure: a row, or the longest part of it that will do."""
    length, is_vector = max(row_length(shape), 1), len(shape) < 2
    largest = LARGEST_VECTOR_FALLBACK if is_vector else LARGEST_ROW_FALLBACK
    period = max(d for d in divisors(length) if d <= largest)
    return 1 if is_vector and period < SMALLEST else period


def row_period(shape: Sequence[int]) -> int:
    """The period of a parameter that is not to depend on gradients."""
    return _fallback(shape)


def block_sums(grad: Tensor, periods: Sequence[int], deterministic: bool = False) -> list[float]:
    """What block errors are computed from; sums over parts of a parameter add up.

    These are the number of elements that are not zero, the sum of g⁴ and, for each period, the
    sum over blocks of the squared sum of g². E(P) = sqrt(mean over blocks of the variance of g² in
    the block), and the mean variance is mean(g⁴) − mean(block mean of g²)². ``grad`` holds whole
    rows.
    """
    grad, device = grad.detach(), _sum_device(grad, deterministic)
    n = grad.numel()
    chunk = CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    if not any(flat_slice(grad, a, min(a + chunk, n)).any() for a in range(0, n, chunk)):
        return [0.0] * (2 + len(periods))
    count = torch.zeros((), dtype=torch.float64, device=device)
    fourth = torch.zeros((), dtype=torch.float64, device=device)
    squares = [fourth.clone() for _ in periods]
    starts = [fourth.clone() for _ in periods]  # prefix sum at the start of the open block
    base = fourth.clone()
    for start in range(0, n, chunk):
        g = flat_slice(grad, start, min(start + chunk, n)).to(device, torch.float64)
        count += torch.count_nonzero(g)
        g = g * g
        fourth += g.dot(g)
        prefix = torch.cumsum(g, 0)
        for i, period in enumerate(periods):
            ends = prefix[period - 1 - start % period :: period]
            if ends.numel():
                squares[i] += _squared_sums(ends, starts[i] - base)
                starts[i] = base + ends[-1]
        base += prefix[-1]
    return torch.stack([count, fourth, *squares]).tolist()


def _sum_device(grad: Tensor, deterministic: bool) -> torch.device:
    if deterministic or torch.are_deterministic_algorithms_enabled() or not grad.is_cuda:
        return torch.device("cpu")
    return grad.device


def _squared_sums(ends: Tensor, start: Tensor) -> Tensor:
    """Sum of the squared block sums, from the prefix sums at the first start and all ends."""
    first = ends[0] - start
    sums = torch.diff(ends)
    return first * first + sums.dot(sums)
