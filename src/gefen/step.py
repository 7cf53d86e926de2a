"""The order of a step: all halves are ready, and all ranks, before any changes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gefen import capture
from gefen.checkpoint import CheckpointedOptimizer, forbid_inference
from gefen.half import Half
from gefen.parameters import Slot, check_gradient, slots
from gefen.scaling import forgotten_on_failure, refuse_controls


def stepped(optimizer: CheckpointedOptimizer, closure: Callable[[], Any] | None) -> Any:
    """Step all halves, once all of them and all ranks are ready; return the closure's value.

    Under ``torch.compile`` as well it runs as it is: what it does depends on values.
    """
    run = _stepped
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(_stepped)  # type: ignore[no-untyped-call]
    return run(optimizer, closure)


def _stepped(optimizer: CheckpointedOptimizer, closure: Callable[[], Any] | None) -> Any:
    forbid_inference("step()")
    halves: Sequence[Any] = optimizer._halves()
    with forgotten_on_failure(optimizer), _ended_on_failure(halves):
        agreement = optimizer._agreement()
        if capture.under_way():
            capture.check(halves, agreement)
        if agreement is not None:
            return agreement.step(optimizer, halves, partial(evaluate, closure))
        refuse_controls(optimizer)
        loss = evaluate(closure)
        plans = [half._prepare(half._collect()) for half in halves]
        for half, plan in zip(halves, plans, strict=True):
            half._commit(plan)
        return loss


@contextmanager
def _ended_on_failure(halves: Sequence[Half]) -> Iterator[None]:
    """Let go of what a step that fails has begun with, its gradients among it."""
    try:
        yield
    except BaseException:
        for half in halves:
            half._ended()
        raise


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """What ``closure`` returns, run with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def gradients(
    groups: list[dict[str, Any]], check: Callable[[Slot], None]
) -> Iterator[tuple[Slot, Tensor]]:
    """Every parameter that has a gradient, both validated, and that gradient."""
    for slot in slots(groups):
        grad = slot.param.grad
        if grad is not None:
            check(slot)
            check_gradient(slot.param, grad, slot.name)
            yield slot, grad.detach()
