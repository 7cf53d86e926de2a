"""Complete checkpoints of state that is spread over owners.

Consolidating is collective. A rank that calls it alone must not wait for ever, so the ranks
first meet in the process group's store, within a bounded time; only then do they exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from gefen.distributed.mesh import Channel, exchange, show_ranks
from gefen.errors import CheckpointError, PeerFailureError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ARRIVAL_S = 60.0
"""How long a rank waits for the others before it gives up, in seconds."""

_SHOWN = 4
_GO, _ABANDONED = "go", "abandoned"


def meet(name: str, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
    """Return on all of ``ranks``, or raise on those that came, naming those that did not.

    name: what they meet for, equal on all of them. After a failure they can meet again. Raises
    :class:`PeerFailureError` within ``timeout_s`` seconds.
    """
    store = PrefixStore(f"gefen/{name}/{show_ranks(ranks)}", _get_default_store())
    round_ = _open_round(store)
    store.set(f"{round_}/rank{rank}", "1")
    verdict = f"{round_}/verdict"
    if store.add(f"{round_}/arrived", 1) == len(ranks):
        _decide(store, round_, _GO)
    try:
        store.wait([verdict], timedelta(seconds=timeout_s))
    except RuntimeError:  # not every store raises its own kind when time is up
        _decide(store, round_, _ABANDONED)
    if store.get(verdict).decode().startswith(_ABANDONED):
        missing = [r for r in ranks if not store.check([f"{round_}/rank{r}"])]
        raise PeerFailureError(
            f"Waited {timeout_s:g} s in vain for rank{'s' * (len(missing) != 1)} "
            f"{show_ranks(missing)}: {name} gathers state from every rank. Call it on ranks "
            f"{show_ranks(ranks)} together, and write the file on one of them."
        )


def _open_round(store: Store) -> int:
    """Number of the round that has no verdict yet."""
    while True:
        round_: int = store.add("round", 0)
        if not store.check([f"{round_}/verdict"]):
            return round_


def _decide(store: Store, round_: int, verdict: str) -> None:
    """Set the verdict unless there is one: a round has one, whatever ranks decide at once.

    Whoever sets it opens the next round; the others' value tells that they came second.
    """
    mine = f"{verdict} {dist.get_rank()}"
    if store.compare_set(f"{round_}/verdict", "", mine).decode() == mine:
        store.add("round", 1)


@dataclass(frozen=True)
class Holding:
    """The part of one parameter's state that only its owner has."""

    name: str
    steps: int
    """How many the parameter has taken; every rank knows."""
    owner: int
    """Global rank."""
    group: dist.ProcessGroup
    device: torch.device
    entry: Mapping[str, Any] | None
    """On the owner: tensors and whole numbers by key. None elsewhere."""


def consolidate(holdings: Sequence[Holding], channel: Channel) -> list[dict[str, Any]]:
    """Give every rank the entry of each holding, from its owner.

    Collective over ``channel``: all its ranks pass the same holdings in one order. Raises
    :class:`CheckpointError` on every rank of it where they do not, or where an owner lacks an
    entry.
    """
    rank = dist.get_rank()
    mine = {
        "listed": [[h.name, h.owner, h.steps] for h in holdings],
        "outlines": [_outline(h.entry) if h.owner == rank else None for h in holdings],
    }
    known = exchange([channel], {str(rank): mine}, "gathering the state of every owner")
    _compare({int(each): known[each]["listed"] for each in known})
    outlines = [known[str(h.owner)]["outlines"][i] for i, h in enumerate(holdings)]
    lost = [h for h, outline in zip(holdings, outlines, strict=True) if outline is None]
    if lost:
        names = ", ".join(f"{h.name!r} (owner: rank {h.owner})" for h in lost)
        raise CheckpointError(
            f"The state of {names} is missing on its owner; load a complete checkpoint"
        )
    return [_broadcast(h, outline) for h, outline in zip(holdings, outlines, strict=True)]


def _compare(listed: Mapping[int, list[list[Any]]]) -> None:
    """Raise, alike on every rank, where ranks do not list the same parameters and counts."""
    first, *others = sorted(listed)
    for rank in others:
        if listed[rank] == listed[first]:
            continue
        differing = [
            f"{_shown(one)} on rank {first}, {_shown(other)} on rank {rank}"
            for one, other in zip_longest(listed[first], listed[rank])
            if one != other
        ]
        raise CheckpointError(
            f"Ranks hold different state: {'; '.join(differing[:_SHOWN])}. Load one checkpoint "
            "on every rank"
        )


def _shown(listed: list[Any] | None) -> str:
    if listed is None:
        return "none"
    name, owner, steps = listed
    return f"{name!r} after {steps} step{'s' * (steps != 1)}, owned by rank {owner}"


def _outline(entry: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {
        key: [str(value.dtype).removeprefix("torch."), list(value.shape)]
        if isinstance(value, torch.Tensor)
        else value
        for key, value in entry.items()
    }


def _broadcast(holding: Holding, outline: Mapping[str, Any]) -> dict[str, Any]:
    complete: dict[str, Any] = {}
    for key, what in outline.items():
        if not isinstance(what, list):
            complete[key] = what
            continue
        dtype, shape = getattr(torch, what[0]), what[1]
        if holding.entry is None:
            complete[key] = torch.empty(shape, dtype=dtype, device=holding.device)
        else:
            complete[key] = holding.entry[key].contiguous()
        dist.broadcast(complete[key], holding.owner, group=holding.group)
    return complete
