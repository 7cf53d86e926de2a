"""Which parameters and gradients can be optimized, and what they are called in errors."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gefen.errors import InvalidArgumentError, UnsupportedParameterError

PLAIN = frozenset({Tensor, nn.Parameter})
"""Types that are no subclass with a layout of its own."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Modules that torch.compile, FSDP1 and activation checkpointing put between others."""

_FRONT = "module."


class Slot(NamedTuple):
    """One parameter's place in an optimizer."""

    group: dict[str, Any]
    param: Tensor
    name: str
    number: int
    """Position over all groups."""

    @property
    def stream(self) -> int:
        """What keys the random numbers of stochastic rounding, below 2^56: the name, if any.

        Ranks that hold other parameters before it, or none, still draw alike, as do runs that
        wrap their model in another way. Two that share a name by that share their numbers only.
        """
        if not self.group.get("param_names"):
            return self.number
        name = plain(self.name).encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big")


def slots(groups: Iterable[dict[str, Any]]) -> Iterator[Slot]:
    """Every parameter in registration order.

    Named as given but for what wrappers put between; ``param_<number>`` where it was given bare,
    ``partition_<number>`` where another number of tensors has taken the place of those given.
    """
    groups = list(groups)
    number = 0
    for group, names in zip(groups, _names(groups), strict=True):
        instead = "param" if names is None else "partition"
        fitting = names if names and len(names) == len(group["params"]) else None
        for i, param in enumerate(group["params"]):
            yield Slot(group, param, fitting[i] if fitting else f"{instead}_{number}", number)
            number += 1


def _names(groups: Sequence[Mapping[str, Any]]) -> list[list[str] | None]:
    """Each group's names without what wrappers put between; None for one without names.

    Names that would be equal then stay as they are: two parameters never become one.
    """
    given = [group.get("param_names") or None for group in groups]
    found = [None if names is None else list(map(_unwrapped, names)) for names in given]
    counts = Counter(chain.from_iterable(filter(None, found)))
    if len(counts) == counts.total():
        return found
    return [
        None
        if names is None
        else [n if counts[_unwrapped(n)] > 1 else _unwrapped(n) for n in names]
        for names in given
    ]


def _unwrapped(name: str) -> str:
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or name


def plain(name: str) -> str:
    """A name without whatever wrappers may have put in front or between.

    For patterns and the like: two parameters may have the same one, where a module of the user's
    is called as a wrapper is.
    """
    return ".".join(part for part in name.split(".") if part not in {*WRAPPERS, "module"}) or name


def comparable_names(groups: Sequence[Mapping[str, Any]]) -> list[list[str] | None]:
    """Each group's names as a run has them that wraps its model in another way, or not at all.

    DDP, DataParallel and AveragedModel put ``module.`` in front, as often as they are nested. A
    module of the user's may be called so too, so it counts as theirs only in front of all names.
    Hence for checkpoints alone: ranks that hold different parameters would disagree on it.
    """
    found = _names(groups)
    names = [name for some in found for name in some or ()]
    while names and all(name.startswith(_FRONT) for name in names):
        names = [name.removeprefix(_FRONT) for name in names]
    left = iter(names)
    return [None if some is None else [next(left) for _ in some] for some in found]


def check_names(group: Mapping[str, Any]) -> None:
    """Raise where a group that is about to be added has not one name for each parameter.

    Later that is no mistake: ZeRO and its kind put flat partitions in place of the parameters.
    """
    params, names = group["params"], group.get("param_names")
    if names and len(names) != len(params):
        raise InvalidArgumentError(
            f"Invalid param_names of a group: {len(names)} names for {len(params)} parameters"
        )


def named(params: Any) -> tuple[list[Any], list[str] | None]:
    """Split what a group's ``params`` may be into tensors and their explicit names, if any."""
    if isinstance(params, Tensor):
        return [params], None
    unordered = isinstance(params, (set, frozenset, str, dict, nn.Module))
    if unordered or not isinstance(params, Iterable):
        raise InvalidArgumentError(
            f"Invalid params of type {type(params).__name__}: must be an ordered iterable of "
            "parameters or (name, parameter) pairs, such as model.named_parameters(), or of dicts "
            "that hold one as 'params'"
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
    """Raise where a tensor or an explicit name occurs twice, or where only some have names.

    Names of parameters that ranks share are compared before a step instead, so that a rank with
    duplicates does not raise alone while the others wait for it.
    """
    tensors: dict[int, str] = {}
    names: set[str] = set()
    named_first = None
    for slot in found:
        has_name = "param_names" in slot.group
        named_first = has_name if named_first is None else named_first
        if has_name != named_first:
            raise InvalidArgumentError(
                f"Parameter {slot.name!r} is of a group with{'' if has_name else 'out'} names, "
                "others are not: pass (name, parameter) pairs in all groups or in none"
            )
        if id(slot.param) in tensors:
            raise InvalidArgumentError(
                f"Duplicate parameter {slot.name!r}: the same tensor is registered as "
                f"{tensors[id(slot.param)]!r}; pass each parameter once"
            )
        if slot.name in names and not is_shared(slot.param):
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
    if nn.parameter.is_lazy(param):
        raise UnsupportedParameterError(
            f"Parameter {name!r} is not initialized: run the lazy module once, then make the "
            "optimizer"
        )
    _check_format(param, f"Parameter {name!r}")
    if param.is_inference():
        raise UnsupportedParameterError(
            f"Parameter {name!r} was made under torch.inference_mode(), which forbids updating it "
            "in place: build the model outside of it"
        )
    placements = getattr(param, "placements", ())
    if any(placement.is_partial() for placement in placements):
        raise UnsupportedParameterError(
            f"Parameter {name!r} has placements {placements}: a partial tensor holds "
            "summands, not values; redistribute it"
        )
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
    _check_format(grad, label)
    _check_sharding(param, grad, label)
    if grad.is_meta:
        raise UnsupportedParameterError(f"{label} is on the meta device: it holds no numbers")
    for what in ("shape", "device"):
        if getattr(grad, what) != getattr(param, what):
            raise UnsupportedParameterError(
                f"{label} has {what} {_shown(getattr(grad, what))}, the parameter has "
                f"{_shown(getattr(param, what))}: run backward again after changing a parameter"
            )


def _check_sharding(param: Tensor, grad: Tensor, label: str) -> None:
    if is_dtensor(param) != is_dtensor(grad):
        which = (
            "a DTensor, the parameter is" if is_dtensor(grad) else "no DTensor, the parameter is"
        )
        raise UnsupportedParameterError(
            f"{label} is {which} {'one' if is_dtensor(param) else 'a plain tensor'}"
        )
    if not is_dtensor(param):
        return
    for what in ("device_mesh", "placements", "dtype"):
        if getattr(grad, what) != getattr(param, what):
            raise UnsupportedParameterError(
                f"{label} has {what} {getattr(grad, what)}, the parameter has "
                f"{getattr(param, what)}: redistribute the gradient like the parameter"
            )


def _shown(value: object) -> object:
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


def is_dtensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor; imports nothing, as one cannot exist before its module."""
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_shared(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor of this rank and at least one other."""
    if not is_dtensor(tensor):
        return False
    mesh = tensor.device_mesh
    return bool(mesh.size() > 1 and mesh.get_coordinate() is not None)


def local(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself. Shares the memory."""
    shard: Tensor = tensor.detach().to_local() if is_dtensor(tensor) else tensor
    return shard


def held(tensor: Any) -> Tensor:
    """What this rank holds of a tensor that needs no gradient; shares the memory."""
    if type(tensor) in PLAIN or not is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    part: Tensor = tensor.to_local()
    return part
