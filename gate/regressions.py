"""Runs tests/regression against the installed wheel and accepts only a complete, green result.

First the inventory: every test id is collected in the environment, and every test function in
the source must be among them. Then each id must come back *passed*, from every rank, in a JUnit
file, with a record that the process reached its end. Anything else is a failure.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import shlex
import shutil
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gate import judge as judging
from gate import records
from gate.environment import Environment
from gate.errors import EnvironmentFailed, IdentityMismatch, RegressionFailed, UsageFailure
from gate.harness.supervise import descendants
from gate.judge import Judgement, Start
from gate.machine import Machine, Profile
from gate.parallel import Need
from gate.report import Failure
from gate.runner import Outcome, Runner
from gate.wheels import sha256_of

CHECKOUT = Path(__file__).parent.parent
SUITE = CHECKOUT / "tests" / "regression"
COLLECT_TIMEOUT = 180.0
STACKS_WAIT_SECONDS = 3.0
# Host memory of a test process, measured at 0.6 GiB on the CPU; CUDA maps more.
CPU_PROCESS_BYTES = 2**30
GPU_PROCESS_BYTES = 4 * 2**30
TAMPERS = "code of the package changes the tests or their results"
# Of tests in one process; those in "worlds" fork ranks of their own, and take longest.
FOLDERS = ("worlds", "own", "single")
# A suite without any of these is none.
REQUIRED = ("ranks", "single")
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
class Run:
    """One start of tests in ``folder``: ``world`` ranks, or a single process for 1.

    Attributes:
        files: the test files to run, relative to the suite; all those in ``folder`` if empty.
        nodes: the ids of the tests to run; all those in the files if empty.
        share: which of several starts that share the folder's files; 0 for the only one.
    """

    folder: str
    world: int
    files: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    share: int = 0

    @property
    def label(self) -> str:
        """What the tests passed under: the same, however many starts shared them."""
        return self.folder if self.world == 1 else f"{self.folder}-{self.world}"

    @property
    def name(self) -> str:
        """The name of the start's evidence folder."""
        return f"{self.label}.{self.share}" if self.share else self.label

    def need(self, profile: Profile) -> Need:
        """Return what it takes while it runs: a core and, where ranks use them, a GPU each."""
        gpus = self.world if profile.min_gpus else 0
        memory = self.world * (GPU_PROCESS_BYTES if profile.min_gpus else CPU_PROCESS_BYTES)
        return Need(cores=self.world, gpus=gpus, memory=memory)

    def expected(self, inventory: Sequence[str]) -> list[str]:
        """Return the ids, out of ``inventory``, that must come back as passed."""
        return [
            node
            for node in inventory
            if node.startswith(self.folder + "/")
            and (not self.files or node.partition("::")[0] in self.files)
            and (not self.nodes or node in self.nodes)
        ]

    def ids(self, inventory: Sequence[str]) -> list[str]:
        """Return what those expected are called in reports and statements."""
        return [f"{self.label}: {node}" for node in self.expected(inventory)]


def plan(
    profile: Profile,
    machine: Machine,
    inventory: Sequence[str],
    processes: int,
    *,
    quick_first: bool = False,
) -> list[Run]:
    """Return what ``profile`` runs on this machine, in the order to start it.

    That is slow parts first, so that nothing runs alone at the end.

    Args:
        processes: how many processes may share the tests that need only one.
        quick_first: rather start with what tells of a failure soon.
    """
    if profile.min_gpus:
        processes = min(processes, len(machine.gpus))
    ranks = [Run(folder="ranks", world=world) for world in reversed(machine.worlds(profile))]
    alone = [run for folder in FOLDERS for run in _shared(folder, inventory, processes)]
    parts = [run for run in [*ranks, *alone] if run.expected(inventory) or run.folder in REQUIRED]
    return parts[::-1] if quick_first else parts


def only(parts: Sequence[Run], names: Sequence[str], inventory: Sequence[str]) -> list[Run]:
    """Return what runs just the tests that ``names`` name.

    Args:
        names: ids of tests, with or without their parameters, or files or folders of the suite;
            ``ranks-2: `` before one means the ranks of that start only.

    Raises:
        UsageFailure: one names no test that these parts run.
    """
    chosen = []
    for part in parts:
        nodes = part.expected(inventory)
        kept = [node for node in nodes if any(_names(name, part, node) for name in names)]
        chosen += [replace(part, nodes=tuple(kept))] if kept else []
    for name in names:
        if not any(_names(name, part, node) for part in chosen for node in part.nodes):
            known = {node for part in parts for node in part.expected(inventory)}
            close = difflib.get_close_matches(name, known, 1)
            raise UsageFailure(
                f"--only {name}: this profile of the suite has no such test.",
                next_step=f"try --only {shlex.quote(close[0])}" if close else "",
            )
    return chosen


def _names(name: str, part: Run, node: str) -> bool:
    name = name.removeprefix(f"{part.label}: ").removeprefix("tests/regression/").rstrip("/")
    return node == name or node.startswith((f"{name}[", f"{name}::", f"{name}/"))


def _shared(folder: str, inventory: Sequence[str], processes: int) -> list[Run]:
    """Starts that share a folder's files, about as many tests for each."""
    nodes = Run(folder=folder, world=1).expected(inventory)
    counts = Counter(node.partition("::")[0] for node in nodes)
    count = min(processes, len(counts))
    if count < 2:
        return [Run(folder=folder, world=1)]
    shares: list[list[str]] = [[] for _ in range(count)]
    for file, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        min(shares, key=lambda share: sum(counts[each] for each in share)).append(file)
    return [
        Run(folder=folder, world=1, files=tuple(sorted(files)), share=number)
        for number, files in enumerate(shares, 1)
    ]


def prepare(subject: Subject, suite: Path) -> Path:
    """Copy the suite to a scratch folder, with a configuration that nothing else can change."""
    target = subject.environment.root / "suite"
    shutil.copytree(suite, target, ignore=shutil.ignore_patterns("__pycache__"))
    (subject.environment.root / "pytest.ini").write_text(PYTEST_INI)
    return target


def collect(
    subject: Subject, suite: Path, folder: Path, runner: Runner, timeout: float = COLLECT_TIMEOUT
) -> list[str]:
    """Return every test id of the suite; prove that the package under test is the wheel's.

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
    for problem in judging.canary_problems(folder, 0, _node(canary), finished):
        raise IdentityMismatch(problem, cause=TAMPERS)
    if changed:
        raise IdentityMismatch(f"{changed[0]} was changed by the test process.", cause=TAMPERS)
    collected = {str(node).partition("[")[0] for node in inventory}
    if missing := sorted(set(_declared(suite)) - collected):
        raise RegressionFailed(f"{missing[0]} exists but was not collected.")
    return [str(node) for node in inventory]


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
    inventory: Sequence[str],
    *,
    folder: Path,
    runner: Runner,
    profile: Profile,
    timeout: float,
    exit_first: bool = False,
    gpus: Sequence[str] = (),
) -> Judgement:
    """Run one part of the suite; return what passed everywhere, what failed and what did not run.

    Args:
        exit_first: whether to stop at the first failing test. Ranks always do: after it, they no
            longer agree on what comes next.
        gpus: entries of CUDA_VISIBLE_DEVICES to run on, if not on all.
    """
    expected = plan.expected(inventory)
    variables = {
        "GEFEN_TEST_DEVICE": profile.device,
        # Each process has a core; more threads would only get into the way of others.
        "OMP_NUM_THREADS": "1",
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
    }
    exit_first = exit_first or plan.world > 1
    words = list(plan.nodes or plan.files or [plan.folder])
    # Starts side by side must not see what others do to their tests.
    own = suite.with_name(f"suite-{plan.name}")
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
        names=(
            (f"{own}/", "tests/regression/"),
            (f"{subject.environment.site}/", ""),
            (f"{subject.environment.root}/", ""),
        ),
    )
    judgement = judging.judge(start, expected, outcome)
    if not changed:
        return judgement
    # Whoever changes files may have changed what the tests say.
    changes = [
        Failure(where=plan.label, reason=f"{name} was changed while the tests ran")
        for name in changed
    ]
    missed = [*judgement.passed, *judgement.missed]
    return Judgement(failures=[*changes, *judgement.failures], missed=missed)


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
        *(
            "--confcutdir",
            suite,
            "-p",
            "no:faulthandler",
            "-p",
            "gate_harness",
            "--basetemp",
            folder / "tmp",
        ),
        *(folders or ["."]),
        # The last of all, so that what tests leave behind would show.
        *([f"{canary}.py"] if folders else []),
        *(["--exitfirst"] if exit_first else []),
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


def _declared(suite: Path) -> Iterator[str]:
    """Node ids, without parameters, of every test function in the source files."""
    for path in sorted(suite.rglob("test_*.py")):
        name = path.relative_to(suite).as_posix()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{name}::{node.name}"


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
