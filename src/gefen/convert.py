"""State dicts of gefen-x 0.5.0, as their optimizers save them, in the layout of this package.

Nearly all of it is renaming. Blocks of gefen-x may cross rows; their magnitudes and second
moments then stay vectors of one element per block, and such a run goes on as gefen-x's would. Only
where ranks share a parameter are blocks that a cut may cross divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from gefen.errors import CheckpointError
from gefen.newton_schulz import STANDARD
from gefen.parameters import is_dtensor
from gefen.state import (
    CODEBOOK,
    GLOBAL_STEP,
    INDEX,
    MAGNITUDE,
    NORMUON_STEP,
    NORMUON_V,
    PERIOD,
    STEP,
    V_COL,
    V_ROW,
    Entry,
    V,
)

_METADATA = "_gefen_checkpoint_metadata"
_OWN = {"name", "params", "param_names", "param_names_synthesized", "beta1", "beta2", _METADATA}
_NEEDED = {"step", "automatic_period", "m_codebook", "m_magnitude"}
_KNOWN = {
    *_NEEDED,
    *("name", "vmean", "vmean_step", "v_row", "v_col", "factored_step"),
    *("normuon_v", "normuon_step"),
}


def from_gefen_x(saved: Any, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What gefen-x saved as a state dict of this package; None where something else did.

    ``groups`` are those of the optimizer that loads it: they give shapes, and the settings that
    gefen-x does not save (``factored_v_2d``, ``stochastic_round`` and others). Names, which
    gefen-x writes in lower case, become the optimizer's where they differ in nothing else.
    Tensors may share memory with ``saved``, which is not changed.

    A second moment that is younger than its parameter (the run had changed ``factored_v_2d``)
    is scaled so that its bias-corrected value stays; of two forms, the older one is taken.

    Raises :class:`CheckpointError` for what cannot be converted: state that ranks hold in parts,
    other groups, the state of another optimizer.
    """
    parts = _parts(saved)
    if parts is None:
        return None
    saved_groups = [(part, group) for part in parts for group in part["param_groups"]]
    sizes = [len(group["params"]) for _, group in saved_groups]
    own_sizes = [len(group["params"]) for group in groups]
    if sizes != own_sizes:
        _refuse(
            f"it has groups of {sizes} parameters, this optimizer has groups of {own_sizes}; "
            "build the optimizer from the same parameters in the same groups"
        )
    state: dict[int, Entry] = {}
    converted = []
    for number, ((part, group), own) in enumerate(zip(saved_groups, groups, strict=True)):
        _check_kind(number, group, own)
        shared = _shared(part)
        first = len(state)
        for key, param in zip(group["params"], own["params"], strict=True):
            label = f"parameter {key} of group {number}"
            state[len(state)] = _entry(part["state"].get(key), param, group, shared, label)
        settings = _settings(group, own) | {"params": list(range(first, len(state)))}
        if "gefen_deterministic" in part:
            settings["deterministic"] = part["gefen_deterministic"]
        converted.append(settings)
    return {"state": state, "param_groups": converted}


def _refuse(problem: str) -> NoReturn:
    raise CheckpointError(f"Nothing was loaded: this is a state dict of gefen-x, but {problem}")


def _parts(saved: Any) -> list[Mapping[str, Any]] | None:
    """The state dict, or those of a hybrid's halves; None where gefen-x saved none of them."""
    if not isinstance(saved, Mapping):
        return None
    if {"muon", "backup"} <= saved.keys():
        halves = [saved["muon"], saved["backup"]]
        parts = [half for half in halves if half is not None]
    else:
        parts = [saved]
        groups = saved.get("param_groups")
        marked = isinstance(groups, list) and any(
            isinstance(group, Mapping) and _METADATA in group for group in groups
        )
        if not marked and "gefen_codebook" not in saved:
            return None
    for part in parts:
        _check_form(part)
    return parts


def _check_form(part: Any) -> None:
    """Raise where ``part`` is no state dict, or holds the state of some ranks only."""
    complete = isinstance(part, Mapping) and {"state", "param_groups"} <= part.keys()
    if not complete or not isinstance(part["state"], Mapping):
        _refuse("it lacks 'state' and 'param_groups'")
    groups = part["param_groups"]
    if not isinstance(groups, list) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    ):
        _refuse("its 'param_groups' is no list of groups with 'params'")
    for number, entry in part["state"].items():
        if not isinstance(entry, Mapping):
            _refuse(f"the state of parameter {number} is no dict")
        strange = sorted(str(key) for key in entry if str(key).startswith("_gefen"))
        if strange:
            _refuse(
                f"its parameter {number} has {strange}: parts of a state that ranks hold for "
                "themselves. Their blocks and codebooks differ from rank to rank, so there is no "
                "whole to load; go on with a new optimizer and the model's weights"
            )


def _check_kind(number: int, group: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    saved, wanted = _kind(group, "beta1"), _kind(own, "factored_v_2d")
    if saved != wanted:
        _refuse(f"group {number} was saved by {saved}, this optimizer has {wanted} there")


def _kind(group: Mapping[str, Any], mark: str) -> str:
    if "momentum" in group:
        return "GefenMuon"
    return "Gefen" if mark in group else "AdamW"


def _shared(part: Mapping[str, Any]) -> Entry:
    """Codebook and count of an optimizer; nothing before its first step, or for AdamW."""
    metadata: Mapping[str, Any] = next(
        (g[_METADATA] for g in part["param_groups"] if _METADATA in g), {}
    )
    codebook = part.get("gefen_codebook", metadata.get("codebook"))
    count = part.get("gefen_global_step", metadata.get("global_step"))
    if codebook is None or count is None:
        return {}
    return {CODEBOOK: codebook, GLOBAL_STEP: torch.tensor(int(count), dtype=torch.int64)}


def _settings(group: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings; those that gefen-x does not save are this optimizer's."""
    kind = _kind(own, "factored_v_2d")
    settings = {key: value for key, value in own.items() if key not in ("params", "param_names")}
    if kind == "AdamW":
        # It saves what it asked of its other half, and then runs torch's default.
        return settings | dict(group) | {"fused": settings["fused"]}
    settings |= {key: value for key, value in group.items() if key not in _OWN}
    if kind == "Gefen":
        settings["betas"] = (group["beta1"], group["beta2"])
    else:
        settings |= _schedule(group)
    names, own_names = group.get("param_names"), own.get("param_names") or []
    if names and not all(group.get("param_names_synthesized") or [False]):
        same = [n.lower() for n in own_names] == [n.lower() for n in names]
        settings["param_names"] = list(own_names if same else names)
    return settings


def _schedule(group: Mapping[str, Any]) -> dict[str, Any]:
    """gefen-x saves what a schedule amounts to: one triple, or one for each iteration."""
    coefficients = group["ns_coefficients"]
    if all(isinstance(triple, (list, tuple)) for triple in coefficients):
        triples = tuple(tuple(triple) for triple in coefficients)
        return {"ns_schedule": triples, "ns_coefficients": STANDARD}
    return {"ns_schedule": None, "ns_coefficients": tuple(coefficients)}


def _entry(
    saved: Mapping[str, Any] | None,
    param: Tensor,
    group: Mapping[str, Any],
    shared: Entry,
    label: str,
) -> Entry:
    if not saved or saved.keys() == {"name"}:
        return {STEP: 0}
    if "exp_avg" in saved:
        return dict(saved)
    strange = saved.keys() - _KNOWN
    if strange or not saved.keys() >= _NEEDED or not shared:
        _refuse(
            f"the state of {label} has {sorted(map(str, saved))}, expected {sorted(_NEEDED)} and "
            "second moments, with a codebook beside"
        )
    blocks = _Blocks(param, int(saved["automatic_period"]), label)
    new: Entry = {
        STEP: int(saved["step"]),
        PERIOD: blocks.period,
        INDEX: _shaped(saved["m_codebook"], tuple(param.shape), label),
        MAGNITUDE: blocks.laid_out(saved["m_magnitude"]),
    }
    if "normuon_v" in saved:
        new[NORMUON_V] = _shaped(saved["normuon_v"], (_rows(param),), label)
        new[NORMUON_STEP] = int(saved["normuon_step"])
    return new | _second_moment(saved, new[STEP], blocks, group) | shared


class _Blocks:
    """How the state that gefen-x has per block lies here.

    Ranks that share a parameter cut it between rows, a vector anywhere. Blocks across a cut are
    divided into ones that no cut crosses, each with the values of the one that it was a part of,
    so that the momentum is the same.
    """

    def __init__(self, param: Tensor, period: int, label: str) -> None:
        rows, self._label = _rows(param), label
        length = param.numel() // max(rows, 1)
        self._saved = (param.numel() // max(period, 1),)
        self.period = period
        if is_dtensor(param):
            self.period = math.gcd(period, length) if param.dim() > 1 else 1
        self._parts = period // max(self.period, 1)
        divided = param.dim() > 1 and length % max(self.period, 1) == 0
        self._shape = (rows, length // self.period) if divided else (-1,)

    def laid_out(self, value: Any) -> Tensor:
        """What gefen-x saved of each block."""
        return (
            _shaped(value, self._saved, self._label)
            .repeat_interleave(self._parts)
            .reshape(self._shape)
        )


def _second_moment(
    saved: Mapping[str, Any],
    step: int,
    blocks: _Blocks,
    group: Mapping[str, Any],
) -> Entry:
    ages = {key: int(saved.get(key, 0)) for key in ("factored_step", "vmean_step")}
    age = max(ages.values())
    if not age:
        return {}
    if ages["factored_step"] == age:
        moments = {V_ROW: saved["v_row"], V_COL: saved["v_col"]}
    else:
        moments = {V: blocks.laid_out(saved["vmean"])}
    if age == step:
        return moments
    beta2 = float(group["beta2"])
    return {key: v * ((1 - beta2**step) / (1 - beta2**age)) for key, v in moments.items()}


def _rows(param: Tensor) -> int:
    """A matrix's rows, or what has one index of dimension 0; a vector is one row."""
    return param.shape[0] if param.dim() > 1 else 1


def _shaped(value: Any, shape: tuple[int, ...], label: str) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != torch.Size(shape).numel():
        form = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        _refuse(f"the state of {label} has a value of form {form} where {shape} fits")
    return value.reshape(shape)
