"""What ranks agree on before a step, and what that costs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from members import group, members, mesh_over, one_mesh, two_on_each, weight, without_grad
from pool import RankPool
from sharded import Collectives

from gefen.distributed.preflight import Member, Preflight


def all_missing_everywhere(rank: int, world: int) -> None:
    preflight, mine = Preflight(), one_mesh("exact", world)
    assert not preflight.agree(without_grad(mine)).skip
    assert not preflight.agree(mine).skip


def test_no_gradient_anywhere_is_agreed(ranks: RankPool) -> None:
    ranks.run(all_missing_everywhere, 2)


def skipping(rank: int, world: int) -> list[bool]:
    good = two_on_each("exact", [mesh_over(0, 1), mesh_over(1, 2), mesh_over(2, 3)])
    preflight = Preflight()
    return [preflight.agree(good, skip=rank == 3).skip, preflight.agree(good).skip]


def test_a_skip_asked_by_one_rank_is_a_skip_on_every_rank(ranks: RankPool) -> None:
    assert ranks.run(skipping, 4) == [[True, False]] * 4


def count_calls(rank: int, world: int, count: int) -> list[list[tuple[str, int]]]:
    mesh = mesh_over(*range(world))
    mine = members("exact", {f"w{i}": weight(mesh) for i in range(count)})
    preflight = Preflight()
    preflight.agree(mine)
    per_step = []
    with Collectives() as counter:
        for _ in range(2):
            preflight.agree(mine)
            per_step.append(counter.take())
    return per_step


@pytest.mark.parametrize("count", [1, 300])
def test_a_step_costs_one_small_all_reduce_per_group(ranks: RankPool, count: int) -> None:
    for per_step in ranks.run(count_calls, 2, count):
        assert per_step == [[("allreduce", 80)]] * 2


def count_chain(rank: int, world: int) -> list[tuple[str, int]]:
    good = two_on_each("exact", [mesh_over(0, 1), mesh_over(1, 2), mesh_over(2, 3)])
    preflight = Preflight()
    preflight.agree(good)
    with Collectives() as counter:
        preflight.agree(good)
    return counter.take()


def test_a_chain_costs_its_rounds_per_group(ranks: RankPool) -> None:
    counted = ranks.run(count_chain, 4)
    assert [len(calls) for calls in counted] == [3, 6, 6, 3]
    assert {call for calls in counted for call in calls} == {("allreduce", 80)}


def count_nothing(rank: int, world: int) -> list[tuple[str, int]]:
    plain = Member("a", True, torch.zeros(2, 2), group(), "exact", ("lr",))
    with Collectives() as counter:
        assert not Preflight().agree([plain]).skip
        with pytest.raises(ValueError, match="mine"):
            Preflight().agree([plain], failure=ValueError("mine"))
    return counter.take()


@pytest.mark.parametrize("world", [1, 2])
def test_plain_tensors_enter_no_collective(ranks: RankPool, world: int) -> None:
    assert ranks.run(count_nothing, world) == [[]] * world


def one_rank_mesh(rank: int, world: int) -> list[tuple[str, int]]:
    meshes = [mesh_over(r) for r in range(world)]
    named = {"a": weight(meshes[rank]), "b": weight(meshes[rank])}
    with Collectives() as counter:
        assert not Preflight().agree(members("exact", named)).skip
    return counter.take()


def test_a_mesh_of_one_rank_enters_no_collective(ranks: RankPool) -> None:
    assert ranks.run(one_rank_mesh, 2) == [[], []]


EQUAL: list[dict[str, Any]] = [
    {"lr": 1},
    {"lr": 1.0},
    {"lr": np.float64(1)},
    {"lr": np.float32(1)},
    {"lr": torch.tensor(1.0)},
    {"lr": torch.tensor([1.0], dtype=torch.float64)},
    {"lr": 1.0, "ns_schedule": [(3, -4.0, 2)]},
    {"lr": 1.0, "ns_schedule": ((3.0, -4, 2.0),)},
    {"lr": 1.0, "ns_schedule": np.array([[3.0, -4.0, 2.0]])},
]


def equal_in_value(rank: int, world: int) -> None:
    """Numbers of any type, and keys that the optimizer does not know."""
    mesh = mesh_over(*range(world))
    named = {"a": weight(mesh), "b": weight(mesh, (4, 6))}
    preflight = Preflight()
    for first, second in itertools.product(EQUAL, EQUAL):
        if ("ns_schedule" in first) == ("ns_schedule" in second):
            known = ("lr", "ns_schedule")
            mine = members("exact", named, **(second if rank else first), note=object(), of=rank)
            assert not preflight.agree([replace(m, compared=known) for m in mine]).skip


def test_equal_values_of_other_types_are_no_disagreement(ranks: RankPool) -> None:
    ranks.run(equal_in_value, 2)


def legal_orders(rank: int, world: int) -> None:
    """Ranks interleave their meshes as they like; within each mesh the order is one."""
    meshes = [mesh_over(0, 1), mesh_over(1, 2), mesh_over(0, 2), mesh_over(0, 1, 2)]
    blocks = [
        [(f"w{i}.{j}", weight(mesh)) for j in range(2)]
        for i, mesh in enumerate(meshes)
        if mesh.get_coordinate() is not None
    ]
    orders = list(itertools.permutations(blocks))
    preflight = Preflight()
    for shift in range(4):
        chosen = orders[(rank * 2 + shift) % len(orders)]
        named = dict(pair for block in chosen for pair in block)
        assert not preflight.agree(members("exact", named)).skip


def test_meshes_may_be_registered_in_any_order(ranks: RankPool) -> None:
    ranks.run(legal_orders, 3)


def topology_changes(rank: int, world: int) -> list[int]:
    """{0,1} and {2,3} apart; then joined by {1,2}; then one rank forgets its optimizer."""
    meshes = [mesh_over(0, 1), mesh_over(2, 3), mesh_over(1, 2)]
    early = members("exact", {f"w{i}": weight(m) for i, m in enumerate(meshes[:2])})
    late = members("exact", {f"w{i}": weight(m) for i, m in enumerate(meshes)})
    preflight = Preflight()
    rounds = []
    for mine in (early, early, late, late):
        assert not preflight.agree(mine).skip
        assert preflight.topology is not None
        rounds.append(preflight.topology.rounds)
    for forgetful in range(world):
        preflight = Preflight() if rank == forgetful else preflight
        assert not preflight.agree(late).skip
        assert preflight.topology is not None
        rounds.append(preflight.topology.rounds)
    return rounds


def test_the_topology_is_learned_again_when_groups_change(ranks: RankPool) -> None:
    assert ranks.run(topology_changes, 4) == [[1, 1, 3, 3, 3, 3, 3, 3]] * 4
