"""Which parameters Muon optimizes, and which its backup."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import Tensor, nn

from gefen.errors import InvalidArgumentError, UnsupportedParameterError
from gefen.hyperparameters import strings
from gefen.parameters import Slot, check_distinct, check_parameter

BACKUP_SUBSTRINGS = ("embed", "wte", "wpe", "lm_head", "classifier", "score")

NamedParams: TypeAlias = list[tuple[str, Tensor]]


def split_params_for_muon(
    model: nn.Module, backup_substrings: Iterable[str] = BACKUP_SUBSTRINGS
) -> tuple[NamedParams, NamedParams]:
    """(name, parameter) pairs of the model's trainable parameters: Muon's, then the backup's.

    The backup's are those that are not matrices, those of embedding modules (a head tied to one
    included), and those whose name contains one of ``backup_substrings``, in any case.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"Invalid model of type {type(model).__name__}: must be a torch.nn.Module"
        )
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    return split_named(model.named_parameters(), backup_substrings, embeddings)


def split_named(
    named_params: Iterable[Any], backup_substrings: Iterable[str], embeddings: Iterable[int] = ()
) -> tuple[NamedParams, NamedParams]:
    """The same for (name, parameter) pairs; ``embeddings`` are ids of embedding weights."""
    parts = [part.lower() for part in strings("backup_substrings", backup_substrings)]
    embeddings = set(embeddings)
    muon: NamedParams = []
    backup: NamedParams = []
    for name, param in _pairs(named_params, "params"):
        hidden = param.dim() == 2 and id(param) not in embeddings
        hidden = hidden and not any(part in name.lower() for part in parts)
        if param.requires_grad:
            (muon if hidden else backup).append((name, param))
    return muon, backup


def validate_split(
    muon_named_params: Iterable[Any],
    backup_named_params: Iterable[Any],
    model: nn.Module | None = None,
) -> tuple[NamedParams, NamedParams]:
    """The two halves as lists of (name, parameter) pairs, once they are known to be sound.

    Raises, naming the parameter, where one is in both halves or twice in one, where two have
    the same name, where one of Muon's is no matrix, and, given the ``model``, where one that is
    trainable is in neither half.
    """
    muon = _pairs(muon_named_params, "muon_named_params")
    backup = _pairs(backup_named_params, "backup_named_params")
    _check_apart(muon, backup)
    for name, param in muon + backup:
        check_parameter(param, name)
    check_distinct(Slot({}, param, name, i) for i, (name, param) in enumerate(muon + backup))
    for name, param in muon:
        if param.dim() != 2:
            raise UnsupportedParameterError(
                f"Parameter {name!r} has shape {tuple(param.shape)}: Muon takes matrices only; "
                "move it to the backup half"
            )
    if model is not None:
        _check_complete(model, muon + backup)
    return muon, backup


def _check_apart(muon: NamedParams, backup: NamedParams) -> None:
    in_muon = {id(param): name for name, param in muon}
    for name, param in backup:
        if id(param) in in_muon:
            raise InvalidArgumentError(
                f"Parameter {name!r} is in both halves (as {in_muon[id(param)]!r} in Muon's): it "
                "would be stepped twice; leave it in one"
            )


def _check_complete(model: nn.Module, pairs: NamedParams) -> None:
    found = {id(param) for _, param in pairs}
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in found:
            raise InvalidArgumentError(
                f"Parameter {name!r} is trainable but in neither half: it would never be "
                "stepped; add it to one or set requires_grad=False"
            )


def _pairs(params: Iterable[Any], argument: str) -> NamedParams:
    pairs = list(params) if isinstance(params, Iterable) else [params]
    for pair in pairs:
        named = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
        if not (named and isinstance(pair[1], Tensor)):
            raise InvalidArgumentError(
                f"Invalid {argument}: must hold (name, parameter) pairs, such as "
                f"model.named_parameters() gives, not {type(pair).__name__}"
            )
    return pairs
