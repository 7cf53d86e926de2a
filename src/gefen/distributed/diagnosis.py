"""Say what ranks disagree about: pure functions from gathered facts to one error.

Every rank calls :func:`explain` with the same gathered values and gets the same message.
"""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import torch

from gefen.distributed.mesh import show_ranks
from gefen.errors import (
    GradientPresenceError,
    HyperparameterMismatchError,
    ParameterIdentityError,
    ParameterOrderError,
    PeerFailureError,
    ShardedStepError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

Record = dict[str, Any]
_UNITS_SHOWN = 3
_WITNESSES = 4
_LINES_SHOWN = 8
_UNCHANGED = "Nothing was changed on any rank; correct it and call step() again."
_NAME_THEM = "Pass model.named_parameters() instead of model.parameters()."


def canonical(value: Any) -> str:
    """Write a hyperparameter so that equal values on two ranks are written alike.

    Numbers are equal whatever their types, such as 1, 1.0 and ``numpy.float64(1)``.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real):
        number = float(value)
        return repr(int(number)) if number.is_integer() else repr(number)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(canonical, value))})"
    return type(value).__name__


def ambiguity(records: Sequence[Record]) -> str | None:
    """Say why a rank's own parameters cannot be told apart, or None when they can."""
    named = _repeated(records, lambda r: r["name"] is not None, ("name",))
    if named is not None:
        (name,), positions = named
        return (
            f"the parameters at positions {_listed(positions)} all have the name {name!r}; give "
            "each parameter its own name"
        )
    fields = ("shape", "dtype", "placements", "mesh")
    bare = _repeated(records, lambda r: r["name"] is None, fields)
    if bare is not None:
        (shape, dtype, placements, _), positions = bare
        return (
            f"the unnamed parameters at positions {_listed(positions)} all have shape "
            f"{tuple(shape)}, dtype {dtype} and placements ({placements}), so ranks cannot tell "
            "one from another"
        )
    return None


def _repeated(
    records: Sequence[Record], wanted: Callable[[Record], bool], fields: Sequence[str]
) -> tuple[list[Any], list[int]] | None:
    places: dict[str, list[int]] = {}
    for position, record in enumerate(records):
        if wanted(record):
            places.setdefault(repr([record[f] for f in fields]), []).append(position)
    for positions in places.values():
        if len(positions) > 1:
            return [records[positions[0]][f] for f in fields], positions
    return None


def summarise(
    digests: Mapping[tuple[int, ...], str],
    fault: str | None,
    failure: Exception | None,
) -> dict[str, Any]:
    """Put what one rank holds into a few bytes per unit, for all ranks to compare."""
    units = {
        show_ranks(ranks): {"ranks": list(ranks), "digest": digest}
        for ranks, digest in digests.items()
    }
    text = None if failure is None else f"{type(failure).__name__}: {failure}"[:500]
    return {"units": units, "fault": fault, "failure": text}


def units_to_describe(summaries: Mapping[str, Any], rank: int) -> set[str]:
    """Choose the units this rank describes: one witness for each view of a unit in dispute."""
    if any(summary["failure"] for summary in summaries.values()):
        return set()
    chosen = set()
    for unit in _disputed(summaries)[:_UNITS_SHOWN]:
        witnesses = [ranks[0] for digest, ranks in _views(summaries, unit) if digest is not None]
        if rank in witnesses[:_WITNESSES]:
            chosen.add(unit)
    return chosen


def _units(summaries: Mapping[str, Any]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for summary in summaries.values():
        for name, unit in summary["units"].items():
            found[name] = unit["ranks"]
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _views(summaries: Mapping[str, Any], unit: str) -> list[tuple[str | None, list[int]]]:
    """Group the ranks of a unit by what they hold; None: no parameter of it."""
    views: dict[str | None, list[int]] = {}
    for rank in _units(summaries)[unit]:
        held = summaries[str(rank)]["units"].get(unit) if str(rank) in summaries else None
        views.setdefault(None if held is None else held["digest"], []).append(rank)
    return sorted(views.items(), key=lambda view: view[1])


def _disputed(summaries: Mapping[str, Any]) -> list[str]:
    return [unit for unit in _units(summaries) if len(_views(summaries, unit)) > 1]


def explain(summaries: Mapping[str, Any], details: Mapping[str, Any]) -> ShardedStepError:
    """Compose the one error that every rank raises.

    summaries: per rank what :func:`summarise` gave; details: per witness the records of the
    units that it described.
    """
    failures = {int(r): s["failure"] for r, s in summaries.items() if s["failure"]}
    if failures:
        said: dict[str, list[int]] = {}
        for rank in sorted(failures):
            said.setdefault(failures[rank], []).append(rank)
        lines = [f"{in_words(ranks)} failed with {text}" for text, ranks in said.items()]
        return PeerFailureError(_message("A rank failed before the step", lines, _UNCHANGED))
    faults = _fault_lines(summaries)
    if faults:
        advice = f"{_NAME_THEM} {_UNCHANGED}"
        return ParameterIdentityError(_message("Parameters cannot be told apart", faults, advice))
    return _compare_units(summaries, details)


def _message(title: str, lines: Sequence[str], advice: str) -> str:
    shown = [*lines[:_LINES_SHOWN]]
    if len(lines) > _LINES_SHOWN:
        shown.append(f"and {len(lines) - _LINES_SHOWN} more")
    return f"{title}: {'; '.join(shown)}. {advice}"


def _fault_lines(summaries: Mapping[str, Any]) -> list[str]:
    said: dict[str, set[int]] = {}
    for rank, summary in summaries.items():
        if summary["fault"]:
            said.setdefault(summary["fault"], set()).add(int(rank))
    ordered = sorted(said.items(), key=lambda item: (sorted(item[1]), item[0]))
    return [f"on {in_words(ranks)}, {text}" for text, ranks in ordered]


def _compare_units(summaries: Mapping[str, Any], details: Mapping[str, Any]) -> ShardedStepError:
    checks = (
        (_identity_lines, ParameterIdentityError, "Parameters differ between ranks", _SAME),
        (_order_lines, ParameterOrderError, "Parameters are registered in another order", _ORDER),
        (_presence_lines, GradientPresenceError, "Gradients are missing on some ranks", _GRADS),
        (_hyper_lines, HyperparameterMismatchError, "Hyperparameters differ", _HYPER),
        (_state_lines, HyperparameterMismatchError, "The optimizer's state differs", _STATE),
    )
    described = [_described(summaries, details, unit) for unit in _disputed(summaries)]
    for find, kind, title, advice in checks:
        lines = [line for views in described for line in find(views)]
        if lines:
            return kind(_message(title, lines, f"{advice} {_UNCHANGED}"))
    return ShardedStepError(
        _message("Ranks disagree", ["what differs could not be found out"], _UNCHANGED)
    )


_SAME = "Give every rank of a mesh the same parameters."
_ORDER = "Register the parameters in one order on every rank."
_GRADS = (
    "Run the backward pass of the same parameters on every rank, or set the gradient to zeros "
    "where a rank has none."
)
_HYPER = "Set the same values on every rank."
_STATE = "Make every rank's optimizer alike, and load the same checkpoint on all of them."

Views = list[tuple[list[int], list[Record]]]


def _described(summaries: Mapping[str, Any], details: Mapping[str, Any], unit: str) -> Views:
    views: Views = []
    for digest, ranks in _views(summaries, unit):
        records = [] if digest is None else details.get(str(ranks[0]), {}).get(unit)
        if records is not None:
            views.append((ranks, records))
    return views


def _key(record: Record) -> Hashable:
    if record["name"] is not None:
        return str(record["name"])
    return ("unnamed", _signature(record), record["mesh"])


def _signature(record: Record) -> str:
    shape = tuple(record["shape"])
    return f"shape {shape}, dtype {record['dtype']}, placements ({record['placements']})"


def _label(record: Record) -> str:
    if record["name"] is not None:
        return repr(record["name"])
    return f"the unnamed parameter of {_signature(record)}"


def _identity_lines(views: Views) -> list[str]:
    lines = []
    if len({len(records) for _, records in views}) > 1:
        counts = [f"{len(records)} on {in_words(ranks)}" for ranks, records in views]
        lines.append(f"the number of parameters is {', '.join(counts)}")
    for key, label in _every_key(views).items():
        held = [(ranks, [r for r in records if _key(r) == key]) for ranks, records in views]
        without = [rank for ranks, found in held if not found for rank in ranks]
        if without:
            lines.append(f"{label} is missing on {in_words(without)}")
        elif len({_signature(found[0]) for _, found in held}) > 1:
            parts = [f"{_signature(found[0])} on {in_words(ranks)}" for ranks, found in held]
            lines.append(f"{label} has {', but '.join(parts)}")
        elif len({found[0]["mesh"] for _, found in held}) > 1:
            lines.append(f"{label} lies on another mesh of the same ranks on each of them")
    return lines


def _every_key(views: Views) -> dict[Hashable, str]:
    return {_key(record): _label(record) for _, records in views for record in records}


def _order_lines(views: Views) -> list[str]:
    for position in range(len(views[0][1]) if views else 0):
        if len({_key(records[position]) for _, records in views}) > 1:
            parts = [
                f"{_label(records[position])} on {in_words(ranks)}" for ranks, records in views
            ]
            return [f"position {position} holds {', but '.join(parts)}"]
    return []


def _presence_lines(views: Views) -> list[str]:
    lines = []
    for position, record in enumerate(views[0][1] if views else []):
        present = {
            state: [
                r
                for ranks, records in views
                if records[position]["has_grad"] is state
                for r in ranks
            ]
            for state in (True, False)
        }
        if present[True] and present[False]:
            lines.append(
                f"{_label(record)} has a gradient on {in_words(present[True])} "
                f"but none on {in_words(present[False])}"
            )
    return lines


def _hyper_lines(views: Views) -> list[str]:
    lines = _value_lines(views, "hyperparameters")
    if not lines and _partition(views) > 1:
        lines.append("the parameters are divided into parameter groups differently")
    return lines


def _state_lines(views: Views) -> list[str]:
    return _value_lines(views, "state")


def _value_lines(views: Views, kind: str) -> list[str]:
    """kind: the part of the records that holds values by name."""
    said: dict[str, list[str]] = {}
    for position, record in enumerate(views[0][1] if views else []):
        values = [(ranks, records[position][kind]) for ranks, records in views]
        for name in sorted({name for _, held in values for name in held}):
            if len({held.get(name) for _, held in values}) > 1:
                parts = [
                    f"{held.get(name, 'absent')} on {in_words(ranks)}" for ranks, held in values
                ]
                said.setdefault(f"{name} is {', but '.join(parts)}", []).append(_label(record))
    return [f"{text} for {first_few(labels)}" for text, labels in said.items()]


def _partition(views: Views) -> int:
    return len({tuple(record["group"] for record in records) for _, records in views})


def in_words(ranks: Iterable[int]) -> str:
    """Write ranks for a sentence: ``ranks 0-3, 6``."""
    ranks = sorted(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {show_ranks(ranks)}"


def _listed(positions: Sequence[int]) -> str:
    return ", ".join(map(str, positions))


def first_few(labels: Sequence[str]) -> str:
    """Name up to four of ``labels``, each once, and say how many more there are."""
    shown = list(dict.fromkeys(labels))
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    return ", ".join(shown[:4]) + more
