"""Small parameters, gradients and training, for the tests of single optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
        param.grad = grad
        optimizer.step()
    return param.detach()


def start(shape: tuple[int, ...], dtype: torch.dtype = F32) -> nn.Parameter:
    generator = torch.Generator().manual_seed(7)
    return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
