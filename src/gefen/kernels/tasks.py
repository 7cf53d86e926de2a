"""What one parameter's update reads and writes: the arguments that all implementations share.

Tensors named as written are changed in place. Parameters and gradients have any strides; state
tensors are contiguous. Elements are counted row-major.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gefen.codebook import Quantizer


@dataclass(frozen=True, slots=True)
class Momentum:
    """One parameter's quantised momentum and the gradient that advances it.

    Written: ``index`` uint8 [n] and ``magnitude`` float32 [n / period].
    """

    grad: Tensor
    index: Tensor
    magnitude: Tensor
    period: int
    beta: float
    quantizer: Quantizer
    dtype: torch.dtype
    """Of the arithmetic: float64 for float64 parameters, otherwise float32."""
    seed: tuple[int, int] | None
    """(global step, parameter number) of stochastic rounding; None rounds to the nearest."""


@dataclass(frozen=True, slots=True)
class DenseMomentum:
    """Momentum wanted as a dense tensor. Written: the momentum's state and ``out``.

    ``out`` is contiguous, of the gradient's shape and any floating dtype.
    """

    momentum: Momentum
    nesterov: bool
    out: Tensor


@dataclass(frozen=True, slots=True)
class Adam:
    """The scalars of one Adam step; ``correction`` is 1 − beta^t."""

    lr: float
    weight_decay: float
    eps: float
    beta2: float
    correction1: float
    correction2: float


@dataclass(frozen=True, slots=True)
class BlockStep:
    """Adam with one second moment per block. Written: ``param``, ``v`` float32 [n / period]."""

    param: Tensor
    momentum: Momentum
    v: Tensor
    adam: Adam


@dataclass(frozen=True, slots=True)
class FactoredStep:
    """Adam with a factored second moment.

    Written: ``param`` [rows, columns], ``row`` float32 [rows], ``column`` float32 [columns].
    """

    param: Tensor
    momentum: Momentum
    row: Tensor
    column: Tensor
    adam: Adam
