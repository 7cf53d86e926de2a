"""How many rounds carry a fact to every rank of a component, on abstract graphs of groups."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from gefen.distributed.mesh import rounds_needed, show_ranks

Group = tuple[int, ...]
GRAPHS = 300


def links_of(groups: list[Group]) -> dict[int, list[Group]]:
    ranks = sorted({rank for group in groups for rank in group})
    return {rank: [group for group in groups if rank in group] for rank in ranks}


def ring(size: int) -> list[Group]:
    return [tuple(sorted((rank, (rank + 1) % size))) for rank in range(size)]


def rounds_until_all_know(groups: list[Group], ranks: set[int], fault: Group | None) -> int:
    """Visit the groups in their order, round by round, as every rank does.

    ranks: those that know from the start; fault: the group whose members find out when they
    first visit it.
    """
    knowing, everyone, rounds = set(ranks), {r for g in groups for r in g}, 0
    while knowing != everyone:
        rounds += 1
        for group in groups:
            if knowing.intersection(group) or group == fault:
                knowing.update(group)
    return rounds


def needed(groups: list[Group]) -> int:
    """The most rounds that any fault takes, in the worst order of the groups."""
    found = 0
    for order in (groups, groups[::-1]):
        for fault in groups:
            found = max(found, rounds_until_all_know(order, set(), fault))
        for rank in {rank for group in groups for rank in group}:
            found = max(found, rounds_until_all_know(order, {rank}, None))
    return found


@pytest.mark.parametrize(
    ("groups", "rounds"),
    [
        ([(0, 1)], 1),
        ([(0, 1, 2), (0, 1, 2)], 1),
        ([(0, 1), (1, 2)], 2),
        ([(0, 1, 2), (1, 2)], 2),
        ([(0, 1), (1, 2), (2, 3)], 3),
        (sorted(ring(3)), 2),
        (sorted(ring(4)), 2),
        (sorted(ring(5)), 3),
        (sorted(ring(7)), 4),
        ([(0, 1), (0, 2), (1, 3), (2, 3)], 2),
    ],
)
def test_rounds_of_known_graphs(groups: list[Group], rounds: int) -> None:
    assert rounds_needed(links_of(groups)) == rounds


def connected_groups(seed: int) -> list[Group]:
    """Groups of two to four of up to nine ranks, in a random order, that hang together."""
    draw = random.Random(seed)
    count = draw.randint(2, 9)
    names = draw.sample(range(count), count)
    groups = [(names[i], names[draw.randrange(i)]) for i in range(1, count)]
    for _ in range(draw.randint(0, 4)):
        groups.append(tuple(draw.sample(range(count), draw.randint(2, min(4, count)))))
    groups = [tuple(sorted(group)) for group in groups]
    draw.shuffle(groups)
    return groups


def test_every_fact_reaches_every_rank_in_the_rounds_needed() -> None:
    for seed in range(GRAPHS):
        groups = connected_groups(seed)
        assert needed(groups) <= rounds_needed(links_of(groups)), groups


def test_fewer_rounds_would_not_do() -> None:
    """On a ring of five, ordered so that the fault is found last, one round less is too few."""
    edges = ring(5)
    orders = [[e for e in edges if e != fault] + [fault] for fault in edges]
    assert any(needed(order) == rounds_needed(links_of(order)) for order in orders)


def test_all_members_of_one_round_share_every_group() -> None:
    for seed in range(GRAPHS):
        groups = connected_groups(seed)
        one = rounds_needed(links_of(groups)) == 1
        assert one == all(set(a) == set(b) for a, b in combinations(groups, 2))


def test_ranks_are_shown_as_spans() -> None:
    assert show_ranks([5, 0, 1, 2]) == "0-2, 5"
