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
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from gate import judge as judging
from gate import records
from gate.environment import Environment
from gate.errors import EnvironmentFailed, IdentityMismatch, RegressionFailed
from gate.harness.supervise import descendants
from gate.judge import Judgement, Start
from gate.machine import Profile
from gate.parts import Run
from gate.report import Failure
from gate.runner import Outcome, Runner
from gate.wheels import sha256_of

CHECKOUT = Path(__file__).parent.parent
SUITE = CHECKOUT / "tests" / "regression"
COLLECT_TIMEOUT = 180.0
STACKS_WAIT_SECONDS = 3.0
# For how long to start anew what a failing test or a crash keeps from running.
GO_ON_SECONDS = 300.0
TAMPERS = "code of the package changes the tests or their results"
CANARY = '''\
import {package}


def {name}():
    """Fails on purpose, so that the gate knows that failures are seen."""
    assert {package} is None
'''
PYTEST_INI = """\
[pytest]
addopts = --strict-markers --strict-config -p no:cacheprovider
xfail_strict = true
junit_family = xunit1
markers = own: about what only this package has
"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The installed package under test."""

    environment: Environment
    distribution: str
    package: str

    def fingerprint(self, suite: Path) -> dict[str, str]:
        """Return digests of all files that a test process must not change, ``suite`` included."""
        root, site = self.environment.root, self.environment.site
        watched = {"pytest.ini": root / "pytest.ini", "harness": root / "harness"}
        watched |= {"suite": suite, "site-packages": site}
        return {
            str(name / path.relative_to(top)): sha256_of(path)
            for name, top in ((Path(name), top) for name, top in watched.items())
            for path in ([top] if top.is_file() else records.files(top))
        }


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The tests of a suite.

    Attributes:
        tests: their ids. Of a file that cannot be collected, those of its functions.
        own: those about what only this checkout's package has.
        broken: files that cannot be collected, and why.
    """

    tests: Sequence[str]
    own: Set[str] = frozenset()
    broken: Mapping[str, str] = field(default_factory=dict)


def prepare(subject: Subject, suite: Path) -> Path:
    """Copy the suite to a scratch folder, with a configuration that nothing else can change."""
    target = subject.environment.root / "suite"
    shutil.copytree(suite, target, ignore=shutil.ignore_patterns("__pycache__"))
    (subject.environment.root / "pytest.ini").write_text(PYTEST_INI)
    return target


def collect(
    subject: Subject, suite: Path, folder: Path, runner: Runner, timeout: float = COLLECT_TIMEOUT
) -> Inventory:
    """Return every test of the suite; prove that the package under test is the wheel's.

    Runs the canary alone: a test that must come back as failed.

    Raises:
        IdentityMismatch: something else than the wheel's files was imported, or the package
            tampers with the tests.
        EnvironmentFailed: the environment does not have what the wheel requires.
        RegressionFailed: the tests cannot be collected, or a test function is missing.
    """
    with _canary(subject, suite) as canary:
        before = subject.fingerprint(suite)
        variables = {"GATE_ONLY_COLLECT": "1"}
        limit = min(timeout, COLLECT_TIMEOUT)
        outcome = _pytest(subject, suite, folder, runner, [], canary, variables, limit)
        changed = _changes(before, subject.fingerprint(suite))
    finished = records.read_json(folder / "finished-0.json", dict) or {}
    if problem := finished.get("failure"):
        raise RegressionFailed(f"{subject.package} cannot be imported.\n{problem}")
    _demand_proof(subject.package, finished)
    inventory = records.read_json(folder / "inventory-0.json", list)
    if not outcome.ok or not finished or inventory is None:
        how = "it ended early, without a record" if outcome.ok else outcome.describe()
        raise RegressionFailed(
            f"The regression tests cannot be collected: {how}.\n{_details(folder, outcome)}"
        )
    start = Start(label="identity", world=1, folder=folder, canary=_node(canary))
    for problem in judging.canary_problems(start, judging.read_rank(start, 0)):
        raise IdentityMismatch(problem, cause=TAMPERS)
    if changed:
        raise IdentityMismatch(f"{changed[0]} was changed by the test process.", cause=TAMPERS)
    found = records.read_json(folder / "collected-0.json", dict) or {}
    broken = {str(file): str(why) for file, why in found.get("broken", {}).items()}
    tests, own = list(map(str, inventory)), set(map(str, found.get("own", ())))
    collected = {node.partition("[")[0] for node in tests}
    for node, is_own in _declared(suite):
        if node in collected:
            continue
        if node.partition("::")[0] not in broken:
            raise RegressionFailed(f"{node} exists but was not collected.")
        tests.append(node)
        own |= {node} if is_own else set()
    return Inventory(tests=tests, own=own, broken=broken)


@contextmanager
def _canary(subject: Subject, suite: Path) -> Iterator[str]:
    """A test that must fail, under a name of its own each time, while the body runs."""
    name = f"test_must_fail_{uuid.uuid4().hex}"
    text = CANARY.format(name=name, package=subject.package)
    (suite / f"{name}.py").write_text(text)
    try:
        yield name
    finally:
        (suite / f"{name}.py").unlink(missing_ok=True)


def _node(canary: str) -> str:
    return f"{canary}.py::{canary}"


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | after if before.get(name) != after.get(name))


def run(
    subject: Subject,
    suite: Path,
    plan: Run,
    inventory: Inventory,
    *,
    folder: Path,
    runner: Runner,
    profile: Profile,
    timeout: float,
    exit_first: bool = False,
    gpus: Sequence[str] = (),
) -> Judgement:
    """Run one part of the suite; return what passed everywhere, what failed and what did not run.

    What a failing test or a crash keeps from running is started anew, as long as that goes fast.

    Args:
        exit_first: whether to stop at the first failing test.
        gpus: entries of CUDA_VISIBLE_DEVICES to run on, if not on all.
    """
    planned = plan.expected(inventory.tests)
    failures = list(_broken(plan, planned, inventory.broken, _names_of(subject, suite)))
    left = [node for node in planned if not _is_in(node, inventory.broken)]
    if failures and (exit_first or not left):
        return Judgement(failures=failures, missed=plan.ids(left))
    variables = {
        "GEFEN_TEST_DEVICE": profile.device,
        # Each process has a core; more threads would only get into the way of others.
        "OMP_NUM_THREADS": "1",
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
    }
    passed: list[str] = []
    began = time.monotonic()
    for number in count(1):
        here = folder if number == 1 else folder.with_name(f"{folder.name}.again-{number}")
        came = _start(
            *(subject, suite, plan, left, variables, here, runner, timeout), exit_first=exit_first
        )
        passed += came.passed
        failures += came.failures
        slow = time.monotonic() - began > GO_ON_SECONDS
        # A test that has failed is not run again, so that this comes to an end.
        failed = any(failure.tests for failure in came.failures)
        if exit_first or came.void or slow or not (came.missed and failed):
            break
        left = [node for node in left if f"{plan.label}: {node}" in came.missed]
        plan = replace(plan, nodes=tuple(left))
    return replace(came, passed=passed, failures=failures)


def _start(
    subject: Subject,
    suite: Path,
    plan: Run,
    expected: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    runner: Runner,
    timeout: float,
    *,
    exit_first: bool,
) -> Judgement:
    """Start the tests ``expected`` once, in a copy of the suite of their own."""
    # After a failing test ranks no longer agree on what comes next.
    exit_first = exit_first or plan.world > 1
    files = sorted({node.partition("::")[0] for node in expected})
    words = (expected if plan.nodes else files) or [plan.folder]
    # Starts side by side must not see what others do to their tests.
    own = suite.with_name(f"suite-{folder.name}")
    shutil.copytree(suite, own)
    with _canary(subject, own) as canary:
        before = subject.fingerprint(own)
        outcome = _pytest(
            *(subject, own, folder, runner, words, canary, variables, timeout),
            world=plan.world,
            exit_first=exit_first,
        )
        changed = _changes(before, subject.fingerprint(own))
    start = Start(
        label=plan.label,
        world=plan.world,
        folder=folder,
        canary=_node(canary),
        exit_first=exit_first,
        names=_names_of(subject, own),
    )
    return _unchanged(subject, plan, judging.judge(start, expected, outcome), changed)


def _unchanged(
    subject: Subject, plan: Run, judgement: Judgement, changed: Sequence[str]
) -> Judgement:
    """A judgement that also counts what files were changed."""
    if not changed:
        return judgement
    changes = [
        Failure(where=plan.label, reason=f"{name} was changed while the tests ran")
        for name in changed
    ]
    failures = [*changes, *judgement.failures]
    # Whoever changes more than files of its own may have changed what the tests say.
    if all(name.startswith(f"site-packages/{subject.package}/") for name in changed):
        return replace(judgement, failures=failures)
    missed = [*judgement.passed, *judgement.missed]
    return Judgement(failures=failures, missed=missed, void=True)


def _names_of(subject: Subject, suite: Path) -> tuple[tuple[str, str], ...]:
    """What paths that are gone after the run are called for a person."""
    folders = {suite: "tests/regression/", subject.environment.site: "", suite.parent: ""}
    return tuple((f"{path}/", name) for path, name in folders.items())


def _is_in(node: str, files: Container[str]) -> bool:
    return node.partition("::")[0] in files


def _broken(
    plan: Run, planned: Sequence[str], files: Mapping[str, str], names: Sequence[tuple[str, str]]
) -> Iterator[Failure]:
    """A failure for each file of tests that cannot be collected."""
    for file, why in files.items():
        if tests := plan.ids([node for node in planned if _is_in(node, {file})]):
            for path, called in names:
                why = why.replace(path, called)
            said = [line[1:].strip() for line in why.splitlines() if line.startswith("E ")]
            reason = f"cannot be collected: {said[-1] if said else why.strip()[-200:]}"
            name = f"{plan.label}: {file}" if plan.world > 1 else file
            yield Failure(where=name, reason=reason, detail=why, tests=tuple(tests))


def _pytest(
    subject: Subject,
    suite: Path,
    folder: Path,
    runner: Runner,
    folders: Sequence[str],
    canary: str,
    variables: Mapping[str, str],
    timeout: float,
    world: int = 1,
    exit_first: bool = False,
) -> Outcome:
    environment = subject.environment
    folder.mkdir(parents=True)
    python = environment.python
    command: list[str | Path] = [
        *(python, "-IBm", "pytest", "-c", suite.parent / "pytest.ini", "--rootdir", suite),
        *("--confcutdir", suite, "-p", "no:faulthandler", "-p", "gate_harness"),
        *("--basetemp", folder / "tmp"),
        *(folders or ["."]),
        # The last of all, so that what tests leave behind would show.
        *([f"{canary}.py"] if folders else []),
        *(["--exitfirst"] if exit_first else []),
        # Collecting goes on to the canary; a start gets no file that cannot be collected.
        *([] if folders else ["--continue-on-collection-errors"]),
    ]
    if world > 1:
        command = [*_torchrun(python, world, folder), *command]
    allowed = [environment.root, *environment.layers]
    return runner.run(
        command,
        env={
            **environment.variables,
            **variables,
            "GATE_RECORDS": str(folder),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
            "GATE_PACKAGE": subject.package,
            "GATE_DISTRIBUTION": subject.distribution,
            "GATE_SITE": str(environment.site),
            "GATE_PATH": json.dumps([str(path) for path in allowed]),
            "GATE_CANARY": canary,
            "GATE_FORBIDDEN": json.dumps([str(CHECKOUT)]),
        },
        cwd=suite,
        log=folder / "output.log",
        timeout=timeout,
        on_timeout=lambda pid: _dump_stacks(pid, folder, world),
        bounded=folder,
        writable=environment.root,
    )


def _torchrun(python: Path, world: int, folder: Path) -> list[str | Path]:
    """A rendezvous of its own on a port the kernel picks, by address rather than host name."""
    return [
        *(python, "-IBm", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={world}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={uuid.uuid4().hex}"),
        *("--local-addr=127.0.0.1", "--log-dir", folder / "ranks", "--redirects=3"),
        *("--no-python", "--"),
    ]


def _declared(suite: Path) -> Iterator[tuple[str, bool]]:
    """(Node id without parameters, whether it is own) of every test function in the source."""
    for path in sorted(suite.rglob("test_*.py")):
        name = path.relative_to(suite).as_posix()
        body = ast.parse(path.read_text()).body
        marks = [ast.unparse(node) for node in body if isinstance(node, ast.Assign)]
        all_own = name.startswith("own/") or any(
            mark.startswith("pytestmark") and "mark.own" in mark for mark in marks
        )
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                decorators = map(ast.unparse, node.decorator_list)
                is_own = all_own or any(each.endswith("mark.own") for each in decorators)
                yield f"{name}::{node.name}", is_own


def _demand_proof(package: str, finished: Mapping[str, Any]) -> None:
    if unmet := finished.get("unmet"):
        raise EnvironmentFailed(
            f"The environment lacks what the wheel requires: {unmet[0]}.",
            next_step="choose another torch with --torch or --site",
        )
    if problems := finished.get("identity"):
        raise IdentityMismatch(
            f"The tests would not have tested the wheel: {problems[0]}.",
            cause="something shadows the package under test, or it changed itself",
        )
    if effects := finished.get("effects"):
        raise IdentityMismatch(
            f"Importing {package} {effects[0]}.",
            cause="code of the package changes what is not its own",
        )
    if tampering := finished.get("tampering"):
        raise IdentityMismatch(f"{package} {tampering[0]}.", cause=TAMPERS)


def _dump_stacks(supervisor: int, folder: Path, world: int) -> None:
    """Ask every test process for its Python stacks and wait until they are written."""
    for pid in descendants(supervisor):
        if _catches(pid, signal.SIGUSR1):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
    files = [folder / f"stacks-{rank}.txt" for rank in range(world)]
    deadline = time.monotonic() + STACKS_WAIT_SECONDS
    # The dump of a main thread ends with the frame that runs the module.
    while time.monotonic() < deadline and not all(
        "in _run_code" in records.read_text(file) for file in files
    ):
        time.sleep(0.05)


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process handles a signal that would otherwise end it."""
    for line in records.read_text(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _details(folder: Path, outcome: Outcome) -> str:
    stacks = judging.stacks(folder / "stacks-0.txt")
    return "\n\n".join([*([stacks] if stacks else []), outcome.tail()])
