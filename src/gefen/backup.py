"""torch's AdamW as one half of a hybrid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from gefen import capture
from gefen import hyperparameters as check
from gefen.errors import UnsupportedParameterError
from gefen.group_keys import KnownKeys
from gefen.layout import Layout
from gefen.parameters import Slot
from gefen.state import EXP_AVG, EXP_AVG_SQ, STEP, Entry, Spec, check_unchanged
from gefen.step import gradients


def _unhooked_step() -> Any:
    """AdamW's step without the hooks that torch wraps it in: the hybrid's own step ran them."""
    step: Any = torch.optim.AdamW.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


class BackupAdamW(KnownKeys, torch.optim.AdamW):
    """torch's AdamW, with the parts of a step and of a checkpoint that a hybrid asks for."""

    checks: ClassVar[dict[str, check.Check]] = {
        "lr": check.learning_rate,
        "betas": check.betas,
        "eps": check.divisor,
        "weight_decay": check.at_least_zero,
        "maximize": check.flag,
    }

    torchs_checks: ClassVar[dict[str, check.Check]] = {
        "amsgrad": check.unavailable,
        "foreach": check.one_of(None, False, True),
        "capturable": check.flag,
        "differentiable": check.unavailable,
        "fused": check.one_of(None, False),
    }
    """One for each setting that torch's constructor has besides; groups may have their own."""

    place = 1

    @property
    def capturable(self) -> bool:
        """Whether torch's step keeps its counts and tensor rates on the device."""
        return all(group["capturable"] for group in self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in AdamW, with settings and parameters validated as in the other half."""
        group = self._with_betas(param_group)
        settings = {**self.defaults, **group}
        torchs = {key: own for key, own in self.torchs_checks.items() if key in settings}
        super().add_param_group(group | check.checked(settings, {**self.checks, **torchs}))

    def _collect(self) -> list[Slot]:
        for group in self.param_groups:
            self._current(group)
        pairs = gradients(self.param_groups, self._check)
        return [self._unchanged(slot, grad) for slot, grad in pairs]

    def _unchanged(self, slot: Slot, grad: Tensor) -> Slot:
        """The slot, once torch's step is known not to fail halfway on it."""
        if grad.dtype != slot.param.dtype:
            raise UnsupportedParameterError(
                f"Gradient of parameter {slot.name!r} is {grad.dtype}, the parameter "
                f"{slot.param.dtype}: AdamW takes equal dtypes only"
            )
        settings, device = slot.group, slot.param.device
        if settings["capturable"]:
            if device.type == "cpu":
                raise UnsupportedParameterError(
                    f"Parameter {slot.name!r} is on {device}: torch's AdamW with capturable=True "
                    "steps parameters of accelerators only; pass capturable=False"
                )
            rate = settings["lr"]
            if not (isinstance(rate, Tensor) and capture.reads_rate(rate, [slot.param])):
                check.unread_rate("lr", rate, device)
        entry = self.state.get(slot.param)
        if entry:
            check_unchanged(self._spec(slot, entry), entry, slot.name)
            here, there = slot.param.device, entry[EXP_AVG].device
            if here != there:
                raise UnsupportedParameterError(
                    f"Parameter {slot.name!r} is on {here}, its state on {there}: load the "
                    "optimizer's state_dict() into it once the parameter has moved"
                )
        return slot

    def _prepare(self, works: list[Slot]) -> list[Slot]:
        if capture.under_way():
            for slot in works:
                if not self.state.get(slot.param):
                    capture.refuse_first(slot.name, "gets its state")
        return works

    def _commit(self, plan: list[Slot], active: bool = False) -> None:
        if not plan:
            return
        for group in self.param_groups:
            group.update(self._current(group))
        _unhooked_step()(self)

    def _current(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group's settings; a tensor rate is not read where the device does it."""
        rate = group.get("lr")
        if group.get("capturable") is True and isinstance(rate, Tensor):
            return self._resumed({**group, "lr": 0.0}) | {"lr": rate}
        return self._resumed(group)

    def _resumed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        self._check_keys(settings)
        torchs = {
            key: settings.get(key, default)
            for key, default in self.defaults.items()
            if key not in self.checks
        }
        checks = {**self.checks, "lr": check.current_rate}
        checks |= {key: own for key, own in self.torchs_checks.items() if key in torchs}
        chosen = torchs | check.checked({**torchs, **settings}, checks)
        rate_is_read = isinstance(chosen["lr"], Tensor) and not chosen["capturable"]
        if chosen["foreach"] and rate_is_read:
            check.refuse("foreach", True, "None or False where lr is a tensor")
        return chosen

    def _spec(self, slot: Slot, entry: Entry) -> Spec:
        param = slot.param
        # torch counts in its default dtype, which may have been another one then.
        wide = getattr(entry.get(STEP), "dtype", None) == torch.float64
        average = (param.dtype, tuple(param.shape))
        return Spec(
            {},
            {
                STEP: (torch.float64 if wide else torch.float32, ()),
                EXP_AVG: average,
                EXP_AVG_SQ: average,
            },
            Layout(param.shape),
            {EXP_AVG: param, EXP_AVG_SQ: param},
        )
