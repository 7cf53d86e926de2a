"""Sharded parameters for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHAPES = {"a": (12, 8), "b": (1, 16), "c": (3, 8), "d": (9, 5), "e": (8, 24)}


def whole_mesh(device: torch.device) -> DeviceMesh:
    return DeviceMesh(device.type, list(range(dist.get_world_size())))


def full(name: str, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + ord(name[0]))
    return torch.randn(SHAPES[name[0]], generator=generator).to(device)


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of a tensor that every rank has, without communication."""
    everywhere = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=placements)


def shard(tensor: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> DTensor:
    return placed(tensor, mesh, [Shard(dim)])


def parameters(mesh: DeviceMesh, device: torch.device, dim: int = 0) -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(shard(full(n, 0, device), mesh, dim)) for n in SHAPES}


def give_gradients(params: dict[str, nn.Parameter], seed: int, device: torch.device) -> None:
    for name, param in params.items():
        grad = full(name, seed, device)
        if isinstance(param, DTensor):
            grad = placed(grad, param.device_mesh, param.placements)
        param.grad = grad


def contents(optimizer: torch.optim.Optimizer, params: dict[str, nn.Parameter]) -> list[Any]:
    """Copies of every parameter, gradient and value of state on this rank."""
    held: list[Any] = [t for p in params.values() for t in (p.detach(), p.grad) if t is not None]
    for entry in optimizer.state.values():
        held += entry.values()
    local = [value.to_local() if isinstance(value, DTensor) else value for value in held]
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in local]


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


class Collectives(TorchDispatchMode):
    """What this process asks of other ranks while entered, whichever function of torch does it.

    Every collective and message, coalesced or not, and those of DTensor too, is an operator of
    one of these namespaces in the end.
    """

    _NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
    _LOCAL = ("wait_tensor", "_wrap_tensor_autograd")

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: it may ask something of other ranks
        name = func.__name__.split(".")[0]
        if func.namespace in self._NAMESPACES and name not in self._LOCAL:
            self._calls.append((name.strip("_"), args))
        return func(*args, **(kwargs or {}))

    def take(self) -> list[tuple[str, int]]:
        """The calls since the last time, with the bytes of their first tensor."""
        return [(name, _bytes(args)) for name, args in self.take_arguments()]

    def take_arguments(self) -> list[tuple[str, tuple[Any, ...]]]:
        calls, self._calls = self._calls, []
        return calls


def _bytes(args: tuple[Any, ...]) -> int:
    first = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), None)
    return 0 if first is None else first.numel() * first.element_size()
