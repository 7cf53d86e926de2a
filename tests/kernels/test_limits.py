"""What steps do at the ends: bounded movement, huge and tiny gradients, none at all.

Each for the reference and for the kernels on the emulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import ADAM, QUANTIZER, close, with_zero
from emulation import REAL, SMALL, Emulator, kernels
from torch import Tensor

from gefen.codebook import SIZE, Quantizer
from gefen.kernels import reference
from gefen.kernels.tasks import Adam, BlockStep, FactoredStep, Momentum, shrink

PLAIN = replace(ADAM, lr=0.25, weight_decay=0.0)
EXACT = replace(PLAIN, eps=0.0)


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator()


@pytest.fixture(params=["reference", "kernels"])
def backend(request: pytest.FixtureRequest, emulator: Emulator) -> Any:
    return reference if request.param == "reference" else kernels(emulator)


def momentum(grad: Tensor, period: int, **changes: Any) -> Momentum:
    n = grad.numel()
    start = torch.zeros(n, dtype=torch.uint8), torch.zeros(n // period)
    task = Momentum(grad, *start, period, 0.9, QUANTIZER, torch.float32, None)
    return replace(task, **changes)


def block(grad: Tensor, period: int, adam: Adam = PLAIN, **changes: Any) -> BlockStep:
    task = momentum(grad, period, **changes)
    return BlockStep(torch.zeros_like(grad), task, torch.zeros_like(task.magnitude), adam)


def factored(grad: Tensor, period: int, adam: Adam = PLAIN, **changes: Any) -> FactoredStep:
    rows, columns = grad.shape
    task = momentum(grad, period, **changes)
    moments = torch.zeros(rows), torch.zeros(columns)
    return FactoredStep(torch.zeros_like(grad), task, *moments, adam)


MAKE = {"block": block, "factored": factored}


def run(backend: Any, task: BlockStep | FactoredStep) -> Tensor:
    if isinstance(task, BlockStep):
        backend.block_step([task])
    else:
        backend.factored_step([task])
    return task.param


def moments(task: BlockStep | FactoredStep) -> Iterator[Tensor]:
    yield from [task.v] if isinstance(task, BlockStep) else [task.row, task.column]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-8])
@pytest.mark.parametrize("kind", MAKE)
def test_no_element_moves_far(backend: Any, kind: str, eps: float, maximize: bool) -> None:
    """Momentum that is left when gradients have ceased, of every size float32 has."""
    adam = replace(PLAIN, eps=eps, maximize=maximize)
    task = MAKE[kind](torch.zeros(8, 64), 64, adam)
    task.momentum.index[:] = torch.arange(512) % SIZE
    task.momentum.magnitude[:] = torch.tensor([0, 1e-44, 1e-30, 1e-8, 1, 1e10, 1e30, 3e38])
    param = run(backend, task)
    most = 10 * adam.lr
    assert param.isfinite().all()
    assert param.abs().max() <= most
    assert not param[0].any()
    down = QUANTIZER.decode(task.momentum.index).view(8, 64).sign()
    assert not param[down == 0].any()
    for row in (5, 7):
        assert torch.equal(param[row], most * (down if maximize else 0 - down)[row])
        assert down[row].count_nonzero() > 60


@pytest.mark.parametrize("period", [8, 64])
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_spreads(backend: Any, bad: float, kind: str, period: int) -> None:
    """Other blocks stay finite and within their bound."""
    grad = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    grad[3, 5] = bad
    param = run(backend, MAKE[kind](grad, period))
    assert not param[3, 5].isfinite()
    if kind == "block":
        start = 3 * 64 // period * period
        others = torch.cat([param.view(-1)[:start], param.view(-1)[start + period :]])
        assert others.isfinite().all()


@pytest.mark.parametrize("kind", MAKE)
def test_infinite_momentum_is_not_bounded(backend: Any, kind: str) -> None:
    """Blocks may cross rows, whose own second moments stay finite."""
    grad = torch.ones(8, 64)
    grad[3, 5] = torch.inf
    book = Quantizer(torch.linspace(-1, 1, SIZE))
    assert not run(backend, MAKE[kind](grad, 512, quantizer=book)).isfinite().any()


@pytest.mark.parametrize("size", [1e18, 1.0, 1e-18])
@pytest.mark.parametrize(
    ("kind", "shape", "period"),
    [
        *(("block", (1, 12_000), period) for period in (5, 8, 60, 1000, 3000, 12_000)),
        *(("factored", shape, 1) for shape in ((300, 40), (4, 3000), (1500, 8))),
    ],
)
def test_means_of_squares(
    backend: Any, kind: str, shape: tuple[int, ...], period: int, size: float
) -> None:
    """Their sums would overflow, or vanish if they were made smaller without need."""
    task = MAKE[kind](torch.full(shape, size), period, EXACT)
    param = run(backend, task)
    for moment in moments(task):
        close(moment.double() / size / size, torch.full_like(moment, 0.01).double(), rtol=1e-3)
    close(param, torch.full(shape, -PLAIN.lr), rtol=1e-3)


@pytest.mark.parametrize("kind", MAKE)
def test_one_square_beyond_float32_whose_mean_is_not(backend: Any, kind: str) -> None:
    grad = torch.zeros(128, 128)
    grad[3, 4] = 1e20
    task = MAKE[kind](grad, 128)
    param = run(backend, task)
    (first, *_) = moments(task)
    close(first[3], torch.tensor(1e38 / 128), rtol=1e-5)
    assert param.isfinite().all()
    assert param[3, 4] < 0


def test_columns_whose_sum_is_beyond_float32(backend: Any) -> None:
    """A step does not depend on the scale of gradients and state."""
    params = []
    for scale in (1.0, 2.0**-60):
        task = factored(torch.zeros(4, 320), 64, EXACT)
        task.momentum.index[:] = torch.arange(4 * 320) % SIZE
        task.momentum.magnitude.fill_(1e19 * scale)
        for moment in moments(task):
            moment.fill_(3e38 * scale**2)
        params.append(run(backend, task))
    close(*params, rtol=1e-6)
    assert 0.1 < params[0].abs().max() < 2.5


@pytest.mark.parametrize("size", [1e18, 1e-18])
def test_means_of_long_blocks(size: float) -> None:
    """Longer than what squares are made smaller for, as in a state of gefen-x."""
    count = (1 << 20) + 8
    assert shrink(1 << 40) == shrink(count) == 2.0**-20
    for backend in (reference, kernels(Emulator(REAL), REAL)):
        task = block(torch.full((count,), size), count, EXACT)
        close(run(backend, task), torch.full((count,), -PLAIN.lr), rtol=1e-2)


def test_shrink() -> None:
    assert [shrink(count) for count in (1, 2, 3, 4, 5)] == [1.0, 0.5, 0.25, 0.25, 0.125]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("period", [4, 60, 3000])
@pytest.mark.parametrize("kind", MAKE)
def test_what_never_has_a_gradient_does_not_move(
    backend: Any, kind: str, period: int, stochastic: bool
) -> None:
    """Beside elements that have: its momentum is the entry that is 0."""
    generator = torch.Generator().manual_seed(period)
    task = MAKE[kind](torch.zeros(2, 3000), period)
    dead = torch.rand(2, 3000, generator=generator) < 0.5
    dead[0, :200] = True
    task.param.copy_(torch.randn(2, 3000, generator=generator))
    before = task.param.clone()
    for step in range(1, 4):
        grad = torch.randn(2, 3000, generator=generator).masked_fill_(dead, 0)
        seed = (step, 0) if stochastic else None
        task = replace(
            task,
            momentum=replace(task.momentum, grad=grad, seed=seed),
            adam=replace(PLAIN, step=step),
        )
        run(backend, task)
    assert torch.equal(task.param[dead], before[dead])
    assert (task.param != before)[~dead].float().mean() > 0.9
    entries = QUANTIZER.decode(task.momentum.index).view(2, 3000)
    assert not entries[dead].any()


@pytest.mark.parametrize(
    "entries", [torch.linspace(-1, 1, SIZE), torch.linspace(-1, 1, SIZE) ** 5]
)
def test_the_index_of_zero(entries: Tensor) -> None:
    book = with_zero(entries)
    zero = int((book.codebook == 0).nonzero())
    both = torch.tensor([0.0, -0.0])
    assert book.encode(both).tolist() == [zero, zero]
    lower, _, chance = book.neighbours(both)
    assert (lower.tolist(), chance.tolist()) == ([zero, zero], [0.0, 0.0])


@pytest.mark.parametrize("given", [False, True])
def test_a_shard_without_rows(backend: Any, given: bool) -> None:
    task = factored(torch.zeros(0, 12), 1)
    task.column.fill_(1)
    other = factored(torch.ones(2, 12), 12)
    mean = torch.full((12,), 2.0) if given else None
    backend.factored_step([replace(task, column_mean=mean), other])
    close(task.column, torch.full((12,), 1.01 if given else 1.0), rtol=1e-6)
    assert other.param.all()


def test_means_are_given_in_some_steps(emulator: Emulator) -> None:
    """A launch that is repeated does not remember them."""
    results = []
    for backend in (reference, kernels(emulator)):
        task = factored(torch.ones(3, 12), 12)
        for number in (1.0, 3.0, None, 2.0):
            mean = None if number is None else torch.full((12,), number)
            run(backend, replace(task, column_mean=mean))
        results.append(task)
    close(results[1].column, results[0].column, rtol=1e-6)
    close(results[1].param, results[0].param, rtol=1e-6)


def test_scalars_of_the_device_where_some_blocks_are_long(emulator: Emulator) -> None:
    results = []
    for wrap in (float, torch.tensor):
        adam = replace(PLAIN, lr=wrap(0.25), step=wrap(1.0))
        grads = [torch.linspace(-1, 1, count) for count in (9001, 64, 18002)]
        tasks = [block(g, p, adam) for g, p in zip(grads, (9001, 8, 9001), strict=True)]
        kernels(emulator).block_step(tasks)
        results.append([task.param for task in tasks])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", MAKE)
def test_scalars_of_the_device(emulator: Emulator, kind: str) -> None:
    """Rates, bounds, signs and random numbers that the host does not read."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(4, 30, generator=generator).bfloat16()
    grad[:, :29] /= 1e6
    results = []
    for wrap in (float, torch.tensor):
        adams = [
            Adam(wrap(0.01), 0.1, 1e-8, 0.9, 0.99, wrap(3.0), maximize)
            for maximize in (False, True)
        ]
        count = 7 if wrap is float else torch.tensor(7)
        tasks = [
            replace(
                MAKE[kind](grad, 15, adam, seed=(count, 2), offset=5),
                param=torch.ones(4, 30).bfloat16(),
                rounding=(count, 2),
            )
            for adam in adams
        ]
        for task in tasks:  # beyond their bound
            task.momentum.index[:] = torch.arange(120)
            task.momentum.magnitude.fill_(1e3)
        backend = kernels(emulator, SMALL)
        (backend.block_step if kind == "block" else backend.factored_step)(tasks)
        results.append(tasks)
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine.param, theirs.param)
        assert torch.equal(mine.momentum.index, theirs.momentum.index)
    assert not torch.equal(results[0][0].param, results[0][1].param)
