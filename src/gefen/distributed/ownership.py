"""Which rank orthogonalises which matrix."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

Shape = tuple[int, int]


def newton_schulz_cost(rows: int, columns: int) -> int:
    """Work of one orthogonalisation, in units common to all schedules of one optimizer."""
    short, long = sorted((rows, columns))
    return 5 * short * (rows * columns + 2 * long * short)


def assign_owners(shapes: Mapping[str, Shape], width: int) -> dict[str, int]:
    """Give each named matrix an owner in ``range(width)``.

    Longest processing time first: the costliest matrix goes to the least loaded owner, ties by
    name and then by the lower owner. Depends on names and shapes alone, so that every rank
    computes the same owners, and they stay whatever gradients a step has.
    """
    costs = {name: newton_schulz_cost(*shape) for name, shape in shapes.items()}
    loads = [(0, owner) for owner in range(width)]
    owners = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        load, owner = heapq.heappop(loads)
        owners[name] = owner
        heapq.heappush(loads, (load + costs[name], owner))
    return owners
