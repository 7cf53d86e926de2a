"""The tables of docs/convergence.md from the results of convergence.py, as markdown."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]

# The optimizers of each kind; the first is what the others are compared to.
KINDS = (
    ("adamw", "gefen", "gefen-x", "adamw8bit"),
    ("muon", "hybrid", "gefen-x-hybrid"),
)
NAMES = {
    "adamw": "AdamW",
    "gefen": "Gefen",
    "gefen-x": "Gefen of gefen-x",
    "adamw8bit": "AdamW 8-bit, bitsandbytes",
    "muon": "Muon and AdamW",
    "hybrid": "GefenMuonHybrid",
    "gefen-x-hybrid": "GefenMuonHybrid of gefen-x",
}
CURVE = (0.1, 0.25, 0.5, 0.75, 1.0)
MARKS = ("<!-- tables -->\n", "<!-- end of tables -->\n")


def markdown(lines: list[Line]) -> str:
    """A section for each task: every learning rate in float32, the best in bfloat16, curves."""
    parts = []
    for task in distinct(line["task"] for line in lines):
        chosen = [line for line in lines if line["task"] == task]
        for steps in distinct(line["steps"] for line in chosen):
            alike = [line for line in chosen if line["steps"] == steps]
            single, half = of(alike, dtype="float32"), of(alike, dtype="bfloat16")
            parts += [f"### {task}, {steps} steps", rates_table(single)]
            if half:
                parts += ["With bfloat16 autocast, at the same rates:", half_table(half, single)]
            parts += ["Validation loss during training, float32:", curve_table(single)]
    parts.append("Made by: " + "; ".join(sorted({line["code"] for line in lines})) + ".")
    return "\n\n".join(parts)


def insert(path: Path, tables: str) -> None:
    """Put the tables between MARKS in the file, in place of what is there."""
    text = path.read_text(encoding="utf-8")
    begin, end = MARKS
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        sys.exit(f"{path} needs one line {begin.strip()} and after it one {end.strip()}")
    head, tail = text.partition(begin)[0], text.partition(end)[2]
    path.write_text(f"{head}{begin}\n{tables}\n\n{end}{tail}", encoding="utf-8")


def rates_table(lines: list[Line]) -> str:
    """Mean final loss at every rate; the best with its seeds, and what that means."""
    rates = sorted({line["lr"] for line in lines})
    head = [*(f"{rate:g}" for rate in rates), "best: least to most", "verdict", "bytes"]
    rows = []
    for optimizer, first in ordered(lines):
        mine = of(lines, optimizer=optimizer)
        losses = [mean(finals(of(mine, lr=rate))) for rate in rates]
        known = [loss for loss in losses if not math.isnan(loss)]
        cells = [shown(loss, bold=loss == min(known)) for loss in losses]
        state = mine[0]["state_bytes"] / mine[0]["parameters"]
        rows.append([*cells, *compared(best(mine), best(of(lines, optimizer=first)))])
        rows[-1] = [NAMES.get(optimizer, optimizer), *rows[-1], f"{state:.2f}"]
    return table(["", *head], rows)


def half_table(lines: list[Line], single: list[Line]) -> str:
    rows = []
    for optimizer, first in ordered(lines):
        mine = of(lines, optimizer=optimizer)
        rate = best_rate(of(single, optimizer=optimizer) or mine)
        mine, reference = of(mine, lr=rate), best(of(lines, optimizer=first))
        cells = [f"{rate:g}", shown(mean(finals(mine))), *compared(mine, reference)]
        rows.append([NAMES.get(optimizer, optimizer), *cells])
    return table(["", "rate", "mean", "least to most", "verdict"], rows)


def curve_table(lines: list[Line]) -> str:
    """Means over the seeds at the best rate."""
    rows = []
    for optimizer, _ in ordered(lines):
        curves = [line["curve"] for line in best(of(lines, optimizer=optimizer))]
        places = [max(0, round(part * len(curves[0])) - 1) for part in CURVE]
        means = [mean([number(curve[place][1]) for curve in curves]) for place in places]
        rows.append([NAMES.get(optimizer, optimizer), *map(shown, means)])
    steps = [str(curves[0][place][0]) for place in places]
    return table(["step", *steps], rows)


def compared(mine: list[Line], reference: list[Line]) -> list[str]:
    """The range of the seeds, and where their mean lies in that of the reference."""
    ours, theirs = finals(mine), finals(reference)
    spread = f"{shown(min(ours))} to {shown(max(ours))}"
    if mine == reference or not theirs:
        return [spread, ""]
    return [spread, verdict(ours, theirs)]


def verdict(ours: list[float], theirs: list[float]) -> str:
    """Of final losses by seed: is the mean of ours in the range of theirs?"""
    difference = mean(ours) - mean(theirs)
    if min(theirs) <= mean(ours) <= max(theirs):
        return f"within the spread ({difference:+.3f})"
    return f"{'worse' if difference > 0 else 'better'} ({difference:+.3f})"


def best(lines: list[Line]) -> list[Line]:
    """The lines with the best rate, by seed."""
    rate = best_rate(lines) if lines else None
    return sorted(of(lines, lr=rate), key=lambda line: line["seed"])


def best_rate(lines: Iterable[Line]) -> float:
    """The learning rate whose final losses have the least mean; the lower of two."""
    lines = list(lines)
    return min(
        sorted({float(line["lr"]) for line in lines}),
        key=lambda rate: mean(finals(of(lines, lr=rate))),
    )


def ordered(lines: list[Line]) -> list[tuple[str, str]]:
    """(optimizer, what it is compared to) of all optimizers in the lines, kind by kind."""
    present = distinct(line["optimizer"] for line in lines)
    pairs = [(name, kind[0]) for kind in KINDS for name in kind if name in present]
    known = {name for name, _ in pairs}
    others = [name for name in present if name not in known]
    return pairs + [(name, KINDS["hybrid" in name or "muon" in name][0]) for name in others]


def finals(lines: list[Line]) -> list[float]:
    return [number(line["final"]) for line in lines]


def number(loss: float | None) -> float:
    """A loss that was not finite counts as infinite."""
    return math.inf if loss is None else loss


def of(lines: list[Line], **wanted: Any) -> list[Line]:
    return [line for line in lines if all(line[name] == wanted[name] for name in wanted)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def shown(loss: float, bold: bool = False) -> str:
    if not math.isfinite(loss):
        return "" if math.isnan(loss) else "diverged"
    return f"**{loss:.3f}**" if bold else f"{loss:.3f}"


def distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
