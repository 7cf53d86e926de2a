"""Learning rate tools: what they find, and that they leave no trace."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workload import OPTIMIZERS, bytes_of

from gefen import Gefen, GefenMuonHybrid, tools
from gefen.errors import InvalidArgumentError, UnsupportedFeatureError
from gefen.tools import find_lr as finder


class Line(nn.Module):
    """A model with random numbers and with averages of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 24)
        self.hidden = nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = nn.functional.dropout(self.embed(input_ids), 0.1, self.training)
        x = self.norm(torch.tanh(self.hidden(x)).mT).mT
        logits = self.head(x)[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def blocks(count: int = 32) -> Tensor:
    """Every token decides the next one."""
    first = torch.arange(count)[:, None]
    return (first * 5 + torch.arange(6) * 3) % 16


def closure_of(net: nn.Module) -> Any:
    def closure() -> Tensor:
        loss: Tensor = net(blocks(), blocks()).loss
        loss.backward()
        return loss

    return closure


def make(kind: str, net: nn.Module) -> Any:
    if kind == "torch":
        return torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-3))
    return OPTIMIZERS[kind](net)


def traces(net: nn.Module, optimizer: Any) -> Any:
    grads = [param.grad for param in net.parameters()]
    everything = [net.state_dict(), optimizer.state_dict(), grads, torch.get_rng_state()]
    return bytes_of(everything)


TOOLS = {
    "range": lambda o, c, net: tools.lr_range_test(o, c, num_iter=8, model=net),
    "rms": lambda o, c, net: tools.measure_update_rms(o, c, num_steps=3, warmup=1, model=net),
    "adamw": lambda o, c, net: tools.calibrate_vs_adamw(o, c, num_steps=3, warmup=1, model=net),
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", ["gefen", "gefen-stochastic", "hybrid", "hybrid-adamw", "torch"])
@pytest.mark.parametrize("tool", TOOLS)
def test_no_trace_is_left(tool: str, kind: str, trained: bool) -> None:
    """Not in bytes, and not in the steps that follow."""
    net = Line()
    optimizer = make(kind, net)
    closure = closure_of(net)
    if trained:
        for _ in range(2):
            optimizer.zero_grad()
            closure()
            optimizer.step()
    other = copy.deepcopy(net)
    twin = make(kind, other)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = traces(net, optimizer)
    TOOLS[tool](optimizer, closure, net)
    assert traces(net, optimizer) == before
    for model, its in ((net, optimizer), (other, twin)):
        torch.manual_seed(5)
        for _ in range(2):
            its.zero_grad()
            closure_of(model)()
            its.step()
    assert bytes_of(list(net.parameters())) == bytes_of(list(other.parameters()))


def test_a_failing_closure_leaves_no_trace() -> None:
    net = Line()
    optimizer = make("gefen", net)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ArithmeticError
        return closure_of(net)()

    before = traces(net, optimizer)
    with pytest.raises(ArithmeticError):
        tools.lr_range_test(optimizer, closure, num_iter=8, model=net)
    assert traces(net, optimizer) == before


def bowl(kind: Any = Gefen, **chosen: Any) -> tuple[Any, Any]:
    param = nn.Parameter(torch.linspace(1, 2, 64))

    def closure() -> Tensor:
        loss = param.square().sum()
        loss.backward()
        return loss

    return kind([param], **chosen), closure


def test_a_range_test_finds_the_falling_part() -> None:
    optimizer, closure = bowl()
    found = tools.lr_range_test(optimizer, closure, num_iter=60, start_lr=1e-5, end_lr=100.0)
    assert found.lrs[0] == 1e-5
    assert 1e-3 < found.suggested_lr < found.min_loss_lr < 10
    assert found.diverged_at is not None
    assert found.min_loss_lr < found.diverged_at
    assert len(found.lrs) == len(found.losses) == len(found.smoothed) < 60
    assert found.losses[0] == pytest.approx(float(torch.linspace(1, 2, 64).square().sum()))
    beta = 0.9
    second = (beta * found.losses[0] + found.losses[1]) / (1 + beta)
    assert found.smoothed[1] == pytest.approx(second)


def test_movement_is_measured() -> None:
    optimizer, closure = bowl(lr=0.01, weight_decay=0.5, force_1d_period_one=True)
    (stats,) = tools.measure_update_rms(optimizer, closure, num_steps=4, warmup=1)
    assert (stats.label, stats.is_muon, stats.num_params) == ("0:gefen", False, 1)
    assert stats.applied_rms == pytest.approx(0.01, rel=0.05)
    assert len(stats.per_step_rms) == 3
    (decayed,) = tools.measure_update_rms(
        optimizer, closure, num_steps=4, warmup=1, zero_weight_decay=False
    )
    assert decayed.applied_rms == pytest.approx(0.01 * (1 + 0.5 * 1.5), rel=0.05)
    (same,) = tools.calibrate_vs_adamw(optimizer, closure, num_steps=4, warmup=1)
    assert same.ratio == pytest.approx(1.0, rel=0.01)
    assert (same.name, same.rows, same.cols, same.sqrt_max) == ("param_0", 64, 1, None)


def test_factors_between_groups() -> None:
    net = Line()
    optimizer = GefenMuonHybrid(net, lr=1e-3)
    run = {"num_steps": 5, "warmup": 1, "model": net}
    found = tools.calibrate_relative(optimizer, closure_of(net), **run)
    muon, backup = found.stats
    assert (found.reference_label, muon.label, muon.active_ratio) == (
        "1:gefen", "0:muon", pytest.approx(0.2 * math.sqrt(24)),
    )  # fmt: skip
    assert found.multipliers["1:gefen"] == 1.0
    assert found.multipliers["0:muon"] == pytest.approx(backup.applied_rms / muon.applied_rms)
    assert found.analytic_comparison["0:muon"]["match_rms_adamw"] == muon.active_ratio
    optimizer.param_groups[0]["lr"] *= found.multipliers["0:muon"]
    again = tools.calibrate_relative(optimizer, closure_of(net), reference="0:muon", **run)
    assert again.multipliers["1:gefen"] == pytest.approx(1.0, rel=0.2)
    with pytest.raises(InvalidArgumentError, match="reference='other'"):
        tools.calibrate_relative(optimizer, closure_of(net), reference="other", **run)


@pytest.mark.parametrize("kind", ["gefen", "gefen_muon", "hybrid", "adamw"])
@pytest.mark.parametrize("method", ["range_test", "sweep"])
def test_find_lr(kind: str, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    net = Line()
    before = bytes_of([net.state_dict(), torch.get_rng_state()])
    found = finder.find_lr(
        net, blocks(), optimizer=kind, method=method, eval_blocks=blocks(4), num_iter=12,
        sweep_lrs=[1e-6, 1e-2], sweep_steps=8, warmup=2,
    )  # fmt: skip
    assert bytes_of([net.state_dict(), torch.get_rng_state()]) == before
    assert (found.optimizer, found.method) == (kind, method)
    assert f"find_lr[{kind}/{method}]" in capsys.readouterr().out
    if method == "sweep":
        assert found.lr == 1e-2
        assert found.sweep[1e-2] < found.sweep[1e-6]
    else:
        assert found.range_result is not None
        assert 1e-6 < found.lr <= found.min_loss_lr <= 0.1


def test_find_lr_takes_a_closure() -> None:
    net = Line()
    found = finder.find_lr(net, closure_of(net), num_iter=10, verbose=False, device="cpu")
    assert found.lr > 1e-6


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
        ({"method": "guess"}, "method='guess'"),
        ({"method": "sweep"}, "eval_blocks=None"),
        ({"train_data": torch.zeros(3)}, "train_data"),
        ({"bs": 0}, "bs=0"),
        ({"num_iter": 2}, "num_iter=2"),
        ({"start_lr": 1.0, "end_lr": 0.1}, "start_lr=1.0"),
    ],
)
def test_bad_arguments_are_named(chosen: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        finder.find_lr(Line(), **{"train_data": blocks(), **chosen})


def test_other_misuse() -> None:
    optimizer, closure = bowl()
    with pytest.raises(InvalidArgumentError, match="num_steps=3"):
        tools.measure_update_rms(optimizer, closure, num_steps=3, warmup=3)
    with pytest.raises(InvalidArgumentError, match="no gradient"):
        tools.lr_range_test(optimizer, lambda: torch.tensor(1.0))
    with pytest.raises(InvalidArgumentError, match="start lower"):
        tools.lr_range_test(optimizer, closure, start_lr=1e20, end_lr=1e30)
    with pytest.raises(UnsupportedFeatureError, match="restore=False"):
        finder.find_lr(Line(), blocks(), restore=False)
    for name in ("find_lr_parallel_sweep", "find_lr_sharded_sweep", "build_token_stream"):
        with pytest.raises(UnsupportedFeatureError, match=f"{name} of gefen-x"):
            getattr(finder, name)("path", ["cuda:0"])
    with pytest.raises(AttributeError, match="other"):
        finder.other  # noqa: B018


@pytest.mark.parametrize(
    ("module", "said"),
    [("find_lr", "find_lr(model, blocks)"), ("run_model_calibration", "calibrate_vs_adamw")],
)
def test_commands_of_gefen_x_say_what_to_call(module: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"gefen.tools.{module}", "--model", "x"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert said in done.stderr
