"""The sharded step of matrices: who computes what, in which order, and what if that fails.

Meshes are visited in the order of their keys and matrices in the order of registration, which
the preflight has compared, so every rank enters the same exchanges in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from gefen.distributed.exchange import (
    Full,
    Lane,
    Parcel,
    double_buffered,
    gather_everywhere,
    lane_of,
    make_buckets,
    send_from_owners,
    send_to_owners,
    sharded_dimension,
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
from gefen.errors import PeerFailureError, UnsupportedParameterError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

T = TypeVar("T")


@dataclass(frozen=True)
class Matrix:
    """One sharded parameter of a step; ``handle`` is the caller's own."""

    name: str
    parameter: DTensor
    mode: str
    handle: Any = None

    @property
    def key(self) -> int:
        """Tells matrices apart on this rank: names may repeat, and not all matrices have one."""
        return id(self.parameter)


@dataclass(frozen=True)
class _Route:
    """How a matrix travels: by ``parcel`` along ``lane``, or whole through DTensor."""

    mesh: MeshKey
    dimension: int
    lane: Lane | None = None
    parcel: Parcel | None = None
    distributed: bool = False

    @property
    def owned(self) -> bool:
        """Whether this rank computes the matrix's update."""
        if not self.distributed:
            return True
        assert self.lane is not None
        assert self.parcel is not None
        return self.parcel.owner == self.lane.position


class Routes:
    """The routes of all sharded matrices of an optimizer, whether they have gradients or not.

    kept: owners of matrices that must stay where they are, by the matrices' keys.
    """

    def __init__(self, matrices: Sequence[Matrix], kept: Mapping[int, int] | None = None) -> None:
        meshes = {id(m.parameter.device_mesh): m.parameter.device_mesh for m in matrices}
        keys = dict(zip(meshes, identify_meshes(meshes.values()), strict=True))
        splits = [_split(matrix) for matrix in matrices]
        self.unserved = [m for m, s in zip(matrices, splits, strict=True) if _is_unserved(m, s)]
        """Those that ``distributed`` steps as ``exact`` does."""
        self._routes: dict[int, _Route] = {}
        together: dict[tuple[MeshKey, int], list[tuple[Matrix, int]]] = {}
        for matrix, split in zip(matrices, splits, strict=True):
            key = keys[id(matrix.parameter.device_mesh)]
            if split is None:
                self._routes[matrix.key] = _Route(key, -1)
            else:
                together.setdefault((key, split[0]), []).append((matrix, split[1]))
        for (key, dimension), held in together.items():
            self._routes |= _parcels(key, dimension, held, kept or {})

    def of(self, matrix: Matrix) -> _Route:
        """How a matrix travels."""
        return self._routes[matrix.key]

    def owner(self, matrix: Matrix) -> int | None:
        """Place in its group of the only rank that holds a matrix's momentum; None: all do."""
        route = self.of(matrix)
        return self.parcel(matrix).owner if route.distributed else None

    def owned(self, matrix: Matrix) -> bool:
        """Whether this rank computes the update of a matrix and holds its momentum."""
        return self.of(matrix).owned

    def counts(self, matrix: Matrix) -> bool:
        """Whether this rank is the one of the mesh that counts a matrix it has computed."""
        route, mesh = self.of(matrix), matrix.parameter.device_mesh
        if not route.distributed:
            return bool(route.mesh.ranks[0] == dist.get_rank())
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        return not any(place for d, place in enumerate(coordinate) if d != route.dimension)

    def spread(self, matrix: Matrix) -> tuple[int, dist.ProcessGroup] | None:
        """Owner (global rank) and group of a matrix whose state one rank holds, else None."""
        route = self.of(matrix)
        if not route.distributed:
            return None
        assert route.lane is not None
        assert route.parcel is not None
        return dist.get_global_rank(route.lane.group, route.parcel.owner), route.lane.group

    def trips(self, matrices: Iterable[Matrix]) -> list[tuple[_Route, list[Matrix]]]:
        """Matrices that travel together, in the order in which every rank must take them."""
        found: dict[Any, tuple[_Route, list[Matrix]]] = {}
        for matrix in matrices:
            route = self.of(matrix)
            dtype = str(matrix.parameter.dtype)
            key = (route.mesh, route.dimension, route.distributed, dtype)
            found.setdefault(key, (route, []))[1].append(matrix)
        return [found[key] for key in sorted(found)]

    def parcel(self, matrix: Matrix) -> Parcel:
        """The parcel of a matrix that travels by parcel."""
        parcel = self.of(matrix).parcel
        assert parcel is not None
        return parcel


def _split(matrix: Matrix) -> tuple[int, int] | None:
    """(mesh dimension, tensor dimension) of a matrix that can travel by parcel, else None.

    Raises where this rank's shard is not the one that DTensor would place here: no exchange,
    DTensor's own included, can tell what it holds.
    """
    parameter = matrix.parameter
    found = sharded_dimension(parameter)
    if found is None:
        return None
    lane = lane_of(parameter.device_mesh, found[0])
    span = spans_of(parameter.shape[found[1]], lane)[lane.position]
    held = parameter.to_local().shape[found[1]]
    if held != span.stop - span.start:
        raise UnsupportedParameterError(
            f"Parameter {matrix.name!r} of shape {tuple(parameter.shape)} and placements "
            f"{parameter.placements} has a shard of length {held} on this rank instead of "
            f"{span.stop - span.start}: distribute it with distribute_tensor or fully_shard"
        )
    return found


def _is_unserved(matrix: Matrix, split: tuple[int, int] | None) -> bool:
    replicated = all(isinstance(placement, Replicate) for placement in matrix.parameter.placements)
    return split is None and matrix.mode == "distributed" and not replicated


def _parcels(
    key: MeshKey, dimension: int, held: Sequence[tuple[Matrix, int]], kept: Mapping[int, int]
) -> dict[int, _Route]:
    """held: matrices with the tensor dimension that is split."""
    lane = lane_of(held[0][0].parameter.device_mesh, dimension)
    # Ties go by registration, which ranks have in common where they do not have names.
    places = {m.key: (m.name, i) for i, (m, _) in enumerate(held) if m.mode == "distributed"}
    owners = assign_owners(
        {places[m.key]: _shape(m) for m, _ in held if m.key in places},
        lane.width,
        {places[k]: owner for k, owner in kept.items() if k in places and owner < lane.width},
    )
    routes = {}
    for matrix, dim in held:
        spans = spans_of(matrix.parameter.shape[dim], lane)
        distributed = matrix.key in places
        owner = owners[places[matrix.key]] if distributed else 0
        parcel = Parcel(matrix.key, _shape(matrix), dim, owner, spans)
        routes[matrix.key] = _Route(key, dimension, lane, parcel, distributed)
    return routes


def _shape(matrix: Matrix) -> tuple[int, int]:
    rows, columns = matrix.parameter.shape
    return rows, columns


def whole_gradients(
    routes: Routes, matrices: Sequence[Matrix]
) -> Iterator[tuple[Matrix, torch.Tensor]]:
    """Give each matrix that this rank computes with its whole gradient, a bucket at a time."""
    for route, held in routes.trips(matrices):
        for bucket, full, _ in _deliveries(routes, route, held):
            for matrix in bucket:
                if matrix.key in full:
                    yield matrix, full[matrix.key]


def _deliveries(
    routes: Routes, route: _Route, held: Sequence[Matrix]
) -> Iterator[tuple[list[Matrix], Full, list[Parcel]]]:
    """Give each bucket of one trip with the whole gradients that came to this rank."""
    by_key: dict[Hashable, Matrix] = {matrix.key: matrix for matrix in held}
    if route.lane is None:
        for matrix in held:
            yield [matrix], {matrix.key: _gradient(matrix).full_tensor()}, []
        return
    lane = route.lane
    like = held[0].parameter.to_local()
    send = send_to_owners if route.distributed else gather_everywhere
    parcels = [routes.parcel(matrix) for matrix in held]

    def start(bucket: Sequence[Parcel]) -> Callable[[], Full]:
        shards = {p.key: _gradient(by_key[p.key]).to_local() for p in bucket}
        return send(lane, bucket, shards, like)

    buckets = make_buckets(parcels, lane.width, like.element_size())
    for bucket, full in double_buffered(buckets, start):
        yield [by_key[p.key] for p in bucket], full, list(bucket)


def _gradient(matrix: Matrix) -> DTensor:
    gradient = matrix.parameter.grad
    assert isinstance(gradient, DTensor)
    return gradient


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
    routes: Routes,
    matrices: Sequence[Matrix],
    compute: Callable[[list[tuple[Matrix, torch.Tensor]]], Full],
    apply: Callable[[Matrix, torch.Tensor], None],
) -> Exception | None:
    """Update every matrix. Return this rank's first error, having kept up all exchanges.

    compute: takes matrices with their whole gradients and gives their whole updates by key,
    bfloat16 where they travel; apply: takes a matrix and this rank's shard of its update.
    """
    failure = StepFailure()

    def computed(bucket: Sequence[Matrix], full: Full) -> Full:
        mine = [(matrix, full[matrix.key]) for matrix in bucket if matrix.key in full]
        return failure.keep(lambda: compute(mine), {})

    def applied(bucket: Sequence[Matrix], shards: Full) -> None:
        for matrix in bucket:
            if matrix.key in shards:
                shard = shards[matrix.key]
                failure.keep(lambda m=matrix, s=shard: apply(m, s), None)  # type: ignore[misc]

    for route, held in routes.trips(matrices):
        deliveries = _deliveries(routes, route, held)
        if route.distributed:
            _step_distributed(route, deliveries, computed, applied)
        else:
            for bucket, full, _ in deliveries:
                updates = computed(bucket, full)
                applied(bucket, {m.key: _own(routes, m, updates) for m in bucket if updates})
    return failure.error


def _own(routes: Routes, matrix: Matrix, updates: Full) -> torch.Tensor:
    """This rank's shard of an update that it has as a whole."""
    update, route = updates[matrix.key], routes.of(matrix)
    if route.lane is not None and route.parcel is not None:
        return route.parcel.shard_of(update, route.lane.position).contiguous()
    mesh, placements = matrix.parameter.device_mesh, matrix.parameter.placements
    whole = DTensor.from_local(update, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=placements).to_local().contiguous()


def _step_distributed(
    route: _Route,
    deliveries: Iterator[tuple[list[Matrix], Full, list[Parcel]]],
    computed: Callable[[Sequence[Matrix], Full], Full],
    applied: Callable[[Sequence[Matrix], Full], None],
) -> None:
    """Compute a bucket while the next gradients and the last updates are on their way."""
    lane = route.lane
    assert lane is not None
    returning: tuple[list[Matrix], Callable[[], Full]] | None = None
    for bucket, full, parcels in deliveries:
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
