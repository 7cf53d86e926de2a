"""A step of sharded parameters is that of one process; Muon's in all bits on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded import (
    SHAPES,
    Collectives,
    full,
    give_gradients,
    on_every_rank,
    parameters,
    whole_mesh,
)
from torch import nn

import gefen

STEPS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.02},
    "normuon": {"lr": 0.02, "normuon": True, "ns_schedule": "tuned3"},
}


def alone(device: torch.device, chosen: str) -> dict[str, torch.Tensor]:
    params = {name: nn.Parameter(full(name, 0, device)) for name in SHAPES}
    train(gefen.GefenMuon(params.items(), **SETTINGS[chosen]), params, device)
    return {name: param.detach() for name, param in params.items()}


def train(
    optimizer: torch.optim.Optimizer,
    params: dict[str, nn.Parameter],
    device: torch.device,
    steps: range = range(STEPS),
) -> None:
    for step in steps:
        give_gradients(params, step, device)
        if step == 1:
            params["d"].grad = None
        optimizer.step()


def assert_equal(
    params: dict[str, nn.Parameter], expected: dict[str, torch.Tensor], device: torch.device
) -> None:
    """Equal bits on the CPU; on a GPU within the bfloat16 products' rounding."""
    tolerance = 0.0 if device.type == "cpu" else 2e-3
    for name, param in params.items():
        found = param.detach().full_tensor()
        torch.testing.assert_close(found, expected[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("chosen", SETTINGS)
@pytest.mark.parametrize(("mode", "dim"), [("exact", 0), ("exact", 1), ("distributed", 0)])
def test_a_sharded_step_equals_one_process(
    mode: str, dim: int, chosen: str, device: torch.device
) -> None:
    params = parameters(whole_mesh(device), device, dim)
    optimizer = gefen.GefenMuon(params.items(), sharded_mode=mode, **SETTINGS[chosen])
    train(optimizer, params, device)
    assert_equal(params, alone(device, chosen), device)


@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_each_rank_keeps_the_momentum_of_its_rows(mode: str, device: torch.device) -> None:
    params = parameters(whole_mesh(device), device)
    optimizer = gefen.GefenMuon(params.items(), sharded_mode=mode)
    train(optimizer, params, device, range(1))
    held = sum(entry["index"].to_local().numel() for entry in optimizer.state.values())
    assert sum(on_every_rank(held)) == sum(rows * columns for rows, columns in SHAPES.values())


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("factored", [True, False])
def test_gefen_steps_like_one_process(factored: bool, dim: int, device: torch.device) -> None:
    single = {name: nn.Parameter(full(name, 0, device)) for name in SHAPES}
    params = parameters(whole_mesh(device), device, dim)
    for held in (single, params):
        train(gefen.Gefen(held.items(), lr=0.02, factored_v_2d=factored), held, device)
    for name, param in params.items():
        # Sums over ranks are rounded otherwise.
        found = param.detach().full_tensor()
        torch.testing.assert_close(found, single[name].detach(), rtol=1e-5, atol=1e-5)


def test_a_distributed_checkpoint_continues_exactly(device: torch.device) -> None:
    params = parameters(whole_mesh(device), device)
    optimizer = gefen.GefenMuon(params.items(), sharded_mode="distributed", **SETTINGS["normuon"])
    train(optimizer, params, device, range(2))
    saved = optimizer.state_dict()
    resumed = gefen.GefenMuon(params.items(), sharded_mode="distributed")
    resumed.load_state_dict(saved)
    train(resumed, params, device, range(2, STEPS))
    assert_equal(params, alone(device, "normuon"), device)


def test_approximate_steps_enter_no_collective(device: torch.device) -> None:
    params = parameters(whole_mesh(device), device)
    optimizer = gefen.GefenMuon(params.items(), sharded_mode="approx")
    give_gradients(params, 1, device)
    before = [param.detach().to_local().clone() for param in params.values()]
    with Collectives() as counter:
        optimizer.step()
    assert counter.take() == []
    for param, old in zip(params.values(), before, strict=True):
        assert not old.numel() or not torch.equal(param.detach().to_local(), old)
