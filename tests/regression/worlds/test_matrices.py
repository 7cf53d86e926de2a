"""Sharded matrices when groups, meshes and checkpoints change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matrices import SHAPES, STEPS, alone, give, gradient, layout, over, parameters, train, whole
from pool import RankPool
from sharded import contents, refusal, same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from gefen import GefenMuon

FIRST, LATER = ("a", "b", "c", "d", "s"), ("e",)
"""The last is by far the costliest: owners of the others change with it."""


def grown(params: dict[str, nn.Parameter], place: Any, mode: str) -> GefenMuon:
    """Three steps; the last matrix is added after the second."""
    early = {name: params[name] for name in FIRST}
    optimizer = GefenMuon(early.items(), lr=0.02, sharded_mode=mode, normuon=True)
    train(optimizer, early, place, range(2))
    optimizer.add_param_group({"params": [(name, params[name]) for name in LATER]})
    train(optimizer, params, place, range(2, 3))
    return optimizer


def continued(rank: int, world: int, how: str) -> None:
    place = layout("rows", world)
    exact, params = parameters(place), parameters(place)
    expected = train(grown(exact, place, "exact"), exact, place, range(3, STEPS))
    optimizer = grown(params, place, "distributed")
    if how == "copied":
        optimizer, params = copy.deepcopy((optimizer, params))
    elif how == "loaded":
        saved, optimizer = optimizer.state_dict(), made_of_two_groups(params)
        optimizer.load_state_dict(saved)
    found = train(optimizer, params, place, range(3, STEPS))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def made_of_two_groups(params: dict[str, nn.Parameter]) -> GefenMuon:
    groups = [{"params": [(name, params[name]) for name in names]} for names in (FIRST, LATER)]
    return GefenMuon(groups, lr=0.02, sharded_mode="distributed", normuon=True)


@pytest.mark.parametrize("how", ["on", "copied", "loaded"])
def test_a_group_added_later_continues_what_was_there(ranks: RankPool, how: str) -> None:
    ranks.run(continued, 2, how)


def added_by_one_rank_first(rank: int, world: int) -> tuple[str, str]:
    """Rank 1 tries a step too early; what it prepared then must not last."""
    place = layout("rows", world)
    exact, params = parameters(place), parameters(place)
    expected = train(GefenMuon(exact.items(), lr=0.02), exact, place, range(1, 3))
    pairs = list(params.items())
    optimizer = GefenMuon(pairs[:2], lr=0.02, sharded_mode="distributed")
    if rank == 1:
        optimizer.add_param_group({"params": pairs[2:4]})
    give(params, place, 1)
    told = refusal(optimizer)
    if rank == 0:
        optimizer.add_param_group({"params": pairs[2:4]})
    optimizer.add_param_group({"params": pairs[4:]})
    found = train(optimizer, params, place, range(1, 3))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    return told


def test_a_group_added_on_one_rank_first_is_refused_and_forgotten(ranks: RankPool) -> None:
    told = ranks.run(added_by_one_rank_first, 2)
    assert told[0] == told[1]
    assert told[0][0] == "ParameterIdentityError"


def two_meshes_of_one_communicator(rank: int, world: int) -> None:
    """Bare parameters of one shape that only their meshes tell apart."""
    group = dist.new_group(list(range(world)))
    places = [
        over(DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,)), Shard(0))
        for name in "xy"
    ]
    full = torch.arange(48.0).view(6, 8)
    params = [nn.Parameter(place("", full * scale)) for scale, place in enumerate(places, 1)]
    optimizer = GefenMuon(params, lr=0.02, sharded_mode="distributed")
    for step in range(2):
        for i, param in enumerate(params):
            torch.manual_seed(10 * step + i)
            param.grad = places[i]("", torch.randn(6, 8))
        optimizer.step()
    entries = optimizer.state_dict()["state"]
    first, second = (whole(entries[number]["index"]) for number in range(2))
    assert not torch.equal(first, second)


def test_bare_matrices_of_two_meshes_keep_their_states_apart(ranks: RankPool) -> None:
    ranks.run(two_meshes_of_one_communicator, 2)


def repeated_names(rank: int, world: int, mode: str, everywhere: bool) -> tuple[str, str]:
    place = layout("rows", world)
    params = parameters(place)
    twice = everywhere or rank == 1
    names = ["a", "a" if twice else "b", "c", "d", "e", "s"]
    optimizer = GefenMuon(zip(names, params.values(), strict=True), sharded_mode=mode)
    give(params, place, 1)
    before = contents(optimizer, params)
    told = refusal(optimizer)
    assert same(before, contents(optimizer, params))
    optimizer.param_groups[0]["param_names"][1] = "b"
    optimizer.step()
    return told


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_a_repeated_name_is_refused_whatever_the_shapes(
    ranks: RankPool, mode: str, everywhere: bool
) -> None:
    told = ranks.run(repeated_names, 3, mode, everywhere)
    assert len(set(told)) == 1
    assert told[0][0] == "ParameterIdentityError"
    who = "ranks 0-2" if everywhere else "rank 1"
    assert f"on {who}, the parameters at positions 0, 1 all have the name 'a'" in told[0][1]


def nested_meshes(rank: int, world: int, mode: str) -> None:
    """{0,1,2} and, within it, {1,2}; rank 0 alone is in one mesh only."""
    places = {
        "a": over(DeviceMesh("cpu", [0, 1, 2]), Shard(0)),
        "e": over(DeviceMesh("cpu", [1, 2]), Shard(0)),
    }
    torch.manual_seed(5)
    full = {name: torch.randn(SHAPES[name]) for name in places}
    expected = {name: nn.Parameter(value.clone()) for name, value in full.items()}
    single = GefenMuon(expected.items(), lr=0.02, stochastic_round=False)
    params = {n: nn.Parameter(places[n](n, full[n])) for n in places if n == "a" or rank}
    optimizer = GefenMuon(params.items(), lr=0.02, sharded_mode=mode)
    for step in range(3):
        for name in places:
            grad = gradient(name, step)
            assert grad is not None
            expected[name].grad = grad
            if name in params:
                params[name].grad = places[name](name, grad)
        single.step()
        optimizer.step()
    for name, param in params.items():
        assert torch.equal(whole(param.detach()), expected[name].detach()), name


@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_a_mesh_within_another_learns_one_codebook(ranks: RankPool, mode: str) -> None:
    ranks.run(nested_meshes, 3, mode)


def other_matrices_before(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Cut within rows, a momentum is whole on each rank, also if rounded at random."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    places = {"a": over(meshes[0], Shard(1)), "b": over(meshes[1], Shard(1))}
    mine = {n: p for (n, p), mesh in zip(places.items(), meshes, strict=True) if rank in mesh.mesh}
    params = {n: nn.Parameter(place(n, torch.ones(6, 8))) for n, place in mine.items()}
    optimizer = GefenMuon(params.items(), lr=0.02, stochastic_round=True)
    for step in range(4):
        for i, name in enumerate(params):
            torch.manual_seed(step)
            params[name].grad = mine[name](name, torch.randn(6, 8) + i)
        optimizer.step()
    return {name: optimizer.state[param]["index"].to_local() for name, param in params.items()}


def test_copies_of_a_momentum_stay_equal_whatever_else_ranks_hold(ranks: RankPool) -> None:
    first, second, third = ranks.run(other_matrices_before, 3)
    assert torch.equal(first["a"], second["a"])
    assert torch.equal(second["b"], third["b"])


def odd_shards(rank: int, world: int) -> tuple[str, str]:
    """Shards of 3, 4 and 5 rows: only rank 1's is the one that DTensor would place there."""
    mesh = DeviceMesh("cpu", list(range(world)))
    local = torch.ones(3 + rank, 2)
    shape, stride = torch.Size((12, 2)), (2, 1)

    def made() -> DTensor:
        tensor = local.clone()
        return DTensor.from_local(
            tensor, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )

    param = nn.Parameter(made())
    optimizer = GefenMuon([("w", param)])
    param.grad = made()
    return refusal(optimizer)


def test_shards_that_dtensor_would_not_make_are_one_error_on_all(ranks: RankPool) -> None:
    told = ranks.run(odd_shards, 3)
    assert len(set(told)) == 1
    assert told[0][0] == "PeerFailureError"
    assert "'w' of shape (12, 2)" in told[0][1]
    assert "shard of length 3 on this rank instead of 4" in told[0][1]


def replicated(rank: int, world: int) -> None:
    """HSDP: each replica's shards have an owner of their own; all replicas stay equal."""
    mesh = DeviceMesh("cpu", torch.arange(world).view(2, -1))
    place = over(mesh, Replicate(), Shard(0))
    exact, params = parameters(place), parameters(place)
    expected = train(GefenMuon(exact.items(), lr=0.02), exact, place)
    optimizer = GefenMuon(params.items(), lr=0.02, sharded_mode="distributed")
    found = train(optimizer, params, place)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for param in params.values():
        index = optimizer.state[param]["index"].to_local()
        copies = [torch.empty_like(index) for _ in range(2)]
        dist.all_gather(copies, index, group=mesh.get_group(0))
        assert torch.equal(copies[0], copies[1])


def test_replicas_step_alike(ranks: RankPool) -> None:
    ranks.run(replicated, 4)


def rounded(rank: int, world: int, where: str, chosen: dict[str, bool]) -> None:
    """Each element is rounded by the random number that it has in one process."""
    found = []
    for place in (layout(where, world), alone):
        params = parameters(place, torch.bfloat16)
        optimizer = GefenMuon(params.items(), lr=0.02, bf16_stochastic_round=True, **chosen)
        found.append(train(optimizer, params, place))
    for name, value in found[1].items():
        assert torch.equal(found[0][name], value), name


@pytest.mark.parametrize("chosen", [{}, {"cautious": True}], ids=["plain", "cautious"])
@pytest.mark.parametrize(("where", "world"), [("rows", 3), ("columns", 2), ("grid", 4)])
def test_rounding_of_bfloat16_is_that_of_one_process(
    ranks: RankPool, where: str, world: int, chosen: dict[str, bool]
) -> None:
    ranks.run(rounded, world, where, chosen)
