"""CUDA-graph capture: what a step may not do in it, since replays repeat the device's part alone.

The host reads nothing of the device, nothing is made that must outlive the graph, and what the
host decides or computes is the same in every replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gefen.errors import InvalidArgumentError


def under_way() -> bool:
    """Whether what is started on the current stream becomes part of a CUDA graph."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()


def reads_rate(rate: Tensor, params: Iterable[Tensor]) -> bool:
    """Whether the host may read a rate although its optimizer is capturable: it lies there alone.

    torch.distributed.checkpoint puts such a one in the place of others while it makes state.
    """
    if rate.device.type != "cpu" or under_way():
        return False
    return all(param.device.type != "cpu" for param in params)


def check(halves: Sequence[Any], agreement: object) -> None:
    """Raise where these optimizers' step cannot be captured at all."""
    if not all(half.capturable for half in halves):
        raise InvalidArgumentError(
            "Invalid capturable=False: a CUDA graph is being captured, and its replays would "
            "repeat this step's counts and rates; pass capturable=True, and step a few times "
            "before the capture"
        )
    if agreement is not None:
        raise InvalidArgumentError(
            "step() cannot be captured in a CUDA graph where ranks share parameters: they agree "
            "on the host before each step; pass sharded_mode='approx', or do not capture it"
        )


def refuse_first(name: str, what: str) -> None:
    """Raise for a parameter that needs a step outside of the capture."""
    raise InvalidArgumentError(
        f"Parameter {name!r} {what} in a step that is captured in a CUDA graph: replays would do "
        "so anew each time; step with the same gradients present before the capture"
    )
