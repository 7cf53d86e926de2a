"""bfloat16 parameters written with stochastic rounding: what is too small for one step adds up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training import BF16, F32, own_copy
from workload import bytes_of, model, step

from gefen import Gefen, GefenMuon, GefenMuonHybrid, split_params_for_muon
from gefen.errors import InvalidArgumentError, UnsupportedFeatureError

MAKERS: dict[str, Callable[..., Any]] = {
    "factored": lambda net, **k: Gefen(net.parameters(), **k),
    "blocks": lambda net, **k: Gefen(net.parameters(), factored_v_2d=False, **k),
    "muon": lambda net, **k: GefenMuon(split_params_for_muon(net)[0], **k),
    "hybrid": lambda net, **k: GefenMuonHybrid(net, **k),
}
STEPS = 200
SHAPES = {"factored": (64, 64), "blocks": (4096,), "muon": (64, 64), "hybrid": (64, 64)}


def one_weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Module:
    net = nn.Module()
    net.weight = nn.Parameter(torch.ones(shape, dtype=dtype))
    net.other = nn.Parameter(torch.ones(shape[0], dtype=dtype))
    return net.to(device)


def lost(kind: str, device: torch.device, **chosen: Any) -> float:
    """What weights of 1.0 lose to decay that is an 80th of half a unit in the last place."""
    net = one_weight(SHAPES[kind], BF16, device)
    optimizer = MAKERS[kind](net, lr=1e-9, weight_decay=5e4, **chosen)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        for param in net.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        optimizer.step()
    return 1 - float(net.weight.detach().float().mean())


@pytest.mark.parametrize("kind", MAKERS)
def test_small_decay_adds_up(kind: str, device: torch.device) -> None:
    exact = 1 - (1 - 5e-5) ** STEPS
    assert lost(kind, device) == 0.0
    assert lost(kind, device, bf16_stochastic_round=True) == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("kind", MAKERS)
def test_runs_repeat_and_resume(kind: str, device: torch.device) -> None:
    def run(resumed: bool) -> Any:
        net = model(BF16, device)
        optimizer = MAKERS[kind](net, lr=1e-3, bf16_stochastic_round=True)
        for number in range(4):
            if resumed and number == 2:
                saved = own_copy(optimizer.state_dict())
                optimizer = MAKERS[kind](net, lr=1e-3, bf16_stochastic_round=False)
                optimizer.load_state_dict(saved)
            step(net, optimizer, number)
        return bytes_of(list(net.parameters()))

    assert run(False) == run(False) == run(True)


@pytest.mark.parametrize("kind", MAKERS)
def test_other_dtypes_are_not_affected(kind: str, device: torch.device) -> None:
    found = []
    for rounding in (False, True):
        net = model(F32, device)
        optimizer = MAKERS[kind](net, lr=1e-3, bf16_stochastic_round=rounding)
        for number in range(3):
            step(net, optimizer, number)
        found.append(bytes_of(list(net.parameters())))
    assert found[0] == found[1]


def test_groups_have_their_own(device: torch.device) -> None:
    ones = torch.ones(4096, dtype=BF16, device=device)
    first, second = (nn.Parameter(ones.clone()) for _ in range(2))
    groups = [{"params": [first], "bf16_stochastic_round": True}, {"params": [second]}]
    optimizer = Gefen(groups, lr=1e-4)
    for param in (first, second):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert not torch.equal(first, second)
    assert set(second.tolist()) == {1.0}


def test_adamw_as_backup_cannot() -> None:
    with pytest.raises(UnsupportedFeatureError, match="backup_optimizer='gefen'"):
        GefenMuonHybrid(model(), lr=1e-3, backup_optimizer="adamw", bf16_stochastic_round=True)
    with pytest.raises(InvalidArgumentError, match="bf16_stochastic_round=1"):
        GefenMuonHybrid(model(), lr=1e-3, backup_optimizer="adamw", bf16_stochastic_round=1)
