"""What differs on one rank of an optimizer in use, and chains of meshes under a hybrid."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from matrices import alone, give, layout, over, parameters, train, whole
from pool import RankPool
from sharded import contents, refusal, same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from gefen import GefenMuon, GefenMuonHybrid


def float32_rate(optimizer: GefenMuon) -> None:
    optimizer.param_groups[0]["lr"] = np.float32(0.5)


def other_dtype(optimizer: GefenMuon) -> None:
    param = optimizer.param_groups[0]["params"][1]
    holder = nn.ParameterList([param])
    holder.to(torch.bfloat16)
    assert holder[0] is param
    assert param.dtype == param.to_local().dtype == torch.bfloat16


def other_option(optimizer: GefenMuon) -> None:
    optimizer.fused = False


DIFFERENCES: dict[str, tuple[Any, str, str]] = {
    "float32 rate": (
        float32_rate,
        "HyperparameterMismatchError",
        "lr is 0.02 on ranks 0, 2, but 0",
    ),
    "older": (
        None,
        "HyperparameterMismatchError",
        "step is 2 on ranks 0, 2, but 1 on",
    ),
    "dtype": (other_dtype, "ParameterIdentityError", "dtype float32, .* but .* dtype bfloat16"),
    "option": (
        other_option,
        "HyperparameterMismatchError",
        "fused is True on ranks 0, 2, but False on rank 1",
    ),
}


def differing(rank: int, world: int, mode: str, difference: str) -> tuple[str, str]:
    """After two steps, rank 1 changes something; then all start from one checkpoint again."""
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), lr=0.02, sharded_mode=mode)
    optimizer.param_groups[0]["note"] = {"user": rank}
    train(optimizer, params, place, range(3, 4))
    older = copy.deepcopy(optimizer.state_dict())
    train(optimizer, params, place, range(3, 4))
    if difference == "older":  # all load together, rank 1 another file
        optimizer.load_state_dict(older if rank == 1 else optimizer.state_dict())
    elif rank == 1:
        DIFFERENCES[difference][0](optimizer)
    give(params, place, 1)
    before = contents(optimizer, params)
    told = refusal(optimizer)
    assert same(before, contents(optimizer, params))
    if rank == 1 and difference == "dtype":
        nn.ParameterList([params["b"]]).to(torch.float32)
    optimizer.fused = True
    optimizer.load_state_dict(older)
    train(optimizer, params, place, range(1, 2))
    return told


@pytest.mark.parametrize("mode", ["exact", "distributed"])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_difference_between_optimizers_is_one_error_on_all(
    ranks: RankPool, mode: str, difference: str
) -> None:
    told = ranks.run(differing, 3, mode, difference)
    assert len(set(told)) == 1, told
    assert told[0][0] == DIFFERENCES[difference][1]
    assert re.search(DIFFERENCES[difference][2], told[0][1]), told[0][1]


def chain_of_hybrids(
    rank: int, mode: str, backup: str, matrices: tuple[str, ...] = ("m0", "m1")
) -> tuple[Any, Any, Any]:
    """A matrix and a vector on each of the meshes {0,1} and {1,2}."""
    found: dict[str, dict[str, nn.Parameter]] = {"m": {}, "b": {}}
    places = {}
    for number, mesh in enumerate((DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2]))):
        if mesh.get_coordinate() is not None:
            places[number] = over(mesh, Shard(0))
            for half, shape in (("m", (6, 4)), ("b", (5,))):
                torch.manual_seed(number)
                full = torch.randn(shape)
                found[half][f"{half}{number}"] = nn.Parameter(places[number]("", full))
    found["m"] = {name: param for name, param in found["m"].items() if name in matrices}
    optimizer = GefenMuonHybrid(
        found["m"].items(),
        found["b"].items(),
        lr=0.02,
        sharded_mode=mode,
        backup_optimizer=backup,
    )
    return optimizer, found["m"] | found["b"], lambda n, full: places[int(n[1])]("", full)


def give_chain(params: Any, place: Any, step: int, without: tuple[str, ...] = ()) -> None:
    for name, param in params.items():
        torch.manual_seed(10 * step + ord(name[0]) + int(name[1]))
        full = torch.randn(param.shape)
        param.grad = None if name in without else place(name, full)


def faults_in_a_chain(rank: int, world: int, mode: str, backup: str) -> list[tuple[str, str]]:
    """No gradient on rank 0; a closure that raises on rank 2; an infinity on rank 2."""
    optimizer, params, place = chain_of_hybrids(rank, mode, backup)
    told = []

    def closure() -> None:
        if rank == 2:
            raise OSError("data ran out")

    for step in range(2):
        give_chain(params, place, step, tuple(params) if rank == 0 else ())
        before = contents(optimizer, params)
        told += [refusal(optimizer)]
        assert same(before, contents(optimizer, params))
        give_chain(params, place, step)
        before = contents(optimizer, params)
        told += [refusal(optimizer, closure=closure)]
        optimizer.grad_scale, optimizer.found_inf = (
            torch.tensor(2.0),
            torch.tensor(float(rank == 2)),
        )
        optimizer.step()
        assert same(before, contents(optimizer, params))
        del optimizer.grad_scale, optimizer.found_inf
        optimizer.step()
        assert not same(before, contents(optimizer, params))
    return told


@pytest.mark.parametrize("backup", ["gefen", "adamw"])
@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_a_hybrids_faults_reach_the_end_of_a_chain(
    ranks: RankPool, mode: str, backup: str
) -> None:
    told = ranks.run(faults_in_a_chain, 3, mode, backup)
    assert told[0] == told[1] == told[2]
    kinds = [kind for kind, _ in told[0]]
    assert kinds == ["GradientPresenceError", "PeerFailureError"] * 2
    assert "'m0' has a gradient on rank 1 but none on rank 0" in told[0][0][1]
    assert "rank 2 failed with OSError: data ran out" in told[0][1][1]


def late_mesh(rank: int, world: int, mode: str) -> dict[str, torch.Tensor]:
    """The parameters of {0,1} have no gradient in the first two steps: rank 0 has none at all."""
    optimizer, params, place = chain_of_hybrids(rank, mode, "gefen")
    for step in range(4):
        give_chain(params, place, step, ("m0", "b0") if step < 2 else ())
        optimizer.step()
    return {name: whole(param.detach()) for name, param in params.items() if name[0] == "m"}


def late_mesh_alone() -> dict[str, torch.Tensor]:
    params: dict[str, nn.Parameter] = {}
    for number in range(2):
        torch.manual_seed(number)
        params[f"m{number}"] = nn.Parameter(torch.randn(6, 4))
    optimizer = GefenMuonHybrid(params.items(), [], lr=0.02)
    for step in range(4):
        give_chain(params, alone, step, ("m0",) if step < 2 else ())
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_a_rank_without_gradients_keeps_step_with_the_others(ranks: RankPool, mode: str) -> None:
    expected = late_mesh_alone()
    for found in ranks.run(late_mesh, 3, mode):
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


def other_optimizer_first(rank: int, world: int) -> list[tuple[str, str]]:
    """Two optimizers over the same ranks, stepped in another order on rank 1."""
    place = layout("rows", world)
    params = parameters(place)
    pairs = list(params.items())
    optimizers = [GefenMuon(pairs[:2]), GefenMuon(pairs[2:])]
    give(params, place, 3)
    told = [refusal(optimizer) for optimizer in optimizers[:: -1 if rank else 1]]
    for optimizer in optimizers:
        optimizer.step()
    return told


def test_optimizers_stepped_in_another_order_are_one_error_on_all(ranks: RankPool) -> None:
    told = ranks.run(other_optimizer_first, 2)
    assert told[0] == told[1]
    assert [kind for kind, _ in told[0]] == ["ParameterIdentityError"] * 2


def without_matrices(rank: int, world: int, mode: str) -> dict[str, torch.Tensor]:
    """Rank 0 has a vector alone, on {0,1}; the matrix lies on {1,2}."""
    optimizer, params, place = chain_of_hybrids(rank, mode, "adamw", matrices=("m1",))
    for step in range(2):
        give_chain(params, place, step)
        optimizer.step()
    optimizer.state_dict()
    return {name: whole(param.detach()) for name, param in params.items()}


@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_a_rank_without_matrices_steps_with_the_others(ranks: RankPool, mode: str) -> None:
    first, second, third = ranks.run(without_matrices, 3, mode)
    assert first.keys() == {"b0"}
    assert torch.equal(first["b0"], second["b0"])
    assert torch.equal(second["m1"], third["m1"])


def mixed_modes(rank: int, world: int) -> tuple[str, str]:
    """One group of matrices is approximate, the other is not; a gradient of that is missing."""
    place = layout("rows", world)
    params = parameters(place)
    pairs = list(params.items())
    optimizer = GefenMuonHybrid(pairs[:2], pairs[4:], lr=0.02, sharded_mode="approx")
    optimizer.add_param_group({"params": pairs[2:4], "sharded_mode": "exact"})
    give(params, place, 1)
    kept = params["d"].grad
    params["d"].grad = kept if rank == 0 else None
    before = contents(optimizer, params)
    told = refusal(optimizer)
    assert same(before, contents(optimizer, params))
    params["d"].grad = kept
    optimizer.step()
    return told


def test_a_hybrid_of_both_modes_agrees_before_a_step(ranks: RankPool) -> None:
    told = ranks.run(mixed_modes, 2)
    assert told[0] == told[1]
    assert told[0][0] == "GradientPresenceError"
    assert "'d' has a gradient on rank 0 but none on rank 1" in told[0][1]
