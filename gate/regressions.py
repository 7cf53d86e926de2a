"""Runs tests/regression against the installed wheel and accepts only a complete, green result.

First the inventory: every test id is collected in the environment, and every test function in
the source must be among them. Then each id must come back *passed*, from every rank, in a JUnit
file, with a record that the process reached its end. Anything else is a failure.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gate.environment import Environment
from gate.errors import EnvironmentFailed, IdentityMismatch, RegressionFailed
from gate.machine import Machine, Profile
from gate.report import Failure
from gate.runner import Outcome, Runner

SUITE = Path(__file__).parent.parent / "tests" / "regression"
COLLECT_TIMEOUT = 180.0
STACKS_WAIT_SECONDS = 3.0
PREFIX = "tests/regression/"
PYTEST_FRAMES = ("/_pytest/", "/pluggy/", "/pytest/__main__.py", "<frozen runpy>")
PYTEST_INI = """\
[pytest]
addopts = --strict-markers --strict-config -p no:cacheprovider
xfail_strict = true
junit_family = xunit1
"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The installed package under test."""

    environment: Environment
    distribution: str
    package: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One start of the tests in ``folder``: ``world`` ranks, or a single process for 1."""

    folder: str
    world: int

    @property
    def label(self) -> str:
        """Short name, also the name of the run's evidence folder."""
        return self.folder if self.world == 1 else f"{self.folder}-{self.world}"


def plan(profile: Profile, machine: Machine) -> list[Run]:
    """Return what ``profile`` runs on this machine: tests of one process, then those of ranks."""
    worlds = machine.worlds(profile)
    return [
        Run(folder="single", world=1),
        *(Run(folder="ranks", world=world) for world in worlds),
    ]


def prepare(subject: Subject, suite: Path) -> Path:
    """Copy the suite to a scratch folder, with a configuration that nothing else can change."""
    target = subject.environment.root / "suite"
    shutil.copytree(suite, target, ignore=shutil.ignore_patterns("__pycache__"))
    (subject.environment.root / "pytest.ini").write_text(PYTEST_INI)
    return target


def collect(subject: Subject, suite: Path, records: Path, runner: Runner) -> list[str]:
    """Return every test id of the suite; prove that the package under test is the wheel's.

    Raises:
        IdentityMismatch: something else than the wheel's files was imported.
        RegressionFailed: the tests cannot be collected, or a test function is missing.
    """
    outcome = _pytest(
        subject, suite, records, runner, ["--collect-only", "-q"], {}, COLLECT_TIMEOUT
    )
    with suppress(FileNotFoundError):
        _demand_proof(json.loads((records / "finished-0.json").read_text()))
    if not outcome.ok:
        raise RegressionFailed(
            f"The regression tests cannot be collected: {outcome.describe()}.\n{outcome.tail()}",
            cause="importing the wheel's package fails",
        )
    try:
        inventory: list[str] = json.loads((records / "inventory-0.json").read_text())
    except FileNotFoundError:
        raise RegressionFailed("Collecting the regression tests left no record.") from None
    collected = {node.partition("[")[0] for node in inventory}
    if missing := sorted(set(_declared(suite)) - collected):
        raise RegressionFailed(f"{missing[0]} exists but was not collected.")
    return inventory


def run(
    subject: Subject,
    suite: Path,
    plan: Run,
    inventory: Sequence[str],
    *,
    records: Path,
    runner: Runner,
    profile: Profile,
    timeout: float,
) -> tuple[list[str], list[Failure]]:
    """Run one part of the suite; return the ids that passed everywhere, and what failed."""
    expected = [node for node in inventory if node.startswith(plan.folder + "/")]
    variables = {
        "GEFEN_TEST_DEVICE": profile.device,
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // plan.world)),
    }
    outcome = _pytest(
        subject, suite, records, runner, [plan.folder], variables, timeout, world=plan.world
    )
    failures = list(_judge(plan, expected, outcome, records))
    passed = [] if failures else [f"{plan.label}: {node}" for node in expected]
    return passed, failures


def _pytest(
    subject: Subject,
    suite: Path,
    records: Path,
    runner: Runner,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    timeout: float,
    world: int = 1,
) -> Outcome:
    environment = subject.environment
    records.mkdir(parents=True)
    python = environment.python
    command: list[str | Path] = [
        *(python, "-IBm", "pytest", "-c", suite.parent / "pytest.ini", "--rootdir", suite),
        *("--confcutdir", suite, "-p", "gate_harness", "--basetemp", records / "tmp"),
        *arguments,
    ]
    if world > 1:
        # After a failing test the ranks no longer agree on what comes next.
        command = [*_torchrun(python, world, records), *command, "--exitfirst"]
    allowed = [environment.root, *environment.layers]
    return runner.run(
        command,
        env={
            **environment.variables,
            **variables,
            "GATE_RECORDS": str(records),
            "GATE_PACKAGE": subject.package,
            "GATE_DISTRIBUTION": subject.distribution,
            "GATE_SITE": str(environment.site),
            "GATE_PATH": os.pathsep.join(map(str, allowed)),
        },
        cwd=suite,
        log=records / "output.log",
        timeout=timeout,
        on_timeout=lambda: _dump_stacks(records),
    )


def _torchrun(python: Path, world: int, records: Path) -> list[str | Path]:
    """A rendezvous of its own on a port the kernel picks, by address rather than host name."""
    return [
        *(python, "-IBm", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={world}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={uuid.uuid4().hex}"),
        *("--local-addr=127.0.0.1", "--log-dir", records / "ranks", "--redirects=3"),
        *("--no-python", "--"),
    ]


def _declared(suite: Path) -> Iterator[str]:
    """Node ids, without parameters, of every test function in the source files."""
    for path in sorted(suite.rglob("test_*.py")):
        name = path.relative_to(suite).as_posix()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{name}::{node.name}"


def _demand_proof(finished: Mapping[str, Any]) -> None:
    if unmet := finished["unmet"]:
        raise EnvironmentFailed(
            f"The environment lacks what the wheel requires: {unmet[0]}.",
            next_step="choose another torch with --torch or --site",
        )
    if problems := finished["identity"]:
        raise IdentityMismatch(
            f"The tests would not have tested the wheel: {problems[0]}.",
            cause="something shadows the package under test",
        )


def _dump_stacks(records: Path) -> None:
    """Ask every test process for its Python stacks and wait until they are written."""
    asked = []
    for file in sorted(records.glob("pid-*")):
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(file.read_text()), signal.SIGUSR1)
            asked.append(records / f"stacks-{file.name.removeprefix('pid-')}.txt")
    deadline = time.monotonic() + STACKS_WAIT_SECONDS
    while time.monotonic() < deadline and not all(_complete(file) for file in asked):
        time.sleep(0.05)


def _complete(stacks: Path) -> bool:
    """Whether the dump has reached the bottom of the main thread's stack."""
    return "in _run_code" in stacks.read_text()


def _judge(
    plan: Run, expected: Sequence[str], outcome: Outcome, records: Path
) -> Iterator[Failure]:
    if not expected:
        yield Failure(where=plan.label, reason="no tests were collected for it")
    failures = [
        failure
        for rank in range(plan.world)
        for failure in _judge_rank(plan, rank, expected, records)
    ]
    if not outcome.ok or failures:
        stacks = list(_stacks(records))
        detail = "\n\n".join([*stacks, outcome.tail()])
        yield Failure(where=plan.label, reason=outcome.describe(), detail=detail)
    yield from failures


def _stacks(records: Path) -> Iterator[str]:
    """The stacks that test processes wrote when they were ended, without pytest's own frames."""
    for file in sorted(records.glob("stacks-*.txt")):
        lines = file.read_text(errors="replace").splitlines()
        kept = [line for line in lines if not any(part in line for part in PYTEST_FRAMES)]
        if any(line.strip() for line in kept):
            text = "\n".join(kept).strip()
            yield f"stacks of rank {file.stem.removeprefix('stacks-')}:\n{text}"


def _judge_rank(plan: Run, rank: int, expected: Sequence[str], records: Path) -> Iterator[Failure]:
    suffix = f" on rank {rank}" if plan.world > 1 else ""
    where = plan.label + suffix
    try:
        finished = json.loads((records / f"finished-{rank}.json").read_text())
    except FileNotFoundError:
        yield Failure(where=where, reason="ended early: it left no completion record")
        with suppress(FileNotFoundError):
            running = (records / f"current-{rank}").read_text()
            yield Failure(where=f"{PREFIX}{running}{suffix}", reason="was running when it ended")
        return
    for problem in finished["identity"]:
        yield Failure(where=where, reason=problem)
    results = _results(records / f"junit-{rank}.xml")
    for node in expected:
        verdict, detail = results.pop(node, ("did not run", ""))
        if verdict != "passed":
            yield Failure(where=f"{PREFIX}{node}{suffix}", reason=verdict, detail=detail)
    for node, (verdict, detail) in results.items():
        yield Failure(where=f"{node}{suffix}", reason=f"unexpected: {verdict}", detail=detail)


def _results(junit: Path) -> dict[str, tuple[str, str]]:
    """Return {test id: (verdict, detail)}; an absent or truncated file gives none."""
    try:
        cases = ElementTree.parse(junit).getroot().iter("testcase")
    except (OSError, ElementTree.ParseError):
        return {}
    results = {}
    for case in cases:
        properties = {item.get("name"): item.get("value", "") for item in case.iter("property")}
        node = properties.get("nodeid") or f"{case.get('classname')}::{case.get('name')}"
        results[node] = _verdict(case, properties)
    return results


def _verdict(case: ElementTree.Element, properties: Mapping[str | None, str]) -> tuple[str, str]:
    for tag, verdict in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            message = (found.get("message") or "").strip().splitlines()
            reason = f"{verdict}: {message[0]}" if message else verdict
            return reason, found.text or ""
    if "wasxfail" in properties:
        return f"passed although expected to fail: {properties['wasxfail']}", ""
    return "passed", ""
