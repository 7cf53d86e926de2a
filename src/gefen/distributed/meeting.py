"""Where ranks that are about to exchange something outside of a step find out who has come.

A rank that comes alone must not wait for ever, so they first meet in the process group's store,
within a bounded time; only then do they exchange.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from gefen.distributed.mesh import show_ranks
from gefen.errors import PeerFailureError

if TYPE_CHECKING:
    from collections.abc import Sequence

ARRIVAL_S = 60.0
"""How long a rank waits for the others before it gives up, in seconds."""

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
            f"{show_ranks(missing)}: {name} is for all of them. Call it on ranks "
            f"{show_ranks(ranks)} together."
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
