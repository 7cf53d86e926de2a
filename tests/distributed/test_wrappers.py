"""The same cases as in the gate's regressions of wrappers, on the ranks of this pool."""

from __future__ import annotations

import pytest
import wrapped
from ranks import RankPool


def redundancy(rank: int, world: int, kind: str) -> list[float]:
    return wrapped.redundancy(rank, world, kind)


def fsdp1(rank: int, world: int, original: bool) -> list[str]:
    return wrapped.fsdp1(rank, world, original)


@pytest.mark.parametrize("kind", ["bare", "groups"])
@pytest.mark.parametrize("world", [2, 3])
def test_zero_redundancy_optimizer(ranks: RankPool, kind: str, world: int) -> None:
    for losses in ranks.run(redundancy, world, kind):
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("original", [True, False])
def test_fsdp1(ranks: RankPool, original: bool) -> None:
    expected = wrapped.NAMES[original]
    assert ranks.run(fsdp1, 2, original) == [expected, expected]
