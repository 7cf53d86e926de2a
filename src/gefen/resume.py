"""Room for state that torch.distributed.checkpoint is about to load."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gefen.blocks import UNDECIDED, row_length
from gefen.checkpoint import CheckpointedOptimizer
from gefen.codebook import blank
from gefen.errors import CheckpointError, InvalidArgumentError
from gefen.half import Half
from gefen.parameters import Slot, slots
from gefen.state import CODEBOOK, COUNTED, GLOBAL_STEP, INDEX, MAGNITUDE, PERIOD, ROWWISE, Entry

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageReader

Sizes = Mapping[str, tuple[int, ...]]
"""Sizes of the tensors of one parameter's saved state."""


def prepare_load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: str | PathLike[str] | StorageReader | Metadata,
) -> None:
    """Give a fresh optimizer state of the sizes that a checkpoint holds, to be loaded into.

    ``torch.distributed.checkpoint.load`` copies into tensors that are there, and the sizes of some
    depend on gradients of the run that saved. Call this on every rank, after ``fully_shard`` and
    before ``get_optimizer_state_dict``; it reads the checkpoint's metadata and exchanges nothing.

    ``checkpoint`` is the checkpoint's folder, its reader, or its metadata. Parameters are found by
    their names in ``model``. The loaded state replaces what this makes, so load in any case.

    Raises :class:`~gefen.errors.InvalidArgumentError` for another kind of optimizer, and
    :class:`~gefen.errors.CheckpointError`, having changed nothing, where the checkpoint has no
    state of this model's parameters or state that does not fit them.
    """
    if not isinstance(optimizer, CheckpointedOptimizer):
        raise InvalidArgumentError(
            f"Invalid optimizer of type {type(optimizer).__name__}: must be one of gefen's"
        )
    saved, names = _saved(_metadata(checkpoint)), _names(model)
    entries: dict[torch.Tensor, Entry] = {}
    for half, slot in _held(optimizer):
        for name in (names.get(slot.param, slot.name), str(slot.number)):
            if name in saved:
                entries[slot.param] = _room(half, slot, saved[name])
                break
    if not entries:
        raise CheckpointError(
            "Nothing was prepared: the checkpoint has no optimizer state of the parameters of "
            f"this model, such as {next(iter(names.values()), '(none)')!r}; was it saved with "
            "get_optimizer_state_dict?"
        )
    for param in [p for group in optimizer.param_groups for p in group["params"]]:
        optimizer.state.pop(param, None)
    optimizer.state.update(entries)
    for half in optimizer._halves():
        half._loaded()


def _metadata(checkpoint: Any) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

    if isinstance(checkpoint, Metadata):
        return checkpoint
    if isinstance(checkpoint, (str, PathLike)):
        checkpoint = FileSystemReader(checkpoint)
    return checkpoint.read_metadata()


def _saved(metadata: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    """Sizes by the names of parameters, from keys such as ``optim.state.layer.weight.index``."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, value in metadata.state_dict_metadata.items():
        path, _, what = key.rpartition(".")
        parts = path.split(".")
        if "state" not in parts or not hasattr(value, "size"):
            continue
        name = ".".join(parts[parts.index("state") + 1 :])
        found.setdefault(name, {})[what] = tuple(value.size)
    return found


def _names(model: nn.Module) -> dict[torch.Tensor, str]:
    """As torch.distributed.checkpoint names them: without what wrappers add."""
    from torch.distributed.checkpoint.state_dict import _get_fqns

    return {param: next(iter(_get_fqns(model, name))) for name, param in model.named_parameters()}


def _held(optimizer: CheckpointedOptimizer) -> Iterator[tuple[Half, Slot]]:
    halves = {id(group): half for half in optimizer._halves() for group in half.param_groups}
    for slot in slots(optimizer.param_groups):
        yield halves[id(slot.group)], slot


def _room(half: Half, slot: Slot, sizes: Sizes) -> Entry:
    entry: Entry = dict.fromkeys(sizes)
    if INDEX in sizes:
        entry[PERIOD] = _period(slot, sizes)
    spec, param = half._spec(slot, entry), slot.param
    for key, (dtype, shape) in spec.tensors.items():
        like = spec.like.get(key)
        part = spec.layout.part(shape, key in ROWWISE)
        if like is not None:
            entry[key] = torch.zeros_like(like.detach(), dtype=dtype)
        elif key == CODEBOOK:
            entry[key] = blank().to(param.device)
        elif key == GLOBAL_STEP or key in COUNTED:
            entry[key] = torch.zeros(shape, dtype=dtype, device="cpu")
        else:
            entry[key] = spec.relaid(key, torch.zeros(part, dtype=dtype, device=param.device))
    return entry | {key: 0 for key in spec.counts if key != PERIOD}


def _period(slot: Slot, sizes: Sizes) -> int:
    """The block length by the number of magnitudes."""
    blocks, n = math.prod(sizes.get(MAGNITUDE, (0,))), slot.param.numel()
    if tuple(sizes[INDEX]) != tuple(slot.param.shape) or (blocks and n % blocks):
        raise CheckpointError(
            f"Nothing was prepared: the checkpoint's state of {slot.name!r} is that of a "
            f"parameter of shape {tuple(sizes[INDEX])} with {blocks} blocks, this one has "
            f"{tuple(slot.param.shape)}"
        )
    return n // blocks if blocks else UNDECIDED if n else max(row_length(slot.param.shape), 1)
