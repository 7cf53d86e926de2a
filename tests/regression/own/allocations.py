"""Counts what an operation allocates."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Bytes of the largest new storage, apart from those in ``known``."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.sizes[storage.data_ptr()] = storage.nbytes()
                self.kept.append(storage)  # so that no address is used twice
        return out

    def largest(self, known: set[int]) -> int:
        return max(size for address, size in self.sizes.items() if address not in known)
