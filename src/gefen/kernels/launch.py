"""What runs kernels: the CUDA driver, or anything else that takes the same tables."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256
"""Threads of each block, in every kernel: THREADS in platform.cuh."""


class Driver(Protocol):
    """Runs kernels ``extern "C" __global__ void NAME(const void* table, long long items)``."""

    def launch(self, kernel: str, grid: int, table: Tensor, items: int) -> None:
        """Start ``grid`` blocks of ``BLOCK`` threads on the current stream of the table's device.

        ``table`` is contiguous and lies on the device; it may be freed once this returns.

        Raises:
            CudaKernelError: there is no such kernel, or the launch was refused.
        """


def probe(driver: Driver, device: torch.device | str, items: int = 1000) -> bool:
    """Whether a kernel that squares numbers does so on ``device``."""
    out = torch.zeros(items, dtype=torch.int64, device=device)
    table = torch.tensor([out.data_ptr()], dtype=torch.int64, device=device)
    driver.launch("probe", 2, table, items)
    return torch.equal(out.cpu(), torch.arange(items) ** 2)
