from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gefen.distributed import exchange
from gefen.distributed.exchange import (
    Lane,
    Parcel,
    Span,
    double_buffered,
    gather_everywhere,
    lane_of,
    make_buckets,
    send_from_owners,
    send_to_owners,
    spans_of,
)

SHAPES = {"a": (5, 4), "b": (1, 8), "c": (3, 8), "d": (8, 2), "e": (6, 6)}


def numbered(shape: tuple[int, int], salt: int) -> torch.Tensor:
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape) + 100 * salt


def placed(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    made = distribute_tensor(full, mesh, placements)
    coordinate = mesh.get_coordinate()
    if mesh.mesh.flatten().tolist() == sorted(mesh.mesh.flatten().tolist()) or not coordinate:
        return made
    # torch scatters by rank instead of by coordinate where a mesh is not in rank order.
    chunks = [*full.chunk(mesh.size())] + [full[:0]] * mesh.size()
    local = chunks[coordinate[0]]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def distributed(
    mesh: DeviceMesh, placements: list[Any]
) -> tuple[Lane, list[Parcel], dict[str, Any]]:
    whole = {name: numbered(shape, i) for i, (name, shape) in enumerate(SHAPES.items())}
    tensors = {n: placed(full, mesh, placements) for n, full in whole.items()}
    lane = lane_of(mesh, mesh.ndim - 1)
    parcels = [
        Parcel(name, shape, i % lane.width, spans_of(shape[0], lane))
        for i, (name, shape) in enumerate(SHAPES.items())
    ]
    return lane, parcels, tensors


def there_and_back(rank: int, world: int, layout: str) -> None:
    mesh, placements = {
        "rows": lambda: (DeviceMesh("cpu", list(range(world))), [Shard(0)]),
        "permuted": lambda: (DeviceMesh("cpu", list(range(world))[::-1]), [Shard(0)]),
        "hybrid": lambda: (
            DeviceMesh("cpu", torch.arange(world).view(2, -1)),
            [Replicate(), Shard(0)],
        ),
    }[layout]()
    lane, parcels, tensors = distributed(mesh, placements)
    shards = {name: tensor.to_local() for name, tensor in tensors.items()}
    like = torch.empty(0)
    for parcel in parcels:
        assert parcel.shard_shape(lane.position) == tuple(shards[parcel.key].shape)
    owned = send_to_owners(lane, parcels, shards, like)()
    everywhere = gather_everywhere(lane, parcels, shards, like)()
    assert set(owned) == {p.key for p in parcels if p.owner == lane.position}
    assert list(everywhere) == list(SHAPES)
    for i, (name, shape) in enumerate(SHAPES.items()):
        assert torch.equal(everywhere[name], numbered(shape, i))
        assert name not in owned or torch.equal(owned[name], numbered(shape, i))
    back = send_from_owners(lane, parcels, owned, like)()
    for name, shard in shards.items():
        assert torch.equal(back[name], shard)


@pytest.mark.parametrize(
    ("layout", "world"),
    [("rows", 2), ("rows", 4), ("permuted", 3), ("hybrid", 4)],
)
def test_matrices_reach_their_owners_and_shards_return(
    ranks: RankPool, layout: str, world: int
) -> None:
    ranks.run(there_and_back, world, layout)


def byte_count(rank: int, world: int) -> tuple[int, int]:
    """Bytes that cross the wire from this rank, both ways, for balanced owners."""
    sent = []
    real = dist.all_to_all_single

    def counting(
        out: torch.Tensor, source: torch.Tensor, outs: Any, ins: list[int], **kwargs: Any
    ) -> Any:
        sent.append((sum(ins) - ins[rank]) * source.element_size())
        return real(out, source, outs, ins, **kwargs)

    dist.all_to_all_single = counting
    mesh = DeviceMesh("cpu", list(range(world)))
    lane = lane_of(mesh, 0)
    side = 12
    parcels = [
        Parcel(f"w{i}", (side, side), i % world, spans_of(side, lane)) for i in range(2 * world)
    ]
    shards = {p.key: torch.zeros(p.shard_shape(rank)) for p in parcels}
    exchange.BUCKET_BYTES = 2 * side * side * 4
    for bucket in make_buckets(parcels, world, 4):
        owned = send_to_owners(lane, bucket, shards, torch.empty(0))()
        updates = {name: full.bfloat16() for name, full in owned.items()}
        send_from_owners(lane, bucket, updates, torch.empty(0, dtype=torch.bfloat16))()
    return sum(sent), 2 * world * side * side


@pytest.mark.parametrize("world", [2, 3, 4])
def test_traffic_is_that_of_the_formula(ranks: RankPool, world: int) -> None:
    for sent, elements in ranks.run(byte_count, world):
        assert sent * world**2 == elements * (4 + 2) * (world - 1)


def parcel(name: str, owner: int, rows: int = 4) -> Parcel:
    return Parcel(name, (rows, 4), owner, (Span(0, rows // 2), Span(rows // 2, rows)))


def test_buckets_are_bounded_and_give_every_owner_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BUCKET_BYTES", 2 * 64)
    parcels = [parcel(f"a{i}", 0) for i in range(4)] + [parcel(f"b{i}", 1) for i in range(4)]
    buckets = make_buckets(parcels, 2, 4)
    assert [[p.key for p in bucket] for bucket in buckets] == [
        ["a0", "b0", "a1", "b1"],
        ["a2", "b2", "a3", "b3"],
    ]


def test_a_parcel_above_the_bound_travels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BUCKET_BYTES", 64)
    buckets = make_buckets([parcel("small", 0), parcel("large", 0, rows=64)], 2, 4)
    assert [[p.key for p in bucket] for bucket in buckets] == [["small"], ["large"]]


def test_the_next_exchange_starts_before_a_bucket_is_used() -> None:
    log: list[str] = []

    def start(bucket: Any) -> Any:
        log.append(f"start {bucket[0].key}")
        return lambda: log.append(f"wait {bucket[0].key}") or {}

    for bucket, _ in double_buffered([[parcel("a", 0)], [parcel("b", 0)]], start):
        log.append(f"use {bucket[0].key}")
    assert log == ["start a", "start b", "wait a", "use a", "wait b", "use b"]
