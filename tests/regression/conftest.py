"""What every regression test may use; imports nothing of the checkout.

Three folders hold what any package with this interface keeps: ``single`` (one process),
``worlds`` (tests that fork their ranks) and ``ranks`` (started on each rank). ``own`` holds what
only this package has: the layout of its state, and its parts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

HERE = Path(__file__).parent
# Helper modules can be imported wherever the suite is copied.
sys.path[:0] = [str(HERE / folder) for folder in ("single", "worlds", "ranks", "own")]
from pool import ranks  # noqa: E402, F401 - a fixture

# The same cases each time, and nothing kept from one time to the next.
settings.register_profile("regression", database=None, derandomize=True, deadline=None)
settings.load_profile("regression")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that the gate's profile asks for; each rank has a GPU of its own."""
    kind = os.environ.get("GEFEN_TEST_DEVICE", "cpu")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) if kind == "cuda" else None)
