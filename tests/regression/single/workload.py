"""A small model, gradients that depend on the step alone, and snapshots of everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gefen import Gefen, GefenMuon, GefenMuonHybrid, split_params_for_muon

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "gefen": lambda model: Gefen(model.named_parameters(), lr=1e-2, weight_decay=0.1),
    "gefen-stochastic": lambda model: Gefen(
        model.parameters(), lr=1e-2, stochastic_round=True, codebook_refresh_every=3
    ),
    "muon": lambda model: GefenMuon(split_params_for_muon(model)[0], lr=1e-2, normuon=True),
    "hybrid": lambda model: GefenMuonHybrid(model, lr=1e-2, weight_decay=0.1),
    "hybrid-adamw": lambda model: GefenMuonHybrid(model, lr=1e-2, backup_optimizer="adamw"),
}


def model(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Embedding(24, 16), nn.Linear(16, 40), nn.Linear(40, 8), nn.LayerNorm(8))
    return nn.Sequential(*layers).to(device, dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One step with the gradients of step ``number``."""
    generator = torch.Generator().manual_seed(number)
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=generator) * 0.1
        param.grad = grad.to(param.device, param.dtype)
    optimizer.step()


def bytes_of(value: Any) -> Any:
    """``value`` with every tensor replaced by its dtype, shape and bytes: == then is bitwise."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), raw.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bytes_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bytes_of(item) for item in value]
    return value


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """All bytes that a step can change."""
    return bytes_of([list(model.parameters()), optimizer.state_dict()])
