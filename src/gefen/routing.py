"""Which parameters Muon optimizes, which its backup, and a table that says why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from gefen.errors import InvalidArgumentError, UnsupportedParameterError
from gefen.hyperparameters import strings
from gefen.parameters import Slot, check_distinct, check_parameter
from gefen.sides import (
    BACKUP,
    MUON,
    Decision,
    Sides,
    Survey,
    check_all_meant,
    check_sides,
    decide,
    survey,
)

BACKUP_SUBSTRINGS = ("embed", "wte", "wpe", "lm_head", "classifier", "score")

NamedParams: TypeAlias = list[tuple[str, Tensor]]

Decided: TypeAlias = list[tuple[str, Tensor, Decision]]

BARE = (
    "bare parameters do not say which of them are embeddings or output heads, which Muon must "
    "not take; pass (name, parameter) pairs, such as model.named_parameters() gives. "
    "transformers.Trainer passes bare ones for optimizer_cls_and_kwargs: give it "
    "optimizers=(GefenMuonHybrid.from_model(model), None) instead, with lr=... among the "
    "arguments of from_model"
)


class Route(NamedTuple):
    """Where one parameter goes."""

    name: str
    shape: tuple[int, ...]
    side: str
    """"muon", "backup", or "left out" for what is frozen and cannot be stepped."""
    why: str


class RoutingTable(list[Route]):
    """The routes of all parameters, in their order; as text, a line for each."""

    def __str__(self) -> str:
        cells = [(route.side, route.name, str(route.shape), route.why) for route in self]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        )


def routing_table(
    model: nn.Module | Iterable[tuple[str, Tensor]],
    backup_substrings: Iterable[str] = BACKUP_SUBSTRINGS,
    *,
    sides: Sides | None = None,
) -> RoutingTable:
    """How :class:`~gefen.GefenMuonHybrid` routes a model or (name, parameter) pairs, and why.

    A list of (name, shape, side, why) in the order of the parameters; ``print`` shows it. The
    arguments are those of :func:`split_params_for_muon`.
    """
    return tabulated(routed(model, backup_substrings, sides))


def split_params_for_muon(
    model: nn.Module,
    backup_substrings: Iterable[str] = BACKUP_SUBSTRINGS,
    *,
    sides: Sides | None = None,
) -> tuple[NamedParams, NamedParams]:
    """(name, parameter) pairs of the model: Muon's, then the backup's.

    Muon's are the weight matrices of hidden layers, and those of experts that lie in tensors of
    three dimensions. The backup's are what else there is: vectors, embeddings by their modules'
    types (heads tied to one included), output heads, convolutions, matrices that are no weights,
    and what has one of ``backup_substrings`` in its name, in any case. Frozen parameters are
    routed like others, as they may be trained later; only those that could not be stepped, such
    as integers, are in neither list.

    ``sides`` overrules this: a mapping from names, or patterns as in "*.router.weight", to
    "muon" or "backup", or a function of (name, parameter) that returns one of them, or None to
    leave the choice. :func:`routing_table` shows what becomes of each parameter, and why.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"Invalid model of type {type(model).__name__}: must be a torch.nn.Module"
        )
    return halves(routed(model, backup_substrings, sides))


def routed(
    source: nn.Module | Iterable[Any], backup_substrings: Iterable[str], sides: Sides | None
) -> Decided:
    """Every parameter of a model, or of pairs, with its side."""
    found = decided(source, backup_substrings, sides)
    check_all_meant(sides, [name for name, _, _ in found])
    return found


def decided(
    source: nn.Module | Iterable[Any], backup_substrings: Iterable[str], sides: Sides | None
) -> Decided:
    """The same where ``sides`` may also speak of parameters of other sources."""
    substrings, sides = strings("backup_substrings", backup_substrings), check_sides(sides)
    if isinstance(source, nn.Module):
        return decide(source.named_parameters(), survey(source), substrings, sides)
    return decide(pairs(source, "params"), Survey(), substrings, sides)


def halves(found: Decided) -> tuple[NamedParams, NamedParams]:
    """Muon's pairs and the backup's."""
    muon = [(name, param) for name, param, (side, _) in found if side == MUON]
    return muon, [(name, param) for name, param, (side, _) in found if side == BACKUP]


def tabulated(found: Decided) -> RoutingTable:
    """The table of what was decided."""
    return RoutingTable(Route(name, _shape(p), side, why) for name, p, (side, why) in found)


def _shape(param: Tensor) -> tuple[int, ...]:
    return () if nn.parameter.is_lazy(param) else tuple(param.shape)


def validate_split(
    muon_named_params: Iterable[Any],
    backup_named_params: Iterable[Any],
    model: nn.Module | None = None,
) -> tuple[NamedParams, NamedParams]:
    """The two halves as lists of (name, parameter) pairs, once they are known to be sound.

    Raises, naming the parameter, where one is in both halves or twice in one, where two have
    the same name, where one of Muon's is neither matrix nor batch of matrices, and, given the
    ``model``, where one that is trainable is in neither half.
    """
    muon = pairs(muon_named_params, "muon_named_params")
    backup = pairs(backup_named_params, "backup_named_params")
    _check_apart(muon, backup)
    for name, param in muon + backup:
        check_parameter(param, name)
    check_distinct(Slot({}, param, name, i) for i, (name, param) in enumerate(muon + backup))
    for name, param in muon:
        if param.dim() not in (2, 3):
            raise UnsupportedParameterError(
                f"Parameter {name!r} has shape {tuple(param.shape)}: Muon takes matrices, and "
                "batches of them, only; move it to the backup half"
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


def _check_complete(model: nn.Module, given: NamedParams) -> None:
    found = {id(param) for _, param in given}
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in found:
            raise InvalidArgumentError(
                f"Parameter {name!r} is trainable but in neither half: it would never be "
                "stepped; add it to one or set requires_grad=False"
            )


def pairs(params: Iterable[Any], argument: str) -> NamedParams:
    """``params`` as a list, once it is known to hold (name, parameter) pairs."""
    found = list(params) if isinstance(params, Iterable) else [params]
    if any(isinstance(item, Tensor) for item in found):
        raise InvalidArgumentError(f"Invalid {argument}: {BARE}")
    for pair in found:
        named = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
        if not (named and isinstance(pair[1], Tensor)):
            raise InvalidArgumentError(
                f"Invalid {argument}: must hold (name, parameter) pairs, such as "
                f"model.named_parameters() gives, not {type(pair).__name__}"
            )
    return found
