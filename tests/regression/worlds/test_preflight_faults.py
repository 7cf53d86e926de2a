"""Every way in which ranks can disagree before a step, on a first and on a later step."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from members import group, members, mesh_over, one_mesh, two_on_each, weight, without_grad
from pool import RankPool
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from gefen.distributed.preflight import Member, Preflight
from gefen.errors import ShardedStepError

MODES = ("exact", "distributed")


def bare(mode: str, *parameters: torch.Tensor | None) -> list[Member]:
    held = group()
    kept = [p for p in parameters if p is not None]
    return [Member(f"param{i}", False, p, held, mode, held) for i, p in enumerate(kept)]


Case = tuple[list[Member], list[Member]]


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
    good = [replace(m, steps=lambda: 5) for m in one_mesh(mode, world)]
    older = [replace(m, steps=lambda: 3) for m in good]
    return on_rank(rank, 1, older, good)


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
    return overlapping(rank, mode, [mesh_over(0, 1), mesh_over(1, 2)])


def chain(rank: int, world: int, mode: str) -> Case:
    return overlapping(rank, mode, [mesh_over(0, 1), mesh_over(1, 2), mesh_over(2, 3)])


def ring(rank: int, world: int, mode: str) -> Case:
    return overlapping(rank, mode, [mesh_over(0, 1), mesh_over(1, 2), mesh_over(0, 2)])


def overlapping(rank: int, mode: str, meshes: list[DeviceMesh]) -> Case:
    """The fault is on the first mesh alone, between ranks 0 and 1."""
    good = two_on_each(mode, meshes)
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
    good = two_on_each("exact", meshes)
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


def failing_rank(rank: int, world: int) -> tuple[str, str, str]:
    """Overlapping meshes; rank 0 fails, rank 2 does not share a mesh with it."""
    good = two_on_each("exact", [mesh_over(0, 1), mesh_over(1, 2)])
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
