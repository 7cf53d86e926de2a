"""What runs kernels: the CUDA driver, or anything else that takes the same tables."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

BLOCK = 256
"""Threads of each block, in every kernel."""


class Driver(Protocol):
    """Runs kernels ``extern "C" __global__ void NAME(const void* table, long long items)``."""

    def launch(self, kernel: str, grid: int, table: Tensor, items: int) -> None:
        """Start ``grid`` blocks of ``BLOCK`` threads on the current stream of the table's device.

        ``table`` is contiguous and lies on the device; it may be freed once this returns.

        Raises:
            CudaKernelError: there is no such kernel, or the launch was refused.
        """
