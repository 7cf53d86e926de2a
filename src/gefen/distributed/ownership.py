"""Which rank orthogonalises which matrix."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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


def heaviest_over_mean(
    shapes: Mapping[str, Shape], owners: Mapping[str, int], width: int
) -> float:
    """Load of the busiest owner over the mean load; 1 is perfect balance."""
    loads = [0] * width
    for name, owner in owners.items():
        loads[owner] += newton_schulz_cost(*shapes[name])
    return max(loads) * width / sum(loads)


def index_modulo(names: Iterable[str], width: int) -> dict[str, int]:
    """The usual alternative: matrix number i belongs to rank i modulo ``width``."""
    return {name: index % width for index, name in enumerate(names)}


def decoder_shapes(
    layers: int = 28, hidden: int = 1024, mlp: int = 3072, query: int = 2048, key: int = 1024
) -> dict[str, Shape]:
    """Hidden matrices of a grouped-attention decoder; the defaults have 0.44 billion elements.

    With its embeddings such a model has 0.6 billion parameters.
    """
    block: Sequence[tuple[str, Shape]] = (
        ("self_attn.q_proj", (query, hidden)),
        ("self_attn.k_proj", (key, hidden)),
        ("self_attn.v_proj", (key, hidden)),
        ("self_attn.o_proj", (hidden, query)),
        ("mlp.gate_proj", (mlp, hidden)),
        ("mlp.up_proj", (mlp, hidden)),
        ("mlp.down_proj", (hidden, mlp)),
    )
    return {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in block}
