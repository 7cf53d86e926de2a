"""The bits of sharded steps, where state is held, and failures in the middle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrices import (
    SHAPES,
    STEPS,
    alone,
    initial,
    layout,
    over,
    parameters,
    settings_of,
    train,
    whole,
)
from ranks import RankPool
from sharded import Collectives, refusal
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from gefen import GefenMuon
from gefen.distributed import exchange, stepping


def compare(rank: int, world: int, where: str, mode: str, chosen: str, bucket_bytes: int) -> None:
    exchange.BUCKET_BYTES = bucket_bytes
    dtype = torch.bfloat16 if chosen == "normuon" else torch.float32
    lonely = parameters(alone, dtype)
    settings = settings_of(mode, chosen)
    expected = train(GefenMuon(lonely.items(), **settings), lonely, alone)
    place = layout(where, world)
    params = parameters(place, dtype)
    optimizer = GefenMuon(params.items(), **settings)
    found = train(optimizer, params, place)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("bucket_bytes", [64, 2**20])
@pytest.mark.parametrize("mode", ["exact", "distributed"])
@pytest.mark.parametrize(
    ("where", "world", "chosen"),
    [
        ("rows", 2, "plain"),
        ("rows", 4, "normuon"),
        ("columns", 3, "normuon"),
        ("two meshes", 2, "stochastic"),
        ("hybrid", 4, "plain"),
        ("replicated", 2, "plain"),
    ],
)
def test_a_sharded_step_has_the_bits_of_one_process(
    ranks: RankPool, where: str, world: int, chosen: str, mode: str, bucket_bytes: int
) -> None:
    ranks.run(compare, world, where, mode, chosen, bucket_bytes)


def test_a_cautious_exact_step_has_the_bits_of_one_process(ranks: RankPool) -> None:
    ranks.run(compare, 2, "rows", "exact", "cautious", 2**20)


def mode_equality(rank: int, world: int) -> None:
    """A layout that no parcel serves: 'distributed' warns and steps it as 'exact' does."""
    place = layout("grid", world)
    expected = parameters(alone)
    train(GefenMuon(expected.items(), lr=0.02), expected, alone)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), lr=0.02, sharded_mode="distributed")
    with pytest.warns(UserWarning, match=r"placements .*Shard.*'a', 'b', 'c', 'd' and 1 more are"):
        found = train(optimizer, params, place)
    for name, value in expected.items():
        assert torch.equal(found[name], value.detach()), name


def test_an_unserved_layout_warns_and_is_stepped_exactly(ranks: RankPool) -> None:
    ranks.run(mode_equality, 4)


def cautious_distributed(rank: int, world: int) -> list[str]:
    """Warns once, then steps as 'exact' does, by the same bounded exchanges."""
    exchange.BUCKET_BYTES = 64
    place, expected = layout("rows", world), parameters(alone)
    settings = settings_of("distributed", "cautious")
    wanted = train(GefenMuon(expected.items(), **settings), expected, alone)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), **settings)
    with pytest.warns(UserWarning, match=r"cautious=True.*: 'a', 'b', 'c', 'd' and 1 more are"):
        train(optimizer, params, place, range(1))
    found = train(optimizer, params, place, range(1, STEPS))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert all("index" in optimizer.state[param] for param in params.values())
    with Collectives() as counter:
        optimizer.step()
    return [name for name, _ in counter.take()]


def test_cautious_matrices_are_stepped_exactly_in_distributed_mode(ranks: RankPool) -> None:
    agree, gathers, close = "allreduce", ["allgather_base"] * len(SHAPES), "allgather_base"
    assert ranks.run(cautious_distributed, 2) == [[agree, *gathers, close]] * 2


def collectives_of_a_step(rank: int, world: int, mode: str) -> tuple[list[str], int, int]:
    """Collectives of the last step, momentum bytes held, elements of all matrices."""
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), sharded_mode=mode)
    train(optimizer, params, place, range(3))
    train(optimizer, params, place, range(3, 4))
    with Collectives() as counter:
        optimizer.step()
    calls = [name for name, _ in counter.take()]
    state = optimizer.state_dict if mode == "exact" else None
    held = sum(e["index"].numel() for e in optimizer.state.values() if "index" in e)
    assert state is None or len(state()["state"]) == len(SHAPES)
    return calls, held, sum(p.numel() for p in params.values())


def test_distributed_momentum_exists_on_owners_alone(ranks: RankPool) -> None:
    told = ranks.run(collectives_of_a_step, 3, "distributed")
    assert sum(held for _, held, _ in told) == told[0][2]
    agree, there, back, close = "allreduce", "alltoall_base", "alltoall_base", "allgather_base"
    assert all(calls == [agree, there, back, close] for calls, _, _ in told)


def test_exact_momentum_exists_everywhere(ranks: RankPool) -> None:
    told = ranks.run(collectives_of_a_step, 2, "exact")
    assert all(held == elements for _, held, elements in told)
    assert all(calls == ["allreduce", "allgather_base", "allgather_base"] for calls, _, _ in told)


def test_small_buckets_are_more_exchanges_of_the_same_bits(ranks: RankPool) -> None:
    for calls in ranks.run(calls_with_small_buckets, 2):
        assert calls.count("alltoall_base") > 4


def calls_with_small_buckets(rank: int, world: int) -> list[str]:
    exchange.BUCKET_BYTES = 64
    return collectives_of_a_step(rank, world, "distributed")[0]


def traffic_of_a_step(rank: int, world: int) -> tuple[int, int]:
    """Bytes that a step sends to other ranks in exchanges of matrices; elements of all."""
    exchange.BUCKET_BYTES = 1024
    place = over(DeviceMesh("cpu", list(range(world))), Shard(0))
    full = [torch.ones(12, 6) for _ in range(2 * world)]
    params = {f"w{i}": nn.Parameter(place("", value)) for i, value in enumerate(full)}
    optimizer = GefenMuon(params.items(), sharded_mode="distributed")
    for param in params.values():
        param.grad = place("", torch.ones(12, 6))
    optimizer.step()
    with Collectives() as counter:
        optimizer.step()
    sent = 0
    for name, arguments in counter.take_arguments():
        if name == "alltoall_base":
            _, source, _, _, splits, *_ = arguments
            sent += (sum(splits) - splits[rank]) * source.element_size()
        else:
            assert name in ("allreduce", "allgather_base")
    return sent, sum(value.numel() for value in full)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_distributed_step_sends_what_the_formula_says(ranks: RankPool, world: int) -> None:
    for sent, elements in ranks.run(traffic_of_a_step, world):
        assert sent * world**2 == elements * (4 + 2) * (world - 1)


def order_of_a_step(rank: int, world: int) -> list[str]:
    """Exchanges and computations in the order in which they start, one matrix per bucket."""
    exchange.BUCKET_BYTES = 1
    place = over(DeviceMesh("cpu", [0, 1]), Shard(0))
    params = {f"w{i}": nn.Parameter(place("", torch.ones(4, 4))) for i in range(3)}
    optimizer = GefenMuon(params.items(), sharded_mode="distributed")
    for param in params.values():
        param.grad = place("", torch.ones(4, 4))
    optimizer.step()
    log: list[str] = []
    real = stepping.step

    def logged(routes: Any, matrices: Any, compute: Any, apply: Any) -> Any:
        def computing(bucket: Any) -> Any:
            log.append("compute")
            return compute(bucket)

        def applying(*arguments: Any) -> None:
            log.append("apply")
            apply(*arguments)

        return real(routes, matrices, computing, applying)

    class Logging(Collectives):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.__name__.startswith("alltoall"):
                log.append(str(args[1].dtype).removeprefix("torch."))
            return super().__torch_dispatch__(func, types, args, kwargs)

    stepping.step = logged
    with Logging():
        optimizer.step()
    return log


def test_exchanges_of_one_bucket_run_while_another_is_computed(ranks: RankPool) -> None:
    """float32 are gradients on their way to owners, bfloat16 updates on their way back."""
    there, back = "float32", "bfloat16"
    expected = [there, there, "compute", back, there, "compute", back, "apply", "compute", back]
    assert ranks.run(order_of_a_step, 2) == [[*expected, "apply", "apply"]] * 2


def failing_owner(rank: int, world: int, mode: str, how: str) -> list[tuple[str, str]]:
    """Rank 2's orthogonalisation fails; ranks 0 and 2 share no mesh."""
    from gefen import gefen_muon

    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    params = {
        f"w{i}{j}": nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
        for i, mesh in enumerate(meshes)
        if mesh.get_coordinate() is not None
        for j in range(2)
    }
    optimizer = GefenMuon(params.items(), sharded_mode=mode)
    for param in params.values():
        param.grad = torch.ones_like(param.detach())
    optimizer.step()
    saved = optimizer.state_dict()
    real = gefen_muon.orthogonalise
    if rank == 2:
        gefen_muon.orthogonalise = raising if how == "raise" else lambda u, *_: u * torch.nan
    told = [refusal(optimizer), refusal(optimizer)]
    gefen_muon.orthogonalise = real
    if rank == 0:
        optimizer.load_state_dict(saved)
    told.append(refusal(optimizer))
    if rank != 0:
        optimizer.load_state_dict(saved)
    optimizer.step()
    return told


def raising(*_: Any) -> None:
    raise MemoryError("no room")


@pytest.mark.parametrize("mode", ["exact", "distributed"])
@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_failing_owner_reaches_every_rank_and_a_load_mends(
    ranks: RankPool, mode: str, how: str
) -> None:
    told = ranks.run(failing_owner, 3, mode, how)
    assert len({repr(each) for each in told}) == 1
    assert [kind for kind, _ in told[0]] == ["PeerFailureError"] * 3
    first, second, half_loaded = [message for _, message in told[0]]
    assert ("rank 2 failed with MemoryError" if how == "raise" else "is not finite") in first
    assert "load a checkpoint" in first
    assert "ranks 0-2 failed with" in second
    assert "ranks 1-2 failed with" in half_loaded
    assert "no checkpoint was loaded here since" in half_loaded


def non_finite_gradient(rank: int, world: int, mode: str) -> None:
    """As in one process: what it touches becomes non-finite, without an error."""
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), sharded_mode=mode)
    train(optimizer, params, place, range(1, 2))
    spoiled = initial()["a"]
    spoiled[0, 0] = torch.inf
    params["a"].grad = place("a", spoiled)
    optimizer.step()
    assert not whole(params["a"].detach()).isfinite().all()
    assert whole(params["e"].detach()).isfinite().all()


@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_non_finite_gradients_propagate(ranks: RankPool, mode: str) -> None:
    ranks.run(non_finite_gradient, 2, mode)
