"""One record per run feeds the terminal, report.json and the evidence."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from threading import RLock
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
WAITING = "waiting"
RUNS_PYTEST = ("identity", "regressions")
# Of failures: how many are told in full and by name, and lines of an assertion, and of a log.
SHOWN_FULLY = 5
SHOWN_FAILURES = 20
SHOWN_ASSERTION = 7
SHOWN_LINES = 60
SHOWN_WIDTH = 240


@dataclass(kw_only=True)
class Phase:
    """One phase of one wheel: how it ended, when it began and how long it took, in seconds."""

    name: str
    status: str = WAITING
    began: float = 0.0
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One reason why a wheel failed.

    Attributes:
        where: the test, or what else failed.
        reason: one line.
        detail: its traceback, stack or log.
        tests: the ids of those that failed for it; none where no test did.
        place: file and line of the suite where the test failed, or "".
        again: the command that repeats it, or "".
        files: logs and JUnit files, below the run's folder.
    """

    where: str
    reason: str
    detail: str = ""
    tests: tuple[str, ...] = ()
    place: str = ""
    again: str = ""
    files: tuple[str, ...] = ()

    def told(self) -> list[str]:
        """Return what to tell of it below its name."""
        kept = [line[1:].strip() for line in self.detail.splitlines() if line.startswith("E ")]
        # The reason is the first line of the assertion.
        assertion = [f"  {line}" for line in kept[1:] if line][:SHOWN_ASSERTION]
        lines = [self.reason, *(assertion if kept else self.detail.splitlines()[:SHOWN_LINES])]
        lines = [f"{line[:SHOWN_WIDTH]}..." if line[SHOWN_WIDTH:] else line for line in lines]
        place = [f"at {self.place}"] if self.place else []
        again = [f"again: {self.again}"] if self.again else []
        return [*lines, *place, *again]


@dataclass(kw_only=True)
class Report:
    """What happened to one wheel.

    ``tests`` is how many should have passed; ``missed_tests`` have no result that counts.
    ``own_tests`` are about what only this checkout's package has, which others need not keep.
    ``only``: names of tests that alone were asked for, which is no gate.
    """

    wheel: str
    sha256: str = ""
    environment: str = ""
    profile: str = ""
    result: str = "incomplete"
    phases: list[Phase] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    tests: int = 0
    own_tests: list[str] = field(default_factory=list)
    foreign: bool = False
    passed_tests: list[str] = field(default_factory=list)
    missed_tests: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    commit: str = ""
    started: str = ""
    finished: str = ""
    embedded_archs: list[str] = field(default_factory=list)
    executed_archs: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the record as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")

    def verdict(self) -> str:
        """Return what it passed or failed, and how long that took."""
        total, pytest = self.span()[1], self.seconds(*RUNS_PYTEST)
        return (
            f"{self._result()}; pytest took {pytest:.1f} s, everything else {total - pytest:.1f} s"
        )

    def _result(self) -> str:
        if not self.failures and self.only:
            count = f"{len(self.passed_tests)} of the profile {self.profile}'s tests"
            return f"passed {count}: those that --only names, which is no evidence"
        if not self.failures:
            return f"passed profile {self.profile}: {len(self.passed_tests)} tests"
        failed = self._failed()
        counts = [f"{failed} of {self.tests} tests failed"] if failed else ["no test failed"]
        if faults := sum(not failure.tests for failure in self.failures):
            counts.append(f"{faults} other {'failure' if faults == 1 else 'failures'}")
        counts.append(f"{len(self.passed_tests)} passed")
        if self.missed_tests:
            counts.append(f"{len(self.missed_tests)} without a result")
        if self.foreign and self.own_tests:
            counts.append(self.kept())
        named = ", of those that --only names" if self.only else ""
        return f"FAILED profile {self.profile}: {', '.join(counts)}{named}"

    def _failed(self) -> int:
        return self.tests - len(self.passed_tests) - len(self.missed_tests)

    def kept(self) -> str:
        """Return how much of the public interface, and of what is ours alone, was kept."""
        own, passed = set(self.own_tests), set(self.passed_tests)
        public = self.tests - len(own)
        return (
            f"public interface: {len(passed - own)} of {public} kept; "
            f"own: {len(passed & own)} of {len(own)}"
        )

    def told(self) -> Iterator[str]:
        """What failed, in lines: by its name, then its assertion, its place, how to repeat it."""
        failed = self._failed()
        count = f"FAILED {failed} of {self.tests}" if failed else "FAILED"
        if len(self.failures) == 1:
            (failure,) = self.failures
            yield f"{count}: {failure.where}"
            yield from (f"  {line}" for line in failure.told())
            return
        yield f"{count}:"
        for failure in self.failures[:SHOWN_FULLY]:
            yield f"  {failure.where}"
            yield from (f"    {line}" for line in failure.told())
        for failure in self.failures[SHOWN_FULLY:SHOWN_FAILURES]:
            yield f"  {failure.where}: {failure.reason}"
        if more := len(self.failures[SHOWN_FAILURES:]):
            yield f"  and {more} more"

    def seconds(self, *names: str) -> float:
        """Return for how long at least one of these phases was running."""
        spans = sorted(
            (phase.began, phase.began + phase.seconds)
            for phase in self.phases
            if phase.name in names and phase.status != WAITING
        )
        total, covered = 0.0, 0.0
        for began, ended in spans:
            total += max(0.0, ended - max(began, covered))
            covered = max(covered, ended)
        return total

    def span(self) -> tuple[float, float]:
        """Return when the first phase began, and the seconds from there to the last one's end."""
        ran = [phase for phase in self.phases if phase.status != WAITING]
        begin = min((phase.began for phase in ran), default=0.0)
        return begin, max((phase.began + phase.seconds for phase in ran), default=0.0) - begin

    def stamp(self, now: float) -> None:
        """Note when the first phase began and that the run ends now, by a clock that cannot jump.

        Args:
            now: the seconds that phases are timed in.
        """
        ended = datetime.now(timezone.utc)
        began = ended - timedelta(seconds=now - self.span()[0])
        self.started = began.isoformat(timespec="seconds")
        self.finished = ended.isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Running:
    phase: Phase
    heading: str
    note: str


class Display:
    """Progress for a person: a line as each phase ends, and on a terminal a running clock.

    Where there is no terminal, a phase that comes with a note also has a line as it begins.
    Phases of several lanes may run at once.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._origin = time.monotonic()
        self._shown = 0
        self._running: list[_Running] = []
        self._lock = RLock()

    def lane(self, label: str) -> Lane:
        """Return what shows one of several things that go on side by side."""
        return Lane(display=self, label=label)

    def say(self, text: str) -> None:
        """Print a line."""
        with self._lock, suppress(OSError):  # worth finishing even if nobody can read of it
            self._clear()
            print(text, file=sys.stderr, flush=True)

    def tick(self) -> None:
        """Show, once a second, how long the current phases have been running."""
        with self._lock, suppress(OSError):
            seconds = int(self.seconds())
            if self._terminal and self._running and seconds != self._shown:
                self._shown = seconds
                self._clear()
                print(self._clock(), end="", file=sys.stderr, flush=True)

    @contextmanager
    def phase(
        self,
        report: Report,
        name: str,
        note: str = "",
        *,
        label: str = "",
        phase: Phase | None = None,
    ) -> Iterator[Phase]:
        """Time a phase and record how it ends, also when it ends in an error.

        Args:
            note: what a phase that may take long is doing, and its limit.
            label: of the lane.
            phase: one that the report already has, or None to add one.
        """
        if phase is None:
            report.phases.append(phase := Phase(name=name))
        number = f"[{PHASES.index(name) + 1}/{len(PHASES)}]" if name in PHASES else "[-]"
        heading = f"{label}  {number}" if label else number
        running = _Running(phase=phase, heading=f"{heading} {name:<12}", note=note)
        phase.began, phase.status = round(self.seconds(), 3), "running"
        self._begin(running)
        try:
            yield phase
            phase.status = phase.status.replace("running", "passed")
        except GateError as error:
            phase.status = "interrupted" if isinstance(error, Interrupted) else "failed"
            raise
        except OSError:
            phase.status = "failed"
            raise
        except BaseException:
            phase.status = "interrupted"
            raise
        finally:
            phase.seconds = max(0.0, round(self.seconds() - phase.began, 3))
            self._finish(running)

    def seconds(self) -> float:
        """Return the time since this display was made, which phases are timed in."""
        return time.monotonic() - self._origin

    def _begin(self, running: _Running) -> None:
        with self._lock:
            if running.note and not self._terminal:
                self.say(f"  {running.heading}           {running.note}")
            self._running.append(running)
            self._shown = -1
        self.tick()

    def _finish(self, running: _Running) -> None:
        phase = running.phase
        mark = {"passed": "ok", "failed": "FAILED"}.get(phase.status, phase.status)
        line = f"  {running.heading} {phase.seconds:5.1f} s  {mark:<6}  {phase.detail}"
        with self._lock:
            self._running.remove(running)
            self._shown = -1
            self.say(line.rstrip())

    def _clock(self) -> str:
        """What is running, on one line of the terminal."""
        now = self.seconds()
        parts = [f"  {each.heading} {now - each.phase.began:5.0f} s" for each in self._running]
        if len(parts) == 1:
            line = f"{parts[0]}          {self._running[0].note}"
        else:
            line = "  " + " | ".join(" ".join(part.split()) for part in parts)
        return line[: shutil.get_terminal_size().columns - 1]

    def _clear(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One of several things that a display shows side by side; its lines carry ``label``."""

    display: Display
    label: str = ""

    def say(self, text: str) -> None:
        """Print a line about this lane."""
        self.display.say(f"{self.label.strip()}: {text}" if self.label else text)

    def phase(
        self, report: Report, name: str, note: str = "", phase: Phase | None = None
    ) -> AbstractContextManager[Phase]:
        """Time a phase, as :meth:`Display.phase` does."""
        return self.display.phase(report, name, note, label=self.label, phase=phase)
