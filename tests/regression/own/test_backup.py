"""The AdamW backup of a hybrid: what it refuses, before either half has changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from workload import OPTIMIZERS, bytes_of, model, snapshot, step

from gefen import GefenMuonHybrid
from gefen.errors import CheckpointError, GefenError


def trained(steps: int = 2, **settings: Any) -> tuple[nn.Module, GefenMuonHybrid]:
    net = model()
    chosen = {"lr": 0.01, "backup_optimizer": "adamw"} | settings
    optimizer = GefenMuonHybrid(net, **chosen)
    for number in range(steps):
        step(net, optimizer, number)
    return net, optimizer


SETTINGS: list[tuple[str, Any]] = [
    ("lr", "foo"),
    ("lr", math.nan),
    ("lr", None),
    ("betas", (0.9,)),
    ("betas", (0.9, 1.0)),
    ("betas", None),
    ("eps", -1),
    ("weight_decay", math.nan),
    ("maximize", "yes"),
    ("foreach", 3),
    ("fused", "no"),
    ("amsgrad", True),
    ("capturable", True),
    ("differentiable", True),
]


@pytest.mark.parametrize(("name", "value"), SETTINGS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_bad_setting_changes_neither_half(steps: int, name: str, value: Any) -> None:
    net, optimizer = trained(steps)
    group = optimizer.param_groups[-1]
    kept, group[name] = group[name], value
    step(net, torch.optim.SGD(net.parameters(), lr=0.0), steps)
    before = snapshot(net, optimizer)
    with pytest.raises(GefenError, match=name):
        optimizer.step()
    assert snapshot(net, optimizer) == before
    group[name] = kept
    optimizer.step()


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay"])
def test_a_lost_setting_changes_neither_half(name: str) -> None:
    net, optimizer = trained()
    step(net, torch.optim.SGD(net.parameters(), lr=0.0), 2)
    group = optimizer.param_groups[-1]
    kept = group.pop(name)
    before = snapshot(net, optimizer)
    with pytest.raises(GefenError, match=f"no setting '{name}'"):
        optimizer.step()
    assert snapshot(net, optimizer) == before
    group[name] = kept
    optimizer.step()


def another_dtype(param: nn.Parameter) -> None:
    param.data = param.data.bfloat16()


def another_shape(param: nn.Parameter) -> None:
    param.data = param.data[:-1].clone()


@pytest.mark.parametrize("change", [another_dtype, another_shape])
def test_a_parameter_changed_since_its_state_was_made(
    change: Callable[[nn.Parameter], None],
) -> None:
    net, optimizer = trained()
    bias = net[1].bias
    bias.grad = None
    change(bias)
    step(net, torch.optim.SGD(net.parameters(), lr=0.0), 2)
    before = snapshot(net, optimizer)
    with pytest.raises(GefenError, match=r"Parameter '1\.bias' has changed since"):
        optimizer.step()
    assert snapshot(net, optimizer) == before


@pytest.mark.parametrize("key", ["exp_avg", "step"])
def test_spoiled_state_changes_neither_half(key: str) -> None:
    net, optimizer = trained()
    del optimizer.state[net[1].bias][key]
    before = snapshot(net, optimizer)
    with pytest.raises(GefenError, match=r"'1\.bias'"):
        optimizer.step()
    assert snapshot(net, optimizer) == before


def test_a_tensor_lr_changed_in_place_takes_effect() -> None:
    rate = torch.tensor(0.01)
    (net, optimizer), (other_net, other) = trained(lr=rate), trained(lr=0.01)
    rate.fill_(0.5)
    for group in other.param_groups:
        group["lr"] = 0.5
    step(net, optimizer, 2)
    step(other_net, other, 2)
    assert optimizer.param_groups[-1]["lr"] is rate
    for param, expected in zip(net.parameters(), other_net.parameters(), strict=True):
        torch.testing.assert_close(param, expected)


def test_a_tensor_lr_is_refused_where_adamw_cannot_take_it() -> None:
    net, optimizer = trained(lr=torch.tensor(0.01))
    optimizer.param_groups[-1]["foreach"] = True
    before = snapshot(net, optimizer)
    with pytest.raises(GefenError, match="foreach"):
        optimizer.step()
    assert snapshot(net, optimizer) == before


@pytest.mark.parametrize("kind", ["hybrid", "hybrid-adamw"])
def test_step_hooks_of_all_optimizers_run_once(kind: str) -> None:
    calls: list[str] = []
    net = model()
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # torch then hooks the class's step
    optimizer = OPTIMIZERS[kind](net)
    optimizer.register_step_pre_hook(lambda *_: calls.append("own"))
    handles = [
        register_optimizer_step_pre_hook(lambda opt, *_: calls.append(type(opt).__name__)),
        register_optimizer_step_post_hook(lambda opt, *_: calls.append("after")),
    ]
    try:
        step(net, optimizer, 0)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["GefenMuonHybrid", "own", "after"]


@pytest.mark.parametrize("saved_under", [torch.float64, torch.float32])
def test_state_saved_under_another_default_dtype(saved_under: torch.dtype) -> None:
    """AdamW's step counts have the default dtype of the time."""
    loaded_under = {torch.float64: torch.float32, torch.float32: torch.float64}[saved_under]
    try:
        torch.set_default_dtype(saved_under)
        net, optimizer = trained()
        saved = copy.deepcopy(optimizer.state_dict())
        torch.set_default_dtype(loaded_under)
        other_net, other = trained()
        other_net.load_state_dict(net.state_dict())
        other.load_state_dict(saved)
        assert bytes_of(other.state_dict()) == bytes_of(saved)
        step(net, optimizer, 2)
        step(other_net, other, 2)
        assert snapshot(net, optimizer) == snapshot(other_net, other)
    finally:
        torch.set_default_dtype(torch.float32)


IMPOSSIBLE: dict[str, tuple[str, Any]] = {
    "step is a vector": ("step", torch.tensor([1.0, 2.0])),
    "step is nan": ("step", torch.tensor(math.nan)),
    "step is infinite": ("step", torch.tensor(math.inf)),
    "step is negative": ("step", torch.tensor(-1.0)),
    "step is zero": ("step", torch.tensor(0.0)),
    "step is a fraction": ("step", torch.tensor(1.5)),
    "step is meta": ("step", torch.tensor(1.0, device="meta")),
    "step is an int": ("step", 2),
    "negative second moment": ("exp_avg_sq", lambda v: -1 - v),
    "sparse moment": ("exp_avg", lambda m: m.to_sparse()),
    "meta moment": ("exp_avg", lambda m: m.to("meta")),
    "moment in another dtype": ("exp_avg", lambda m: m.double()),
}


@pytest.mark.parametrize("damage", IMPOSSIBLE)
def test_impossible_state_is_refused(damage: str) -> None:
    net, optimizer = trained()
    key, value = IMPOSSIBLE[damage]
    saved = copy.deepcopy(optimizer.state_dict())
    entry = saved["state"][4]
    assert "exp_avg" in entry
    entry[key] = value(entry[key]) if callable(value) else value
    before = snapshot(net, optimizer)
    with pytest.raises(CheckpointError, match="Nothing was loaded"):
        optimizer.load_state_dict(saved)
    assert snapshot(net, optimizer) == before
