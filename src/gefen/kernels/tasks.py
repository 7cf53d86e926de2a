"""What one parameter's update reads and writes: the arguments that all implementations share.

Tensors named as written are changed in place. Parameters and gradients have any strides; state
tensors are contiguous and of any shape, for which only the number of elements is given here.
Elements are counted row-major. Scalars that are tensors have one element and lie on the
parameter's device: the host does not read them, so a step can be captured.

A parameter, its gradient and its state may be a shard: whole rows of a parameter that ranks share.
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

Seed: TypeAlias = tuple[Count, int]
"""(global step, parameter number) of random numbers."""

BOUND = 10
"""Learning rates that one element moves in one step of Adam at most, weight decay apart."""

ROUNDING = 1 << 62
"""Set in a parameter's number, its random numbers are others: those its own values round by."""


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
    seed: Seed | None
    """Of stochastic rounding; None rounds to the nearest."""
    offset: int = 0
    """Of the first element within the whole parameter: element i draws the random numbers of
    element ``offset + i``, so that shards draw what the whole draws."""


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
    """The scalars of one Adam step; ``step`` is 1 at the first. Tasks may share it.

    ``maximize`` adds the update instead of subtracting it; weight decay is the same.
    """

    lr: Scalar
    weight_decay: float
    eps: float
    beta1: float
    beta2: float
    step: Count
    maximize: bool = False

    @property
    def rate(self) -> Scalar:
        """What the update is multiplied by, for the first moment's bias as well."""
        rate = wide(self.lr) / (1 - self.beta1 ** wide(self.step))
        return -rate if self.maximize else rate

    @property
    def reach(self) -> Scalar:
        """The largest movement of an element in one step, weight decay apart."""
        return BOUND * wide(self.lr)

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


def shrink(count: int) -> float:
    """A power of two by which squares are multiplied before so many of them are added.

    Then the sum overflows only where the mean does. It is bounded, since small squares would
    vanish in their turn.
    """
    return 2.0 ** -min((count - 1).bit_length(), 20)


def wide(scalar: Scalar) -> Scalar:
    """A scalar in float64 without dimensions, as Python's are."""
    return scalar.double().reshape(()) if isinstance(scalar, Tensor) else scalar


@dataclass(slots=True, eq=False)
class BlockStep:
    """Adam with one second moment per block. Written: ``param``, ``v`` float32 [n / period].

    ``rounding``: None rounds a parameter of 16 bits to the nearest, after weight decay and after
    the update, as torch.optim does. Given a seed, a bfloat16 parameter is computed in float32 and
    written once, rounded up or down at random by distance: the upper 16 bits of the element's
    random word are added to the float32's bits, of which the upper 16 stay. Where that leaves the
    finite numbers, and of what is not finite, the result is the nearest. The random numbers are
    those of the parameter's number with ``ROUNDING`` set, never those of its momentum. Parameters
    of other dtypes are not affected.
    """

    param: Tensor
    momentum: Momentum
    v: Tensor
    adam: Adam
    rounding: Seed | None = None


@dataclass(slots=True, eq=False)
class FactoredStep:
    """Adam with a factored second moment.

    Written: ``param`` [rows, columns], ``row`` float32 [rows], ``column`` float32 [columns].
    ``rounding`` as in :class:`BlockStep`.

    ``column_mean``, float32 [columns], is given where the matrix is a shard: the mean over all
    rows of the whole parameter of each column's g², which ``column`` then takes up instead of
    that of these rows; see :func:`gefen.kernels.reference.column_means`. A shard without rows
    only takes up that, so that ``column`` is equal on all ranks.
    """

    param: Tensor
    momentum: Momentum
    row: Tensor
    column: Tensor
    adam: Adam
    column_mean: Tensor | None = None
    rounding: Seed | None = None
