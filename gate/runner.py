"""The only place that starts processes.

Every command is printed, gets exactly the environment it is given, runs below a supervisor that
leaves no process behind, and is bounded in time and in output.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any, TypeVar

from gate import records
from gate.errors import EnvironmentFailed, Interrupted
from gate.harness.supervise import become_subreaper, descendants, kill

SUPERVISOR = Path(__file__).parent / "harness" / "supervise.py"
POLL_SECONDS = 0.05
OUTPUT_LIMIT = 64 * 2**20
FOLDER_LIMIT = 4 * OUTPUT_LIMIT
TAIL_LINES = 40
TAIL_BYTES = 8000
HUNG = "hung"
UNCONFINED = (
    "gate: this kernel cannot keep tests from changing files outside of the environment "
    "(Landlock, Linux 5.19, is missing)"
)
# Said once, however many commands it holds for.
_told_unconfined = Event()
# A supervisor must be known before anyone looks for processes that nobody supervises.
_STARTING = Lock()
_supervisors: set[int] = set()

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended.

    ``returncode`` is negative for a signal, as in subprocess, and None where the command was
    stopped. ``stopped`` says why ("" if it ended by itself). ``unconfined``: the command could
    change files outside of its ``writable`` folder, as this kernel does not prevent it.
    """

    command: tuple[str, ...]
    returncode: int | None
    stopped: str
    survivors: tuple[str, ...]
    log: Path
    seconds: float
    unconfined: bool = False

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself, successfully, leaving nothing running."""
        return self.returncode == 0 and not self.stopped and not self.survivors

    def describe(self) -> str:
        """Return one sentence about how the command ended."""
        if self.stopped:
            return self.stopped
        if self.returncode is None:
            return "its supervisor was killed"
        if self.returncode < 0:
            return f"killed by {signal.Signals(-self.returncode).name}"
        if self.returncode:
            return f"exit status {self.returncode}"
        if self.survivors:
            return f"left {len(self.survivors)} process(es) running: {self.survivors[0]}"
        return "passed"

    def output(self) -> str:
        """Return everything the command printed."""
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        """Return the last lines the command printed."""
        return "\n".join(self.output()[-TAIL_BYTES:].splitlines()[-TAIL_LINES:])


def to_stderr(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Starts commands, in any thread.

    Args:
        verbose: echo the commands and their output while they run.
        on_tick: called many times a second while a command runs (for a progress display).
        say: prints a line about what goes on.
        stops: one of them set stops what is running and keeps more from starting.
    """

    verbose: bool = False
    on_tick: Callable[[], None] = lambda: None
    say: Callable[[str], None] = to_stderr
    stops: tuple[Event, ...] = ()

    def stoppable(self, stop: Event) -> Runner:
        """Return a runner that ``stop`` ends too."""
        return replace(self, stops=(*self.stops, stop))

    def demand_going(self) -> None:
        """Return unless the work was stopped.

        Raises:
            Interrupted: it was.
        """
        if any(stop.is_set() for stop in self.stops):
            raise Interrupted("Stopped, since the result is no longer needed.")

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        timeout: float,
        on_timeout: Callable[[int], None] = lambda _pid: None,
        bounded: Path | None = None,
        stdin: Path | None = None,
        writable: Path | None = None,
    ) -> Outcome:
        """Run ``command`` to its end, but no longer than ``timeout`` seconds.

        Args:
            env: the whole environment of the command.
            log: file that receives standard output and error.
            on_timeout: called, before a command that ran too long is killed, with the process
                id that all its processes are below.
            bounded: folder whose size is limited, as that of the log is.
            stdin: file that the command reads as its standard input; none by default.
            writable: the only folder whose files the command may change; None leaves it free.
                Where the kernel cannot see to that, the outcome and one line to the user say so.

        Raises:
            EnvironmentFailed: the command could not be started.
            Interrupted: the runner was stopped, before the command or while it ran.
        """
        self.demand_going()
        words = tuple(os.fspath(word) for word in command)
        log.parent.mkdir(parents=True, exist_ok=True)
        if self.verbose:
            print(f"+ {shlex.join(words)}", file=sys.stderr, flush=True)
        started = time.monotonic()
        result = log.with_name(log.name + ".result")
        result.unlink(missing_ok=True)
        arguments = [str(result), os.fspath(writable or ""), *words]
        stopped = ""
        with _supervised(arguments, env, cwd, stdin or Path(os.devnull), log) as supervisor:
            stopped = self._watch(supervisor, log, bounded, started + timeout)
            if stopped == HUNG:
                on_timeout(supervisor.pid)
                stopped = f"hung: killed after {timeout:g} s"
        self.demand_going()
        outcome = self._outcome(words, result, log, stopped, time.monotonic() - started)
        if outcome.unconfined and not _told_unconfined.is_set():
            _told_unconfined.set()
            self.say(UNCONFINED)
        return outcome

    def _watch(
        self, supervisor: subprocess.Popen[bytes], log: Path, bounded: Path | None, deadline: float
    ) -> str:
        """Wait for the end; return why the command has to be stopped, or ""."""
        measured = 0.0
        with log.open("rb") as output:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    supervisor.wait(POLL_SECONDS)
                if self.verbose:
                    sys.stderr.write(output.read().decode(errors="replace"))
                self.on_tick()
                ended = supervisor.returncode is not None
                if log.stat().st_size > OUTPUT_LIMIT:
                    return f"printed more than {OUTPUT_LIMIT >> 20} MiB"
                # A fast command is over before anyone has looked once.
                if bounded is not None and (ended or time.monotonic() > measured + 1):
                    measured = time.monotonic()
                    if records.size(bounded) > FOLDER_LIMIT:
                        return f"wrote more than {FOLDER_LIMIT >> 20} MiB"
                if ended:
                    return ""
                self.demand_going()
                if time.monotonic() > deadline:
                    return HUNG

    @staticmethod
    def _outcome(
        words: tuple[str, ...], result: Path, log: Path, stopped: str, seconds: float
    ) -> Outcome:
        found: dict[str, Any] = {"returncode": None, "survivors": []}
        with suppress(FileNotFoundError):
            found = json.loads(result.read_text())
            result.unlink()
        if "error" in found:
            raise EnvironmentFailed(f"Could not start {words[0]}: {found['error']}.")
        return Outcome(
            command=words,
            returncode=None if stopped else found["returncode"],
            stopped=stopped,
            survivors=tuple(found["survivors"]),
            log=log,
            seconds=seconds,
            unconfined=found.get("unconfined", False),
        )


@contextmanager
def _supervised(
    arguments: Sequence[str], env: Mapping[str, str], cwd: Path, stdin: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a supervisor; at the end, end it and all that is below it."""
    # What the command starts must end with it, even if it kills its supervisor.
    become_subreaper()
    with ExitStack() as stack:
        reading, lifeline = os.pipe()
        stack.callback(os.close, reading)
        closing = stack.enter_context(os.fdopen(lifeline, "wb"))
        with _STARTING:
            supervisor = subprocess.Popen(
                [sys.executable, "-ISB", SUPERVISOR, str(reading), *arguments],
                env=dict(env),
                cwd=cwd,
                stdin=stack.enter_context(stdin.open("rb")),
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
                pass_fds=[reading],
                start_new_session=True,
            )
            _supervisors.add(supervisor.pid)
        try:
            yield supervisor
        finally:
            closing.close()
            supervisor.wait()
            _supervisors.discard(supervisor.pid)
            if not Path(arguments[0]).exists():
                _end_orphans()


def _end_orphans() -> None:
    """Kill what a killed supervisor left to this process."""
    with _STARTING:
        while orphans := descendants(os.getpid(), frozenset(_supervisors)):
            kill(orphans)
            for pid in orphans:
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)


@contextmanager
def in_background(
    runner: Runner, task: Callable[[Runner], Result]
) -> Iterator[Callable[[], Result]]:
    """Run ``task`` beside the body, which gets a call that waits for its result.

    The task's commands are stopped when the body ends, however it ends.
    """
    stop = Event()
    own = replace(runner, on_tick=lambda: None).stoppable(stop)
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(task, own)
        try:
            yield future.result
        finally:
            stop.set()


def checked(outcome: Outcome, what: str, *, cause: str = "", next_step: str = "") -> Outcome:
    """Return ``outcome`` if it is ok.

    Raises:
        EnvironmentFailed: otherwise, with the tail of the output.
    """
    if not outcome.ok:
        raise EnvironmentFailed(
            f"{what}: {outcome.describe()}.\n{outcome.tail()}",
            cause=cause,
            next_step=next_step or f"read {outcome.log}",
        )
    return outcome
