"""CPU time that the host spends on a step of many parameters, with kernels that do nothing.

    python benchmarks/host.py [--parameters 300]

Gradients are new tensors in every step, as after zero_grad().
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gefen
from gefen import kernels
from gefen.kernels import reference
from gefen.kernels.launch import Kernels

STEPS = 60


class Idle:
    """A driver that runs nothing."""

    def launch(self, kernel: str, grid: int, table: Tensor, items: int) -> None:
        """Start no kernel."""

    def store(self, table: Tensor, content: bytes | bytearray) -> None:
        """Write nothing."""


def parameters(count: int) -> list[Tensor]:
    """Matrices and vectors in turn, bfloat16."""
    torch.manual_seed(0)
    shapes = [(16, 16) if i % 2 else (16,) for i in range(count)]
    return [torch.randn(s, dtype=torch.bfloat16).requires_grad_() for s in shapes]


def measured(act: Callable[[], Any], before: Callable[[], Any]) -> tuple[float, float]:
    """(median, least) milliseconds of this thread."""
    times = []
    for _ in range(STEPS):
        before()
        start = time.thread_time()
        act()
        times.append((time.thread_time() - start) * 1e3)
    return statistics.median(times[STEPS // 3 :]), min(times)


def step_time(make: Callable[[list[Tensor]], Any], params: list[Tensor]) -> tuple[float, float]:
    """Of steps that repeat."""

    def renew() -> None:
        for param in params:
            param.grad = torch.randn_like(param)

    optimizer, idle = make(params), kernels._backend
    kernels._backend = lambda device, fused: reference  # type: ignore[assignment]
    renew()
    optimizer.step()  # learns the codebook
    kernels._backend = idle  # type: ignore[assignment]
    return measured(optimizer.step, renew)


KINDS: dict[str, Callable[[list[Tensor]], Any]] = {
    "Gefen": lambda p: gefen.Gefen(p, weight_decay=0.1),
    "Gefen, capturable": lambda p: gefen.Gefen(p, weight_decay=0.1, capturable=True),
    "Gefen, block form": lambda p: gefen.Gefen(p, factored_v_2d=False),
}


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=300)
    count = parser.parse_args().parameters
    torch.set_num_threads(1)
    idle = Kernels(Idle(), torch.device("cpu"), processors=132)
    kernels._backend = lambda device, fused: idle  # type: ignore[assignment]
    for name, make in KINDS.items():
        median, least = step_time(make, parameters(count))
        print(f"{name}: {median:.1f} ms (least {least:.1f})")


if __name__ == "__main__":
    main()
