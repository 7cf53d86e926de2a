"""Which parameters and gradients can be optimized, and what they are called in errors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen.errors import InvalidArgumentError, UnsupportedFeatureError, UnsupportedParameterError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Slot(NamedTuple):
    """One parameter's place in an optimizer."""

    group: dict[str, Any]
    param: Tensor
    name: str
    number: int
    """Position over all groups; keys the random numbers of stochastic rounding."""


def slots(groups: Iterable[dict[str, Any]]) -> Iterator[Slot]:
    """Every parameter in registration order; bare ones are called ``param_<number>``."""
    number = 0
    for group in groups:
        names = group.get("param_names")
        for i, param in enumerate(group["params"]):
            yield Slot(group, param, names[i] if names else f"param_{number}", number)
            number += 1


def named(params: Any) -> tuple[list[Any], list[str] | None]:
    """Split what a group's ``params`` may be into tensors and their explicit names, if any."""
    if isinstance(params, Tensor):
        return [params], None
    if isinstance(params, (set, frozenset, str, dict)) or not isinstance(params, Iterable):
        raise InvalidArgumentError(
            f"Invalid params of type {type(params).__name__}: must be an ordered iterable of "
            "parameters or (name, parameter) pairs, or of dicts that hold one as 'params'"
        )
    items = list(params)
    pairs = [item for item in items if isinstance(item, tuple)]
    if not pairs:
        return items, None
    if len(pairs) < len(items) or not all(len(p) == 2 and isinstance(p[0], str) for p in pairs):
        raise InvalidArgumentError(
            "Invalid params: must be all parameters or all (name, parameter) pairs, not a mix"
        )
    return [param for _, param in pairs], [name for name, _ in pairs]


def check_distinct(found: Iterable[Slot]) -> None:
    """Raise where a tensor or an explicit name occurs twice."""
    tensors: dict[int, str] = {}
    names: set[str] = set()
    for slot in found:
        if id(slot.param) in tensors:
            raise InvalidArgumentError(
                f"Duplicate parameter {slot.name!r}: the same tensor is registered as "
                f"{tensors[id(slot.param)]!r}; pass each parameter once"
            )
        if slot.name in names:
            raise InvalidArgumentError(
                f"Duplicate parameter name {slot.name!r}: two different parameters have it; "
                "pass model.named_parameters() or give each its own name"
            )
        tensors[id(slot.param)] = slot.name
        names.add(slot.name)


def check_parameter(param: Any, name: str) -> None:
    """Raise, naming it, where ``param`` is nothing these optimizers can update in place."""
    if not isinstance(param, Tensor):
        raise UnsupportedParameterError(
            f"Parameter {name!r} is of type {type(param).__name__}: must be a tensor"
        )
    if is_dtensor(param):
        raise UnsupportedFeatureError(
            f"Parameter {name!r} is a DTensor: sharded parameters are not available yet"
        )
    _check_format(param, f"Parameter {name!r}")
    if not (param.is_leaf or param.retains_grad):
        raise UnsupportedParameterError(
            f"Parameter {name!r} is not a leaf: it is computed from other tensors, so a step "
            "would be lost; pass the tensors that it is computed from"
        )
    if any(step == 0 and size > 1 for step, size in zip(param.stride(), param.shape, strict=True)):
        raise UnsupportedParameterError(
            f"Parameter {name!r} is an expanded tensor whose elements share memory: "
            "make it .contiguous() first"
        )


def check_gradient(param: Tensor, grad: Tensor, name: str) -> None:
    """Raise, naming it, where ``grad`` cannot be applied to ``param``."""
    label = f"Gradient of parameter {name!r}"
    if is_dtensor(grad):
        raise UnsupportedFeatureError(
            f"{label} is a DTensor: sharded parameters are not available yet"
        )
    _check_format(grad, label)
    if grad.is_meta:
        raise UnsupportedParameterError(f"{label} is on the meta device: it holds no numbers")
    for what in ("shape", "device"):
        if getattr(grad, what) != getattr(param, what):
            raise UnsupportedParameterError(
                f"{label} has {what} {_plain(getattr(grad, what))}, the parameter has "
                f"{_plain(getattr(param, what))}: run backward again after changing a parameter"
            )


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value


def _check_format(tensor: Tensor, label: str) -> None:
    if tensor.layout != torch.strided:
        raise UnsupportedParameterError(
            f"{label} is sparse ({tensor.layout}): must be dense; for nn.Embedding pass "
            "sparse=False"
        )
    if tensor.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise UnsupportedParameterError(f"{label} has dtype {tensor.dtype}: must be {allowed}")


def is_dtensor(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor; imports nothing, as one cannot exist before its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
