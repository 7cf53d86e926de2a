"""The bits of sharded steps, what is held and sent, and failures in the middle."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from matrices import (
    alone,
    elements,
    give,
    initial,
    layout,
    over,
    parameters,
    settings_of,
    train,
    whole,
)
from pool import RankPool
from sharded import Collectives, refusal
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from gefen import GefenMuon
from gefen.distributed import exchange, stepping


def compare(rank: int, world: int, where: str, mode: str, chosen: str) -> None:
    dtype = torch.bfloat16 if chosen == "normuon" else torch.float32
    lonely = parameters(alone, dtype)
    settings = settings_of(mode, chosen)
    expected = train(GefenMuon(lonely.items(), **settings), lonely, alone)
    place = layout(where, world)
    for bucket_bytes in (64, 2**20):
        exchange.BUCKET_BYTES = bucket_bytes
        params = parameters(place, dtype)
        optimizer = GefenMuon(params.items(), **settings)
        found = train(optimizer, params, place)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("mode", ["exact", "distributed"])
@pytest.mark.parametrize(
    ("where", "world", "chosen"),
    [
        ("rows", 2, "plain"),
        ("rows", 4, "normuon"),
        ("rows", 3, "cautious"),
        ("columns", 3, "normuon"),
        ("columns", 2, "cautious"),
        ("two meshes", 2, "stochastic"),
        ("grid", 4, "cautious"),
        ("hybrid", 4, "cautious"),
        ("replicated", 2, "plain"),
        ("grid", 4, "normuon"),
    ],
)
def test_a_sharded_step_has_the_bits_of_one_process(
    ranks: RankPool, where: str, world: int, chosen: str, mode: str
) -> None:
    ranks.run(compare, world, where, mode, chosen)


def warned(rank: int, world: int) -> None:
    """A layout that no parcel serves, which 'distributed' steps as 'exact' does."""
    params = parameters(layout("grid", world))
    optimizer = GefenMuon(params.items(), lr=0.02, sharded_mode="distributed")
    give(params, layout("grid", world), 3)
    with pytest.warns(UserWarning, match=r"placements .*Shard.*'a', 'b', 'c', 'd' and 2 more are"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_an_unserved_layout_is_named_once(ranks: RankPool) -> None:
    ranks.run(warned, 4)


def collectives_of_a_step(
    rank: int, world: int, mode: str, cautious: bool = False
) -> tuple[list[str], int]:
    """Collectives of the last step, and the momentum's bytes on this rank."""
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), sharded_mode=mode, cautious=cautious)
    train(optimizer, params, place)
    with Collectives() as counter:
        optimizer.step()
        optimizer.state_dict()
    calls = [name for name, _ in counter.take()]
    return calls, sum(e["index"].to_local().numel() for e in optimizer.state.values())


@pytest.mark.parametrize(
    ("mode", "exchanges"),
    [("exact", ["allgather_base"]), ("distributed", ["alltoall_base", "alltoall_base"])],
)
@pytest.mark.parametrize("cautious", [False, True])
def test_each_rank_keeps_the_momentum_of_its_rows_alone(
    ranks: RankPool, mode: str, exchanges: list[str], cautious: bool
) -> None:
    told = ranks.run(collectives_of_a_step, 3, mode, cautious)
    assert sum(held for _, held in told) == elements()
    assert max(held for _, held in told) < 0.5 * elements()
    shares = ["allreduce"] if cautious else []
    assert all(calls == ["allreduce", *exchanges, *shares, "allgather_base"] for calls, _ in told)


def test_small_buckets_are_more_exchanges(ranks: RankPool) -> None:
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
    """Directions and updates in bfloat16, whatever the gradients are."""
    for sent, total in ranks.run(traffic_of_a_step, world):
        assert sent * world**2 == total * (2 + 2) * (world - 1)


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

    def logged(trips: Any, direct: Any, compute: Any, apply: Any, failure: Any) -> None:
        def noted(what: str, run: Any) -> Any:
            return lambda *arguments: log.append(what) or run(*arguments)

        real(trips, direct, noted("compute", compute), noted("apply", apply), failure)

    class Logging(Collectives):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.__name__.startswith("alltoall"):
                log.append("send")
            return super().__torch_dispatch__(func, types, args, kwargs)

    stepping.step = logged
    with Logging():
        optimizer.step()
    return log


def test_exchanges_of_one_bucket_run_while_another_is_computed(ranks: RankPool) -> None:
    """Directions of a bucket leave before the one before it is computed, and come back after."""
    first, second = ["send", "send", "compute", "send"], ["send", "compute", "send", "apply"]
    expected = [*first, *second, "compute", "send", "apply", "apply"]
    assert ranks.run(order_of_a_step, 2) == [expected] * 2


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
    told.append(refusal(optimizer))
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
    first, *later = [message for _, message in told[0]]
    assert ("rank 2 failed with MemoryError" if how == "raise" else "is not finite") in first
    assert "load a checkpoint" in first
    for message in later:
        assert "ranks 0-2 failed with" in message
        assert "no checkpoint was loaded here since" in message


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
