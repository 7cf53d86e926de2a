"""capturable=True does what capturable=False does; on a GPU, as replays of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from workload import model

from gefen import Gefen, GefenMuon, GefenMuonHybrid, split_params_for_muon

WARM_UP, STEPS = 3, 4
# RMS difference over RMS movement: scalars are rounded elsewhere, so a momentum on the border
# between two entries of the codebook may fall to either side.
CLOSE = {torch.float32: 0.01, torch.bfloat16: 0.05}

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "factored": lambda net, **options: Gefen(net.parameters(), weight_decay=0.1, **options),
    "stochastic": lambda net, **options: Gefen(
        net.parameters(), factored_v_2d=False, stochastic_round=True, **options
    ),
    "muon": lambda net, **options: GefenMuon(
        split_params_for_muon(net)[0], normuon=True, **options
    ),
    "hybrid": lambda net, **options: GefenMuonHybrid(net, **options),
}


def repeated(optimizer: Any, device: torch.device) -> Callable[[], Any]:
    """What makes another step like the last ones."""
    if device.type != "cuda":
        step: Callable[[], Any] = optimizer.step
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


def give_gradients(net: nn.Module, number: int) -> None:
    """Where they lay before, as replays demand."""
    generator = torch.Generator().manual_seed(number)
    for param in net.parameters():
        grad = torch.randn(param.shape, generator=generator) * 0.1
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.copy_(grad)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_captured_steps(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    movements = []
    for capturable in (False, True):
        net = model(dtype, device)
        before = [param.detach().clone().float() for param in net.parameters()]
        rate = torch.tensor(0.01, device=device)
        optimizer = OPTIMIZERS[kind](net, lr=rate, capturable=capturable)
        act = optimizer.step
        for number in range(WARM_UP + STEPS):
            give_gradients(net, number)
            if number == WARM_UP and capturable:
                act = repeated(optimizer, device)
            rate.mul_(0.9)
            act()
        after = [param.detach().float() for param in net.parameters()]
        movements.append([a - b for a, b in zip(after, before, strict=True)])
        assert {int(entry["step"]) for entry in optimizer.state.values()} == {WARM_UP + STEPS}
    for expected, actual in zip(*movements, strict=True):
        assert (actual - expected).norm() <= CLOSE[dtype] * expected.norm()
