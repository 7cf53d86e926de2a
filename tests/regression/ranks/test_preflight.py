"""Ranks that disagree all raise the same error, change nothing, and can step once corrected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded import (
    Collectives,
    contents,
    full,
    give_gradients,
    on_every_rank,
    parameters,
    refusal,
    same,
    shard,
)
from sharded import whole_mesh as whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import gefen

Params = dict[str, nn.Parameter]
MODES = ("exact", "distributed")


def last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def swap(optimizer: gefen.GefenMuon, params: Params) -> None:
    group = optimizer.param_groups[0]
    for key in ("params", "param_names"):
        group[key][0], group[key][1] = group[key][1], group[key][0]


def drop_gradient(optimizer: gefen.GefenMuon, params: Params) -> None:
    params["b"].grad = None


def drop_gradients(optimizer: gefen.GefenMuon, params: Params) -> None:
    for param in params.values():
        param.grad = None


def other_rate(optimizer: gefen.GefenMuon, params: Params) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


FAULTS: dict[str, tuple[Callable[[Any, Params], None], str, str]] = {
    "order": (swap, "ParameterOrderError", "position 0 holds 'a' on rank"),
    "gradient": (drop_gradient, "GradientPresenceError", "'b' has a gradient on rank"),
    "gradients": (drop_gradients, "GradientPresenceError", "'e' has a gradient on rank"),
    "rate": (other_rate, "HyperparameterMismatchError", "lr is 0.01 on rank"),
}


@pytest.mark.parametrize("good_steps", [0, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_is_one_error_on_all(
    fault: str, mode: str, good_steps: int, device: torch.device
) -> None:
    breaks, kind, message = FAULTS[fault]
    params = parameters(whole(device), device)
    optimizer = gefen.GefenMuon(params.items(), lr=0.01, sharded_mode=mode)
    for step in range(good_steps):
        give_gradients(params, step, device)
        optimizer.step()
    give_gradients(params, 7, device)
    groups = [dict(group, params=[*group["params"]]) for group in optimizer.param_groups]
    names = [*groups[0]["param_names"]]
    if last_rank():
        breaks(optimizer, params)
    before = contents(optimizer, params)
    told = on_every_rank(refusal(optimizer))
    assert len(set(told)) == 1, told
    assert told[0][0] == kind
    assert message in told[0][1]
    assert same(before, contents(optimizer, params))
    optimizer.param_groups[0].update(groups[0], param_names=names)
    give_gradients(params, 7, device)
    optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_closure_that_raises_on_one_rank_is_one_error_on_all(
    mode: str, device: torch.device
) -> None:
    params = parameters(whole(device), device)
    optimizer = gefen.GefenMuon(params.items(), sharded_mode=mode)
    give_gradients(params, 1, device)

    def closure() -> None:
        if last_rank():
            raise OSError("data ran out")

    told = on_every_rank(refusal(optimizer, closure=closure))
    assert len(set(told)) == 1, told
    assert told[0][0] == "PeerFailureError"
    assert "OSError: data ran out" in told[0][1]
    optimizer.step()


def test_a_fault_reaches_ranks_that_share_no_mesh_with_it(device: torch.device) -> None:
    """Meshes {0,1}, {1,2}, …; the fault lies between ranks 0 and 1."""
    meshes = [DeviceMesh(device.type, [r, r + 1]) for r in range(dist.get_world_size() - 1)]
    params = {
        f"{letter}{i}": nn.Parameter(shard(full(letter, 0, device), mesh))
        for i, mesh in enumerate(meshes)
        if mesh.get_coordinate() is not None
        for letter in "ab"
    }
    optimizer = gefen.GefenMuon(params.items())
    give_gradients(params, 1, device)
    lost = params["a0"].grad if dist.get_rank() == 0 else None
    if lost is not None:
        params["a0"].grad = None
    told = on_every_rank(refusal(optimizer))
    assert len(set(told)) == 1, told
    assert "'a0' has a gradient on rank 1 but none on rank 0" in told[0][1]
    if lost is not None:
        params["a0"].grad = lost
    optimizer.step()


def test_the_cost_of_agreeing_does_not_grow(device: torch.device) -> None:
    mesh = whole(device)
    for count in (1, 40):
        named = [(f"{i}", nn.Parameter(shard(full("a", i, device), mesh))) for i in range(count)]
        optimizer = gefen.GefenMuon(named)
        optimizer.step()
        with Collectives() as counter:
            optimizer.step()
        [(name, size)] = counter.take()
        assert name == "allreduce"
        assert size <= 128
