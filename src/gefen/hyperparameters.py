"""Checks of settings: each returns the value in canonical form or names it in an error."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from gefen.errors import InvalidArgumentError, UnsupportedFeatureError

Check = Callable[[str, Any], Any]


def checked(settings: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    """The canonical value of every setting that ``checks`` names.

    Canonical values are plain Python objects (and the very tensor given as ``lr``), so that a
    state dict holding them loads with ``weights_only=True``.
    """
    for name in checks:
        if name not in settings:
            raise InvalidArgumentError(f"Invalid parameter group: it has no setting {name!r}")
    return {name: check(name, settings[name]) for name, check in checks.items()}


def refuse(name: str, value: object, must: str) -> NoReturn:
    """Raise :class:`InvalidArgumentError` for setting ``name``."""
    raise InvalidArgumentError(f"Invalid {name}={value!r}: must be {must}")


def refuse_in_group(names: Iterable[str]) -> None:
    """Raise where a parameter group has any of these settings of a whole optimizer."""
    for name in sorted(names):
        raise InvalidArgumentError(
            f"Invalid {name} in a parameter group: pass it to the constructor, it holds for all "
            "groups"
        )


def _real(value: object) -> float:
    """``value`` as a float; NaN where it is not a real number."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def at_least_zero(name: str, value: object) -> float:
    """A finite number ≥ 0."""
    number = _real(value)
    return number if 0 <= number < math.inf else refuse(name, value, "a finite number >= 0")


TINY = 2.0**-126
"""The smallest normal number of float32 and of bfloat16."""


def divisor(name: str, value: object) -> float:
    """A finite number that is above 0 in float32 too.

    It is what is left below a fraction where a gradient is 0: of 0 / 0 came NaN.
    """
    number = _real(value)
    must = "a finite number >= 2**-126 (1.2e-38), since smaller ones are 0 in float32"
    return number if TINY <= number < math.inf else refuse(name, value, must)


def decay_rate(name: str, value: object) -> float:
    """A number in [0, 1), the weight an average gives to its past."""
    number = _real(value)
    return number if 0 <= number < 1 else refuse(name, value, "a number in [0, 1)")


def learning_rate(name: str, value: object) -> float | Tensor:
    """A finite number ≥ 0, or a floating tensor that holds just one; the tensor is kept."""
    if not isinstance(value, Tensor):
        return at_least_zero(name, value)
    at_least_zero(name, _item(name, value))
    return value


def _check_rate(name: str, value: Tensor) -> None:
    holds_numbers = value.layout == torch.strided and not value.is_meta
    if value.numel() != 1 or not value.is_floating_point() or not holds_numbers:
        refuse(name, value, "a number or a dense floating-point tensor with one element")


def _item(name: str, value: Tensor) -> float:
    _check_rate(name, value)
    return value.item()


def betas(name: str, value: object) -> tuple[float, float]:
    """Two numbers in [0, 1)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        refuse(name, value, "two numbers in [0, 1)")
    first, second = (decay_rate(f"{name}[{i}]", beta) for i, beta in enumerate(value))
    return first, second


def flag(name: str, value: object) -> bool:
    """True or False, no other value that merely counts as one."""
    return value if isinstance(value, bool) else refuse(name, value, "True or False")


def whole(name: str, value: object) -> int:
    """A whole number ≥ 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        refuse(name, value, "a whole number >= 0")
    return int(value)


def strings(name: str, value: object) -> tuple[str, ...]:
    """A collection of strings; a single string is refused, as its letters are never meant."""
    must = "a collection of strings, such as ('bias', 'norm')"
    if isinstance(value, str) or not isinstance(value, Iterable):
        refuse(name, value, must)
    items = tuple(value)
    return items if all(isinstance(item, str) for item in items) else refuse(name, value, must)


def _one_of(choices: tuple[object, ...], name: str, value: object) -> Any:
    if not any(
        value is choice or (isinstance(value, str) and value == choice) for choice in choices
    ):
        refuse(name, value, "one of " + ", ".join(map(repr, choices)))
    return value


def one_of(*choices: object) -> Check:
    """One of ``choices``: strings or None."""
    return partial(_one_of, choices)


def unavailable(name: str, value: object) -> bool:
    """False; True asks for an option that this version does not have."""
    if flag(name, value):
        raise UnsupportedFeatureError(f"{name}=True is not available yet: pass {name}=False")
    return False


def unread_rate(name: str, value: object, device: torch.device) -> None:
    """Raise where a captured step on ``device`` cannot use a learning rate without reading it."""
    if not isinstance(value, Tensor):
        return
    _check_rate(name, value)
    if value.device != device:
        raise InvalidArgumentError(
            f"Invalid {name} on {value.device}: with capturable=True a tensor must be on the "
            f"parameters' device, {device}"
        )


def current_rate(name: str, value: object) -> float | Tensor:
    """A learning rate in use: finite; schedulers may leave one a rounding error below zero."""
    number = _item(name, value) if isinstance(value, Tensor) else value
    if not math.isfinite(_real(number)):
        refuse(name, value, "a finite number or a tensor with one element")
    return value if isinstance(value, Tensor) else _real(number)
