"""What torch.amp.GradScaler hands to an optimizer for one step, and what becomes of it.

It sets ``grad_scale`` and ``found_inf`` on optimizers that unscale by themselves
(``_step_supports_amp_scaling``), and deletes both after the step, but not after one that raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gefen.errors import InvalidArgumentError
from gefen.parameters import local, slots

CONTROLS = ("grad_scale", "found_inf")


@contextmanager
def forgotten_on_failure(optimizer: Any) -> Iterator[None]:
    """Delete both attributes when a step fails: a scaler multiplies a rest into its next scale."""
    try:
        yield
    except BaseException:
        for name in CONTROLS:
            vars(optimizer).pop(name, None)
        raise


def refuse_controls(optimizer: Any) -> None:
    """Raise where an optimizer that leaves unscaling to the scaler was given scaled gradients."""
    for name in CONTROLS:
        if getattr(optimizer, name, None) is not None:
            raise InvalidArgumentError(
                f"{name} is set, but this optimizer takes unscaled gradients: delete it, and "
                "step through torch.amp.GradScaler.step()"
            )


def has_overflowed(optimizer: Any) -> bool:
    """Whether this rank's gradient scaler, if there is one, found an infinity."""
    found = getattr(optimizer, "found_inf", None)
    if found is None and getattr(optimizer, "grad_scale", None) is not None:
        raise InvalidArgumentError(
            "grad_scale is set without found_inf: step through torch.amp.GradScaler.step()"
        )
    return found is not None and bool(local(torch.as_tensor(found)) > 0)


class Unscaling:
    """Gradients divided by ``grad_scale`` in place, as the scaler does it.

    revocable: keep copies, so that :meth:`revoke` gives back their bytes.
    """

    def __init__(self, optimizer: Any, revocable: bool) -> None:
        self._scale = getattr(optimizer, "grad_scale", None)
        self._revocable = revocable
        self._kept: list[tuple[Tensor, Tensor]] = []

    def apply(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Divide this rank's shard of every gradient; False where there is no scale."""
        if self._scale is None:
            return False
        inverse = float(local(torch.as_tensor(self._scale)).double().reciprocal().float())
        for slot in slots(groups):
            if slot.param.grad is not None:
                grad = local(slot.param.grad)
                if self._revocable:
                    self._kept.append((grad, grad.clone()))
                grad.mul_(inverse)
        return True

    def revoke(self) -> None:
        """Give the gradients back as they were."""
        for grad, before in self._kept:
            grad.copy_(before)

    def settle(self) -> None:
        """Free the copies: from now on the gradients stay divided."""
        self._kept.clear()
