"""Small parameters, gradients and training, for the tests of single optimizers."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import torch
from torch import Tensor, nn
from workload import OPTIMIZERS, model, step

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def gradients(shape: tuple[int, ...], steps: int, dtype: torch.dtype = F32) -> list[Tensor]:
    """Of uneven size, so that block magnitudes and rows differ."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    scale = torch.rand(shape, generator=generator) ** 3
    return [
        (torch.randn(shape, generator=generator) * scale * (i + 1)).to(dtype) for i in range(steps)
    ]


def train(optimizer: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    for grad in grads:
        param.grad = grad.to(param.device)
        optimizer.step()
    return param.detach()


def start(
    shape: tuple[int, ...], dtype: torch.dtype = F32, device: torch.device | str = "cpu"
) -> nn.Parameter:
    generator = torch.Generator().manual_seed(7)
    return nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))


def trained(kind: str, steps: int = 3) -> tuple[nn.Module, Any]:
    """The model of workload.py and its optimizer, after ``steps`` steps."""
    pair: tuple[nn.Module, Any] = copy.deepcopy(_trained_once(kind, steps))
    return pair


@functools.cache
def _trained_once(kind: str, steps: int) -> tuple[nn.Module, Any]:
    net = model()
    optimizer = OPTIMIZERS[kind](net)
    for number in range(steps):
        step(net, optimizer, number)
    return net, optimizer


def fresh(kind: str) -> tuple[nn.Module, Any]:
    net = model(seed=1)
    return net, OPTIMIZERS[kind](net)


def own_copy(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Through torch.save, as a user would get it."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
