"""Owners and state of whole matrices when groups, meshes and checkpoints change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matrices import SHAPES, STEPS, alone, give, gradient, layout, over, parameters, train, whole
from ranks import RankPool
from sharded import contents, refusal, same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from gefen import GefenMuon, GefenMuonHybrid

FIRST, LATER = ("a", "b", "c", "d"), ("e",)
"""The last is by far the costliest: chosen afresh, owners of the others would change."""


def holders(optimizer: GefenMuon, params: dict[str, nn.Parameter]) -> list[bool]:
    """Which momenta this rank holds."""
    return ["index" in optimizer.state.get(param, {}) for param in params.values()]


def grown(params: dict[str, nn.Parameter], place: Any, mode: str) -> GefenMuon:
    """Three steps; the last matrix is added after the second."""
    early = {name: params[name] for name in FIRST}
    optimizer = GefenMuon(early.items(), lr=0.02, sharded_mode=mode)
    train(optimizer, early, place, range(2))
    before = holders(optimizer, early)
    optimizer.add_param_group({"params": [(name, params[name]) for name in LATER]})
    train(optimizer, params, place, range(2, 3))
    assert holders(optimizer, early) == before
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
    elif how == "reloaded":
        optimizer.load_state_dict(optimizer.state_dict())
    elif how == "not loaded":
        optimizer.register_load_state_dict_post_hook(broken_hook)
        with pytest.raises(OSError, match="disk full"):
            optimizer.load_state_dict(optimizer.state_dict())
    found = train(optimizer, params, place, range(3, STEPS))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    held: list[Any] = [None] * world
    dist.all_gather_object(held, holders(optimizer, params))
    assert [sum(each) for each in zip(*held, strict=True)] == [1] * len(params)


def broken_hook(optimizer: Any) -> None:
    raise OSError("disk full")


def made_of_two_groups(params: dict[str, nn.Parameter]) -> GefenMuon:
    groups = [{"params": [(name, params[name]) for name in names]} for names in (FIRST, LATER)]
    return GefenMuon(groups, lr=0.02, sharded_mode="distributed")


@pytest.mark.parametrize("how", ["on", "copied", "loaded", "reloaded", "not loaded"])
def test_a_group_added_later_leaves_owners_in_place(ranks: RankPool, how: str) -> None:
    ranks.run(continued, 2, how)


def added_by_one_rank_first(rank: int, world: int) -> tuple[str, str]:
    """Rank 1 tries a step too early; the owners it chose then must not last."""
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
    assert not torch.equal(entries[0]["index"], entries[1]["index"])
    for number, param in enumerate(params):
        own = optimizer.state[param]
        assert "index" not in own or torch.equal(own["index"], entries[number]["index"])


def test_bare_matrices_of_two_meshes_keep_their_states_apart(ranks: RankPool) -> None:
    ranks.run(two_meshes_of_one_communicator, 2)


def repeated_names(rank: int, world: int, mode: str, everywhere: bool) -> tuple[str, str]:
    place = layout("rows", world)
    params = parameters(place)
    twice = everywhere or rank == 1
    names = ["a", "a" if twice else "b", "c", "d", "e"]
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


def other_matrices_before(rank: int, world: int) -> None:
    """Stochastic rounding where ranks hold other matrices too: copies of a momentum stay equal."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    places = {"a": over(meshes[0], Shard(0)), "b": over(meshes[1], Shard(0))}
    mine = {n: p for (n, p), mesh in zip(places.items(), meshes, strict=True) if rank in mesh.mesh}
    params = {n: nn.Parameter(place(n, torch.ones(6, 8))) for n, place in mine.items()}
    optimizer = GefenMuon(params.items(), lr=0.02, stochastic_round=True)
    for step in range(4):
        for i, name in enumerate(params):
            torch.manual_seed(step)
            params[name].grad = mine[name](name, torch.randn(6, 8) + i)
        optimizer.step()
    for name, param in params.items():
        index = optimizer.state[param]["index"]
        copies = [torch.empty_like(index) for _ in range(2)]
        dist.all_gather(copies, index, group=mine_group(meshes, name))
        assert torch.equal(copies[0], copies[1]), name


def mine_group(meshes: list[DeviceMesh], name: str) -> Any:
    return meshes["ab".index(name)].get_group()


def test_copies_of_a_momentum_stay_equal_whatever_else_ranks_hold(ranks: RankPool) -> None:
    ranks.run(other_matrices_before, 3)


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


def hybrid(muon: Any, backup: Any, mode: str) -> GefenMuonHybrid:
    return GefenMuonHybrid(muon, backup, lr=0.02, sharded_mode=mode)


def saved_hybrid(rank: int, world: int) -> Any:
    place = layout("rows", world)
    params = parameters(place)
    scale = nn.Parameter(torch.ones(5))
    optimizer = hybrid(params.items(), [("scale", scale)], "distributed")
    middle = train_with(optimizer, params, scale, place, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    return saved, middle, train_with(optimizer, params, scale, place, range(2, STEPS))


def train_with(
    optimizer: Any, params: dict[str, nn.Parameter], scale: nn.Parameter, place: Any, steps: range
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for step in steps:
        torch.manual_seed(step)
        scale.grad = torch.randn(5)
        found = train(optimizer, params, place, range(step, step + 1))
    return {**found, "scale": scale.detach().clone()}


def resumed_hybrid(rank: int, world: int, mode: str, saved: Any, middle: Any) -> Any:
    where = layout("columns", world) if world > 1 else alone
    params = {name: nn.Parameter(where(name, middle[name])) for name in SHAPES}
    scale = nn.Parameter(middle["scale"].clone())
    optimizer = hybrid(params.items(), [("scale", scale)], mode)
    optimizer.load_state_dict(saved)
    return train_with(optimizer, params, scale, where, range(2, STEPS))


@pytest.mark.parametrize(("mode", "world"), [("exact", 3), ("distributed", 2), ("exact", 1)])
def test_a_hybrids_distributed_checkpoint_continues_elsewhere(
    ranks: RankPool, mode: str, world: int
) -> None:
    saved, middle, expected = ranks.run(saved_hybrid, 3)[2]
    for found in ranks.run(resumed_hybrid, world, mode, saved, middle):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def replicated(rank: int, world: int) -> None:
    """HSDP: each replica's shards have an owner of their own; all replicas stay equal."""
    mesh = DeviceMesh("cpu", torch.arange(world).view(2, -1))
    place = over(mesh, Replicate(), Shard(1))
    exact, params = parameters(place), parameters(place)
    expected = train(GefenMuon(exact.items(), lr=0.02), exact, place)
    optimizer = GefenMuon(params.items(), lr=0.02, sharded_mode="distributed")
    found = train(optimizer, params, place)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    saved = optimizer.state_dict()["state"]
    assert all("index" in entry for entry in saved.values())


def test_replicas_step_alike(ranks: RankPool) -> None:
    ranks.run(replicated, 4)
