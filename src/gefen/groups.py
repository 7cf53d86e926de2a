"""Groups of a hybrid: their parameters routed, their settings given to the halves they concern."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from gefen import hyperparameters as check
from gefen.errors import InvalidArgumentError
from gefen.group_keys import GEFEN_X_BETAS
from gefen.parameters import plain
from gefen.routing import Decided, NamedParams, decided, halves, pairs, validate_split
from gefen.sides import BACKUP, MUON, Sides, check_all_meant

RATES = ("lr", "weight_decay")
"""Settings that a group may also have for one half alone, as in ``muon_lr``."""

UNCHECKED = frozenset({"params", "initial_lr"})
"""What a group may hold besides settings; schedulers resume from its ``initial_lr``."""

OF_CONSTRUCTOR = frozenset(
    (
        *("fused", "deterministic", "capturable", "verbose", "codebook_refresh_every"),
        "param_names",
    )
)
"""What no group may hold: names come with the pairs."""


class Halves(NamedTuple):
    """Groups of both halves, and why their parameters are there."""

    muon: list[dict[str, Any]]
    backup: list[dict[str, Any]]
    routes: Decided


@dataclass(frozen=True)
class Router:
    """How a hybrid shares out groups, at first and when some are added."""

    substrings: tuple[str, ...]
    sides: Sides | None
    no_decay: tuple[str, ...]
    """In lower case."""
    checks: Mapping[str, Mapping[str, check.Check]]
    """The settings of each half's groups."""

    def given(self, muon: Any, backup: Any) -> Halves:
        """Two lists of pairs that are routed already."""
        first, second = validate_split(muon, backup)
        routes = [(*pair, (MUON, "given as Muon's")) for pair in first]
        routes += [(*pair, (BACKUP, "given as the backup's")) for pair in second]
        return Halves(_with(first, {}), self._by_decay(second, {}), routes)

    def routed(self, source: Any) -> Halves:
        """A model, pairs, or groups of pairs."""
        found = self._shared_out(_as_groups(source))
        check_all_meant(self.sides, [name for name, _, _ in found.routes])
        validate_split(*halves(found.routes))
        return found

    def added(self, group: Any) -> Halves:
        """One group of pairs, which may or may not go with those that there are."""
        if not isinstance(group, dict) or "params" not in group:
            check.refuse("param_group", group, "a dict that holds pairs as 'params'")
        return self._shared_out([{**group, "params": pairs(group["params"], "params")}])

    def _shared_out(self, groups: Iterable[dict[str, Any]]) -> Halves:
        """Each group's parameters by half, with the settings that concern them."""
        found = Halves([], [], [])
        for group in groups:
            settings = self._settings(group)
            routes = decided(group["params"], self.substrings, self.sides)
            muon, backup = halves(routes)
            self._check_betas(group, backup)
            found.muon.extend(_with(muon, settings[MUON]))
            found.backup.extend(self._by_decay(backup, settings[BACKUP]))
            found.routes.extend(routes)
        return found

    def _settings(self, group: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """What a group sets for each half, valid even where that gets none of its parameters."""
        check.refuse_in_group(group.keys() & OF_CONSTRUCTOR)
        rates = {f"{half}_{rate}" for half in self.checks for rate in RATES}
        known = UNCHECKED.union(rates, *self.checks.values())
        # Keys that none knows are the user's own, unless a half has something against them.
        others = {key: value for key, value in group.items() if key not in known}
        betas = {key: others.pop(key) for key in GEFEN_X_BETAS if key in others}
        own = {MUON: others, BACKUP: others | betas}
        return {half: own[half] | self._settings_of(half, group) for half in self.checks}

    def _check_betas(self, group: Mapping[str, Any], backup: NamedParams) -> None:
        given = sorted(group.keys() & GEFEN_X_BETAS)
        if given and not backup:
            raise InvalidArgumentError(
                f"Invalid {given[0]} in a parameter group: all of its parameters go to Muon, "
                "which has momentum instead"
            )

    def _settings_of(self, half: str, group: Mapping[str, Any]) -> dict[str, Any]:
        checks = self.checks[half]
        chosen = {key: value for key, value in group.items() if key in checks}
        chosen |= {
            rate: group[f"{half}_{rate}"]
            for rate in RATES
            if group.get(f"{half}_{rate}") is not None
        }
        chosen = check.checked(chosen, {key: checks[key] for key in chosen})
        return chosen | {key: group[key] for key in UNCHECKED - {"params"} if key in group}

    def _by_decay(self, params: NamedParams, settings: dict[str, Any]) -> list[dict[str, Any]]:
        """One group with the weight decay of the settings, one without any."""
        rest: NamedParams = []
        exempt: NamedParams = []
        for name, param in params:
            called = name.lower(), plain(name).lower()
            undecayed = any(part in one for part in self.no_decay for one in called)
            (exempt if undecayed else rest).append((name, param))
        return _with(rest, settings) + _with(exempt, {**settings, "weight_decay": 0.0})


def _with(params: NamedParams, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**settings, "params": params}] if params else []


def _as_groups(source: Any) -> list[dict[str, Any]]:
    if isinstance(source, (nn.Module, Tensor)) or not isinstance(source, Iterable):
        return [{"params": source}]
    items = list(source)
    if not any(isinstance(item, dict) for item in items):
        return [{"params": items}]
    for item in items:
        if not isinstance(item, dict) or "params" not in item:
            raise InvalidArgumentError(
                "Invalid params: either all or none must be groups, dicts that hold "
                f"(name, parameter) pairs as 'params'; one is a {type(item).__name__}"
            )
    return [{**group, "params": pairs(group["params"], "params")} for group in items]
