"""The updates in torch operations: the specification, on any device.

Everything runs in chunks of at most ``CHUNK`` elements, so that the temporary memory of a step
does not grow with the largest tensor. A parameter whose dtype is not that of the arithmetic is
rounded after weight decay and after the update, as torch.optim rounds, unless a task says
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from gefen.codebook import accumulate_histogram, counter_uniform
from gefen.flat import edited, load, rectangles
from gefen.kernels.tasks import (
    ROUNDING,
    BlockStep,
    DenseMomentum,
    FactoredStep,
    Momentum,
    Scalar,
    Seed,
    shrink,
)

CHUNK = 1 << 18
"""Elements that are worked on at a time."""

name = "reference"

SMALLEST_SHARE = 1e-3
"""Lower bound of the share that a cautious update is divided by (arXiv 2411.16085)."""


class Scratch:
    """Buffers of one dtype, by name, reused from chunk to chunk."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, count: int) -> Tensor:
        """``count`` elements with arbitrary content."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            buffer = torch.empty(count, dtype=self._dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:count]


def momentum_update(tasks: Sequence[DenseMomentum]) -> None:
    """m̂ ← quantised EMA of the gradient; out ← m̂, or β·m̂ + (1 − β)·g with nesterov."""
    for task in tasks:
        momentum, out = _flat(task.momentum), task.out.view(-1)
        scratch = Scratch(momentum.dtype, out.device)
        for start, stop, grad, entry, top in _advance(momentum, scratch):
            direction = entry.mul_(top).view(-1)
            if task.nesterov:
                direction.lerp_(grad, 1 - momentum.beta)
            out[start:stop].copy_(direction)


def block_step(tasks: Sequence[BlockStep]) -> None:
    """v ← EMA of block means of g²; p ← p(1 − lr·wd) − lr·m̂/bc1 / (sqrt(v)/sqrt(bc2) + eps).

    No element moves more than ``BOUND``·lr besides its decay, unless its momentum is infinite.
    """
    for task in tasks:
        adam, momentum, moments = task.adam, _flat(task.momentum), task.v.view(-1)
        scratch = Scratch(momentum.dtype, task.param.device)
        rate, root2, reach = adam.rate, adam.root2, adam.reach
        write = _Writer(task.param, adam.decay, task.rounding, momentum.offset, scratch)
        _average_blocks(momentum, moments, adam.beta2, scratch)
        for start, stop, _, entry, top in _advance(momentum, scratch):
            first = start // momentum.period
            v = moments[first : first + len(top), None].to(top.dtype)
            below = _floored(v.sqrt().div_(root2).add_(adam.eps))
            step = _finite((top * rate).div_(below), top)
            move = _bounded(entry.mul_(step), top, reach)
            with write.decayed(start, stop) as param:
                param.view_as(move).sub_(move)


def factored_step(tasks: Sequence[FactoredStep]) -> None:
    """r, c ← EMAs of row and column means of g²; v = r cᵀ / mean(c); p as in the block step.

    The mean of all elements is that of c, which shards of a matrix hold alike, not of their r.
    """
    for task in tasks:
        adam, momentum = task.adam, _flat(task.momentum)
        row, column = task.row.view(-1), task.column.view(-1)
        scratch = Scratch(momentum.dtype, task.param.device)
        _average_factors(task, row, column, scratch)
        rate, reach, root2 = adam.rate, adam.reach, adam.root2
        mean = column.mean(dtype=torch.float64)  # in which their sum is finite
        write = _Writer(task.param, adam.decay, task.rounding, momentum.offset, scratch)
        for start, stop, _, entry, top in _advance(momentum, scratch):
            below = scratch.take("below", stop - start)
            _root(row, column, mean.to(below.dtype), root2, start, below)
            below = below.add_(adam.eps).view_as(entry)
            if adam.eps < torch.finfo(below.dtype).tiny:
                _floored(below)
            move = entry.mul_(_finite(top * rate, top)).div_(below)
            move = _bounded(move, top, reach)
            with write.decayed(start, stop) as param:
                param.view_as(move).sub_(move)


def column_means(grad: Tensor, total_rows: int) -> Tensor:
    """float32 [columns]: the sum of g² of each column of a shard, over ``total_rows``.

    ``grad`` [rows, columns] are some of a matrix's ``total_rows`` rows; added over all shards,
    the results are what :class:`~gefen.kernels.tasks.FactoredStep` calls ``column_mean``.
    """
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    means = torch.zeros(grad.shape[1], dtype=torch.float32, device=grad.device)
    scale = shrink(total_rows)
    for part, _, _, left, right in _squares(grad, scale, Scratch(dtype, grad.device)):
        means[left:right].add_(part.sum(dim=0), alpha=1 / scale / total_rows)
    return means


def histogram(gradients: Sequence[tuple[Tensor, int]], counts: Tensor) -> None:
    """Add gradients in blocks of their periods to ``counts``, int64 [4096].

    See :func:`gefen.codebook.accumulate_histogram`.
    """
    for grad, period in gradients:
        accumulate_histogram(grad, period, counts)


def matrix_step(
    param: Tensor,
    update: Tensor,
    lr: Scalar,
    weight_decay: Scalar,
    cautious: Tensor | None,
    rounding: Seed | None = None,
    offset: int = 0,
    share: Tensor | None = None,
) -> None:
    """p ← p(1 − weight_decay) − lr·update; ``weight_decay`` includes the learning rate.

    ``update`` is contiguous and may be overwritten. ``cautious`` is the gradient or None: with
    it, elements of ``update`` that disagree with it in sign are dropped and the others divided
    by their share of all elements (Liang et al. 2024, arXiv 2411.16085), which is given where
    these are rows of a matrix (:func:`agreeing_share`). ``rounding`` and the
    ``offset`` of a shard's first element are those of :class:`~gefen.kernels.tasks.BlockStep` and
    its momentum.
    """
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    scratch = Scratch(dtype, param.device)
    write = _Writer(param, weight_decay, rounding, offset, scratch)
    if cautious is not None and share is None:
        share = agreeing_share(agreeing_count(update, cautious, scratch), update.numel())
    for start, stop in _cut(0, param.numel()):
        step = load(update, start, stop, scratch.take("update", stop - start))
        if cautious is not None and share is not None:
            grad = load(cautious, start, stop, scratch.take("grad", stop - start))
            step = masked(step, grad, share)
        with write.decayed(start, stop) as values:
            _subtract(values, step, lr)


def masked(step: Tensor, grad: Tensor, share: Tensor) -> Tensor:
    """What a cautious update takes of ``step``; ``share`` of it agrees in sign with ``grad``."""
    return step * (step * grad > 0) / share


def agreeing_count(update: Tensor, grad: Tensor, scratch: Scratch | None = None) -> Tensor:
    """How many elements agree in sign: int64, without dimensions."""
    if scratch is None:
        scratch = Scratch(torch.float32, update.device)
    agreeing = torch.zeros((), dtype=torch.int64, device=update.device)
    for start, stop in _cut(0, update.numel()):
        step = load(update, start, stop, scratch.take("update", stop - start))
        sign = load(grad, start, stop, scratch.take("grad", stop - start))
        agreeing += torch.count_nonzero(step * sign > 0)
    return agreeing


def agreeing_share(count: Tensor, total: int) -> Tensor:
    """What a cautious update is divided by: the share of elements that agree, but not tiny."""
    return (count / total).clamp_(min=SMALLEST_SHARE)


def _floored(below: Tensor) -> Tensor:
    """A divisor that is not 0, so that 0 / 0 is 0; NaN stays."""
    return below.clamp_(min=torch.finfo(below.dtype).tiny)


def _bounded(values: Tensor, top: Tensor, limit: Scalar) -> Tensor:
    """``values`` [blocks, any] within ±limit, but for NaN and for blocks of infinite momentum.

    ``top`` [blocks, 1] are the momenta's magnitudes.
    """
    most = torch.full_like(top, torch.inf).masked_fill_(top.isfinite(), limit)
    torch.minimum(values, most, out=values)  # many times faster than clamp
    return torch.maximum(values, most.neg_(), out=values)


def _finite(step: Tensor, top: Tensor) -> Tensor:
    """``step`` [blocks, 1], which overflows for finite momenta to what is still a number.

    What is infinite would make NaN of entries that are 0.
    """
    return _bounded(step, top, torch.finfo(step.dtype).max)


def _subtract(values: Tensor, step: Tensor, rate: Scalar) -> None:
    """values ← values − rate·step."""
    if isinstance(rate, Tensor):
        values.addcmul_(step, rate.to(values.dtype), value=-1)
    else:
        values.add_(step, alpha=-rate)


class _Writer:
    """Changes a parameter's values part by part: weight decay, the caller's update, rounding."""

    def __init__(
        self, param: Tensor, decay: Scalar, rounding: Seed | None, offset: int, scratch: Scratch
    ) -> None:
        self._param, self._decay, self._scratch = param, decay, scratch
        self._rounding = rounding if param.dtype == torch.bfloat16 else None
        self._offset = offset

    @contextmanager
    def decayed(self, start: int, stop: int) -> Iterator[Tensor]:
        """p(1 − decay) of some elements, to be updated in place; written back at the end."""
        buffer = self._scratch.take("param", stop - start)
        with edited(self._param, start, stop, buffer) as values:
            if isinstance(self._decay, Tensor) or self._decay:
                values.mul_(1 - self._decay)
                # torch.optim.AdamW rounds here too: decay below half a unit in the last place is
                # lost.
                if values.dtype != self._param.dtype and self._rounding is None:
                    values.copy_(values.to(self._param.dtype))
            yield values
            if self._rounding is not None:
                _round_randomly(values, self._rounding, self._offset + start)


def _round_randomly(values: Tensor, seed: Seed, start: int) -> None:
    """Make float32 ``values`` numbers that bfloat16 has, or leave those that must be rounded."""
    step, number = seed
    draw = counter_uniform(step, number | ROUNDING, start, values.numel(), values.device)
    bits = values.view(torch.int32) + (draw * (1 << 16)).int()
    rounded = (bits & -(1 << 16)).view(torch.float32)
    keep = values.isfinite().logical_and_(rounded.isfinite())
    torch.where(keep, rounded, values, out=values)


def _flat(momentum: Momentum) -> Momentum:
    index, magnitude = momentum.index.view(-1), momentum.magnitude.view(-1)
    return replace(momentum, index=index, magnitude=magnitude)


def _cut(start: int, stop: int) -> list[tuple[int, int]]:
    return [(a, min(a + CHUNK, stop)) for a in range(start, stop, CHUNK)]


def _spans(n: int, period: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole blocks, as many as fit in a chunk but at least one."""
    width = max(CHUNK // period, 1) * period
    return ((start, min(start + width, n)) for start in range(0, n, width))


def _advance(
    momentum: Momentum, scratch: Scratch
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
    """Advance the momentum's state, chunk by chunk.

    Yields start and stop of the chunk, its gradient [count], the codebook entries of its new
    momentum [blocks, period], free to overwrite, and the blocks' new magnitudes [blocks, 1].
    A block longer than a chunk comes in several chunks and is read twice: its magnitude must
    be known before its first element can be written.
    """
    for start, stop in _spans(momentum.index.numel(), momentum.period):
        old = momentum.magnitude[start // momentum.period : stop // momentum.period]
        chunks = _cut(start, stop)
        grad, mean = _blend(momentum, old, *chunks[0], scratch)
        top = _peak(mean, scratch)
        for chunk in chunks[1:]:
            top = torch.maximum(top, _peak(_blend(momentum, old, *chunk, scratch)[1], scratch))
        for a, b in chunks:
            if len(chunks) > 1:
                grad, mean = _blend(momentum, old, a, b, scratch)
            yield a, b, grad, _quantise(momentum, mean, top, a), top
        old.copy_(top.squeeze(1))


def _blend(
    momentum: Momentum, magnitude: Tensor, start: int, stop: int, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Gradient [count] and m = m̂ + (1 − β)(g − m̂) [blocks, elements] of one chunk."""
    grad = load(momentum.grad, start, stop, scratch.take("grad", stop - start))
    mean = momentum.quantizer.decode(momentum.index[start:stop]).to(grad.dtype)
    mean = mean.view(len(magnitude), -1).mul_(magnitude.unsqueeze(1))
    return grad, mean.lerp_(grad.view_as(mean), 1 - momentum.beta)


def _peak(mean: Tensor, scratch: Scratch) -> Tensor:
    """Largest magnitude of each block, [blocks, 1]; NaN where one is."""
    size = scratch.take("size", mean.numel()).view_as(mean)
    return torch.abs(mean, out=size).amax(dim=1, keepdim=True)


def _quantise(momentum: Momentum, mean: Tensor, top: Tensor, start: int) -> Tensor:
    """Store a chunk's new indices; return their entries. Overwrites ``mean``."""
    quantizer = momentum.quantizer
    x = mean.div_(top.masked_fill(top == 0, 1)).view(-1)
    if momentum.seed is None:
        index = quantizer.encode(x)
    else:
        lower, upper, chance = quantizer.neighbours(x)
        at = momentum.offset + start
        draw = counter_uniform(*momentum.seed, at, x.numel(), x.device)
        index = torch.where(draw < chance, upper, lower)
    momentum.index[start : start + x.numel()] = index
    return quantizer.decode(index).to(mean.dtype).view_as(mean)


def _average_blocks(momentum: Momentum, v: Tensor, beta2: float, scratch: Scratch) -> None:
    """v ← β2·v + (1 − β2)·(mean of g² in each block)."""
    v.mul_(beta2)
    scale = shrink(momentum.period)
    for start, stop in _spans(momentum.index.numel(), momentum.period):
        blocks = v[start // momentum.period : stop // momentum.period]
        for a, b in _cut(start, stop):
            grad = load(momentum.grad, a, b, scratch.take("grad", b - a))
            square = torch.mul(grad, scale, out=scratch.take("size", b - a)).mul_(grad)
            total = square.view(len(blocks), -1).sum(dim=1)
            blocks.add_(total, alpha=(1 - beta2) / scale / momentum.period)


def _average_factors(task: FactoredStep, row: Tensor, column: Tensor, scratch: Scratch) -> None:
    """r ← β2·r + (1 − β2)·(row means of g²), and c likewise for columns."""
    rows, columns = task.param.shape
    beta2 = task.adam.beta2
    mean, scale = task.column_mean, shrink(max(rows, columns))
    if not rows and mean is None:
        return
    row.mul_(beta2)
    column.mul_(beta2)
    if mean is not None:
        column.add_(mean, alpha=1 - beta2)
    for part, top, bottom, left, right in _squares(task.momentum.grad, scale, scratch):
        row[top:bottom].add_(part.sum(dim=1), alpha=(1 - beta2) / scale / columns)
        if mean is None:
            column[left:right].add_(part.sum(dim=0), alpha=(1 - beta2) / scale / rows)


def _squares(
    grad: Tensor, scale: float, scratch: Scratch
) -> Iterator[tuple[Tensor, int, int, int, int]]:
    """scale·g² of a matrix in parts, each with its rows and columns, half-open."""
    rows, columns = grad.shape
    for start, stop in _cut(0, rows * columns):
        values = load(grad, start, stop, scratch.take("grad", stop - start))
        square = torch.mul(values, scale, out=scratch.take("size", stop - start)).mul_(values)
        for top, bottom, left, right in rectangles(start, stop, columns):
            count = (bottom - top) * (right - left)
            part, square = square[:count].view(bottom - top, -1), square[count:]
            yield part, top, bottom, left, right


def _root(
    row: Tensor, column: Tensor, mean: Tensor, root2: Scalar, start: int, out: Tensor
) -> None:
    """``out`` ← sqrt(r cᵀ / mean) / root2 from element ``start`` on; zeros where mean is zero.

    As a product of two roots: r and c of small gradients would underflow if multiplied first.
    """
    mean = mean.masked_fill(mean == 0, 1)
    filled = 0
    for top, bottom, left, right in rectangles(start, start + len(out), len(column)):
        tall = row[top:bottom, None].to(out.dtype).div(mean).sqrt_().div_(root2)
        wide = column[left:right].to(out.dtype).sqrt()
        part = out[filled : filled + len(tall) * len(wide)].view(len(tall), len(wide))
        torch.mul(tall, wide, out=part)
        filled += part.numel()
