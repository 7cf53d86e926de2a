"""Optimizer state: its keys, and what a valid entry looks like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gefen.codebook import SIZE
from gefen.errors import UnsupportedParameterError
from gefen.parameters import is_dtensor, local

STEP = "step"
"""Steps that this parameter has taken: int; for AdamW and with ``capturable`` a float tensor."""
PERIOD = "period"
"""Elements per block, int."""
INDEX = "index"
"""uint8 [n]: codebook entry of each element of the momentum."""
MAGNITUDE = "magnitude"
"""float32 [n / period]: largest magnitude in each block of the momentum."""
V = "v"
"""float32 [n / period]: EMA of the mean of g² in each block."""
V_ROW = "v_row"
"""float32 [rows]: EMA of the row means of g²."""
V_COL = "v_col"
"""float32 [columns]: EMA of the column means of g²."""
NORMUON_V = "normuon_v"
"""float32 [rows]: EMA of the mean square of each row of the update."""
NORMUON_STEP = "normuon_step"
"""Steps that ``normuon_v`` has seen, likewise."""
CODEBOOK = "codebook"
"""float32 [256], one tensor shared by all parameters of an optimizer on a device.

Until there is a gradient to learn from, :func:`gefen.codebook.blank`: helpers such as those of
torch.distributed.checkpoint look at the keys after a step with zero gradients.
"""
GLOBAL_STEP = "global_step"
"""int64 scalar on the CPU, shared likewise: steps that this optimizer has taken.

With ``capturable`` one on each device.
"""

EXP_AVG = "exp_avg"
"""AdamW's momentum, like the parameter."""
EXP_AVG_SQ = "exp_avg_sq"
"""AdamW's EMA of g², like the parameter."""

SHARED = (CODEBOOK, GLOBAL_STEP)

COUNTS = (STEP, GLOBAL_STEP)
"""Keys whose tensors are read by the host and stay on the CPU."""

COUNTED = (STEP, NORMUON_STEP)
"""Keys of what a step counts for each parameter."""

COUNT = torch.float32
"""Dtype of these where the device counts, as in torch.optim."""

NEVER_NEGATIVE = (MAGNITUDE, V, V_ROW, V_COL, NORMUON_V, EXP_AVG_SQ)

_NUMBERS = (torch.float32, torch.float64, torch.int64)

LARGEST_COUNT = 2**63 - 1

Entry: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spec:
    """Exactly what the state of one parameter must hold."""

    counts: dict[str, int]
    """Keys of whole numbers ≥ 1, each with what it must divide; any number divides 0."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    sharded: dict[str, Tensor] = field(default_factory=dict)
    """Keys whose tensors are DTensors where that parameter is one, with its placements."""

    def on_device(self) -> Spec:
        """The same where the device counts steps."""
        counts = {key: total for key, total in self.counts.items() if key not in COUNTED}
        deferred = {key: (COUNT, ()) for key in COUNTED if key in self.counts}
        return Spec(counts, {**self.tensors, **deferred}, self.sharded)


def momentum_spec(param: Tensor, entry: Entry) -> Spec:
    """The part of the state that all quantised optimizers have."""
    n = param.numel()
    period = entry.get(PERIOD)
    blocks = n // period if isinstance(period, int) and period > 0 else n
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        INDEX: (torch.uint8, (n,)),
        MAGNITUDE: (torch.float32, (blocks,)),
        GLOBAL_STEP: (torch.int64, ()),
        CODEBOOK: (torch.float32, (SIZE,)),
    }
    return Spec({STEP: 0, PERIOD: n}, tensors)


def advance(entries: Sequence[Entry], key: str) -> None:
    """Count a step in each entry, on the host or on the device."""
    counts = [entry[key] for entry in entries]
    if counts and isinstance(counts[0], Tensor):
        torch._foreach_add_(counts, 1)
        return
    for entry in entries:
        entry[key] += 1


def counted_by_host(entry: Mapping[str, Any]) -> Entry:
    """``entry`` with numbers in place of tensors that the device counted with."""
    own = dict(entry)
    for key in COUNTED:
        value = own.get(key)
        if type(value) is not Tensor or value.layout != torch.strided or value.is_meta:
            continue
        if value.shape == () and value.dtype in _NUMBERS:
            number = value.item()
            own[key] = int(number) if float(number).is_integer() else number
    return own


def is_unbegun(entry: Mapping[str, Any]) -> bool:
    """Whether ``entry`` says no more than that its parameter has taken no step."""
    steps = counted_by_host(entry)[STEP] if entry.keys() == {STEP} else None
    return isinstance(steps, int) and steps == 0


def disagreement(spec: Spec, entry: Entry) -> str | None:
    """How the form of ``entry`` differs from ``spec``, in words; None where it does not."""
    expected = {*spec.counts, *spec.tensors}
    if expected != entry.keys():
        lacking, excess = expected - entry.keys(), map(str, entry.keys() - expected)
        return f"it lacks {sorted(lacking)} and has {sorted(excess)} beyond what is expected"
    for key, total in spec.counts.items():
        value = entry[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return f"{key} is {value!r}, expected a whole number >= 1"
        if value > LARGEST_COUNT:
            return f"{key} is larger than {LARGEST_COUNT}"
        if total % value:
            return f"{key} is {value}, which does not divide {total} elements"
    for key, form in spec.tensors.items():
        problem = _misfit(entry[key], *form, spec.sharded.get(key))
        if problem is not None:
            return f"{key} {problem}"
    return None


def _misfit(
    value: Any, dtype: torch.dtype, shape: tuple[int, ...], like: Tensor | None
) -> str | None:
    if not (is_dtensor(value) if is_dtensor(like) else type(value) is Tensor):
        kind = "a DTensor" if is_dtensor(like) else "a plain tensor"
        return f"is of type {type(value).__name__}, expected {kind}"
    if value.layout != torch.strided or value.is_nested or value.is_meta:
        return (
            "is sparse, nested or on the meta device, expected a dense tensor that holds numbers"
        )
    if (value.dtype, tuple(value.shape)) != (dtype, shape):
        return f"is {value.dtype} {tuple(value.shape)}, expected {dtype} {shape}"
    if is_dtensor(like):
        for what in ("device_mesh", "placements"):
            if getattr(value, what) != getattr(like, what):
                return f"has {what} {getattr(value, what)}, the parameter {getattr(like, what)}"
    return None


def impossible(entry: Entry) -> str | None:
    """What in an ``entry`` of valid form no training can have led to; None if there is nothing.

    NaN and infinities can be there: gradients that hold some leave them behind.
    """
    for key in NEVER_NEGATIVE:
        if key in entry and bool((local(entry[key]) < 0).any()):
            return f"{key} has negative elements"
    steps = float(entry[STEP])
    if not (1 <= steps < math.inf and steps == int(steps)):
        return f"{STEP} is {steps}, expected a whole number >= 1"
    if entry.get(NORMUON_STEP, 0) > entry[STEP]:
        return f"{NORMUON_STEP} is {entry[NORMUON_STEP]}, larger than {STEP}"
    return None


def check_unchanged(spec: Spec, entry: Entry, name: str) -> None:
    """Raise where ``entry`` is no longer the state of the parameter that has this name."""
    problem = disagreement(spec, entry)
    if problem is not None:
        raise UnsupportedParameterError(
            f"Parameter {name!r} has changed since its state was made: {problem}; make a new "
            "optimizer after casting or resizing a model"
        )
