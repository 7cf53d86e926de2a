"""bfloat16 parameters, and float16 autocast with a gradient scaler."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from workload import OPTIMIZERS, model, snapshot, step


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_bfloat16_parameters(kind: str, device: torch.device) -> None:
    """They follow float32 ones, and state has the same dtypes for both."""
    wide, narrow = model(torch.float32, device), model(torch.bfloat16, device)
    start = [param.detach().clone() for param in wide.parameters()]
    optimizers = [OPTIMIZERS[kind](wide), OPTIMIZERS[kind](narrow)]
    for number in range(6):
        step(wide, optimizers[0], number)
        step(narrow, optimizers[1], number)
    for a, b, origin in zip(wide.parameters(), narrow.parameters(), start, strict=True):
        assert b.dtype == torch.bfloat16
        # Weights near 1 are rounded to 2^-9 at every step: coarse against 6 steps of 0.01.
        off = (b.float() - a).norm() / (a - origin).norm().clamp(min=1e-9)
        assert off < 0.3 or torch.equal(a, origin)
        if "index" in optimizers[1].state[b]:
            types = [
                {key: v.dtype for key, v in optimizer.state[p].items() if torch.is_tensor(v)}
                for optimizer, p in zip(optimizers, (a, b), strict=True)
            ]
            assert types[0] == types[1]
            assert optimizers[1].state[b]["magnitude"].dtype == torch.float32


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_scaled_float16(kind: str, device: torch.device) -> None:
    """A scaler skips the step of an infinite gradient without changing one byte; loss falls."""
    trained = model(torch.float32, device)
    optimizer = OPTIMIZERS[kind](trained)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    tokens = torch.arange(24, device=device)
    targets = tokens % 8
    losses, skipped = [], 0
    for number in range(40):
        trained.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            loss = nn.functional.cross_entropy(trained(tokens).float(), targets)
        scaler.scale(loss).backward()
        before = snapshot(trained, optimizer)
        if number % 10 == 3:
            list(trained.parameters())[1].grad[3, 2] = torch.inf
        scaler.step(optimizer)
        if number % 10 == 3:
            skipped += 1
            assert snapshot(trained, optimizer) == before
        scaler.update()
        losses.append(loss.item())
    assert skipped == 4
    assert losses[-1] < 0.9 * losses[0]
