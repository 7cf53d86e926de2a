"""Runs under ZeroRedundancyOptimizer and FSDP1 train, save and resume."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from wrapped import NAMES, fsdp1, redundancy


@pytest.mark.parametrize("kind", ["bare", "groups"])
def test_zero_redundancy_optimizer(kind: str, device: torch.device) -> None:
    losses = redundancy(dist.get_rank(), dist.get_world_size(), kind, str(device))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("original", [True, False])
def test_fsdp1(original: bool, device: torch.device) -> None:
    names = fsdp1(dist.get_rank(), dist.get_world_size(), original, str(device))
    assert names == NAMES[original]
