"""Steps that CUDA graphs can hold, on a graph of the CPU (graphs.py)."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from graphs import CaptureError, Graph, Run, injected, replayed, tensors_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from training import BF16, F32, F64, gradients, start, train

from gefen import Gefen, GefenMuon, GefenMuonHybrid, capture
from gefen.errors import GefenError, InvalidArgumentError

SHAPES = ((8, 16), (24,), (16, 8), (3,))


def hybrid(params: Any, lr: Any, **options: Any) -> GefenMuonHybrid:
    matrices = [(f"hidden.{i}", p) for i, p in enumerate(params) if p.dim() == 2]
    others = [(f"other.{i}", p) for i, p in enumerate(params) if p.dim() != 2]
    return GefenMuonHybrid(matrices, others, lr=lr, **options)


def muon(params: Any, lr: Any, **options: Any) -> GefenMuon:
    return GefenMuon([p for p in params if p.dim() == 2], lr, **options)


KINDS: dict[str, Any] = {
    "factored": lambda p, lr, **o: Gefen(p, lr, weight_decay=0.1, **o),
    "block": lambda p, lr, **o: Gefen(p, lr, factored_v_2d=False, **o),
    "stochastic": lambda p, lr, **o: Gefen(p, lr, stochastic_round=True, **o),
    "groups": lambda p, lr, **o: Gefen(
        [{"params": p[:2]}, {"params": p[2:], "lr": 0.003, "betas": (0.5, 0.9)}], lr, **o
    ),
    "muon": muon,
    "normuon": lambda p, lr, **o: muon(p, lr, normuon=True, cautious=True, batched_ns=True, **o),
    "random muon": lambda p, lr, **o: muon(p, lr, stochastic_round=True, **o),
    "hybrid": hybrid,
}


def capturable(kind: str) -> Any:
    return lambda params, lr: KINDS[kind](params, lr, capturable=True)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_trajectories_equal_those_of_numbers(kind: str, dtype: torch.dtype) -> None:
    unit = torch.finfo(dtype).eps
    runs = [Run(make, SHAPES, dtype) for make in (KINDS[kind], capturable(kind))]
    for run in runs:
        run.steps(6, run.optimizer.step)
    for expected, actual in zip(runs[0].params, runs[1].params, strict=True):
        torch.testing.assert_close(actual, expected, rtol=4 * unit, atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_replays_equal_steps(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    actual, expected = replayed(monkeypatch, capturable(kind), SHAPES, dtype)
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_without_capturable_a_capture_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    run = Run(KINDS[kind], SHAPES, F32)
    graph = injected(monkeypatch)
    run.steps(2, run.optimizer.step)
    refused(run, graph, "pass capturable=True")


def refused(run: Run, graph: Any, words: str) -> None:
    before = copy.deepcopy(run.optimizer.state_dict())
    with pytest.raises(InvalidArgumentError, match=words), graph.capture([]):
        run.optimizer.step()
    assert_same(run.optimizer.state_dict(), before)


def assert_same(actual: Any, expected: Any) -> None:
    flat = [torch.utils._pytree.tree_flatten(tree) for tree in (actual, expected)]
    assert flat[0][1] == flat[1][1]
    for a, e in zip(flat[0][0], flat[1][0], strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == e


@pytest.mark.parametrize("kind", ["factored", "muon", "hybrid"])
def test_a_capture_without_steps_before(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    run = Run(capturable(kind), SHAPES, F32)
    refused(run, injected(monkeypatch), "gets its state .* before the capture")


def test_a_gradient_that_appears_in_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(capturable("factored"), SHAPES, F32)
    kept, run.params[1].grad = run.params[1].grad, None
    graph = injected(monkeypatch)
    run.optimizer.step()
    run.params[0].grad.normal_()
    run.optimizer.step()
    run.params[1].grad = kept
    refused(run, graph, "'param_1' gets its state")


def test_a_codebook_that_is_not_learned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(capturable("factored"), SHAPES, F32)
    graph = injected(monkeypatch)
    for param in run.params:
        param.grad.fill_(torch.nan)
    run.optimizer.step()  # what is not finite teaches nothing
    refused(run, graph, "waits for a codebook")


def test_blocks_that_are_not_decided_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(capturable("factored"), SHAPES, F32)
    graph = injected(monkeypatch)
    run.optimizer.step()  # all gradients are zero: they decide nothing
    refused(run, graph, "waits for a gradient that is not zero")
    run.steps(1, run.optimizer.step)
    run.captured(graph)


def test_a_capture_right_after_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(capturable("hybrid"), SHAPES, F32)
    graph = injected(monkeypatch)
    run.steps(2, run.optimizer.step)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    refused(run, graph, "codebook")
    run.steps(1, run.optimizer.step)
    run.captured(graph)


def test_a_rate_that_is_elsewhere() -> None:
    optimizer = Gefen([start((4, 4))], capturable=True)
    optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    with pytest.raises(GefenError, match="lr"):
        train(optimizer, optimizer.param_groups[0]["params"][0], gradients((4, 4), 1))


def test_a_rate_that_the_host_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.distributed.checkpoint gives one, and as a capture cannot use it."""
    here, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
    assert capture.reads_rate(here, [elsewhere])
    assert not capture.reads_rate(here, [here, elsewhere])
    assert not capture.reads_rate(elsewhere, [elsewhere])
    with injected(monkeypatch).capture([]):
        assert not capture.reads_rate(here, [elsewhere])


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_a_distributed_checkpoint_makes(kind: str) -> None:
    net, rate = nn.Linear(16, 8), torch.tensor(0.5)
    optimizer = capturable(kind)(list(net.parameters()), rate)
    before = [param.detach().clone() for param in net.parameters()]
    found = get_optimizer_state_dict(net, optimizer)
    assert found["state"]["weight"]["step"] == 1
    assert optimizer.param_groups[0]["lr"] is rate
    for param, value in zip(net.parameters(), before, strict=True):
        assert torch.equal(param, value)


def test_a_rate_in_a_number_is_that_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(lambda p, lr: Gefen(p, 0.5, capturable=True), SHAPES, F32)
    run.steps(2, run.optimizer.step)
    graph = injected(monkeypatch)
    run.captured(graph)
    run.optimizer.param_groups[0]["lr"] = 0.0
    before = run.params[0].detach().clone()
    run.steps(1, graph.replay)
    assert not torch.equal(run.params[0], before)


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: bool(x[0] > 0),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0]),
    ],
)
def test_the_graph_of_the_cpu_notices_what_synchronises(act: Any) -> None:
    """Otherwise the tests above would show nothing."""
    with pytest.raises(CaptureError), Graph().capture([]):
        act(torch.ones(3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_checkpoints_of_one_load_into_the_other(kind: str, before: bool, after: bool) -> None:
    def make(flag: bool) -> Run:
        return Run(lambda p, lr: KINDS[kind](p, lr, capturable=flag), SHAPES, F32)

    saved, loaded = make(before), make(after)
    saved.steps(3, saved.optimizer.step)
    file = io.BytesIO()
    torch.save([saved.optimizer.state_dict(), saved.params], file)
    file.seek(0)
    state, params = torch.load(file, weights_only=True)
    loaded.steps(3, lambda: None)  # as many gradients
    with torch.no_grad():
        for mine, theirs in zip(loaded.params, params, strict=True):
            mine.copy_(theirs)
    loaded.optimizer.load_state_dict(state)
    for entry in loaded.optimizer.state.values():
        assert isinstance(entry["step"], Tensor) == after
        assert entry["step"] == 3
    for run in (saved, loaded):
        run.steps(2, run.optimizer.step)
    for mine, theirs in zip(loaded.params, saved.params, strict=True):
        if before == after:
            assert torch.equal(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_steps_lie_where_parameters_lie() -> None:
    run = Run(capturable("hybrid"), SHAPES, F32)
    run.steps(2, run.optimizer.step)
    for param, entry in run.optimizer.state.items():
        assert entry["step"].dtype == torch.float32
        assert entry["step"].shape == ()
        assert entry["step"].device == entry["global_step"].device == param.device
    assert len({id(e["global_step"]) for e in run.optimizer.muon.state.values()}) <= 2


def test_double_precision() -> None:
    param = start((4, 6), F64)
    optimizer = Gefen([param], torch.tensor(0.01), capturable=True)
    other = start((4, 6), F64)
    grads = gradients((4, 6), 4, F64)
    mine = train(optimizer, param, grads)
    theirs = train(Gefen([other], torch.tensor(0.01)), other, grads)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_the_backup_of_torch_needs_an_accelerator() -> None:
    net = nn.Linear(4, 4)
    optimizer = GefenMuonHybrid(net, lr=0.1, backup_optimizer="adamw", capturable=True)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    before = [x.clone() for x in tensors_of(optimizer)]
    with pytest.raises(GefenError, match=r"'bias' is on cpu.*capturable"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(optimizer), before, strict=True))
