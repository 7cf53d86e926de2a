"""Sharded parameters for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

COLLECTIVES = [
    name
    for name in (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "recv",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    )
    if hasattr(dist, name)
]
"""Every name that one of the supported versions of torch has."""

SHAPES = {"a": (12, 8), "b": (1, 16), "c": (3, 8), "d": (9, 5), "e": (8, 24)}


def whole_mesh(device: torch.device) -> DeviceMesh:
    return DeviceMesh(device.type, list(range(dist.get_world_size())))


def full(name: str, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + ord(name[0]))
    return torch.randn(SHAPES[name[0]], generator=generator).to(device)


def shard(tensor: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> DTensor:
    return distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)


def parameters(mesh: DeviceMesh, device: torch.device, dim: int = 0) -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(shard(full(n, 0, device), mesh, dim)) for n in SHAPES}


def give_gradients(params: dict[str, nn.Parameter], seed: int, device: torch.device) -> None:
    for name, param in params.items():
        grad = full(name, seed, device)
        if isinstance(param, DTensor):
            mesh, placements = param.device_mesh, param.placements
            grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
        param.grad = grad


def contents(optimizer: torch.optim.Optimizer, params: dict[str, nn.Parameter]) -> list[Any]:
    """Copies of every parameter, gradient and value of state on this rank."""
    tensors = [t for p in params.values() for t in (p.detach(), p.grad) if t is not None]
    held: list[Any] = [tensor.to_local().clone() for tensor in tensors]
    for entry in optimizer.state.values():
        held += [v.clone() if isinstance(v, torch.Tensor) else v for v in entry.values()]
    return held


def same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(first, second, strict=True)
    )


def on_every_rank(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def refusal(optimizer: torch.optim.Optimizer, **arguments: Any) -> tuple[str, str]:
    """Kind and message of the error that every rank raises in ``step``."""
    try:
        optimizer.step(**arguments)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", "no error"


class Collectives:
    """The collectives that this process enters from now on, with the bytes of their first tensor.

    patch: pytest's, where the process lives on.
    """

    def __init__(self, patch: pytest.MonkeyPatch | None = None) -> None:
        self._calls: list[tuple[str, int]] = []
        assign = setattr if patch is None else patch.setattr
        for name in COLLECTIVES:
            assign(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else None
            size = first.numel() * first.element_size() if isinstance(first, torch.Tensor) else 0
            self._calls.append((name, size))
            return real(*args, **kwargs)

        return call

    def take(self) -> list[tuple[str, int]]:
        calls, self._calls = self._calls, []
        return calls
