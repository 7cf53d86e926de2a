"""Process groups and meshes of sharded parameters, and the graph that they form.

Two ranks that share a process group may wait on each other. The graph whose nodes are ranks and
whose edges are shared groups therefore decides who must agree before a step: a connected
component. In each round every rank visits its groups once, all in one order; a fact known to one
rank, or found out by one group, reaches all of them in :func:`rounds_needed` rounds.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from gefen.errors import PeerFailureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh


class GroupKey(NamedTuple):
    """A communicator, by content. Its members sort it alike.

    The name is what the members met under in the store, hence equal on all of them; it keeps two
    communicators over the same ranks apart.
    """

    ranks: tuple[int, ...]
    name_length: int
    name: str


class MeshKey(NamedTuple):
    """A mesh, by content. ``ordinal`` counts equal meshes on distinct communicators."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    dim_names: tuple[str, ...]
    device_type: str
    ordinal: int = 0


@dataclass(frozen=True)
class Channel:
    """A process group of two or more ranks that this rank belongs to."""

    key: GroupKey
    group: dist.ProcessGroup = field(compare=False)
    device: torch.device = field(compare=False)


@dataclass(frozen=True)
class Topology:
    """The connected component of this rank: its ranks, and the rounds that reach all of it."""

    groups: frozenset[GroupKey]
    ranks: tuple[int, ...]
    rounds: int


def mesh_channels(mesh: DeviceMesh) -> list[Channel]:
    """Give the channels of this rank in ``mesh``, one per dimension of two or more ranks."""
    return [
        channel_of(group, mesh.device_type)
        for dimension, group in enumerate(mesh.get_all_groups())
        if mesh.size(dimension) > 1
    ]


def channel_of(group: dist.ProcessGroup, device_type: str) -> Channel:
    """Name ``group`` by content and choose the device its control messages live on."""
    name = str(group.group_name)
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    return Channel(GroupKey(ranks, len(name), name), group, _control_device(group, device_type))


def _control_device(group: dist.ProcessGroup, device_type: str) -> torch.device:
    # On the CPU a control message does not wait for the accelerator's queue.
    cpu = torch.device("cpu")
    try:
        group._get_backend(cpu)
    except RuntimeError:
        return torch.device(device_type, torch.get_device_module(device_type).current_device())
    return cpu


def identify_meshes(meshes: Iterable[DeviceMesh]) -> list[MeshKey]:
    """Give each mesh its key, equal on every rank of the mesh.

    Equal contents on distinct communicators are numbered in the order in which the communicators
    were made, which the members share because making one is a collective.
    """
    listed = [(_content(mesh), _communicators(mesh)) for mesh in meshes]
    ordinals: dict[MeshKey, list[tuple[tuple[int, str], ...]]] = {}
    for content, names in sorted(set(listed)):
        ordinals.setdefault(content, []).append(names)
    return [content._replace(ordinal=ordinals[content].index(names)) for content, names in listed]


def _content(mesh: DeviceMesh) -> MeshKey:
    grid = tuple(mesh.mesh.flatten().tolist())
    names = tuple(mesh.mesh_dim_names or ())
    return MeshKey(tuple(sorted(grid)), tuple(mesh.shape), grid, names, mesh.device_type)


def _communicators(mesh: DeviceMesh) -> tuple[tuple[int, str], ...]:
    names = [str(group.group_name) for group in mesh.get_all_groups()]
    return tuple((len(name), name) for name in names)


@contextmanager
def peers_expected(channel: Channel, purpose: str) -> Iterator[None]:
    """Turn a collective that the backend gave up on into a :class:`PeerFailureError`."""
    try:
        yield
    except RuntimeError as error:
        raise PeerFailureError(
            f"{purpose}: the process group {channel.key.name!r} of ranks "
            f"{show_ranks(channel.key.ranks)} gave up waiting: {error}. A rank of it has ended, "
            "is still busy, or has no parameter of this optimizer on that mesh. The group cannot "
            "be used any more; restart the job."
        ) from error


def all_gather_tensor(
    output: torch.Tensor,
    source: torch.Tensor,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> dist.Work | None:
    """Gather equally sized tensors into ``output``; torch renamed the function in 2.13."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(output, source, group=group, async_op=async_op)
    return work


def all_gather_bytes(channel: Channel, payload: bytes, purpose: str) -> list[bytes]:
    """Gather one byte string per rank of ``channel``; their lengths may differ."""
    width = len(channel.key.ranks)
    size = torch.tensor([len(payload)], dtype=torch.int64, device=channel.device)
    sizes = torch.empty(width, dtype=torch.int64, device=channel.device)
    with peers_expected(channel, purpose):
        all_gather_tensor(sizes, size, channel.group)
        lengths: list[int] = sizes.tolist()
        longest = max(lengths)
        sent = torch.zeros(longest, dtype=torch.uint8)
        sent[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        got = torch.empty(width * longest, dtype=torch.uint8, device=channel.device)
        all_gather_tensor(got, sent.to(channel.device), channel.group)
    rows = got.cpu().view(width, longest)
    return [rows[i, :length].numpy().tobytes() for i, length in enumerate(lengths)]


def exchange(
    channels: Sequence[Channel], knowledge: Mapping[str, Any], purpose: str
) -> dict[str, Any]:
    """One round: on each channel in turn, merge what its members know (JSON values)."""
    merged = dict(knowledge)
    for channel in channels:
        payload = json.dumps(merged, sort_keys=True).encode()
        for received in all_gather_bytes(channel, payload, purpose):
            merged.update(json.loads(received))
    return merged


def flood(
    channels: Sequence[Channel], rounds: int, knowledge: Mapping[str, Any], purpose: str
) -> dict[str, Any]:
    """Spread ``knowledge`` through the component: all ranks end with the union."""
    merged = dict(knowledge)
    for _ in range(rounds):
        merged = exchange(channels, merged, purpose)
    return merged


def discover(channels: Sequence[Channel], rank: int) -> Topology:
    """Learn this rank's connected component. Collective over all ranks of the component.

    A rank whose picture is closed knows how many rounds the component needs; every rank takes
    part in exactly that many.
    """
    groups = [[pack_ranks(channel.key.ranks), channel.key.name] for channel in channels]
    known: dict[str, Any] = {str(rank): groups}
    done = 0
    while True:
        known = exchange(channels, known, "learning which ranks step together")
        done += 1
        links = {int(r): [_unpack_ranks(g[0]) for g in mine] for r, mine in known.items()}
        if _closed(links):
            break
    rounds = rounds_needed(links)
    flood(channels, rounds - done, known, "learning which ranks step together")
    return Topology(frozenset(c.key for c in channels), tuple(sorted(links)), rounds)


def pack_ranks(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    """Write ranks for JSON: a mesh dimension, an arithmetic progression, as three numbers."""
    step = ranks[1] - ranks[0]
    if step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return {"start": ranks[0], "stop": ranks[-1] + 1, "step": step}
    return list(ranks)


def _unpack_ranks(packed: list[int] | dict[str, int]) -> tuple[int, ...]:
    if isinstance(packed, dict):
        return tuple(range(packed["start"], packed["stop"], packed["step"]))
    return tuple(packed)


def _closed(links: Mapping[int, Sequence[Sequence[int]]]) -> bool:
    return all(rank in links for groups in links.values() for group in groups for rank in group)


def rounds_needed(links: Mapping[int, Sequence[tuple[int, ...]]]) -> int:
    """Rounds in which whatever one group finds out reaches every rank of a component.

    links: for each rank the groups that it is in. A group's members find out together when they
    visit it in the first round, by when they may have visited all their other groups: from the
    second round on a fact spreads by at least one group a round. Hence 1 + the greatest distance
    of a rank from a group. What a single rank knows beforehand takes no longer. The diameter of
    the ranks alone would be too few rounds on a ring of three, or for a group within another.
    """
    groups = {group for held in links.values() for group in held}
    return 1 + max(_farthest(group, links) for group in groups)


def _farthest(start: tuple[int, ...], links: Mapping[int, Sequence[tuple[int, ...]]]) -> int:
    """Hops from the nearest member of ``start`` to the farthest rank."""
    seen, border, hops = set(start), list(start), 0
    visited = {start}
    while True:
        fresh = {group for rank in border for group in links[rank]} - visited
        visited |= fresh
        border = [rank for rank in {r for group in fresh for r in group} if rank not in seen]
        if not border:
            return hops
        seen.update(border)
        hops += 1


def show_ranks(ranks: Iterable[int]) -> str:
    """Write ranks for a person: ``0-3, 6``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
