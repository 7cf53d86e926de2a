"""Data-parallel training equals training in one process on the same data."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gefen

STEPS = 6
ROWS_PER_RANK = 8

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "gefen": lambda model: gefen.Gefen(model.named_parameters(), lr=1e-2, weight_decay=0.01),
    "hybrid": lambda model: gefen.GefenMuonHybrid.from_model(model, lr=1e-2),
}


def build(device: torch.device) -> nn.Module:
    # float64: the order of a sum then changes less than what quantisation could notice.
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    return nn.Sequential(*layers).to(device, torch.float64)


def batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = ROWS_PER_RANK * dist.get_world_size()
    x = torch.randn(rows, 16, generator=generator, dtype=torch.float64)
    return x.to(device), x[:, :4].sin().to(device)


def train(model: nn.Module, kind: str, device: torch.device, rows: slice) -> None:
    optimizer = OPTIMIZERS[kind](model)
    for step in range(STEPS):
        x, y = batch(step, device)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ddp_equals_one_process(kind: str, device: torch.device) -> None:
    reference = build(device)
    start = copy.deepcopy(reference)
    replica = DistributedDataParallel(copy.deepcopy(reference))
    first = dist.get_rank() * ROWS_PER_RANK

    train(reference, kind, device, slice(None))
    train(replica, kind, device, slice(first, first + ROWS_PER_RANK))

    for (name, expected), actual, initial in zip(
        reference.named_parameters(), replica.module.parameters(), start.parameters(), strict=True
    ):
        assert not torch.equal(expected, initial), f"{name} was not trained"
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=1e-7, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ddp_replicas_stay_identical(kind: str, device: torch.device) -> None:
    replica = DistributedDataParallel(build(device))
    first = dist.get_rank() * ROWS_PER_RANK
    train(replica, kind, device, slice(first, first + ROWS_PER_RANK))
    flat = torch.cat([parameter.detach().flatten() for parameter in replica.parameters()])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    assert all(torch.equal(flat, other) for other in gathered)
