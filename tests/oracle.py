"""The updates written once more, element by element and in float64, from their definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Momentum:
    """Quantised EMA; ``period`` and ``codebook`` are given, as other tests are about them."""

    def __init__(self, n: int, period: int, codebook: Any, beta: float) -> None:
        self.codebook = np.asarray(codebook, dtype=np.float64)
        self.period, self.beta = period, beta
        self.value = np.zeros(n)

    def advance(self, grad: Array) -> Array:
        mean = self.value + (1 - self.beta) * (grad - self.value)
        blocks = mean.reshape(-1, self.period)
        magnitude = np.abs(blocks).max(axis=1, keepdims=True)
        x = blocks / np.where(magnitude == 0, 1, magnitude)
        nearest = np.abs(x[..., None] - self.codebook).argmin(axis=-1)
        magnitude = magnitude.astype(np.float32).astype(np.float64)  # as the state keeps it
        self.value = (self.codebook[nearest] * magnitude).reshape(-1)
        return self.value


def block_roots(history: list[Array], period: int, beta2: float) -> Array:
    """sqrt of the bias-corrected EMA of the block means of g², one for each element."""
    v = 0.0
    for grad in history:
        v = beta2 * v + (1 - beta2) * (grad**2).reshape(-1, period).mean(axis=1)
    return np.repeat(np.sqrt(v / (1 - beta2 ** len(history))), period)


def factored_roots(history: list[Array], shape: tuple[int, int], beta2: float) -> Array:
    """The same where rows and columns of a matrix have EMAs."""
    r, c = np.zeros(shape[0]), np.zeros(shape[1])
    for grad in history:
        squares = (grad**2).reshape(shape)
        r = beta2 * r + (1 - beta2) * squares.mean(axis=1)
        c = beta2 * c + (1 - beta2) * squares.mean(axis=0)
    v = np.outer(r, c) / (r.mean() or 1.0)
    return np.sqrt(v / (1 - beta2 ** len(history))).reshape(-1)
