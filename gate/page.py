"""The evidence folder as one page for a person: report.html, and report.md for CI summaries."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader

from gate.evidence import locked, signature_of, statements_in, write_file
from gate.report import RUNS_PYTEST, WAITING, Phase, Report
from gate.wheels import sha256_of

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
class Link:
    """A file of the evidence folder: what it is called, and its address from the page."""

    name: str
    address: str


@dataclass(frozen=True)
class Reason:
    """Failures that share a reason and its log or stack; ``told`` of the first: place, command."""

    reason: str
    where: list[str]
    log: str
    told: list[tuple[str, str]]
    links: list[Link]


@dataclass(frozen=True)
class Promises:
    """Tests of one kind, by name, with what became of each."""

    kind: str
    kept: int
    tests: list[tuple[str, str]]


@dataclass(frozen=True)
class Run:
    """One wheel in one environment with one profile, as the page shows it."""

    record: Mapping[str, Any]
    anchor: str
    folder: str = ""
    statement: Link | None = None
    signed: str = ""

    @property
    def only(self) -> list[str]:
        """The names of the tests that alone were asked for; none for a whole gate."""
        return list(self.record.get("only") or ())

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
        return self._report.span()

    @property
    def _report(self) -> Report:
        phases = [
            Phase(
                name=phase["name"],
                status=phase["status"],
                began=float(phase["began"]),
                seconds=float(phase["seconds"]),
            )
            for phase in self.record["phases"]
        ]
        return Report(wheel=str(self.record["wheel"]), phases=phases)

    @property
    def times(self) -> str:
        """Where the time went, in figures that add up."""
        report = self._report
        total, pytest = self._span[1], report.seconds(*RUNS_PYTEST)
        names = {phase.name for phase in report.phases}
        others = report.seconds(*names) - pytest
        parts = [
            phase.seconds
            for phase in report.phases
            if phase.name == "regressions" and phase.status != WAITING
        ]
        text = f"{total:.1f} s: pytest {pytest:.1f} s, other phases {others:.1f} s"
        if (between := total - pytest - others) >= 0.05:
            text += f", waiting {between:.1f} s"
        if len(parts) > 1:
            text += f"; {len(parts)} parts of the tests, side by side, took {sum(parts):.1f} s"
        return text

    @property
    def reasons(self) -> list[Reason]:
        """The failures, alike ones together."""
        together: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for failure in self.record.get("failures", ()):
            alike = str(failure["reason"]), str(failure.get("detail") or "")
            together.setdefault(alike, []).append(failure)
        return [
            Reason(
                reason=reason,
                where=[str(failure["where"]) for failure in same],
                log=log,
                told=[
                    (word, str(same[0][key]))
                    for word, key in (("at", "place"), ("again", "again"))
                    if same[0].get(key)
                ],
                links=self.links(same[0].get("files") or ()),
            )
            for (reason, log), same in together.items()
        ]

    def links(self, files: Sequence[str]) -> list[Link]:
        """Links to files below the run's folder; none that would lead out of it."""
        return [
            Link(name, quote(f"{self.folder}/{name}"))
            for name in map(str, files)
            if self.folder and not name.startswith("/") and ".." not in name.split("/")
        ]

    @property
    def promises(self) -> list[Promises]:
        """Every test by name: those of the public interface, and apart those of ours alone."""
        fates = {str(test): "kept" for test in self.record.get("passed_tests", ())}
        fates |= {str(test): "no result" for test in self.record.get("missed_tests", ())}
        for failure in self.record.get("failures", ()):
            fates |= {str(test): "failed" for test in failure.get("tests") or ()}
        own = set(map(str, self.record.get("own_tests", ())))
        kinds = {
            "public interface": {test for test in fates if test not in own},
            "own": {test for test in fates if test in own},
        }
        return [
            Promises(
                kind=kind,
                kept=sum(fates[test] == "kept" for test in tests),
                tests=sorted((test, fates[test]) for test in tests),
            )
            for kind, tests in kinds.items()
            if tests
        ]

    @property
    def archs(self) -> list[tuple[str, bool]]:
        """GPU architectures that the wheel holds code for, and whether this run executed it."""
        executed = set(self.record.get("executed_archs", ()))
        return [(arch, arch in executed) for arch in self.record.get("embedded_archs", ())]


def write(
    evidence: Path,
    signers: Callable[[bytes, bytes], tuple[str, ...]] = lambda _message, _signature: (),
) -> tuple[Path, Path]:
    """Write report.html and report.md about every run that the evidence folder holds.

    Args:
        evidence: the evidence folder.
        signers: who signed a message, by its signature.

    Returns their paths. A record that cannot be read is listed as such.

    Raises:
        GateError: they cannot be written.
    """
    with locked(evidence):
        every, unreadable = _load(sorted(evidence.glob("runs/*/*/report.json")), evidence)
        every = list(_stated(every, evidence, signers))
    runs = [run for run in every if not run.only]
    values = {
        "runs": runs,
        "parts": [run for run in every if run.only],
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


def _stated(
    runs: Iterable[Run], evidence: Path, signers: Callable[[bytes, bytes], tuple[str, ...]]
) -> Iterator[Run]:
    """The runs, each with the statement that binds its report, and who signed that."""
    statements = statements_in(evidence)
    for run in runs:
        report = f"{run.folder}/report.json"
        for statement in statements:
            if statement.files.get(report) == sha256_of(evidence / report):
                name = statement.path.relative_to(evidence).as_posix()
                signed = signature_of(statement, signers)
                run = replace(run, statement=Link(name, quote(name)), signed=signed)
        yield run


def _load(paths: Iterable[Path], evidence: Path) -> tuple[list[Run], list[Path]]:
    runs: list[Run] = []
    unreadable: list[Path] = []
    for path in paths:
        try:
            record = json.loads(path.read_bytes())
            folder = path.parent.relative_to(evidence).as_posix()
            run = Run(record, f"run-{len(runs) + 1}", folder)
            # Everything the templates use, so that a foreign record cannot break the page.
            _ = run.wheel, run.column, run.rank, run.cell, run.bars, run.reasons, run.archs
            _ = run.only, run.times, run.promises
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
    environment.filters["plain"] = plain
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


def plain(text: str) -> str:
    """Markdown text without any meaning of its characters."""
    return re.sub(r"([^\w\s/.-])", r"\\\1", text)
