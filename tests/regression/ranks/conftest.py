"""Started on every rank by torchrun: the process group lives as long as the session."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session", autouse=True)
def process_group(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    yield
    dist.destroy_process_group()
