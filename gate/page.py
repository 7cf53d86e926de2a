"""The evidence folder as one page for a person: report.html, and report.md for CI summaries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from gate.evidence import locked, write_file

SHOWN_LINES = 200
"""Of each log; the last ones tell the reason."""


@dataclass(frozen=True)
class Cell:
    """One run in the table of wheels by environments and profiles."""

    anchor: str
    result: str
    tests: int
    seconds: float


@dataclass(frozen=True)
class Bar:
    """One phase in the timeline; start and width in per cent of the whole run."""

    name: str
    status: str
    seconds: float
    detail: str
    start: float
    width: float


@dataclass(frozen=True)
class Reason:
    """Failures that share a reason and its log or stack."""

    reason: str
    where: list[str]
    log: str


@dataclass(frozen=True)
class Run:
    """One wheel in one environment with one profile, as the page shows it."""

    record: Mapping[str, Any]
    anchor: str

    @property
    def wheel(self) -> tuple[str, str]:
        """File name and sha256."""
        return str(self.record["wheel"]), str(self.record.get("sha256", ""))

    @property
    def column(self) -> tuple[str, str]:
        """Environment and profile."""
        facts = self.facts
        environment = self.record.get("environment") or f"torch {facts.get('torch', '?')}"
        return str(environment), str(self.record.get("profile", ""))

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the machine phase found out; empty if it was not reached."""
        return dict(self.record.get("facts") or {})

    @property
    def rank(self) -> int:
        """Where its details come: what needs attention first."""
        return int(self.record["result"] == "passed")

    @property
    def cell(self) -> Cell:
        """What the table shows."""
        _, seconds = self._span
        passed = len(self.record.get("passed_tests", ()))
        return Cell(self.anchor, str(self.record["result"]), passed, seconds)

    @property
    def bars(self) -> list[Bar]:
        """The phases in order; some may run at once."""
        origin, total = self._span
        per_cent = 100 / (total or 1.0)
        return [
            Bar(
                name=phase["name"],
                status=phase["status"],
                seconds=phase["seconds"],
                detail=phase["detail"],
                start=(phase["began"] - origin) * per_cent,
                width=phase["seconds"] * per_cent,
            )
            for phase in self.record["phases"]
        ]

    @property
    def _span(self) -> tuple[float, float]:
        """When the first phase began and how long it took from there to the last one's end."""
        phases = self.record["phases"]
        begin = min((phase["began"] for phase in phases), default=0.0)
        end = max((phase["began"] + phase["seconds"] for phase in phases), default=0.0)
        return begin, end - begin

    @property
    def reasons(self) -> list[Reason]:
        """The failures, alike ones together."""
        together: dict[tuple[str, str], list[str]] = {}
        for failure in self.record.get("failures", ()):
            alike = str(failure["reason"]), str(failure.get("detail") or "")
            together.setdefault(alike, []).append(str(failure["where"]))
        return [Reason(reason, where, log) for (reason, log), where in together.items()]

    @property
    def archs(self) -> list[tuple[str, bool]]:
        """GPU architectures that the wheel holds code for, and whether this run executed it."""
        executed = set(self.record.get("executed_archs", ()))
        return [(arch, arch in executed) for arch in self.record.get("embedded_archs", ())]


def write(evidence: Path) -> tuple[Path, Path]:
    """Write report.html and report.md about every run that the evidence folder holds.

    Returns their paths. A record that cannot be read is listed as such.

    Raises:
        GateError: they cannot be written.
    """
    with locked(evidence):
        runs, unreadable = _load(sorted(evidence.glob("runs/*/*/report.json")))
    values = {
        "runs": runs,
        "unreadable": [str(path.relative_to(evidence)) for path in unreadable],
        "passed": sum(run.record["result"] == "passed" for run in runs),
        "columns": sorted({run.column for run in runs}),
        "rows": _rows(runs),
    }
    written = evidence / "report.html", evidence / "report.md"
    for path in written:
        template = f"{path.name}.jinja"
        text = _templates().get_template(template).render(values)
        write_file(path, text.encode("utf-8", "backslashreplace"))
    return written


def _load(paths: Iterable[Path]) -> tuple[list[Run], list[Path]]:
    runs: list[Run] = []
    unreadable: list[Path] = []
    for path in paths:
        try:
            record = json.loads(path.read_bytes())
            run = Run(record, f"run-{len(runs) + 1}")
            # Everything the templates use, so that a foreign record cannot break the page.
            _ = run.wheel, run.column, run.rank, run.cell, run.bars, run.reasons, run.archs
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            unreadable.append(path)
            continue
        runs.append(run)
    runs.sort(key=lambda run: (run.wheel, run.column))
    return runs, unreadable


def _rows(runs: Sequence[Run]) -> list[tuple[tuple[str, str], dict[tuple[str, str], Cell]]]:
    """Wheels with their cells by column."""
    return [
        (wheel, {run.column: run.cell for run in same})
        for wheel, same in groupby(runs, key=lambda run: run.wheel)
    ]


def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=lambda name: name is not None and ".html" in name,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["tail"] = tail
    environment.filters["fenced"] = fenced
    environment.filters["code"] = code
    return environment


def tail(text: str, lines: int = SHOWN_LINES) -> str:
    """The last lines of a log, with a first one that says how many are left out."""
    all_lines = text.rstrip().splitlines()
    left_out = len(all_lines) - lines
    if left_out <= 0:
        return "\n".join(all_lines)
    return "\n".join([f"[{left_out} lines before these are in the log]", *all_lines[-lines:]])


def fenced(text: str) -> str:
    """A Markdown code block, with a fence longer than any that the text holds."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def code(text: str) -> str:
    """Markdown code within a line or the cell of a table."""
    flat = " ".join(text.replace("|", "\\|").split())
    fence = "`" * (1 + max(map(len, re.findall("`+", flat)), default=0))
    pad = " " if fence != "`" else ""
    return f"{fence}{pad}{flat}{pad}{fence}"
