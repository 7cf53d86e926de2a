"""Blocks: the period that cuts a flattened parameter into equal, contiguous runs.

A block shares one magnitude and, in the block form, one second moment. The period is chosen
once per parameter, from its first gradient.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from gefen.flat import flat_slice

SMALLEST = 8
"""Periods below this many elements are not worth their per-block state."""

LARGEST_FALLBACK = 2048
"""Upper bound of the period taken where the gradient shows no block structure."""

CHUNK = 1 << 19
"""Elements that :func:`find_period` holds in float64 at a time on the CPU."""

_DEVICE_CHUNK = 1 << 22
_FIRST_SCORE = 1e-12
_ZERO_VARIANCE = 2.0**-40  # relative to the mean of g⁴: below it, rounding decides


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


def find_period(grad: Tensor, deterministic: bool = False) -> int:
    """Choose the block length of a parameter from its first gradient.

    ``grad`` has any shape, any floating dtype and any strides. The result divides
    ``grad.numel()``; an empty gradient gives 1. Non-finite gradients count as
    without structure.

    Work is the sum of the divisors of n (one strided difference of a prefix sum each), in
    float64. Temporary memory is a few chunks of fixed size, whatever the tensor's size.
    On CUDA the sums stay on the device, except with ``deterministic`` or under
    ``torch.use_deterministic_algorithms`` (its float prefix sum is not deterministic there).

    Source: arXiv 2606.13894, block partition; the fallback of step 5 keeps the state near one
    byte per parameter.
    """
    n = grad.numel()
    if n < SMALLEST:
        return 1
    candidates = divisors(n)
    device = _sum_device(grad, deterministic)
    errors = _block_errors(grad.detach(), candidates[:-1], device)
    period = candidates[_largest_drop(errors)]
    return period if period >= SMALLEST else _fallback(grad.shape, candidates)


def _largest_drop(errors: list[float]) -> int:
    """Index of the candidate whose error falls most below the one before; ties: the first."""
    scores = [_FIRST_SCORE] + [b - a for a, b in pairwise(errors)]
    return min(range(len(scores)), key=scores.__getitem__)


def _fallback(shape: torch.Size, candidates: list[int]) -> int:
    """The period without block structure: a row, or the longest run up to 2048."""
    n = candidates[-1]
    period = max(d for d in candidates if d <= LARGEST_FALLBACK)
    if len(shape) >= 2 and n % shape[-1] == 0:
        period = max(period, shape[-1])
    return period if period >= SMALLEST else 1


def _block_errors(grad: Tensor, periods: list[int], device: torch.device) -> list[float]:
    """E(P) = sqrt(mean over blocks of the variance of g² in the block), for each period.

    The mean variance is mean(g⁴) − mean(block mean of g²)², so only block sums are needed.
    Only P = 1 is returned where the sums are not finite.
    """
    n = grad.numel()
    chunk = CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    fourth = torch.zeros((), dtype=torch.float64, device=device)
    squares = [fourth.clone() for _ in periods]
    starts = [fourth.clone() for _ in periods]  # prefix sum at the start of the open block
    base = fourth.clone()
    for start in range(0, n, chunk):
        g = flat_slice(grad, start, min(start + chunk, n)).to(device, torch.float64)
        g = g * g
        fourth += g.dot(g)
        prefix = torch.cumsum(g, 0)
        for i, period in enumerate(periods):
            ends = prefix[period - 1 - start % period :: period]
            if ends.numel():
                squares[i] += _squared_sums(ends, starts[i] - base)
                starts[i] = base + ends[-1]
        base += prefix[-1]
    total = float(fourth)
    variances = [(total - float(s) / p) / n for s, p in zip(squares, periods, strict=True)]
    if not all(map(math.isfinite, (total, *variances))):
        return [0.0]
    variances[0] = 0.0
    floor = _ZERO_VARIANCE * total / n
    return [v**0.5 if v > floor else 0.0 for v in variances]


def _sum_device(grad: Tensor, deterministic: bool) -> torch.device:
    if deterministic or torch.are_deterministic_algorithms_enabled() or not grad.is_cuda:
        return torch.device("cpu")
    return grad.device


def _squared_sums(ends: Tensor, start: Tensor) -> Tensor:
    """Sum of the squared block sums, from the prefix sums at the first start and all ends."""
    first = ends[0] - start
    sums = torch.diff(ends)
    return first * first + sums.dot(sums)
