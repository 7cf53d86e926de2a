"""Every way in which ranks can disagree before a step, on a first and on a later step."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from sharded import Collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from gefen.distributed.preflight import Member, Preflight
from gefen.errors import ShardedStepError

MODES = ("exact", "distributed")


def mesh_over(*ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(ranks))


def weight(
    mesh: DeviceMesh,
    shape: Sequence[int] = (4, 4),
    dtype: torch.dtype = torch.float32,
    placement: Any = Shard(0),  # noqa: B008
) -> torch.Tensor | None:
    """A parameter with a gradient, or None where this rank is not in the mesh."""
    if mesh.get_coordinate() is None:
        return None
    local = torch.zeros(shape, dtype=dtype)
    made = DTensor.from_local(local, mesh, [placement] * mesh.ndim, run_check=False)
    made.grad = made.clone()
    return made


def group(**values: Any) -> dict[str, Any]:
    return {"lr": 0.01, "momentum": 0.95, "ns_schedule": "tuned3", **values}


def members(mode: str, named: dict[str, torch.Tensor | None], **values: Any) -> list[Member]:
    held = group(**values)
    return [Member(n, True, p, held, mode, held) for n, p in named.items() if p is not None]


def bare(mode: str, *parameters: torch.Tensor | None) -> list[Member]:
    held = group()
    kept = [p for p in parameters if p is not None]
    return [Member(f"param{i}", False, p, held, mode, held) for i, p in enumerate(kept)]


def without_grad(mine: list[Member], *names: str) -> list[Member]:
    return [_ungraded(m) if not names or m.name in names else m for m in mine]


def _ungraded(member: Member) -> Member:
    parameter = member.parameter.detach().clone()
    return replace(member, parameter=parameter)


Case = tuple[list[Member], list[Member]]


def one_mesh(mode: str, world: int, **values: Any) -> list[Member]:
    mesh = mesh_over(*range(world))
    named = {"a": weight(mesh), "b": weight(mesh, (4, 6)), "c": weight(mesh)}
    return members(mode, named, **values)


def on_rank(rank: int, at: int, broken: list[Member], good: list[Member]) -> Case:
    return good, broken if rank == at else good


def reversed_order(rank: int, world: int, mode: str) -> Case:
    good = one_mesh(mode, world)
    return on_rank(rank, 1, good[::-1], good)


def swapped_across_meshes(rank: int, world: int, mode: str) -> Case:
    first, second = mesh_over(*range(world)), DeviceMesh("cpu", torch.arange(world).view(1, -1))
    good = members(mode, {"a": weight(first), "b": weight(second)})
    return on_rank(rank, 1, good[::-1], good)


def swapped_across_equal_meshes(rank: int, world: int, mode: str) -> Case:
    pair = [mesh_over(0, 1), mesh_over(0, 1)]
    dist.barrier()
    good = members(mode, {"a": weight(pair[0]), "b": weight(pair[1])})
    return on_rank(rank, 1, good[::-1], good)


def gradient_missing(rank: int, world: int, mode: str) -> Case:
    good = one_mesh(mode, world)
    return on_rank(rank, 1, without_grad(good, "b"), good)


def gradients_all_missing(rank: int, world: int, mode: str) -> Case:
    good = one_mesh(mode, world)
    return on_rank(rank, 0, without_grad(good), good)


def fewer_parameters(rank: int, world: int, mode: str) -> Case:
    good = one_mesh(mode, world)
    return on_rank(rank, 1, good[:2], good)


def duplicate_names(rank: int, world: int, mode: str) -> Case:
    good = one_mesh(mode, world)
    twice = [replace(m, name="a") if m.name == "c" else m for m in good]
    return on_rank(rank, 1, twice, good)


def duplicate_names_of_two_shapes(rank: int, world: int, mode: str) -> Case:
    good = one_mesh(mode, world)
    twice = [replace(m, name="a") if m.name == "b" else m for m in good]
    return on_rank(rank, 1, twice, good)


def duplicate_names_everywhere(rank: int, world: int, mode: str) -> Case:
    good = one_mesh(mode, world)
    return good, [replace(m, name="a") if m.name == "b" else m for m in good]


def duplicate_names_across_meshes(rank: int, world: int, mode: str) -> Case:
    """Rank 1 alone is on both meshes."""
    pair = [mesh_over(0, 1), mesh_over(1, 2)]
    named = {"a": weight(pair[0]), "b": weight(pair[0], (4, 6)), "c": weight(pair[1], (4, 8))}
    good = members(mode, named)
    return good, [replace(m, name="a") if m.name == "c" else m for m in good]


def bare_of_one_shape(rank: int, world: int, mode: str) -> Case:
    mesh = mesh_over(*range(world))
    return one_mesh(mode, world), bare(mode, weight(mesh), weight(mesh))


def bare_swapped(rank: int, world: int, mode: str) -> Case:
    mesh = mesh_over(*range(world))
    small, large = weight(mesh), weight(mesh, (4, 6))
    return on_rank(rank, 1, bare(mode, large, small), bare(mode, small, large))


def other_dtype(rank: int, world: int, mode: str) -> Case:
    mesh = mesh_over(*range(world))
    good = one_mesh(mode, world)
    named = {"a": weight(mesh), "b": weight(mesh, (4, 6), torch.bfloat16), "c": weight(mesh)}
    return on_rank(rank, 1, members(mode, named), good)


def other_placement(rank: int, world: int, mode: str) -> Case:
    mesh = mesh_over(*range(world))
    a, shape = weight(mesh), (4 * world, 4)
    good = members(mode, {"a": a, "b": weight(mesh)})
    other = members(mode, {"a": a, "b": weight(mesh, shape, placement=Replicate())})
    return on_rank(rank, 1, other, good)


def other_lr(rank: int, world: int, mode: str) -> Case:
    good = one_mesh(mode, world)
    return on_rank(rank, 1, one_mesh_again(good, lr=0.02), good)


def other_tensor_lr(rank: int, world: int, mode: str) -> Case:
    good = one_mesh_again(one_mesh(mode, world), lr=torch.tensor(0.01))
    return on_rank(rank, 1, one_mesh_again(good, lr=torch.tensor(0.02)), good)


def other_numpy_lr(rank: int, world: int, mode: str) -> Case:
    good = one_mesh_again(one_mesh(mode, world), lr=np.float32(0.01))
    return on_rank(rank, 1, one_mesh_again(good, lr=np.float32(0.02)), good)


def other_step(rank: int, world: int, mode: str) -> Case:
    """As after one rank has loaded an older checkpoint."""
    good = [replace(m, standing=lambda: (5, None)) for m in one_mesh(mode, world)]
    older = [replace(m, standing=lambda: (3, None)) for m in good]
    return on_rank(rank, 1, older, good)


def other_owner(rank: int, world: int, mode: str) -> Case:
    good = [replace(m, standing=lambda: (5, 0)) for m in one_mesh(mode, world)]
    return on_rank(rank, 1, [good[0], replace(good[1], standing=lambda: (5, 1)), good[2]], good)


def other_codebook(rank: int, world: int, mode: str) -> Case:
    good = [replace(m, facts={"codebook": "12ab"}) for m in one_mesh(mode, world)]
    return on_rank(rank, 1, [replace(m, facts={"codebook": "34cd"}) for m in good], good)


def other_momentum(rank: int, world: int, mode: str) -> Case:
    good = one_mesh(mode, world)
    return on_rank(rank, 1, one_mesh_again(good, momentum=0.9), good)


def other_schedule(rank: int, world: int, mode: str) -> Case:
    good = one_mesh(mode, world)
    return on_rank(rank, 1, one_mesh_again(good, ns_schedule=[(3.0, -4.0, 2.0)]), good)


def other_mode(rank: int, world: int, mode: str) -> Case:
    good = one_mesh(mode, world)
    swapped = MODES[1 - MODES.index(mode)]
    return on_rank(rank, 1, one_mesh_again(good, mode=swapped), good)


def other_groups(rank: int, world: int, mode: str) -> Case:
    good = one_mesh(mode, world)
    return on_rank(rank, 1, [*good[:2], *one_mesh_again(good[2:])], good)


def one_mesh_again(good: list[Member], mode: str = "", **values: Any) -> list[Member]:
    held = {**good[0].group, **values}
    return [
        replace(m, group=held, sharded_mode=mode or m.sharded_mode, compared=held) for m in good
    ]


def two_overlapping(rank: int, world: int, mode: str) -> Case:
    meshes = [mesh_over(0, 1), mesh_over(1, 2)]
    return overlapping(rank, mode, meshes)


def chain(rank: int, world: int, mode: str) -> Case:
    return overlapping(rank, mode, [mesh_over(0, 1), mesh_over(1, 2), mesh_over(2, 3)])


def ring(rank: int, world: int, mode: str) -> Case:
    return overlapping(rank, mode, [mesh_over(0, 1), mesh_over(1, 2), mesh_over(0, 2)])


def overlapping(rank: int, mode: str, meshes: list[DeviceMesh]) -> Case:
    """The fault is on the first mesh alone, between ranks 0 and 1."""
    named = {f"w{i}.{j}": weight(m) for i, m in enumerate(meshes) for j in range(2)}
    good = members(mode, named)
    order = sorted(good, key=lambda m: {"w0.0": "w0.1", "w0.1": "w0.0"}.get(m.name, m.name))
    return on_rank(rank, 0, order, good)


def two_dimensional(rank: int, world: int, mode: str) -> Case:
    """Rank 3 differs; rank 0 shares no group with it."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
    good = members(mode, {"a": weight(mesh), "b": weight(mesh, (4, 6))})
    return on_rank(rank, 3, good[::-1], good)


CASES: list[tuple[Callable[..., Case], int, str, str]] = [
    (reversed_order, 2, "ParameterOrderError", "position 0 holds 'a' on rank 0, but 'c' on"),
    (reversed_order, 3, "ParameterOrderError", "'a' on ranks 0, 2, but 'c' on rank 1"),
    (swapped_across_meshes, 2, "ParameterOrderError", "'a' on rank 0, but 'b' on rank 1"),
    (swapped_across_equal_meshes, 3, "ParameterOrderError", "'a' on rank 0, but 'b'"),
    (gradient_missing, 2, "GradientPresenceError", "'b' has a gradient on rank 0 but none on"),
    (gradient_missing, 4, "GradientPresenceError", "'b' has a gradient on ranks 0, 2-3 but"),
    (gradients_all_missing, 2, "GradientPresenceError", "'a' has a gradient on rank 1 but none"),
    (fewer_parameters, 2, "ParameterIdentityError", "is 3 on rank 0, 2 on rank 1; 'c' is miss"),
    (duplicate_names, 3, "ParameterIdentityError", "on rank 1, the parameters at positions 0, 2"),
    (duplicate_names_of_two_shapes, 2, "ParameterIdentityError", "positions 0, 1 all have the n"),
    (
        duplicate_names_everywhere,
        2,
        "ParameterIdentityError",
        "on ranks 0-1, .* the name 'a'; give",
    ),
    (
        duplicate_names_across_meshes,
        3,
        "ParameterIdentityError",
        "on rank 1, .*positions 0, 2 all",
    ),
    (bare_of_one_shape, 2, "ParameterIdentityError", "on ranks 0-1, the unnamed parameters at"),
    (bare_swapped, 2, "ParameterOrderError", "position 0 holds the unnamed parameter of shape"),
    (other_dtype, 2, "ParameterIdentityError", "dtype float32.* on rank 0, but .*bfloat16"),
    (other_placement, 2, "ParameterIdentityError", "'b' has .*Shard.*rank 0, but .*Replicate"),
    (other_lr, 2, "HyperparameterMismatchError", "lr is 0.01 on rank 0, but 0.02 on rank 1 for"),
    (other_tensor_lr, 2, "HyperparameterMismatchError", "lr is 0.00999.* but 0.01999.* on rank 1"),
    (other_numpy_lr, 2, "HyperparameterMismatchError", "lr is 0.00999.* but 0.01999.* on rank 1"),
    (other_step, 3, "HyperparameterMismatchError", "step is 5 on ranks 0, 2, but 3 on rank 1 for"),
    (
        other_owner,
        2,
        "HyperparameterMismatchError",
        "owner is 0 on rank 0, but 1 on rank 1 for 'b'",
    ),
    (other_codebook, 2, "HyperparameterMismatchError", "codebook is .12ab. on.*same checkpoint"),
    (other_momentum, 2, "HyperparameterMismatchError", "momentum is 0.95 on rank 0, but 0.9 on"),
    (other_schedule, 2, "HyperparameterMismatchError", "ns_schedule is 'tuned3'.*\\(3, -4, 2"),
    (other_mode, 2, "HyperparameterMismatchError", "sharded_mode is .* on rank 0, but .* on ran"),
    (other_groups, 2, "HyperparameterMismatchError", "divided into parameter groups differently"),
    (two_overlapping, 3, "ParameterOrderError", "'w0.0' on rank 1, but|'w0.1' on rank 0, but"),
    (chain, 4, "ParameterOrderError", "'w0.1' on rank 0, but 'w0.0' on rank 1"),
    (ring, 3, "ParameterOrderError", "'w0.1' on rank 0, but 'w0.0' on rank 1"),
    (two_dimensional, 4, "ParameterOrderError", "'a' on ranks 0-2, but 'b' on rank 3"),
]


def agree_and_disagree(
    good: list[Member], broken: list[Member], good_steps: int
) -> tuple[str, str]:
    preflight = Preflight()
    for _ in range(good_steps):
        assert not preflight.agree(good).skip
    told = refusal(preflight, broken)
    assert refusal(preflight, broken) == told
    assert not preflight.agree(good).skip
    return told


def refusal(preflight: Preflight, mine: list[Member], **arguments: Any) -> tuple[str, str]:
    try:
        preflight.agree(mine, **arguments)
    except ShardedStepError as error:
        return type(error).__name__, str(error)
    return "", "no error"


@pytest.mark.parametrize(
    ("builder", "world", "kind", "message"), CASES, ids=lambda v: getattr(v, "__name__", None)
)
def test_every_rank_raises_the_same_error_and_a_corrected_step_follows(
    ranks: RankPool, builder: Callable[..., Case], world: int, kind: str, message: str
) -> None:
    told = [each for each in ranks.run(run_case, world, builder.__name__) if each is not None]
    for variant in zip(*told, strict=True):
        assert len(set(variant)) == 1, variant
        assert variant[0][0] == kind, variant[0]
        assert re.search(message, variant[0][1]), variant[0]
        assert "call step() again" in variant[0][1]


def run_case(rank: int, world: int, builder: str) -> Any:
    """Both modes, the fault on a first and on a later step; None on ranks outside the meshes."""
    told = []
    for mode, good_steps in itertools.product(MODES, (0, 2)):
        good, broken = globals()[builder](rank, world, mode)
        if good:
            told.append(agree_and_disagree(good, broken, good_steps))
    return told or None


GRAPHS: dict[str, list[tuple[int, ...]]] = {
    "pair": [(0, 1), (1, 2)],
    "ring of three": [(0, 1), (0, 2), (1, 2)],
    "one within another": [(0, 1, 2), (1, 2)],
    "ring of four": [(0, 1), (0, 3), (1, 2), (2, 3)],
    "chain": [(0, 1), (1, 2), (2, 3)],
    "star": [(0, 1), (0, 2), (0, 3)],
}


def fault_on_each_mesh(rank: int, world: int, graph: str) -> list[tuple[str, str]]:
    """On each mesh in turn, its lowest rank has swapped the two parameters."""
    meshes = [mesh_over(*ranks) for ranks in GRAPHS[graph]]
    named = {f"w{i}.{j}": weight(m) for i, m in enumerate(meshes) for j in range(2)}
    good = members("exact", named)
    preflight, told = Preflight(), []
    for first, fault in [(True, i) for i in range(len(meshes))] + [(False, 0)]:
        swap = {f"w{fault}.0": f"w{fault}.1", f"w{fault}.1": f"w{fault}.0"}
        faulty = rank == GRAPHS[graph][fault][0]
        broken = sorted(good, key=lambda m, s=swap: s.get(m.name, m.name)) if faulty else good
        preflight = Preflight() if first else preflight
        told.append(refusal(preflight, broken))
        assert not preflight.agree(good).skip
    return told


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_fault_on_any_mesh_reaches_every_rank(ranks: RankPool, graph: str) -> None:
    world = 1 + max(max(group) for group in GRAPHS[graph])
    for fault, told in enumerate(zip(*ranks.run(fault_on_each_mesh, world, graph), strict=True)):
        assert len(set(told)) == 1, told
        assert told[0][0] == "ParameterOrderError", told[0]
        assert f"'w{fault % len(GRAPHS[graph])}.0'" in told[0][1]


def all_missing_everywhere(rank: int, world: int) -> None:
    preflight, mine = Preflight(), one_mesh("exact", world)
    assert not preflight.agree(without_grad(mine)).skip
    assert not preflight.agree(mine).skip


def test_no_gradient_anywhere_is_agreed(ranks: RankPool) -> None:
    ranks.run(all_missing_everywhere, 2)


def failing_rank(rank: int, world: int) -> tuple[str, str, str]:
    """Overlapping meshes; rank 0 fails, rank 2 does not share a mesh with it."""
    good, _ = two_overlapping(rank, world, "exact")
    preflight, causes = Preflight(), []
    told = ("", "")
    for _ in range(2):
        failure = ValueError("closure broke") if rank == 0 else None
        try:
            preflight.agree(good, failure=failure)
        except ShardedStepError as error:
            told = (type(error).__name__, str(error))
            causes.append(error.__cause__ is failure)
        assert not preflight.agree(good).skip
    assert causes == [True, True]
    return (*told, "")


def test_a_local_failure_reaches_the_whole_component(ranks: RankPool) -> None:
    told = ranks.run(failing_rank, 3)
    assert len(set(told)) == 1
    assert told[0][0] == "PeerFailureError"
    assert "rank 0 failed with ValueError: closure broke" in told[0][1]


def skipping(rank: int, world: int) -> list[bool]:
    good, _ = chain(rank, world, "exact")
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
    good, _ = chain(rank, world, "exact")
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


def missing_mesh(rank: int, world: int) -> tuple[str, str]:
    short = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    mesh = DeviceMesh.from_group(short, "cpu", mesh=torch.tensor([0, 1]))
    named = {"a": weight(mesh)} if rank == 0 else {}
    dist.barrier()
    told = refusal(Preflight(), members("exact", named))
    dist.barrier()  # rank 1 lives on: its end would be noticed sooner
    return told


def test_a_rank_that_never_comes_is_reported_after_the_groups_time(ranks: RankPool) -> None:
    told = ranks.run(missing_mesh, 2)[0]
    assert told[0] == "PeerFailureError"
    assert "ranks 0-1" in told[1]
