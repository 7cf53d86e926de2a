"""Eight-bit products in Newton-Schulz: Muon still goes about where it went."""

from __future__ import annotations

import pytest
import torch
from training import gradients, start, train

from gefen import GefenMuon, GefenMuonHybrid


@pytest.mark.parametrize("compiled", [True, False])
def test_muon_takes_it(compiled: bool, device: torch.device) -> None:
    """Alone, and in a batch beside a group that does not."""
    shape = (512, 512)
    plain, first, second = (start(shape, device=device) for _ in range(3))
    chosen = {"weight_decay": 0.0, "fp8_ns_compile": compiled}
    before = plain.detach().clone()
    train(GefenMuon([plain], **chosen), plain, gradients(shape, 2))
    groups = [{"params": [first], "fp8_ns": True}, {"params": [second]}]
    optimizer = GefenMuon(groups, batched_ns=True, **chosen)
    for grad in gradients(shape, 2):
        first.grad = second.grad = grad.to(device)
        optimizer.step()
    assert torch.equal(second, plain)
    moved, off = (plain - before).norm(), (first - plain).norm()
    assert 0.02 * moved < off < 0.4 * moved


@pytest.mark.parametrize("size", [8, 512])
def test_the_hybrid_takes_it(size: int, device: torch.device) -> None:
    param = start((size, size), device=device)
    before = param.detach().clone()
    optimizer = GefenMuonHybrid([("w", param)], lr=0.1, fp8_ns=True)
    assert optimizer.param_groups[0]["fp8_ns"] is True
    assert train(optimizer, param, gradients((size, size), 2)).isfinite().all()
    assert not torch.equal(param, before)
