"""Move rows of matrices between the ranks of one process group.

``distributed`` sends rows of directions to each matrix's owner and rows of updates back, both by
``all_to_all_single`` with variable splits; ``exact`` gathers whole directions on every rank.
Matrices travel in buckets of bounded bytes, and the next bucket is on its way while one is
computed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from gefen.distributed.mesh import all_gather_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

Full = dict[Hashable, torch.Tensor]
"""Tensors by the keys of their parcels."""

BUCKET_BYTES = 64 * 2**20
"""Bound on what one rank sends or receives per bucket; one larger matrix travels alone."""


class Span(NamedTuple):
    """Rows ``start`` to ``stop`` of a matrix."""

    start: int
    stop: int


@dataclass(frozen=True)
class Lane:
    """A process group along one mesh dimension; ``position`` is this rank's place in it."""

    group: dist.ProcessGroup
    places: tuple[int, ...]
    """For each group rank, its coordinate along the mesh dimension."""
    position: int

    @property
    def width(self) -> int:
        """How many ranks the group has."""
        return len(self.places)


@dataclass(frozen=True)
class Parcel:
    """One matrix on its way: its shape, how its rows are split, and the group rank that owns it.

    ``key`` is the caller's own; ranks tell parcels apart by their order alone.
    """

    key: Hashable
    shape: tuple[int, int]
    owner: int
    spans: tuple[Span, ...]
    """For each group rank, the rows that it holds; may be empty."""

    @property
    def numel(self) -> int:
        """Number of elements of the whole matrix."""
        return self.shape[0] * self.shape[1]

    def shard_shape(self, rank: int) -> tuple[int, int]:
        """Shape of the shard of group rank ``rank``."""
        return self.spans[rank].stop - self.spans[rank].start, self.shape[1]

    def shard_numel(self, rank: int) -> int:
        """Number of elements of the shard of group rank ``rank``."""
        rows, columns = self.shard_shape(rank)
        return rows * columns

    def shard_of(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """View of ``full`` (the whole matrix) that group rank ``rank`` holds."""
        return full[self.spans[rank].start : self.spans[rank].stop]


def lane_of(mesh: DeviceMesh, dimension: int) -> Lane:
    """Give the lane of this rank along ``dimension`` of ``mesh``."""
    group = mesh.get_group(dimension)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(slice(None) if d == dimension else coordinate[d] for d in range(mesh.ndim))
    ordered: list[int] = mesh.mesh[index].tolist()
    places = tuple(ordered.index(rank) for rank in dist.get_process_group_ranks(group))
    return Lane(group, places, dist.get_rank(group))


def spans_of(length: int, lane: Lane) -> tuple[Span, ...]:
    """How DTensor divides ``length`` over the lane: equal chunks, then a rest, then nothing."""
    chunk = -(-length // lane.width)
    return tuple(
        Span(min(place * chunk, length), min((place + 1) * chunk, length)) for place in lane.places
    )


def make_buckets(parcels: Sequence[Parcel], width: int, itemsize: int) -> list[list[Parcel]]:
    """Divide ``parcels`` so that no rank sends or receives above ``BUCKET_BYTES`` at once.

    Each bucket takes a parcel from every owner in turn, so that all owners have work in it.
    A larger parcel has its bucket to itself.
    """
    turns: dict[int, int] = {}
    ordered: list[tuple[int, int, int, Parcel]] = []
    for parcel in parcels:
        turns[parcel.owner] = turns.get(parcel.owner, 0) + 1
        ordered.append((turns[parcel.owner], parcel.owner, len(ordered), parcel))
    buckets: list[list[Parcel]] = []
    owned: dict[int, int] = {}
    for *_, parcel in sorted(ordered, key=lambda entry: entry[:3]):
        size = parcel.numel * itemsize
        total = sum(owned.values()) + size
        full = owned.get(parcel.owner, 0) + size > BUCKET_BYTES or total > BUCKET_BYTES * width
        if not buckets or full:
            buckets.append([])
            owned = {}
        buckets[-1].append(parcel)
        owned[parcel.owner] = owned.get(parcel.owner, 0) + size
    return buckets


class _Transfer:
    """An exchange under way: keeps its buffers until it is waited for."""

    def __init__(self, work: dist.Work | None, sent: torch.Tensor, received: torch.Tensor):
        self._work, self._sent, self._received = work, sent, received

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        return self._received


def _all_to_all(
    lane: Lane,
    pieces: Sequence[torch.Tensor],
    sends: list[int],
    receives: list[int],
    like: torch.Tensor,
) -> _Transfer:
    flat = [piece.reshape(-1) for piece in pieces]
    sent = torch.cat(flat) if flat else like.new_empty(0)
    received = like.new_empty(sum(receives))
    work = dist.all_to_all_single(received, sent, receives, sends, group=lane.group, async_op=True)
    return _Transfer(work, sent, received)


def _by_owner(bucket: Sequence[Parcel], width: int) -> list[list[Parcel]]:
    owned: list[list[Parcel]] = [[] for _ in range(width)]
    for parcel in bucket:
        owned[parcel.owner].append(parcel)
    return owned


def send_to_owners(
    lane: Lane,
    bucket: Sequence[Parcel],
    shards: Mapping[Hashable, torch.Tensor],
    like: torch.Tensor,
) -> Callable[[], Full]:
    """Start sending rows to the owners of their matrices.

    shards: this rank's shard of every parcel; like: a tensor of their dtype and device. Calling
    the result waits and gives the whole matrix of every parcel that this rank owns.
    """
    owned = _by_owner(bucket, lane.width)
    mine = owned[lane.position]
    sends = [sum(p.shard_numel(lane.position) for p in held) for held in owned]
    receives = [sum(p.shard_numel(rank) for p in mine) for rank in range(lane.width)]
    pieces = [shards[parcel.key] for held in owned for parcel in held]
    transfer = _all_to_all(lane, pieces, sends, receives, like)

    def finish() -> Full:
        return _assemble(transfer.wait(), mine, lane.width)

    return finish


def _assemble(received: torch.Tensor, parcels: Sequence[Parcel], width: int) -> Full:
    matrices = {parcel.key: received.new_empty(parcel.shape) for parcel in parcels}
    offset = 0
    for rank in range(width):
        for parcel in parcels:
            size = parcel.shard_numel(rank)
            shard = received[offset : offset + size].view(parcel.shard_shape(rank))
            parcel.shard_of(matrices[parcel.key], rank).copy_(shard)
            offset += size
    return matrices


def send_from_owners(
    lane: Lane,
    bucket: Sequence[Parcel],
    updates: Mapping[Hashable, torch.Tensor],
    like: torch.Tensor,
) -> Callable[[], Full]:
    """Start sending rows of updates back.

    updates: the whole bfloat16 update of every parcel that this rank owns. Calling the result
    waits and gives this rank's shard of every parcel of the bucket.
    """
    owned = _by_owner(bucket, lane.width)
    mine = owned[lane.position]
    sends = [sum(p.shard_numel(rank) for p in mine) for rank in range(lane.width)]
    receives = [sum(p.shard_numel(lane.position) for p in held) for held in owned]
    pieces = [p.shard_of(updates[p.key], rank) for rank in range(lane.width) for p in mine]
    transfer = _all_to_all(lane, pieces, sends, receives, like)

    def finish() -> Full:
        received, shards, offset = transfer.wait(), {}, 0
        for parcel in (p for held in owned for p in held):
            size = parcel.shard_numel(lane.position)
            shape = parcel.shard_shape(lane.position)
            shards[parcel.key] = received[offset : offset + size].view(shape)
            offset += size
        return shards

    return finish


def gather_everywhere(
    lane: Lane,
    bucket: Sequence[Parcel],
    shards: Mapping[Hashable, torch.Tensor],
    like: torch.Tensor,
) -> Callable[[], Full]:
    """Start gathering whole matrices on every rank; calling the result waits for them."""
    sizes = [sum(p.shard_numel(rank) for p in bucket) for rank in range(lane.width)]
    sent = like.new_zeros(max(sizes))
    flat = [shards[parcel.key].reshape(-1) for parcel in bucket]
    sent[: sizes[lane.position]] = torch.cat(flat)
    received = like.new_empty(lane.width * max(sizes))
    work = all_gather_tensor(received, sent, lane.group, async_op=True)
    transfer = _Transfer(work, sent, received)

    def finish() -> Full:
        rows = transfer.wait().view(lane.width, max(sizes))
        packed = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
        return _assemble(packed, bucket, lane.width)

    return finish


def double_buffered(
    buckets: Sequence[Sequence[Parcel]],
    start: Callable[[Sequence[Parcel]], Callable[[], Full]],
) -> Iterator[tuple[Sequence[Parcel], Full]]:
    """Give each bucket with what its exchange brought; the next one is already under way."""
    ahead = start(buckets[0]) if buckets else None
    for index, bucket in enumerate(buckets):
        assert ahead is not None
        current = ahead
        ahead = start(buckets[index + 1]) if index + 1 < len(buckets) else None
        yield bucket, current()
