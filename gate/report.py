"""One record per run feeds the terminal, report.json and the evidence."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gate.errors import GateError, Interrupted

PHASES = (
    "resolve",
    "audit",
    "environment",
    "install",
    "identity",
    "machine",
    "regressions",
    "evidence",
)
RUNS_PYTEST = ("identity", "regressions")


@dataclass(kw_only=True)
class Phase:
    """One phase of one wheel: how it ended and how long it took, in seconds."""

    name: str
    status: str = "running"
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One reason why a wheel failed; ``detail`` is its log or stack."""

    where: str
    reason: str
    detail: str = ""


@dataclass(kw_only=True)
class Report:
    """What happened to one wheel."""

    wheel: str
    sha256: str = ""
    profile: str = ""
    result: str = "incomplete"
    phases: list[Phase] = field(default_factory=list)
    passed_tests: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the record as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")


class Display:
    """Progress for a person: a line as each phase ends, and on a terminal a running clock.

    Where there is no terminal, a phase that comes with a note also has a line as it begins.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._started = 0.0
        self._shown = 0
        self._current = self._note = ""

    def say(self, text: str) -> None:
        """Print a line."""
        self._clear()
        with suppress(OSError):  # a run is worth finishing even if nobody can read of it
            print(text, file=sys.stderr, flush=True)

    def tick(self) -> None:
        """Show, once a second, how long the current phase has been running."""
        seconds = int(time.monotonic() - self._started)
        if self._terminal and self._current and seconds != self._shown:
            self._shown = seconds
            line = f"\r  {self._current} {seconds:5d} s          {self._note}"
            print(line, end="", file=sys.stderr, flush=True)

    @contextmanager
    def phase(self, report: Report, name: str, note: str = "") -> Iterator[Phase]:
        """Time a phase and record how it ends, also when it ends in an error.

        ``note`` says what a phase that may take long is doing, and its limit.
        """
        phase = Phase(name=name)
        report.phases.append(phase)
        self._started = time.monotonic()
        number = f"[{PHASES.index(name) + 1}/{len(PHASES)}]" if name in PHASES else "[-]"
        self._current, self._note, self._shown = f"{number} {name:<12}", note, -1
        if note and not self._terminal:
            self.say(f"  {self._current}           {note}")
        self.tick()
        try:
            yield phase
            phase.status = phase.status.replace("running", "passed")
        except GateError as error:
            phase.status = "interrupted" if isinstance(error, Interrupted) else "failed"
            raise
        except BaseException:
            phase.status = "interrupted"
            raise
        finally:
            phase.seconds = round(time.monotonic() - self._started, 3)
            self._finish(phase)

    def _finish(self, phase: Phase) -> None:
        mark = {"passed": "ok", "failed": "FAILED"}.get(phase.status, phase.status)
        self.say(f"  {self._current} {phase.seconds:5.1f} s  {mark:<6}  {phase.detail}".rstrip())
        self._current = ""

    def _clear(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr)
