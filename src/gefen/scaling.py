"""What torch.amp.GradScaler hands to an optimizer for one step, and what becomes of it.

It sets ``grad_scale`` and ``found_inf`` on optimizers that unscale by themselves
(``_step_supports_amp_scaling``), and deletes both after the step, but not after one that raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gefen import capture
from gefen.errors import InvalidArgumentError
from gefen.parameters import local, slots

if TYPE_CHECKING:
    from gefen.work import Work

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
    """Raise where an optimizer that leaves unscaling to the scaler was given scaled gradients.

    One with float16 parameters does not leave it: its halves are told what the scaler found.
    """
    takes = hand_on(optimizer)
    for name in _given(optimizer):
        if not takes:
            raise InvalidArgumentError(
                f"{name} is set, but this optimizer takes unscaled gradients: delete it, and "
                "step through torch.amp.GradScaler.step()"
            )


def hand_on(optimizer: Any) -> bool:
    """Have halves unscale copies where there are float16 parameters; whether there are any.

    Raises where a half cannot.
    """
    takes = has_float16(optimizer)
    for half in optimizer._halves():
        half._scaled_by = optimizer if takes else None
    for name in _given(optimizer) if takes else ():
        if any(isinstance(half, torch.optim.AdamW) for half in optimizer._halves()):
            raise InvalidArgumentError(
                f"{name} is set: torch's AdamW cannot unscale beside float16 parameters; pass "
                "backup_optimizer='gefen', or step float32 copies of the parameters"
            )
    return takes


def _given(optimizer: Any) -> list[str]:
    return [name for name in CONTROLS if getattr(optimizer, name, None) is not None]


def has_overflowed(optimizer: Any) -> bool:
    """Whether this rank's gradient scaler, if there is one, found an infinity."""
    found = getattr(optimizer, "found_inf", None)
    if found is None and getattr(optimizer, "grad_scale", None) is not None:
        raise InvalidArgumentError(
            "grad_scale is set without found_inf: step through torch.amp.GradScaler.step()"
        )
    return found is not None and bool(local(torch.as_tensor(found)) > 0)


def has_float16(optimizer: Any) -> bool:
    """Whether there are float16 parameters, whose gradients a scaler refuses to unscale."""
    groups = optimizer.param_groups
    return any(param.dtype == torch.float16 for group in groups for param in group["params"])


def unscaled(optimizer: Any, works: list[Work]) -> list[Work]:
    """The works with their gradients unscaled; none of them where the scaler found an infinity.

    Gradients are copied in the dtype of the arithmetic: divided in float16, small ones were lost.
    ``.grad`` of the parameters stays scaled.
    """
    scale = getattr(optimizer, "grad_scale", None)
    if scale is None and getattr(optimizer, "found_inf", None) is None:
        return works
    if capture.under_way():
        raise InvalidArgumentError(
            "grad_scale is set in a captured step: gradients of float16 parameters cannot be "
            "unscaled there; capture float32 or bfloat16 parameters"
        )
    if has_overflowed(optimizer):
        return []
    if scale is not None:
        inverse = _inverse(scale)
        for work in works:
            wide = torch.float64 if work.grad.dtype == torch.float64 else torch.float32
            work.grad = work.grad.to(wide, copy=True).mul_(inverse)
    return works


def _inverse(scale: Any) -> float:
    """As the scaler computes it."""
    return float(local(torch.as_tensor(scale)).double().reciprocal().float())


class Unscaling:
    """Gradients divided by ``grad_scale`` in place, as the scaler does it.

    Not beside float16 parameters, where halves have unscaled copies by then (:func:`hand_on`).

    revocable: keep copies, so that :meth:`revoke` gives back their bytes.
    """

    def __init__(self, optimizer: Any, revocable: bool) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        self._scale = None if scale is None or has_float16(optimizer) else scale
        self._revocable = revocable
        self._kept: list[tuple[Tensor, Tensor]] = []

    def apply(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Divide this rank's shard of every gradient; False where there is no scale."""
        if self._scale is None:
            return False
        inverse = _inverse(self._scale)
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
