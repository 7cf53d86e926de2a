"""Libraries as users have them: nothing is downloaded, and what they warn of is theirs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "distributed")]
os.environ["HF_HUB_OFFLINE"] = "1"
from ranks import RankPool


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
