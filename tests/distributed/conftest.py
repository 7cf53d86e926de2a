"""The rank pool shared by every test here; helper modules, also those of the regressions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "regression" / "ranks"))
sys.path.insert(0, str(Path(__file__).parent))
from ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
