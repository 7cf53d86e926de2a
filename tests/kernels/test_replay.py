"""Captured steps through the kernels: what a graph holds of tables and scalars."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import ADAM, DTYPES, Case, momentum
from emulation import SMALL, Emulator
from graphs import Graph, Run, injected, tensors_of
from torch import Tensor

from gefen import Gefen, GefenMuon
from gefen.kernels import launch, reference
from gefen.kernels.launch import Kernels
from gefen.kernels.tasks import BlockStep

SHAPES = ((24, 40), (40,), (33, 7), (3,), (1500,), (9001,))


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator()


KINDS: dict[str, Any] = {
    "factored": lambda p, lr, **o: Gefen(p, lr, weight_decay=0.1, **o),
    "block": lambda p, lr, **o: Gefen(p, lr, factored_v_2d=False, **o),
    "stochastic": lambda p, lr, **o: Gefen(p, lr, stochastic_round=True, **o),
    "groups": lambda p, lr, **o: Gefen(
        [{"params": p[:2]}, {"params": p[2:], "lr": 0.003, "betas": (0.5, 0.9)}], lr, **o
    ),
    "muon": lambda p, lr, **o: GefenMuon(
        [x for x in p if x.dim() == 2], lr, stochastic_round=True, **o
    ),
}


def through_kernels(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    def backend(device: torch.device, fused: bool) -> Kernels:
        return Kernels(driver, torch.device("cpu"), 1, SMALL)

    monkeypatch.setattr("gefen.kernels._backend", backend)


@pytest.mark.parametrize("kind", KINDS)
def test_replays_equal_steps(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    results = []
    for replays in (False, True):
        graph = injected(monkeypatch)
        through_kernels(monkeypatch, graph.driver(emulator))
        run = Run(lambda p, lr: KINDS[kind](p, lr, capturable=True), SHAPES, torch.bfloat16)
        run.steps(2, run.optimizer.step)
        if replays:
            before = Counter(emulator.launches)
            run.captured(graph)
            assert (emulator.launches - before)["store"]
        run.steps(3, graph.replay if replays else run.optimizer.step)
        results.append(run.result())
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("kind", KINDS)
def test_scalars_of_the_device_equal_those_of_the_host(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    through_kernels(monkeypatch, emulator)
    runs = []
    for flag in (False, True):
        run = Run(lambda p, lr, f=flag: KINDS[kind](p, lr, capturable=f), SHAPES, dtype)
        run.steps(5, run.optimizer.step)
        runs.append(run)
    unit = torch.finfo(dtype).eps
    for mine, theirs in zip(runs[0].params, runs[1].params, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=4 * unit, atol=1e-6)


def test_a_graph_owns_its_tables(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps between replays, and another capture, do not change what a graph does."""
    results = []
    for disturbed in (False, True):
        graph = injected(monkeypatch)
        through_kernels(monkeypatch, graph.driver(emulator))
        run = Run(lambda p, lr: Gefen(p, lr, capturable=True), SHAPES, torch.float32)
        run.steps(2, run.optimizer.step)
        run.captured(graph)
        if disturbed:
            kept = [x.clone() for x in tensors_of(run.optimizer)]
            grads = [param.grad for param in run.params]
            for param in run.params:
                param.grad = torch.ones_like(param)
            other = injected(monkeypatch)
            run.captured(other)
            run.optimizer.step()
            for tensor, value in zip(tensors_of(run.optimizer), kept, strict=True):
                tensor.detach().copy_(value)
            for param, grad in zip(run.params, grads, strict=True):
                param.grad = grad
        run.steps(2, graph.replay)
        results.append(run.result())
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_a_step_of_many_parameters_is_a_handful_of_launches(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    through_kernels(monkeypatch, emulator)
    run = Run(lambda p, lr: Gefen(p, lr, capturable=True), [(16, 16), (16,)] * 150, torch.float32)
    run.steps(1, run.optimizer.step)
    before = Counter(emulator.launches)
    run.steps(1, run.optimizer.step)
    assert (emulator.launches - before).total() <= 7


@pytest.mark.parametrize("words", [1, 504, 505, 1300])
def test_store(emulator: Emulator, words: int) -> None:
    content = torch.randint(-(2**62), 2**62, (words,))
    out = torch.zeros(words + 2, dtype=torch.int64)
    emulator.store(out[1:-1], content.numpy().tobytes())
    assert torch.equal(out[1:-1], content)
    assert out[0] == out[-1] == 0


def moved(tensor: Tensor) -> Tensor:
    return tensor.clone()


def restrided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def cast(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float16)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, moved) for name in ("param", "v", "grad", "index", "magnitude")),
        *(("grad", restrided), ("grad", cast), ("param", restrided), ("param", cast)),
    ],
)
def test_a_plan_follows_its_tensors(emulator: Emulator, name: str, change: Any) -> None:
    case = Case(3, 64, *DTYPES[:2], "contiguous", "contiguous", "normal", False, 1)
    results, backend = [], Kernels(emulator, torch.device("cpu"), 1, SMALL)
    for run in (backend, reference):
        task, param, v = momentum(case)
        step = BlockStep(param, task, v, ADAM)
        run.block_step([step])
        owner = task if hasattr(task, name) else step
        before = getattr(owner, name)
        kept = before.clone()
        setattr(owner, name, change(before))
        run.block_step([step])
        assert torch.equal(before, kept), "what was replaced is left alone"
        results.append([step.param, step.v, task.magnitude])
        assert task.index.float().std() > 1
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-6)


def test_another_kind_of_count_in_the_same_memory(emulator: Emulator) -> None:
    """As of an optimizer with capturable that is made when one without is gone."""
    case = Case(3, 64, *DTYPES[:2], "contiguous", "contiguous", "normal", False, 1)
    task, param, v = momentum(case)
    results, backend = [], Kernels(emulator, torch.device("cpu"), 1, SMALL)
    for step in (3, torch.tensor(3.0), 3, torch.tensor([3.0])):
        own = [tensor.clone() for tensor in (param, task.index, task.magnitude, v)]
        backend.block_step([BlockStep(param, task, v, replace(ADAM, step=step))])
        results.append(param.clone())
        for tensor, value in zip((param, task.index, task.magnitude, v), own, strict=True):
            tensor.copy_(value)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=2e-2, atol=1e-6)
    assert not torch.equal(results[0], param)


def test_plans_are_repeated_and_few(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    plan = launch.Launch.operation

    def counted(self: Any, kernel: str, *rest: Any) -> Any:
        made.append(kernel)
        return plan(self, kernel, *rest)

    monkeypatch.setattr(launch.Launch, "operation", counted)
    monkeypatch.setattr(launch, "REMEMBERED", 3)
    through_kernels(monkeypatch, emulator)
    run = Run(lambda p, lr: Gefen(p, lr), SHAPES, torch.float32)
    run.steps(4, run.optimizer.step)
    assert made == ["block_step", "factored_step"]
    assert len(launch._plans[emulator]) <= 3


def test_graphs_record_launches(emulator: Emulator) -> None:
    graph = Graph()
    driver = graph.driver(emulator)
    out, content = torch.zeros(4, dtype=torch.int64), bytearray(torch.arange(4).numpy().tobytes())
    with graph.capture([out]):
        driver.store(out, content)
    content[:] = bytes(32)
    assert out.sum() == 0
    graph.replay()
    assert out.tolist() == [0, 1, 2, 3]
