"""Which rank orthogonalises which matrix."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

Shape = tuple[int, int]
Key = TypeVar("Key", str, tuple[str, int])


def newton_schulz_cost(rows: int, columns: int) -> int:
    """Work of one orthogonalisation, in units common to all schedules of one optimizer."""
    short, long = sorted((rows, columns))
    return 5 * short * (rows * columns + 2 * long * short)


def assign_owners(shapes: Mapping[Key, Shape], width: int) -> dict[Key, int]:
    """Give each matrix an owner in ``range(width)``.

    Longest processing time first: the costliest matrix goes to the least loaded owner, ties by
    key (a name, or a name and a position) and then by the lower owner. Depends on nothing else, so
    that every rank computes the same owners, and they stay whatever gradients a step has.
    """
    costs = {key: newton_schulz_cost(*shape) for key, shape in shapes.items()}
    owners: dict[Key, int] = {}
    loads = [(0, owner) for owner in range(width)]
    for key in sorted(costs, key=lambda key: (-costs[key], key)):
        load, owner = heapq.heappop(loads)
        owners[key] = owner
        heapq.heappush(loads, (load + costs[key], owner))
    return owners
