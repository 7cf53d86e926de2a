"""The updates of a step, and the one place that decides which implementation runs them.

An implementation is a module with the operations of :mod:`gefen.kernels.reference`; each takes
a list of tasks (:mod:`gefen.kernels.tasks`) that lie on one device.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import TypeVar

import torch

from gefen.kernels import reference
from gefen.kernels.tasks import BlockStep, DenseMomentum, FactoredStep

__all__ = ["active_backend", "block_step", "factored_step", "momentum_update"]

Task = TypeVar("Task", DenseMomentum, BlockStep, FactoredStep)


def active_backend(device: torch.device | str, fused: bool = True) -> str:
    """Name of what runs on ``device`` for an optimizer made with ``fused``."""
    return _backend(torch.device(device), fused).__name__.rpartition(".")[2]


def momentum_update(tasks: Sequence[DenseMomentum], fused: bool) -> None:
    """Advance each quantised momentum and write the dense direction to ``task.out``."""
    for device, part in _by_device(tasks).items():
        _backend(device, fused).momentum_update(part)


def block_step(tasks: Sequence[BlockStep], fused: bool) -> None:
    """Step each parameter whose second moment is shared by blocks."""
    for device, part in _by_device(tasks).items():
        _backend(device, fused).block_step(part)


def factored_step(tasks: Sequence[FactoredStep], fused: bool) -> None:
    """Step each matrix whose second moment is an outer product."""
    for device, part in _by_device(tasks).items():
        _backend(device, fused).factored_step(part)


def _by_device(tasks: Sequence[Task]) -> dict[torch.device, list[Task]]:
    parts: dict[torch.device, list[Task]] = {}
    for task in tasks:
        parts.setdefault(task.momentum.grad.device, []).append(task)
    return parts


def _backend(device: torch.device, fused: bool) -> ModuleType:
    if fused and device.type == "cuda":
        _warn_no_kernels()
    return reference


@functools.cache
def _warn_no_kernels() -> None:
    warnings.warn(
        "gefen has no CUDA kernels in this version: the reference runs on CUDA tensors, "
        "correct but slower. Pass fused=False to choose it silently.",
        stacklevel=2,
    )
