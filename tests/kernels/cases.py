"""Random tasks for kernels, and the tolerances within which they equal the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from gefen.codebook import BINS, Quantizer, solve
from gefen.kernels.tasks import Adam, BlockStep, Momentum, Seed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "offset", "strided", "transposed", "permuted")
CONTENTS = ("normal", "zeros", "tiny", "large", "huge", "infinite", "nan")

# Blocks below and above a vector, a tile (1024 elements) and what is cut in chunks (8192).
PERIODS = (1, 2, 3, 5, 7, 8, 9, 12, 16, 24, 31, 64, 100, 255, 256, 1000, 1023, 1024, 1025, 2048)
LONG_PERIODS = (8192, 8200, 9001)
LARGEST = 12_000


@dataclass(frozen=True)
class Case:
    """What a momentum task is made of; ``number`` seeds its content."""

    blocks: int
    period: int
    grad_dtype: torch.dtype
    param_dtype: torch.dtype
    grad_layout: str
    param_layout: str
    content: str
    stochastic: bool
    number: int
    offset: int = 0
    rounds: bool = False

    @property
    def rounding(self) -> Seed | None:
        """Of the parameter itself."""
        return (self.number, 3) if self.rounds else None


@st.composite
def cases(draw: Any, periods: tuple[int, ...] = PERIODS + LONG_PERIODS) -> Case:
    period = draw(st.sampled_from(periods))
    blocks = draw(st.integers(1, max(2, min(40, LARGEST // period)))) if period < 8192 else 1
    return Case(
        blocks,
        period,
        *(draw(st.sampled_from(DTYPES)) for _ in range(2)),
        *(draw(st.sampled_from(LAYOUTS)) for _ in range(2)),
        draw(st.sampled_from(CONTENTS)),
        draw(st.booleans()),
        draw(st.integers(0, 1 << 20)),
        draw(st.sampled_from([0, 0, 1, 6, 2**34 + 3])),
        draw(st.booleans()),
    )


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values, [rows, columns] or [1, rows, columns], in other places of memory."""
    rows, columns = values.shape
    if layout == "offset":
        out = torch.empty(values.numel() + 1, dtype=values.dtype)[1:].view(rows, columns)
    elif layout == "strided":
        out = torch.empty(rows, 2 * columns, dtype=values.dtype)[:, ::2]
    elif layout == "transposed":
        out = torch.empty(columns, rows, dtype=values.dtype).t()
    elif layout == "permuted" and columns % 2 == 0:
        out = torch.empty(columns // 2, 2, rows, dtype=values.dtype).permute(2, 1, 0)
        values = values.view(out.shape)
    else:
        return values.contiguous()
    out.copy_(values)
    return out


def content(kind: str, count: int, generator: torch.Generator) -> Tensor:
    values = torch.randn(count, generator=generator)
    special = torch.rand(count, generator=generator)
    if kind == "zeros":
        values[special < 0.9] = 0
    scale = {"tiny": 1e-42, "large": 1e18, "huge": 1e30}.get(kind, 1.0)
    values *= scale
    if kind == "infinite":
        values[special < 0.01] = torch.inf
        values[special > 0.99] = -torch.inf
    if kind == "nan":
        values[special < 0.01] = torch.nan
    return values


def with_zero(entries: Tensor) -> Quantizer:
    """Of a codebook whose entry nearest to 0 becomes 0."""
    return Quantizer(entries.masked_fill(torch.arange(len(entries)) == entries.abs().argmin(), 0))


def quantizer() -> Quantizer:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, generator=generator).clamp(-3, 3) / 3
    return with_zero(solve(torch.histc(values, BINS, -1, 1).long()))


QUANTIZER = quantizer()
ADAM = Adam(lr=1e-2, weight_decay=0.1, eps=1e-8, beta1=0.9, beta2=0.99, step=1)


def momentum(case: Case, book: Quantizer = QUANTIZER) -> tuple[Momentum, Tensor, Tensor]:
    """(momentum, parameter, second moments of its blocks)."""
    generator = torch.Generator().manual_seed(case.number)
    n = case.blocks * case.period
    grad = content(case.content, n, generator).to(case.grad_dtype).view(case.blocks, -1)
    task = Momentum(
        grad=laid_out(grad, case.grad_layout),
        index=torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator),
        magnitude=torch.rand(case.blocks, generator=generator),
        period=case.period,
        beta=0.9,
        quantizer=book,
        dtype=torch.float32,
        seed=(case.number, 3) if case.stochastic else None,
        offset=case.offset,
    )
    param = torch.randn(n, generator=generator).to(case.param_dtype).view(case.blocks, -1)
    v = torch.rand(case.blocks, generator=generator)
    return task, laid_out(param, case.param_layout), v


def block_step(case: Case, adam: Adam = ADAM) -> BlockStep:
    task, param, v = momentum(case)
    return BlockStep(param, task, v, adam, case.rounding)


def copied(task: Momentum) -> Momentum:
    return replace(task, index=task.index.clone(), magnitude=task.magnitude.clone())


def cloned(tensor: Tensor) -> Tensor:
    """A copy with the same strides and alignment."""
    out = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
    out.untyped_storage().copy_(tensor.untyped_storage())
    flat = out.view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def close(actual: Tensor, expected: Tensor, rtol: float, atol: float = 0.0) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


def same_momentum(actual: Momentum, expected: Momentum) -> Tensor:
    """Assert that states agree; elements [n] whose index is the same.

    Where the compiler of torch fuses operations differently, a magnitude may differ by its last
    bits, and with it the index of an element that lies halfway between two entries.
    """
    close(actual.magnitude, expected.magnitude, rtol=3e-7)
    finite = torch.isfinite(expected.magnitude).repeat_interleave(expected.period)
    apart = (actual.index.int() - expected.index.int()).abs()[finite]
    assert apart.le(1).all()
    assert apart.count_nonzero() <= max(1, apart.numel() // 500)
    return actual.index == expected.index


def same_param(actual: Tensor, expected: Tensor, before: Tensor, same: Tensor) -> None:
    """Assert that updates agree to 1e-5, and parameters to two units in the last place.

    Nearly all are equal, so that they were rounded by the same random numbers if by any.
    """
    assert actual.dtype == expected.dtype
    a, e, b = (x.reshape(-1)[same].double() for x in (actual, expected, before))
    unit = torch.finfo(actual.dtype).eps
    room = 1e-5 * (e - b).abs() + 2 * unit * e.abs() + torch.finfo(actual.dtype).tiny
    ok = ((a - e).abs() <= room) | (a == e) | (a.isnan() & e.isnan())
    assert ok.all(), (a[~ok][:5], e[~ok][:5])
    if actual.dtype == torch.bfloat16:
        apart = ((a != e) & ~(a.isnan() & e.isnan())).count_nonzero()
        assert apart <= max(2, len(a) // 50)
