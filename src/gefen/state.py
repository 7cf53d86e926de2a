"""Optimizer state: its keys, and what a valid entry looks like.

Shapes are those of the whole parameter, [r, ...] with rows of L elements and blocks of P; a vector
is one row, whose state has no dimension for it. Of a DTensor, all but what is shared are DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gefen.blocks import UNDECIDED, row_length
from gefen.codebook import SIZE
from gefen.errors import UnsupportedParameterError
from gefen.layout import Layout, elsewhere, like_other
from gefen.parameters import is_dtensor, local

STEP = "step"
"""Steps that this parameter has taken: int; for AdamW and with ``capturable`` a float tensor."""
PERIOD = "period"
"""P, elements per block, int; 0 until there was a gradient that is not all zero.

Until then a block is a whole row. It divides L, or, in state that gefen-x recorded, n alone.
"""
INDEX = "index"
"""uint8 [r, ...]: codebook entry of each element of the momentum."""
MAGNITUDE = "magnitude"
"""float32 [r, L / P]: largest magnitude in each block of the momentum; [n / P] of a vector."""
V = "v"
"""float32, likewise: EMA of the mean of g² in each block."""
V_ROW = "v_row"
"""float32 [r]: EMA of the row means of g²."""
V_COL = "v_col"
"""float32 [L]: EMA of the column means of g², the same on all ranks."""
NORMUON_V = "normuon_v"
"""float32 [r]: EMA of the mean square of each row of the update; [r, rows] of stacked matrices."""
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

ROWWISE = (INDEX, MAGNITUDE, V, V_ROW, NORMUON_V)
"""Keys of state that belongs to rows, and is cut where they are."""

BLOCKWISE = (MAGNITUDE, V)
"""Keys whose shapes depend on the period."""

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
    """Dtypes, and shapes of the whole parameter's."""
    layout: Layout
    like: dict[str, Tensor] = field(default_factory=dict)
    """Keys whose tensors lie as the parameter does, however that is."""

    def on_device(self) -> Spec:
        """The same where the device counts steps."""
        counts = {key: total for key, total in self.counts.items() if key not in COUNTED}
        deferred = {key: (COUNT, ()) for key in COUNTED if key in self.counts}
        return replace(self, counts=counts, tensors={**self.tensors, **deferred})

    def misplaced(self, key: str, value: Tensor) -> str | None:
        """How a tensor of the state lies where it should not."""
        if key in self.like:
            return _unlike(value, self.like[key])
        if key in SHARED or key in COUNTED:
            return "is a DTensor, expected a plain tensor" if is_dtensor(value) else None
        return self.layout.fits(value, key in ROWWISE)

    def relaid(self, key: str, part: Tensor) -> Tensor:
        """A tensor of the state of which this rank holds ``part``."""
        if key in self.like:
            return like_other(part, self.like[key])
        return self.layout.placed(part, key in ROWWISE)


def block_shape(shape: Sequence[int], period: int) -> tuple[int, ...]:
    """Shape of what has one element for each block."""
    length = row_length(shape)
    period = period or max(length, 1)
    if len(shape) > 1 and length % period == 0:
        return shape[0], length // period
    return (math.prod(shape) // period,)


def momentum_spec(layout: Layout, entry: Entry) -> Spec:
    """The part of the state that all quantised optimizers have."""
    period = entry.get(PERIOD)
    known = period if isinstance(period, int) and period >= 0 else 1
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        INDEX: (torch.uint8, tuple(layout.shape)),
        MAGNITUDE: (torch.float32, block_shape(layout.shape, known)),
        GLOBAL_STEP: (torch.int64, ()),
        CODEBOOK: (torch.float32, (SIZE,)),
    }
    return Spec({STEP: 0, PERIOD: layout.shape.numel()}, tensors, layout)


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
        value, least = entry[key], UNDECIDED if key == PERIOD else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            return f"{key} is {value!r}, expected a whole number >= {least}"
        if value > LARGEST_COUNT:
            return f"{key} is larger than {LARGEST_COUNT}"
        if value and total % value:
            return f"{key} is {value}, which does not divide {total} elements"
    for key, form in spec.tensors.items():
        problem = _misfit(entry[key], *form) or spec.misplaced(key, entry[key])
        if problem is not None:
            return f"{key} {problem}"
    return None


def _misfit(value: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
    if type(value) is not Tensor and not is_dtensor(value):
        return f"is of type {type(value).__name__}, expected a tensor"
    if value.layout != torch.strided or value.is_nested or value.is_meta:
        return (
            "is sparse, nested or on the meta device, expected a dense tensor that holds numbers"
        )
    if (value.dtype, tuple(value.shape)) != (dtype, shape):
        return f"is {value.dtype} {tuple(value.shape)}, expected {dtype} {shape}"
    return None


def _unlike(value: Any, param: Any) -> str | None:
    if is_dtensor(value) != is_dtensor(param):
        kind = "a DTensor" if is_dtensor(param) else "a plain tensor"
        return f"is of type {type(value).__name__}, expected {kind}"
    if is_dtensor(param):
        for what in ("device_mesh", "placements"):
            if getattr(value, what) != getattr(param, what):
                return f"has {what} {getattr(value, what)}, the parameter {getattr(param, what)}"
        return elsewhere(value.device_mesh, param.device_mesh)
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
    if entry.get(PERIOD) == UNDECIDED and any(
        bool(local(entry[key]).any()) for key in BLOCKWISE if key in entry
    ):
        return f"{PERIOD} is {UNDECIDED}, but there is momentum"
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
