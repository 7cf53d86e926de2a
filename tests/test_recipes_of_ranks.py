"""The recipes of docs/training.md that need ranks and torch alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import RankPool
from recipes import RANKS, run


def on_ranks(rank: int, world: int, heading: str, folder: str) -> None:
    run(heading, Path(folder), rank)


@pytest.mark.parametrize("heading", sorted(RANKS))
def test_recipe(ranks: RankPool, heading: str, tmp_path: Path) -> None:
    ranks.run(on_ranks, 2, heading, str(tmp_path), limit_s=60)
