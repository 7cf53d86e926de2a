from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import (
    ADAM,
    DTYPES,
    LAYOUTS,
    QUANTIZER,
    Case,
    block_step,
    cases,
    cloned,
    close,
    content,
    copied,
    laid_out,
    momentum,
    same_momentum,
    same_param,
    with_zero,
)
from emulation import REAL, SMALL, Emulator, kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gefen
from gefen.codebook import BINS, SIZE, Quantizer
from gefen.kernels import launch, packing, reference, scalars
from gefen.kernels.cuda import PAYLOAD
from gefen.kernels.tasks import Adam, BlockStep, DenseMomentum, FactoredStep

bounded = settings(max_examples=40, deadline=None, derandomize=True, database=None)
ADAMS = (
    ADAM,
    replace(ADAM, weight_decay=0.0),
    replace(ADAM, eps=0.0, lr=0.5),
    replace(ADAM, maximize=True),
)


def plain(blocks: int, period: int) -> Case:
    """float32 gradients, bfloat16 parameters."""
    return Case(blocks, period, *DTYPES[:2], *LAYOUTS[:1] * 2, "normal", False, 1)


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator()


def test_probe(emulator: Emulator) -> None:
    assert launch.probe(emulator, "cpu")


def test_tables_are_laid_out_as_the_kernels_read_them(emulator: Emulator) -> None:
    entries = [packing.TASK.itemsize, packing.FACTORS.itemsize, len(packing.codebook(QUANTIZER))]
    assert [emulator.size(i) for i in range(4)] == [*entries, packing.HEADER.itemsize]
    assert emulator.size(9) == PAYLOAD
    real = Emulator(REAL)
    for driver, geometry in ((emulator, SMALL), (real, REAL)):
        sizes = [geometry.threads, geometry.warp, geometry.tile, geometry.strip, packing.PANEL]
        assert [driver.size(i) for i in range(4, 9)] == sizes
    assert REAL.threads == launch.BLOCK


def twin_of(task: BlockStep) -> BlockStep:
    param, momentum, v = cloned(task.param), copied(task.momentum), task.v.clone()
    return replace(task, param=param, momentum=momentum, v=v)


@bounded
@given(st.lists(cases(), min_size=1, max_size=3), st.sampled_from(ADAMS))
def test_block_step(emulator: Emulator, drawn: list[Case], adam: Adam) -> None:
    theirs = [block_step(case, adam) for case in drawn]
    mine = [twin_of(task) for task in theirs]
    before = [task.param.clone() for task in theirs]
    kernels(emulator, processors=2).block_step(mine)
    reference.block_step(theirs)
    for actual, expected, old in zip(mine, theirs, before, strict=True):
        same = same_momentum(actual.momentum, expected.momentum)
        close(actual.v, expected.v, rtol=2e-6, atol=1e-44)
        same_param(actual.param, expected.param, old, same)


CODEBOOKS = {
    "learned": QUANTIZER,
    "dense": Quantizer(torch.linspace(-1, 1, SIZE) ** 7),  # many entries in a sector
    "duplicates": Quantizer(torch.tensor([-1.0] * 100 + [0.0] * 56 + [1.0] * 100)),
    "even": with_zero(torch.linspace(-1, 1, SIZE)),
}


@pytest.mark.parametrize("scale", [1.0, 1e-40, 1e37])
@pytest.mark.parametrize("name", CODEBOOKS)
def test_what_plain_vectors_leave_to_others(emulator: Emulator, name: str, scale: float) -> None:
    """Sectors of several entries, and magnitudes that numbers cannot be multiplied with."""
    task, param, v = momentum(plain(60, 64), CODEBOOKS[name])
    sizes = torch.full_like(task.magnitude, scale)
    sizes[::3] = 1  # those that can be, among them
    each = sizes.repeat_interleave(64).view_as(task.grad)
    task = replace(task, grad=task.grad * each, magnitude=task.magnitude * sizes)
    mine = BlockStep(param.clone(), copied(task), v.clone(), ADAM)
    before = param.clone()
    kernels(emulator).block_step([mine])
    reference.block_step([BlockStep(param, task, v, ADAM)])
    same = same_momentum(mine.momentum, task)
    assert len(task.index.unique()) > 2
    finite = torch.isfinite(param.view(-1).float())
    same_param(mine.param, param, before, same & finite)


@bounded
@given(cases(), st.booleans(), st.sampled_from(DTYPES))
def test_momentum(emulator: Emulator, case: Case, nesterov: bool, dtype: torch.dtype) -> None:
    task, _, _ = momentum(case)
    mine, theirs = (torch.full(task.grad.shape, 7.0, dtype=dtype) for _ in range(2))
    own = copied(task)
    kernels(emulator).momentum_update([DenseMomentum(own, nesterov, mine)])
    reference.momentum_update([DenseMomentum(task, nesterov, theirs)])
    same = same_momentum(own, task)
    same_param(mine, theirs, torch.zeros_like(mine), same)


@bounded
@given(
    st.integers(1, 200),
    st.sampled_from([1, 3, 8, 17, 64, 257, 300, 1030]),
    st.sampled_from(["row", "all", "one"]),
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS[:4]),
    st.sampled_from(ADAMS),
    st.sampled_from(["normal", "zeros", "tiny", "large", "huge", "nan"]),
    st.booleans(),
    st.booleans(),
)
def test_factored_step(
    emulator: Emulator,
    rows: int,
    columns: int,
    blocks: str,
    dtype: torch.dtype,
    layout: str,
    adam: Adam,
    kind: str,
    shard: bool,
    rounds: bool,
) -> None:
    rows = max(1, min(rows, 12_000 // columns))
    period = {"row": columns, "all": rows * columns, "one": 1}[blocks]
    case = plain(rows * columns // period, period)
    case = replace(case, grad_dtype=dtype, param_dtype=dtype, content=kind, number=rows)
    case = replace(case, offset=columns if shard else 0, rounds=rounds)
    task, param, _ = momentum(case)
    task = replace(task, grad=laid_out(task.grad.view(rows, columns), layout))
    param = laid_out(param.view(rows, columns), layout)
    generator = torch.Generator().manual_seed(columns)
    row, column = (torch.rand(size, generator=generator) for size in (rows, columns))
    if kind == "zeros":
        row.zero_()
    extra = (torch.rand(columns, generator=generator) if shard else None, case.rounding)
    mine, twin = (
        FactoredStep(cloned(param), copied(task), row.clone(), column.clone(), adam, *extra)
        for _ in range(2)
    )
    before = param.clone()
    kernels(emulator, processors=2).factored_step([mine, twin])
    reference.factored_step([FactoredStep(param, task, row, column, adam, *extra)])
    same = same_momentum(mine.momentum, task)
    close(mine.row, row, rtol=2e-6, atol=1e-44)
    close(mine.column, column, rtol=2e-6, atol=1e-44)
    same_param(mine.param, param, before, same)
    assert torch.equal(mine.momentum.index, twin.momentum.index)


@bounded
@given(st.lists(cases(), min_size=1, max_size=3))
def test_histogram(emulator: Emulator, drawn: list[Case]) -> None:
    gradients = [(momentum(case)[0].grad, case.period) for case in drawn]
    mine, theirs = (torch.arange(BINS) for _ in range(2))
    kernels(emulator, processors=2).histogram(gradients, mine)
    reference.histogram(gradients, theirs)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("period", [1, 7, 8, 513, 4096, 4097, 33000])
def test_real_geometry(period: int) -> None:
    driver = Emulator(REAL)
    task, param, v = momentum(plain(3, period))
    mine = BlockStep(param.clone(), copied(task), v.clone(), ADAM)
    before = param.clone()
    kernels(driver, REAL).block_step([mine])
    reference.block_step([BlockStep(param, task, v, ADAM)])
    same_param(mine.param, param, before, same_momentum(mine.momentum, task))
    close(mine.v, v, rtol=2e-6)
    assert driver.launches["peaks"] == (period == 33000)


@pytest.mark.parametrize("period", [5, 64, 1023, 3000, 9001])
def test_results_do_not_depend_on_the_grid(emulator: Emulator, period: int) -> None:
    """Every sum has a fixed order, whichever block of threads makes it."""
    results = []
    for processors in (1, 2, 7):
        task, param, v = momentum(replace(plain(4, period), grad_layout="strided"))
        kernels(emulator, processors=processors).block_step([BlockStep(param, task, v, ADAM)])
        results.append((param, task.index, task.magnitude, v))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_elements_beyond_32_bits(emulator: Emulator) -> None:
    """The last item of a tensor of 2³³ elements, of which only the last blocks exist."""
    geometry, period = SMALL, 64
    span, _ = geometry.cut(period)
    n, tail = 2**33 + span, span
    case = Case(
        tail // period, period, *DTYPES[:2], "contiguous", "contiguous", "normal", False, 1
    )
    task, param, v = momentum(case)
    own, mine, mine_v = copied(task), param.clone(), v.clone()
    skipped = n - tail

    def shifted(tensor: Tensor, elements: int = skipped) -> int:
        return tensor.data_ptr() - elements * tensor.element_size()

    entry = packing.Task(
        (shifted(own.grad), 0, 0, 0, packing.KINDS[own.grad.dtype], 1), n, period, span, 1
    )
    entry.param = (shifted(mine), 0, 0, 0, packing.KINDS[mine.dtype], 1)
    entry.index = shifted(own.index)
    entry.magnitude = shifted(own.magnitude, skipped // period)
    entry.v = shifted(mine_v, skipped // period)
    steps = BlockStep(param, task, v, ADAM)
    launched = launch.Launch(geometry, 0)
    launched.steps("block_step", [entry])
    plan = launched.plan([entry], 0)
    book = packing.codebook(QUANTIZER)
    plan.place({}, book.data_ptr(), 0)
    plan.write(scalars.Adams([steps]).columns(plan.flags))
    memory = torch.frombuffer(plan.content, dtype=torch.int64)
    emulator.run("block_step", entry.items - 1, entry.items, memory, entry.items)
    before = param.clone()
    reference.block_step([steps])
    same_param(mine, param, before, same_momentum(own, task))
    close(mine_v, v, rtol=2e-6)


def test_double_precision_and_empty_tensors(emulator: Emulator) -> None:
    backend = kernels(emulator)
    task, param, v = momentum(plain(4, 32))
    wide = replace(task, grad=task.grad.double(), dtype=torch.float64)
    mine, theirs = (BlockStep(param.double(), copied(wide), v.clone(), ADAM) for _ in range(2))
    none = replace(task, grad=torch.empty(0), index=task.index[:0], magnitude=v[:0], period=1)
    before = emulator.launches.total()
    backend.block_step([mine, BlockStep(torch.empty(0), none, v[:0], ADAM)])
    assert emulator.launches.total() == before
    reference.block_step([theirs])
    assert torch.equal(mine.param, theirs.param)
    counts = torch.zeros(BINS, dtype=torch.int64)
    backend.histogram([(wide.grad, 32), (torch.empty(0), 1)], counts)
    assert counts.sum() == wide.grad.numel()


def trained(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], dtype: torch.dtype, steps: int = 4
) -> tuple[list[Tensor], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 40), (40,), (33, 7), (3,), (1500,), (16, 64), (9001,)]
    params = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    optimizer = make(params)
    for _ in range(steps):
        for param in params:
            values = content("normal", param.numel(), generator).to(dtype)
            param.grad = values.view(param.shape)
        optimizer.step()
    return params, optimizer


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "factored": lambda params: gefen.Gefen(params, weight_decay=0.1),
    "block": lambda params: gefen.Gefen(params, factored_v_2d=False),
    "stochastic": lambda params: gefen.Gefen(params, stochastic_round=True),
    "refreshed": lambda params: gefen.Gefen(params, codebook_refresh_every=2),
    "muon": lambda params: gefen.GefenMuon([p for p in params if p.dim() == 2], batched_ns=True),
    "hybrid": lambda params: gefen.GefenMuonHybrid(
        [("hidden.0", params[0]), ("hidden.1", params[5])],
        [(f"other.{i}", p) for i, p in enumerate(params) if i not in (0, 5)],
        lr=1e-3,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trajectories_equal_the_reference(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    expected, _ = trained(OPTIMIZERS[name], dtype)
    before = Counter(emulator.launches)
    monkeypatch.setattr("gefen.kernels._backend", lambda device, fused: kernels(emulator))
    actual, _ = trained(OPTIMIZERS[name], dtype)
    assert emulator.launches - before
    unit = torch.finfo(dtype).eps
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=8 * unit, atol=1e-5)


@pytest.mark.parametrize("name", ["factored", "block"])
def test_autograd_notices_a_step_between_forward_and_backward(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("gefen.kernels._backend", lambda device, fused: kernels(emulator))
    params, optimizer = trained(OPTIMIZERS[name], torch.float32, steps=1)
    loss = (params[0] * params[0]).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_of_many_parameters_is_a_handful_of_launches(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gefen.kernels._backend", lambda device, fused: kernels(emulator))
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 16), (16,)] * 149 + [(9001,), (3, 9001)]
    params = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    optimizer = gefen.Gefen(params)
    counts = []
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        before = Counter(emulator.launches)
        optimizer.step()
        counts.append(emulator.launches - before)
    assert len(params) == 300
    once = ["block_step", "factor_sums", "factor_means", "factor_roots", "factored_step"]
    assert set(counts[1]) - {"peaks"} == set(once)
    assert counts[1].total() <= 7
    assert counts[0] - counts[1] == Counter(["histogram", "peaks"])
