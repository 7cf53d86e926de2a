"""Keys of parameter groups that AdamW, SGD and Muon of torch, or gefen-x know.

Each takes effect here, or raises. All other keys are the user's own and stay in their group, as in
torch.optim: schedulers and wrappers such as SAM keep settings of theirs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gefen.errors import InvalidArgumentError
from gefen.half import Half
from gefen.hyperparameters import Check

_ADAMW = "pass a group that needs it to torch.optim.AdamW instead"

INERT: dict[str, tuple[tuple[object, ...], str]] = {
    "amsgrad": (
        (False,),
        f"there is no second moment per element to keep the largest of; {_ADAMW}",
    ),
    "differentiable": ((False,), "a step is not differentiable; leave it out"),
    "foreach": ((None, False), "parameters are always stepped together; leave it out"),
    "decoupled_weight_decay": ((True,), "weight decay is always decoupled; add L2 to the loss"),
}
"""Keys of torch's AdamW with the values that ask for nothing, and what to do about others."""

# fmt: off
_GEFENS = (
    "betas", "eps", "factored_v_2d", "force_1d_period_one", "force_2d_period_one",
    "period_one_substrings", "codebook_refresh_every",
)
_MUONS = (
    "momentum", "nesterov", "ns_coefficients", "ns_steps", "ns_schedule", "adjust_lr_fn",
    "sharded_mode", "fp8_ns", "fp8_ns_compile", "batched_ns", "batched_ns_workspace_bytes",
    "normuon", "normuon_beta2", "normuon_eps", "cautious",
)
# fmt: on

ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(_GEFENS, "Gefen"),
    **dict.fromkeys(_MUONS, "GefenMuon"),
    "dampening": "torch.optim.SGD",
}
"""Settings, and an optimizer that has them.

Looked at when a group is added: schedulers write ``momentum`` into every group they see.
"""

OF_A_HYBRID: dict[str, str] = {
    **dict.fromkeys(("muon_lr", "backup_lr"), "lr"),
    **dict.fromkeys(("muon_weight_decay", "backup_weight_decay"), "weight_decay"),
    "no_decay_substrings": "weight_decay",
    "backup_1d_period_one": "force_1d_period_one",
    "backup_2d_period_one": "force_2d_period_one",
    "backup_factored_v_2d": "factored_v_2d",
    **dict.fromkeys(("backup_substrings", "backup_optimizer", "sides"), ""),
}
"""Arguments of GefenMuonHybrid, with what a group has in their place."""

GEFEN_X_BETAS = ("beta1", "beta2")


class KnownKeys(Half):
    """An optimizer whose groups hold no key that some optimizer knows and this one ignores."""

    defaults: dict[str, Any]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in the base, with gefen-x's ``beta1`` and ``beta2`` taken as ``betas``.

        Raises :class:`InvalidArgumentError` for keys that another optimizer knows but not this
        one, unless their value asks for nothing, as ``amsgrad=False`` does.
        """
        group = param_group
        if isinstance(param_group, dict):
            group = self._with_betas(param_group)
            own = self.defaults.keys() | getattr(self, "options", {}).keys()
            for key in group.keys() & ELSEWHERE.keys() - own:
                raise InvalidArgumentError(
                    f"Invalid {key}={group[key]!r} in a parameter group: {ELSEWHERE[key]} has "
                    f"this setting, {type(self).__name__} does not; leave it out"
                )
            self._check_keys(group)
        super().add_param_group(group)  # type: ignore[misc]

    def _with_betas(self, group: dict[str, Any]) -> dict[str, Any]:
        given = {key: group[key] for key in GEFEN_X_BETAS if key in group}
        if not given or "betas" not in self.defaults:
            return group
        if "betas" in group:
            raise InvalidArgumentError(
                f"Invalid {given} beside betas={group['betas']!r} in a parameter group: pass one "
                "of the two"
            )
        pair = zip(GEFEN_X_BETAS, self.defaults["betas"], strict=True)
        rest = {key: value for key, value in group.items() if key not in given}
        return rest | {"betas": tuple(given.get(key, own) for key, own in pair)}

    def _check_keys(self, group: Mapping[str, Any]) -> None:
        """Raise where ``group`` asks for what would be ignored."""
        for key in group.keys() & INERT.keys() - self.defaults.keys():
            neutral, advice = INERT[key]
            if not any(group[key] is value for value in neutral):
                raise InvalidArgumentError(
                    f"Invalid {key}={group[key]!r} in a parameter group: {advice}"
                )
        for key in group.keys() & set(GEFEN_X_BETAS):
            own = "betas" if "betas" in self.defaults else "momentum"
            raise InvalidArgumentError(
                f"Invalid {key}={group[key]!r} in a parameter group: it would be ignored; set "
                f"group[{own!r}] instead"
            )

        for key in group.keys() & OF_A_HYBRID.keys():
            own = OF_A_HYBRID[key]
            instead = f"set the group's {own!r} instead" if own else "it holds for all groups"
            raise InvalidArgumentError(
                f"Invalid {key}={group[key]!r} in a parameter group: it is an argument of "
                f"GefenMuonHybrid, and would be ignored here; {instead}"
            )

    def _resumed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        self._check_keys(settings)
        return super()._resumed(settings)


class Options(KnownKeys):
    """What gefen-x has as attributes, and settings of the whole optimizer in its groups."""

    options: dict[str, Any]
    option_checks: ClassVar[dict[str, Check]]
    param_groups: list[dict[str, Any]]

    @property
    def fused(self) -> bool:
        """Whether kernels run where there are any; may be changed between steps."""
        return bool(self.options["fused"])

    @fused.setter
    def fused(self, value: bool) -> None:
        self._set("fused", value)

    @property
    def verbose(self) -> bool:
        """Whether what is learned is logged; may be changed between steps."""
        return bool(self.options["verbose"])

    @verbose.setter
    def verbose(self, value: bool) -> None:
        self._set("verbose", value)

    @property
    def deterministic(self) -> bool:
        """Whether only algorithms that repeat bit for bit run."""
        return bool(self.options["deterministic"])

    def _set(self, name: str, value: object) -> None:
        self.options[name] = self.option_checks[name](name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in the base; what the constructor has may be repeated, as groups of torch's do."""
        group = param_group
        if isinstance(param_group, dict):
            group = {
                key: value
                for key, value in param_group.items()
                if key not in self.options or not (value is None or value == self.options[key])
            }
        super().add_param_group(group)
        # Kept in checkpoints.
        self.param_groups[-1]["deterministic"] = self.deterministic

    def _check_keys(self, group: Mapping[str, Any]) -> None:
        super()._check_keys(group)
        for key in group.keys() & self.options.keys() - {"deterministic"}:
            if not (group[key] is None or group[key] == self.options[key]):
                raise InvalidArgumentError(
                    f"Invalid {key}={group[key]!r} in a parameter group: pass it to the "
                    "constructor, it holds for all groups"
                )

    def _resumed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        saved = settings.get("deterministic", self.deterministic)
        if saved != self.deterministic:
            raise InvalidArgumentError(
                f"Invalid deterministic={saved!r} of a parameter group: this optimizer was made "
                f"with deterministic={self.deterministic}; make it with {saved!r}, or change the "
                "group's value to go on by other sums"
            )
        return super()._resumed(settings) | {"deterministic": self.deterministic}
