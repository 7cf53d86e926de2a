"""What one parameter's update reads and writes: the arguments that all implementations share.

Tensors named as written are changed in place. Parameters and gradients have any strides; state
tensors are contiguous. Elements are counted row-major. Scalars that are tensors have one element
and lie on the parameter's device: the host does not read them, so a step can be captured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gefen.codebook import Quantizer

Scalar: TypeAlias = float | Tensor
Count: TypeAlias = int | Tensor


@dataclass(slots=True, eq=False)
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
    seed: tuple[Count, int] | None
    """(global step, parameter number) of stochastic rounding; None rounds to the nearest."""


@dataclass(slots=True, eq=False)
class DenseMomentum:
    """Momentum wanted as a dense tensor. Written: the momentum's state and ``out``.

    ``out`` is contiguous, of the gradient's shape and any floating dtype.
    """

    momentum: Momentum
    nesterov: bool
    out: Tensor


@dataclass(slots=True, eq=False)
class Adam:
    """The scalars of one Adam step; ``step`` is 1 at the first. Tasks may share it."""

    lr: Scalar
    weight_decay: float
    eps: float
    beta1: float
    beta2: float
    step: Count

    @property
    def rate(self) -> Scalar:
        """What the update is multiplied by, for the first moment's bias as well."""
        return wide(self.lr) / (1 - self.beta1 ** wide(self.step))

    @property
    def correction2(self) -> Scalar:
        """Of the second moment's bias."""
        return 1 - self.beta2 ** wide(self.step)

    @property
    def root2(self) -> Scalar:
        """Its root."""
        correction = self.correction2
        return correction.sqrt() if isinstance(correction, Tensor) else math.sqrt(correction)

    @property
    def decay(self) -> Scalar:
        """What a parameter loses of itself, 0.0 where nothing decays."""
        return wide(self.lr) * self.weight_decay if self.weight_decay else 0.0


def wide(scalar: Scalar) -> Scalar:
    """A scalar in float64 without dimensions, as Python's are."""
    return scalar.double().reshape(()) if isinstance(scalar, Tensor) else scalar


@dataclass(slots=True, eq=False)
class BlockStep:
    """Adam with one second moment per block. Written: ``param``, ``v`` float32 [n / period]."""

    param: Tensor
    momentum: Momentum
    v: Tensor
    adam: Adam


@dataclass(slots=True, eq=False)
class FactoredStep:
    """Adam with a factored second moment.

    Written: ``param`` [rows, columns], ``row`` float32 [rows], ``column`` float32 [columns].
    """

    param: Tensor
    momentum: Momentum
    row: Tensor
    column: Tensor
    adam: Adam
