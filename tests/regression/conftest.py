"""What every regression test may use; imports nothing of the checkout."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that the gate's profile asks for; each rank has a GPU of its own."""
    kind = os.environ.get("GEFEN_TEST_DEVICE", "cpu")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) if kind == "cuda" else None)
