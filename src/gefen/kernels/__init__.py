"""The updates of a step, and the one place that decides which implementation runs them.

An implementation has the operations of :mod:`gefen.kernels.reference`; each takes a list of tasks
(:mod:`gefen.kernels.tasks`) that lie on one device. On CUDA devices that can run them, these are
the kernels (:mod:`gefen.kernels.launch`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gefen.errors import CudaUnavailable
from gefen.kernels import reference
from gefen.kernels.tasks import BlockStep, DenseMomentum, FactoredStep

__all__ = [
    "active_backend",
    "block_step",
    "factored_step",
    "histogram",
    "momentum_update",
]

Task = TypeVar("Task", DenseMomentum, BlockStep, FactoredStep)


class Backend(Protocol):
    """What runs the updates on one device."""

    name: str

    def momentum_update(self, tasks: Sequence[DenseMomentum]) -> None: ...
    def block_step(self, tasks: Sequence[BlockStep]) -> None: ...
    def factored_step(self, tasks: Sequence[FactoredStep]) -> None: ...
    def histogram(self, gradients: Sequence[tuple[Tensor, int]], counts: Tensor) -> None: ...


def active_backend(device: torch.device | str, fused: bool = True) -> str:
    """Name of what runs on ``device`` for an optimizer made with ``fused``."""
    return _backend(torch.device(device), fused).name


def _named(name: str) -> AbstractContextManager[object]:
    """Show in profiles as the operation of that name; costs nothing otherwise."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(f"gefen::{name}")
    return nullcontext()


def momentum_update(tasks: Sequence[DenseMomentum], fused: bool) -> None:
    """Advance each quantised momentum and write the dense direction to ``task.out``."""
    with _named("momentum_update"):
        for device, part in _by_device(tasks).items():
            _backend(device, fused).momentum_update(part)


def block_step(tasks: Sequence[BlockStep], fused: bool) -> None:
    """Step each parameter whose second moment is shared by blocks."""
    with _named("block_step"):
        for device, part in _by_device(tasks).items():
            _backend(device, fused).block_step(part)


def factored_step(tasks: Sequence[FactoredStep], fused: bool) -> None:
    """Step each matrix whose second moment is an outer product."""
    with _named("factored_step"):
        for device, part in _by_device(tasks).items():
            _backend(device, fused).factored_step(part)


def histogram(gradients: Sequence[tuple[Tensor, int]], counts: Tensor, fused: bool) -> None:
    """Add gradients in blocks of their periods to ``counts``, int64 [4096], all on one device."""
    with _named("histogram"):
        _backend(counts.device, fused).histogram(gradients, counts)


def _by_device(tasks: Sequence[Task]) -> dict[torch.device, list[Task]]:
    numbers = [task.momentum.grad.get_device() for task in tasks]
    if len(set(numbers)) == 1:
        return {tasks[0].momentum.grad.device: list(tasks)}
    parts: dict[int, list[Task]] = {}
    for number, task in zip(numbers, tasks, strict=True):
        parts.setdefault(number, []).append(task)
    return {part[0].momentum.grad.device: part for part in parts.values()}


def _backend(device: torch.device, fused: bool) -> Backend:
    if not fused or device.type != "cuda":
        return reference
    from gefen.kernels import cuda, launch

    try:
        driver = cuda.driver(device)
    except CudaUnavailable as error:
        _warn_no_kernels(str(error))
        return reference
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return launch.Kernels(driver, device, processors)


@functools.cache
def _warn_no_kernels(reason: str) -> None:
    warnings.warn(
        f"gefen's CUDA kernels cannot run ({reason}): the reference runs on CUDA tensors, correct "
        "but slower. Pass fused=False to choose it silently.",
        stacklevel=2,
    )
