"""Sharded matrices for the tests of this folder, and their training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

SHAPES: dict[str, tuple[int, ...]] = {
    "a": (12, 8),
    "b": (1, 16),
    "c": (3, 8),
    "d": (9, 5),
    "e": (8, 24),
    "s": (5, 4, 6),
}
"""Matrices, and a stack of them."""
STEPS = 4


def initial(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def gradient(name: str, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
    """Gradients come and go: 'c' has none in step 0, 'd' none in step 2."""
    if (name, step) in {("c", 0), ("d", 2)}:
        return None
    torch.manual_seed(100 * step + ord(name))
    return torch.randn(SHAPES[name]).to(dtype)


def elements() -> int:
    return sum(math.prod(shape) for shape in SHAPES.values())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


Place = Callable[[str, torch.Tensor], torch.Tensor]


def give(params: dict[str, nn.Parameter], place: Place, step: int) -> None:
    for name, param in params.items():
        grad = gradient(name, step, param.dtype)
        param.grad = None if grad is None else place(name, grad)


def train(
    optimizer: torch.optim.Optimizer,
    params: dict[str, nn.Parameter],
    place: Place,
    steps: range = range(STEPS),
) -> dict[str, torch.Tensor]:
    for step in steps:
        give(params, place, step)
        optimizer.step()
    return {name: whole(param.detach()).clone() for name, param in params.items()}


def parameters(place: Place, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(place(name, full)) for name, full in initial(dtype).items()}


def alone(name: str, full: torch.Tensor) -> torch.Tensor:
    return full


def over(mesh: DeviceMesh, *placements: Any) -> Place:
    """This rank's part of what every rank has, without communication."""
    everywhere = [Replicate()] * mesh.ndim
    return lambda name, full: DTensor.from_local(
        full, mesh, everywhere, run_check=False
    ).redistribute(placements=placements)


def layout(name: str, world: int) -> Place:
    line = DeviceMesh("cpu", list(range(world)))
    if name in ("rows", "columns", "replicated"):
        return over(line, {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}[name])
    if name == "two meshes":
        second = DeviceMesh("cpu", torch.arange(world).view(1, -1))
        places = [over(line, Shard(0)), over(second, Replicate(), Shard(1))]
        return lambda name, full: places[ord(name) % 2](name, full)
    grid = DeviceMesh("cpu", torch.arange(world).view(2, -1))
    pairs = {"hybrid": (Replicate(), Shard(0)), "grid": (Shard(0), Shard(1))}
    return over(grid, *pairs[name])


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normuon": {"normuon": True, "ns_schedule": "tuned3", "adjust_lr_fn": "match_rms_adamw"},
    "cautious": {"cautious": True, "nesterov": False},
    "stochastic": {"stochastic_round": True, "batched_ns": True},
}


def settings_of(mode: str, chosen: str) -> dict[str, Any]:
    return {"lr": 0.02, "sharded_mode": mode, **SETTINGS[chosen]}
