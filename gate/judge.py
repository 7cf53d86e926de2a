"""Judges what a start of tests left behind: what passed, what failed and why, what did not run.

Passed is a test that came back as *passed* from every rank, in the records of processes that can
be trusted. Whatever is not explained by a failing test is a failure of the process.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gate import records
from gate.report import Failure
from gate.runner import Outcome

CANARY_FAILED = 1
PYTEST_FRAMES = ("/_pytest/", "/pluggy/", "/pytest/__main__.py", "<frozen runpy>")
LOG_LINES = 25
# What torchrun says of each rank that failed, and again at the end of the first one.
_ENDED = re.compile(r"rank\s+: (?P<rank>\d+) .*?exitcode\s+: (?P<code>-?\d+)", re.DOTALL)
_ROOT = re.compile(f"Root Cause.*?{_ENDED.pattern}", re.DOTALL)
_STOPPED = re.compile(r'File "(?P<file>tests/regression/[^"]+)", line (?P<line>\d+)')
_SIGNALS = {-4: "SIGILL", -6: "SIGABRT", -7: "SIGBUS", -8: "SIGFPE", -9: "SIGKILL", -11: "SIGSEGV"}


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What tests came to, by their ids; ``missed`` have no result that counts.

    ``void``: nothing that these processes say counts.
    """

    passed: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    void: bool = False


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start of tests that is over.

    Attributes:
        label: what the tests pass under.
        world: how many ranks there were.
        folder: their records.
        canary: the id of the test that must fail.
        exit_first: whether a process stops at its first failing test.
        names: (path, what it is called for a person) of folders that are gone soon.
    """

    label: str
    world: int
    folder: Path
    canary: str
    exit_first: bool = False
    names: tuple[tuple[str, str], ...] = ()

    def id(self, node: str) -> str:
        """Return what reports and statements call a test of this start."""
        return f"{self.label}: {node}"

    def name(self, node: str) -> str:
        """Return how a person, and ``--only``, call a test of this start."""
        return node if self.world == 1 else self.id(node)

    def on(self, ranks: Sequence[int]) -> str:
        """Return on which ranks, where that says anything."""
        if len(ranks) == self.world:
            return ""
        number = "ranks" if len(ranks) > 1 else "rank"
        return f" on {number} {' and '.join(map(str, ranks))}"

    def tidy(self, text: str) -> str:
        """Return ``text`` without paths that nobody can look at any more."""
        for path, name in self.names:
            text = text.replace(path, name)
        return text

    def files(self) -> tuple[str, ...]:
        """Return where logs and JUnit files of this start are, below the records."""
        kinds = ("junit-*.xml", "output.log", "stacks-*.txt", "ranks/**/*.log")
        found = [path for kind in kinds for path in sorted(self.folder.glob(kind))]
        above = self.folder.parent
        return tuple(path.relative_to(above).as_posix() for path in found if records.read(path))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a process recorded about one test.

    ``detail`` is its traceback; ``at`` tells the order in which tests failed on several ranks.
    """

    verdict: str
    detail: str = ""
    place: str = ""
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The records that one process left; ``finished`` is None where it did not finish."""

    number: int
    alone: bool
    finished: Mapping[str, Any] | None
    exited: bool
    running: str
    stacks: str
    results: Mapping[str, Verdict]


def read_rank(start: Start, number: int) -> Rank:
    """Return what the process of this number left."""
    folder = start.folder
    finished = records.read_json(folder / f"finished-{number}.json", dict)
    results = from_junit(folder / f"junit-{number}.xml")
    # JUnit files are written at the end; who did not get there left a line for each test.
    lines = _from_lines(folder / f"results-{number}.jsonl") if finished is None else {}
    return Rank(
        number=number,
        alone=start.world == 1,
        finished=finished,
        exited=records.read_json(folder / f"exited-{number}.json", dict) is not None,
        running=records.read_text(folder / f"current-{number}"),
        stacks=start.tidy(stacks(folder / f"stacks-{number}.txt")),
        results=results or lines,
    )


def judge(start: Start, expected: Sequence[str], outcome: Outcome) -> Judgement:
    """Judge a start of the tests ``expected``."""
    ranks = [read_rank(start, number) for number in range(start.world)]
    failed = dict(_failed_tests(start, expected, ranks))
    stopping = any(
        each.verdict != "passed"
        for rank in ranks
        for node, each in rank.results.items()
        if node != start.canary
    )
    faults = list(_process_faults(start, ranks, stopping))
    passed, missed = [], []
    for node in expected:
        verdicts = [rank.results.get(node) for rank in ranks]
        if all(each and each.verdict == "passed" for each in verdicts) and not faults:
            passed.append(start.id(node))
        elif node not in failed:
            missed.append(start.id(node))
    failures = [*faults, *failed.values()]
    if not _stopped(start, ranks, stopping):
        left_out = [node for node in expected if any(node not in rank.results for rank in ranks)]
        failures += [_left_out(start, node) for node in left_out if node not in failed]
    if end := _end(start, ranks, outcome, failures):
        # Its peers may have failed in the same test, since it had left.
        same = [failure for failure in failures if set(failure.tests) & set(end.tests)]
        told = [_join(f"{failure.reason}:", failure.detail) for failure in same]
        failures = [each for each in failures if each not in same]
        failures.append(replace(end, detail=_join(end.detail, *told)))
    if not expected:
        failures.append(Failure(where=start.label, reason="no tests were collected for it"))
    known = {test for failure in failures for test in failure.tests}
    missed = [each for each in missed if each not in known]
    return Judgement(passed=passed, failures=failures, missed=missed, void=bool(faults))


def _stopped(start: Start, ranks: Sequence[Rank], failed: bool) -> bool:
    """Whether tests did not run because the process could not get to them."""
    if failed and start.exit_first:
        return True
    return any(
        rank.finished is None or rank.running or rank.finished.get("failure") for rank in ranks
    )


def _left_out(start: Start, node: str) -> Failure:
    files = start.files()
    return Failure(
        where=start.name(node), reason="did not run", tests=(start.id(node),), files=files
    )


def _failed_tests(
    start: Start, expected: Sequence[str], ranks: Sequence[Rank]
) -> Iterator[tuple[str, Failure]]:
    """Each test that came back as something else than passed, and unknown ones that came back."""
    unknown = {node for rank in ranks for node in rank.results} - {*expected, start.canary}
    for node in [*expected, *sorted(unknown)]:
        bad = {
            rank.number: rank.results[node]
            for rank in ranks
            if node in rank.results and (rank.results[node].verdict != "passed" or node in unknown)
        }
        if not bad:
            continue
        first = min(bad, key=lambda number: bad[number].at)
        verdict = bad[first]
        # What fails later mostly fails for it.
        later = {n: each for n, each in bad.items() if each.verdict != verdict.verdict}
        numbers = [number for number in bad if number not in later]
        told = [f"rank {n}: {each.verdict}\n{each.detail}" for n, each in later.items()]
        # Who did not fail is where it waits for those that did.
        others = [rank for rank in ranks if rank.number not in bad and rank.stacks]
        odd = "unexpected: " if node in unknown else ""
        yield (
            node,
            Failure(
                where=start.name(node),
                reason=start.tidy(f"{odd}{verdict.verdict}{start.on(numbers)}"),
                detail=_join(*map(start.tidy, [verdict.detail, *told]), *map(_stacks_of, others)),
                tests=() if node in unknown else (start.id(node),),
                place=verdict.place,
                files=start.files(),
            ),
        )


def _process_faults(start: Start, ranks: Sequence[Rank], failed: bool) -> Iterator[Failure]:
    """What makes the records of a process worth nothing."""
    faults: dict[str, list[int]] = {}
    for rank in ranks:
        for problem in _faults_of(start, rank, failed):
            faults.setdefault(problem, []).append(rank.number)
    for problem, numbers in faults.items():
        where = f"{start.label}{start.on(numbers)}"
        detail = _join(*(_stacks_of(ranks[number]) for number in numbers))
        yield Failure(where=where, reason=start.tidy(problem), detail=detail, files=start.files())


def _faults_of(start: Start, rank: Rank, failed: bool) -> Iterator[str]:
    finished = rank.finished
    if finished is None:
        return
    if failure := finished.get("failure"):
        yield f"the package cannot be imported: {failure.strip().splitlines()[-1]}"
        return
    yield from finished.get("identity", ["it gave no proof of its identity"])
    yield from (f"importing the package {effect}" for effect in finished.get("effects", []))
    yield from (f"the package {what}" for what in finished.get("tampering", []))
    yield from canary_problems(start, rank, failed=failed)


def _end(
    start: Start, ranks: Sequence[Rank], outcome: Outcome, failures: Sequence[Failure]
) -> Failure | None:
    """How the processes ended, where it takes more than failing tests to explain that."""
    cut = [rank for rank in ranks if rank.finished is None or rank.running]
    # torchrun ends the others with the first that fails; they show where they were then.
    explained = start.world > 1 and failures and not outcome.stopped
    left = [rank for rank in cut if not explained or (rank.running and not rank.stacks)]
    if left:
        return _cut_short(start, cut, left, outcome)
    if outcome.ok or (failures and not outcome.stopped):
        return None
    stacked = [_stacks_of(rank) for rank in ranks if rank.stacks]
    detail = _join(*stacked, _log(start, outcome))
    return Failure(
        where=start.label, reason=outcome.describe(), detail=detail, files=start.files()
    )


def _cut_short(
    start: Start, cut: Sequence[Rank], left: Sequence[Rank], outcome: Outcome
) -> Failure:
    """A start that hung, crashed or left: what was running, and where each process was."""
    codes = {} if start.world == 1 or outcome.stopped else _exit_codes(outcome.output())
    blamed = next((rank for rank in left if rank.number == next(iter(codes), None)), left[0])
    how = _how(blamed, outcome)
    if code := codes.get(blamed.number):
        ended = f"was killed by {_SIGNALS.get(code, f'signal {-code}')}"
        how = ended if code < 0 else f"ended with exit status {code}"
    if not (blamed.alone or outcome.stopped):
        how = f"rank {blamed.number} {how}"
    others = [
        f"rank {rank.number} was in {rank.running}"
        for rank in cut
        if rank.running and rank.running != blamed.running
    ]
    logs = [_log_of(start, blamed)] if start.world > 1 else [_log(start, outcome)]
    stopped = _STOPPED.search(blamed.stacks)
    return Failure(
        where=start.name(blamed.running) if blamed.running else start.label,
        reason="; ".join([how, *others]),
        detail=_join(*map(_stacks_of, cut), *logs),
        tests=(start.id(blamed.running),) if blamed.running else (),
        place=f"{stopped['file']}:{stopped['line']}" if stopped else "",
        files=start.files(),
    )


def _exit_codes(said: str) -> dict[int, int]:
    """How ranks ended, by what torchrun says: first the one that it noticed first."""
    root = {int(found["rank"]): int(found["code"]) for found in _ROOT.finditer(said)}
    return root | {int(found["rank"]): int(found["code"]) for found in _ENDED.finditer(said)}


def _join(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text).strip()


def _how(rank: Rank, outcome: Outcome) -> str:
    if rank.finished is not None:
        return f"ended the tests, with {rank.finished.get('exitstatus')}"
    if rank.alone and outcome.returncode != 0:
        return outcome.describe()
    return outcome.stopped or "ended early: it left no completion record"


def _log(start: Start, outcome: Outcome) -> str:
    lines = outcome.tail().splitlines()[-LOG_LINES:]
    return start.tidy("\n".join(["the last it printed:", *lines])) if lines else ""


def _log_of(start: Start, rank: Rank) -> str:
    """The last that one rank printed to its standard error."""
    for path in sorted(start.folder.glob(f"ranks/**/{rank.number}/stderr.log")):
        if lines := records.read_text(path).splitlines()[-LOG_LINES:]:
            return start.tidy("\n".join([f"the last rank {rank.number} printed:", *lines]))
    return ""


def _stacks_of(rank: Rank) -> str:
    return f"stacks of rank {rank.number}:\n{rank.stacks}" if rank.stacks else ""


def stacks(file: Path) -> str:
    """The stacks that a test process wrote when it was ended, without pytest's own frames."""
    lines = records.read_text(file).splitlines()
    kept = [line for line in lines if not any(part in line for part in PYTEST_FRAMES)]
    return "\n".join(kept).strip()


def canary_problems(start: Start, rank: Rank, *, failed: bool = False) -> Iterator[str]:
    """What speaks against the records of a process, given that its last test must fail.

    Args:
        failed: whether other tests failed; who stops at the first does not get to the last one.
    """
    canary = rank.results.get(start.canary, Verdict(verdict="did not run"))
    # Ranks end with the first of them that stops.
    cut = canary.verdict == "did not run" and (failed or rank.running)
    if not cut and not canary.verdict.startswith("failed: "):
        yield f"A test that must fail did not come back as failed: {canary.verdict}."
    elif not cut and rank.finished and rank.finished.get("exitstatus") != CANARY_FAILED:
        yield f"pytest ended with {rank.finished.get('exitstatus')}"
    if not rank.exited and (rank.alone or not failed):
        yield "The process did not reach its end: its exit was forced or had to be."


def from_junit(junit: Path) -> dict[str, Verdict]:
    """Return what a JUnit file says of each test; an absent or truncated file gives nothing."""
    try:
        cases = ElementTree.fromstring(records.read(junit) or b"").iter("testcase")
    except (ElementTree.ParseError, LookupError, ValueError):
        return {}
    results = {}
    for case in cases:
        properties = {item.get("name"): item.get("value", "") for item in case.iter("property")}
        node = properties.get("nodeid") or f"{case.get('classname')}::{case.get('name')}"
        # A test that was cut short leaves a case without any name.
        if "nodeid" in properties or case.get("name"):
            results[node] = _verdict(case, properties)
    return results


def _verdict(case: ElementTree.Element, properties: Mapping[str | None, str]) -> Verdict:
    for tag, verdict in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            message = (found.get("message") or "").strip().splitlines()
            reason = f"{verdict}: {message[0]}" if message else verdict
            place, at = properties.get("place", ""), _number(properties.get("at", ""))
            return Verdict(verdict=reason, detail=found.text or "", place=place, at=at)
    if "wasxfail" in properties:
        text = f"passed although expected to fail: {properties['wasxfail']}"
        return Verdict(verdict=text)
    return Verdict(verdict="passed")


def _from_lines(file: Path) -> dict[str, Verdict]:
    """What a process noted of each test as it ended; half a line says nothing."""
    results = {}
    for line in records.read_text(file).splitlines():
        try:
            noted = {str(key): str(value) for key, value in dict(json.loads(line)).items()}
            node, verdict = noted["nodeid"], noted["verdict"]
        except (ValueError, TypeError, KeyError):
            continue
        place, detail = noted.get("place", ""), noted.get("detail", "")
        at = _number(noted.get("at", ""))
        results[node] = Verdict(verdict=verdict, detail=detail, place=place, at=at)
    return results


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
