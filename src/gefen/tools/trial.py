"""Steps that are taken back: parameters, gradients, optimizer, buffers and random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gefen.errors import InvalidArgumentError

Closure = Callable[[], Any]


@contextmanager
def taken_back(optimizer: Any, model: nn.Module | None = None) -> Iterator[None]:
    """Put everything back at the end, also where the body raises.

    Buffers of a model, such as the averages of BatchNorm, are found through ``model`` alone.
    """
    params = parameters(optimizer)
    tensors = [*params, *([] if model is None else [*model.parameters(), *model.buffers()])]
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    grads = [(param, param.grad) for param in params]
    kept += [(grad, grad.detach().clone()) for _, grad in grads if grad is not None]
    state = copy.deepcopy(optimizer.state_dict())
    with torch.random.fork_rng(devices=_devices()):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)
                for param, grad in grads:
                    param.grad = grad
            optimizer.load_state_dict(state)


def _devices() -> list[int]:
    """Those that have random numbers of their own so far."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return list(range(torch.cuda.device_count())) if started else []


def parameters(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer, group by group."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_rate(optimizer: Any, rate: float) -> None:
    """Give every group this learning rate; rates that are tensors keep being these tensors."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def backward(optimizer: Any, closure: Closure) -> float:
    """New gradients from ``closure``, which calls ``backward``; the loss it returns."""
    optimizer.zero_grad()
    with torch.enable_grad():
        loss = closure()
    if isinstance(loss, Tensor):
        loss = loss.detach()
    if all(param.grad is None for param in parameters(optimizer)):
        raise InvalidArgumentError("Invalid closure: it left no gradient; let it call backward()")
    return float(loss)
