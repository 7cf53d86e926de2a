"""The sharded step of matrices: who computes what, in which order, and what if that fails.

Each rank advances the momentum of its own rows. What makes an update of a whole matrix needs all
rows: they are gathered on every rank, or sent to the one that owns the matrix, which sends the
update back. Meshes are visited in the order of their keys and matrices in the order of
registration, which the preflight has compared, so every rank enters the same exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from gefen.distributed.exchange import (
    Full,
    Lane,
    Parcel,
    double_buffered,
    gather_everywhere,
    make_buckets,
    send_from_owners,
    send_to_owners,
    spans_of,
)
from gefen.distributed.mesh import (
    Channel,
    MeshKey,
    Topology,
    all_gather_tensor,
    flood,
    identify_meshes,
    peers_expected,
)
from gefen.distributed.ownership import assign_owners
from gefen.errors import PeerFailureError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from torch.distributed.tensor import DTensor

    from gefen.layout import Layout

T = TypeVar("T")


@dataclass(frozen=True)
class Matrix:
    """One parameter of a step whose rows are cut; ``handle`` is the caller's own."""

    name: str
    parameter: DTensor
    layout: Layout
    distributed: bool
    """Whether one rank computes its update, rather than each."""
    columns: int
    """How many numbers of each row travel."""
    handle: Any = None

    @property
    def key(self) -> int:
        """Tells matrices apart on this rank: names may repeat, and not all matrices have one."""
        return id(self.parameter)


class Trip(NamedTuple):
    """Matrices that travel together along one lane."""

    lane: Lane
    distributed: bool
    matrices: list[Matrix]
    parcels: list[Parcel]


def trips(matrices: Sequence[Matrix], held: Sequence[Matrix]) -> list[Trip]:
    """What travels in a step, in the order in which every rank must take it.

    held: all matrices of the optimizer, by which owners are chosen, so that they stay whatever
    gradients a step has.
    """
    meshes = {id(m.parameter.device_mesh): m.parameter.device_mesh for m in held}
    keys = dict(zip(meshes, identify_meshes(meshes.values()), strict=True))

    def way(matrix: Matrix) -> tuple[MeshKey, int, bool]:
        mesh = keys[id(matrix.parameter.device_mesh)]
        return mesh, matrix.layout.dimension, matrix.distributed

    together: dict[tuple[MeshKey, int, bool], list[Matrix]] = {}
    for matrix in held:
        together.setdefault(way(matrix), []).append(matrix)
    present = {matrix.key: matrix for matrix in matrices}
    found = []
    for key in sorted(together):
        parcels = _parcels(together[key])
        moving = [present[m.key] for m in together[key] if m.key in present]
        lane = together[key][0].layout.lane
        assert lane is not None
        found.append(Trip(lane, key[2], moving, [parcels[m.key] for m in moving]))
    return found


def _parcels(together: Sequence[Matrix]) -> dict[int, Parcel]:
    lane = together[0].layout.lane
    assert lane is not None
    # Ties go by registration, which ranks have in common where they do not have names.
    places = {m.key: (m.name, i) for i, m in enumerate(together) if m.distributed}
    shapes = {places[m.key]: _shape(m) for m in together if m.distributed}
    owners = assign_owners(shapes, lane.width)
    return {
        m.key: Parcel(
            m.key,
            (m.parameter.shape[0], m.columns),
            owners[places[m.key]] if m.distributed else 0,
            spans_of(m.parameter.shape[0], lane),
        )
        for m in together
    }


def _shape(matrix: Matrix) -> tuple[int, int]:
    rows, columns = matrix.parameter.shape
    return rows, columns


class StepFailure:
    """What went wrong on this rank after the agreement; the first error counts."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def keep(self, run: Callable[[], T], otherwise: T) -> T:
        """Run, and on an error note it and return ``otherwise``: the exchanges must go on."""
        if self.error is not None:
            return otherwise
        try:
            return run()
        except Exception as error:  # every kind of error must reach the other ranks
            self.error = error
            return otherwise


def step(
    trips: Sequence[Trip],
    direct: Callable[[list[Matrix]], Full],
    compute: Callable[[list[tuple[Matrix, torch.Tensor]]], Full],
    apply: Callable[[Matrix, torch.Tensor], None],
    failure: StepFailure,
) -> None:
    """Update every matrix; this rank's errors go to ``failure``, and all exchanges are kept up.

    direct: takes matrices and gives what this rank's rows send, bfloat16 [rows, columns], by key;
    compute: takes matrices with what all rows sent and gives their whole updates, likewise;
    apply: takes a matrix and this rank's rows of its update.
    """

    def computed(bucket: Sequence[Matrix], full: Full) -> Full:
        mine = [(matrix, full[matrix.key]) for matrix in bucket if matrix.key in full]
        return failure.keep(lambda: compute(mine), {})

    def applied(bucket: Sequence[Matrix], shards: Full) -> None:
        for matrix in bucket:
            if matrix.key in shards:
                shard = shards[matrix.key]
                failure.keep(lambda m=matrix, s=shard: apply(m, s), None)  # type: ignore[misc]

    for trip in trips:
        deliveries = _deliveries(trip, lambda bucket: failure.keep(lambda: direct(bucket), {}))
        if trip.distributed:
            _step_distributed(trip.lane, deliveries, computed, applied)
            continue
        for bucket, parcels, full in deliveries:
            updates, place = computed(bucket, full), trip.lane.position
            applied(bucket, {p.key: p.shard_of(updates[p.key], place) for p in parcels if updates})


def _deliveries(
    trip: Trip, direct: Callable[[list[Matrix]], Full]
) -> Iterator[tuple[list[Matrix], Sequence[Parcel], Full]]:
    """Give each bucket of a trip with what came to this rank."""
    if not trip.matrices:
        return
    by_key: dict[Hashable, Matrix] = {matrix.key: matrix for matrix in trip.matrices}
    like = trip.matrices[0].parameter.to_local().new_empty(0, dtype=torch.bfloat16)
    send = send_to_owners if trip.distributed else gather_everywhere

    def start(bucket: Sequence[Parcel]) -> Callable[[], Full]:
        sent = direct([by_key[p.key] for p in bucket])
        for parcel in bucket:
            if parcel.key not in sent:
                sent[parcel.key] = like.new_zeros(parcel.shard_shape(trip.lane.position))
        return send(trip.lane, bucket, sent, like)

    buckets = make_buckets(trip.parcels, trip.lane.width, like.element_size())
    for bucket, full in double_buffered(buckets, start):
        yield [by_key[p.key] for p in bucket], bucket, full


def _step_distributed(
    lane: Lane,
    deliveries: Iterator[tuple[list[Matrix], Sequence[Parcel], Full]],
    computed: Callable[[Sequence[Matrix], Full], Full],
    applied: Callable[[Sequence[Matrix], Full], None],
) -> None:
    """Compute a bucket while the next directions and the last updates are on their way."""
    returning: tuple[list[Matrix], Callable[[], Full]] | None = None
    for bucket, parcels, full in deliveries:
        updates = computed(bucket, full)
        like = bucket[0].parameter.to_local().new_empty(0, dtype=torch.bfloat16)
        for parcel in parcels:
            if parcel.owner == lane.position and parcel.key not in updates:
                updates[parcel.key] = like.new_zeros(parcel.shape)
        finish = send_from_owners(lane, parcels, updates, like)
        if returning is not None:
            applied(returning[0], returning[1]())
        returning = bucket, finish
    if returning is not None:
        applied(returning[0], returning[1]())


def total_over_component(
    counts: torch.Tensor, channels: Sequence[Channel], topology: Topology
) -> torch.Tensor:
    """Add int64 counts of all ranks of the component. Collective."""
    if len(channels) == 1 and topology.rounds == 1:
        channel = channels[0]
        total = counts.to(channel.device, copy=True)
        with peers_expected(channel, "learning the codebook"):
            dist.all_reduce(total, group=channel.group)
        return total.to(counts.device)
    rank = str(dist.get_rank())
    known = flood(channels, topology.rounds, {rank: counts.tolist()}, "learning the codebook")
    return torch.tensor([known[r] for r in sorted(known)], device=counts.device).sum(dim=0)


def close(
    error: Exception | None,
    channels: Sequence[Channel],
    topology: Topology,
    purpose: str,
    advice: str,
) -> None:
    """Raise on every rank of the component if any rank had an error since the agreement.

    One all_gather of 8 bytes a rank in every group and round; the same PeerFailureError is
    raised everywhere, with ``error`` as its cause on the rank that had it.
    """
    failed = int(error is not None)
    for _ in range(topology.rounds):
        for channel in channels:
            mine = torch.tensor([failed], dtype=torch.int64, device=channel.device)
            seen = mine.new_empty(len(channel.key.ranks))
            with peers_expected(channel, purpose):
                all_gather_tensor(seen, mine, channel.group)
            failed = int(seen.max())
    if not failed:
        return
    mine_text = {} if error is None else {str(dist.get_rank()): f"{type(error).__name__}: {error}"}
    texts = flood(channels, topology.rounds, mine_text, purpose)
    lines = [f"rank {rank} failed with {texts[rank]}" for rank in sorted(texts, key=int)]
    raise PeerFailureError(f"A rank failed {purpose}: {'; '.join(lines)}. {advice}") from error
