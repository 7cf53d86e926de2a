"""Agreement before a sharded step: all ranks that could wait on each other step, or none does.

Every rank hashes what it is about to do; one all_reduce(MAX) of ``[hash, -hash, flags]`` per
process group and round shows whether all members agree, whatever the number of parameters. The
component's number of rounds carries a flag to every rank of it. Only a disagreement
costs more: then details are gathered, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gefen.distributed import diagnosis, meeting
from gefen.distributed.meeting import meet
from gefen.distributed.mesh import (
    Channel,
    MeshKey,
    Topology,
    discover,
    flood,
    identify_meshes,
    mesh_channels,
    peers_expected,
    show_ranks,
)
from gefen.errors import CheckpointError
from gefen.parameters import is_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

_FINGERPRINT, _FINGERPRINT_NEGATED, _ROUNDS, _ROUNDS_NEGATED = range(4)
_FLAGS = 4
_STATE = frozenset({"codebook", "global_step"})
"""Facts that a checkpoint brings."""


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter that takes part in a sharded step.

    ``explicit`` says whether the user gave ``name``. ``group`` is the parameter group that holds
    its hyperparameters, of which those ``compared`` must agree, and ``facts`` what else must, such
    as the kind of the optimizer; both are read anew at every step. So is ``steps``, how many the
    parameter has taken; None where the host does not know.
    """

    name: str
    explicit: bool
    parameter: torch.Tensor
    group: Mapping[str, Any]
    sharded_mode: str
    compared: Collection[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    steps: Callable[[], int | None] = lambda: None


class Agreed(NamedTuple):
    """What any rank of the component asked for or said."""

    skip: bool
    active: bool
    survey: bool


class _Flags(NamedTuple):
    """What a rank says besides its hash, in the order of the vector."""

    fault: bool
    failure: bool
    relearn: bool
    skip: bool
    active: bool
    survey: bool


@dataclass
class _Unit:
    """What the ranks of one rank set must agree on: their parameters in registration order."""

    members: list[Member]
    heads: list[Member]
    """The first member of each parameter group."""
    facts: list[Mapping[str, Any]]
    records: list[dict[str, Any]]
    static: bytes


class Preflight:
    """The agreement of one optimizer; keeps what does not change between steps.

    Each rank of the component calls :meth:`agree` once per step with its own members.
    """

    def __init__(self) -> None:
        self._members: Sequence[Member] | None = None
        self._units: dict[tuple[int, ...], _Unit] = {}
        self._channels: dict[Channel, list[tuple[int, ...]]] = {}
        self._topology: Topology | None = None
        self._fault: str | None = None

    @property
    def channels(self) -> list[Channel]:
        """The process groups of the last agreement, in the order every rank visits them."""
        return list(self._channels)

    @property
    def topology(self) -> Topology | None:
        """The component of the last agreement; None before it, or where nothing is shared."""
        return self._topology

    def agree(
        self,
        members: Sequence[Member],
        *,
        skip: bool = False,
        active: bool = False,
        survey: bool = False,
        failure: Exception | None = None,
    ) -> Agreed:
        """Return what any rank asked for, or raise on every rank.

        members: the same object as in the last call when nothing was registered in between.
        skip: leave out this step; active: this rank has something to update; survey: it needs
        a survey of all gradients first. Any rank's wish is told to all.
        failure: what went wrong on this rank before the step, if anything did.

        Raises the same :class:`~gefen.errors.ShardedStepError` on every rank of the component;
        where no parameter is shared, ``failure`` itself. Nothing was changed then.
        """
        if members is not self._members:
            self._register(members)
        if not self._channels:
            if failure is not None:
                raise failure
            return Agreed(skip, active, survey)
        digests = self._digests()
        mine = _Flags(
            fault=self._fault is not None,
            failure=failure is not None,
            relearn=self._is_stale(),
            skip=skip,
            active=active,
            survey=survey,
        )
        flags = self._rounds(digests, mine)
        if flags.relearn:
            self._topology = discover(self.channels, dist.get_rank())
            flags = self._rounds(digests, mine._replace(relearn=False))
        if flags.fault or flags.failure:
            self._refuse(digests, failure)
        return Agreed(flags.skip, flags.active, flags.survey)

    def report(self, members: Sequence[Member], failure: Exception | None, purpose: str) -> None:
        """Raise on every rank of the component if any comes with a ``failure``, else return.

        For what all ranks do outside of a step, and each calls together. The error is
        :class:`~gefen.errors.CheckpointError`, or :class:`~gefen.errors.PeerFailureError` where
        a rank does not come.
        """
        if members is not self._members:
            self._register(members)
        rank, alike = dist.get_rank(), dict.fromkeys(self._units, b"")
        for channel in self._channels:
            meet(purpose, channel.key.ranks, rank, meeting.ARRIVAL_S)
        told = _Flags(False, failure is not None, self._is_stale(), False, False, False)
        flags = self._rounds(alike, told)
        if flags.relearn:
            self._topology = discover(self.channels, rank)
            flags = self._rounds(alike, told._replace(relearn=False))
        if not flags.failure:
            return
        assert self._topology is not None
        mine = {} if failure is None else {str(rank): str(failure)}
        texts = flood(self.channels, self._topology.rounds, mine, purpose)
        told_by = {text: [r for r in texts if texts[r] == text] for text in texts.values()}
        lines = [f"{diagnosis.in_words(map(int, who))}: {text}" for text, who in told_by.items()]
        raise CheckpointError(
            f"{purpose} failed, and changed nothing on any rank; on " + "; on ".join(lines)
        ) from failure

    def _register(self, members: Sequence[Member]) -> None:
        shared = [m for m in members if is_shared(m.parameter)]
        meshes = [_mesh(m) for m in shared]
        distinct = {id(mesh): mesh for mesh in meshes}
        keys = dict(zip(distinct, identify_meshes(distinct.values()), strict=True))
        sets: dict[tuple[int, ...], list[Member]] = {}
        for member, mesh in zip(shared, meshes, strict=True):
            sets.setdefault(keys[id(mesh)].ranks, []).append(member)
        channels: dict[Channel, set[tuple[int, ...]]] = {}
        for mesh in distinct.values():
            for channel in mesh_channels(mesh):
                channels.setdefault(channel, set()).add(keys[id(mesh)].ranks)
        self._units = {ranks: _make_unit(held, keys) for ranks, held in sets.items()}
        self._fault = diagnosis.ambiguity([_record(m, keys[id(_mesh(m))], 0) for m in shared])
        ordered = sorted(channels, key=lambda channel: channel.key)
        self._channels = {channel: sorted(channels[channel]) for channel in ordered}
        self._members = members

    def _is_stale(self) -> bool:
        held = frozenset(channel.key for channel in self._channels)
        return self._topology is None or self._topology.groups != held

    def _digests(self) -> dict[tuple[int, ...], bytes]:
        texts: dict[int, bytes] = {}
        for unit in self._units.values():
            for head in unit.heads:
                if id(head.group) not in texts:
                    texts[id(head.group)] = repr(_hyperparameters(head)).encode()
            for facts in unit.facts:
                if id(facts) not in texts:
                    texts[id(facts)] = repr(_canonical(facts)).encode()
        return {ranks: _digest(unit, texts) for ranks, unit in self._units.items()}

    def _rounds(self, digests: Mapping[tuple[int, ...], bytes], flags: _Flags) -> _Flags:
        """Run the rounds and return the flags that any rank of the component raised.

        A rank that does not know the number of rounds learns it from the vector; the members of
        a group see the same vectors, so they agree on it.
        """
        prints = {c: _fingerprint(digests[r] for r in sets) for c, sets in self._channels.items()}
        known = self._topology.rounds if self._topology is not None else 0
        rounds = dict.fromkeys(self._channels, 1)
        done = 0
        while active := [c for c in self._channels if rounds[c] > done]:
            for channel in active:
                mark = prints[channel]
                seen = _reduce(channel, [mark, -mark, known, -known, *map(int, flags)])
                flags = _Flags(*map(bool, seen[_FLAGS:]))
                flags = flags._replace(
                    fault=flags.fault or seen[_FINGERPRINT] != -seen[_FINGERPRINT_NEGATED],
                    relearn=flags.relearn or seen[_ROUNDS] != -seen[_ROUNDS_NEGATED],
                )
                rounds[channel] = max(rounds[channel], seen[_ROUNDS])
            done += 1
        return flags

    def _refuse(
        self,
        digests: Mapping[tuple[int, ...], bytes],
        failure: Exception | None,
    ) -> NoReturn:
        assert self._topology is not None
        rank = dist.get_rank()
        summary = diagnosis.summarise(
            {ranks: digest.hex() for ranks, digest in digests.items()},
            self._fault,
            failure,
        )
        spread = (self.channels, self._topology.rounds)
        summaries = flood(*spread, {str(rank): summary}, "finding out what differs")
        wanted = diagnosis.units_to_describe(summaries, rank)
        mine = {
            show_ranks(ranks): _describe(unit)
            for ranks, unit in self._units.items()
            if show_ranks(ranks) in wanted
        }
        details = flood(*spread, {str(rank): mine} if mine else {}, "finding out what differs")
        raise diagnosis.explain(summaries, details) from failure


def _mesh(member: Member) -> Any:
    assert isinstance(member.parameter, DTensor)
    return member.parameter.device_mesh


def _make_unit(members: list[Member], keys: Mapping[int, MeshKey]) -> _Unit:
    heads: dict[int, Member] = {}
    positions: dict[int, int] = {}
    records = []
    for member in members:
        heads.setdefault(id(member.group), member)
        position = positions.setdefault(id(member.group), len(positions))
        records.append(_record(member, keys[id(_mesh(member))], position))
    static = hashlib.blake2b(repr([sorted(r.items()) for r in records]).encode()).digest()
    facts = {id(member.facts): member.facts for member in members}
    return _Unit(members, list(heads.values()), list(facts.values()), records, static)


def _record(member: Member, mesh: MeshKey, group: int) -> dict[str, Any]:
    parameter = member.parameter
    assert isinstance(parameter, DTensor)
    return {
        "name": member.name if member.explicit else None,
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "placements": ", ".join(map(repr, parameter.placements)),
        "mesh": repr(tuple(mesh[1:])),
        "group": group,
        "sharded_mode": member.sharded_mode,
    }


def _hyperparameters(member: Member) -> list[tuple[str, str]]:
    group = member.group
    return _canonical({name: group[name] for name in member.compared if name in group})


def _canonical(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return sorted((name, diagnosis.canonical(value)) for name, value in values.items())


def _digest(unit: _Unit, texts: Mapping[int, bytes]) -> bytes:
    digest = hashlib.blake2b(unit.static, digest_size=16)
    digest.update(bytes([member.parameter.grad is not None for member in unit.members]))
    digest.update(repr([member.steps() for member in unit.members]).encode())
    for values in (*(head.group for head in unit.heads), *unit.facts):
        digest.update(texts[id(values)])
    return digest.digest()


def _fingerprint(digests: Iterable[bytes]) -> int:
    joined = hashlib.blake2b(b"".join(digests), digest_size=8).digest()
    return int.from_bytes(joined, "little") >> 1


def _reduce(channel: Channel, slots: list[int]) -> list[int]:
    vector = torch.tensor(slots, dtype=torch.int64, device=channel.device)
    with peers_expected(channel, "agreeing on the step"):
        dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=channel.group)
    reduced: list[int] = vector.tolist()
    return reduced


def _describe(unit: _Unit) -> list[dict[str, Any]]:
    texts = [dict(_hyperparameters(head)) for head in unit.heads]
    facts = {id(values): _canonical(values) for values in unit.facts}
    return [
        {
            **record,
            "hyperparameters": {
                **texts[record["group"]],
                **{name: text for name, text in facts[id(member.facts)] if name not in _STATE},
                "sharded_mode": repr(record["sharded_mode"]),
            },
            "state": {
                **{name: text for name, text in facts[id(member.facts)] if name in _STATE},
                "step": repr(member.steps()),
            },
            "has_grad": member.parameter.grad is not None,
        }
        for record, member in zip(unit.records, unit.members, strict=True)
    ]
