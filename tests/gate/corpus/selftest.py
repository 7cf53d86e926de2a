"""Runs cases through the gate's own command line, as a release manager would, and judges it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gate.runner import Outcome, Runner
from tests.gate.corpus import kernels
from tests.gate.corpus.case import Case
from tests.gate.corpus.package import Package

ROOT = Path(__file__).parents[3]
SUITE = ROOT / "tests" / "regression"
FAILED = re.compile(r"^  \[\d/\d\] (\w+) .* FAILED", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How the gate took one wheel."""

    case: Case
    phase: str
    exit_code: int | None
    seconds: float
    problems: tuple[str, ...]
    log: Path

    def row(self) -> str:
        """A line of the table."""
        expected = "caught" if self.case.exit_code else "passed"
        return (
            f"{self.case.name:<44} {'WRONG' if self.problems else expected:<6} "
            f"{self.phase or '-':<12} "
            f"{self.exit_code!s:<5} {self.seconds:6.1f}"
        )


HEADING = f"{'case':<44} {'result':<6} {'phase':<12} {'exit':<5} {'s':>6}"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where cases run.

    Attributes:
        wheel: the real wheel, which is not changed.
        scratch: an empty folder.
        patience: factor on all time limits.
        site: where torch is taken from, if not from the gate's own cache.
    """

    wheel: Path
    scratch: Path
    runner: Runner
    patience: float = 1.0
    site: Path | None = None

    def run(self, case: Case) -> Result:
        """Break the wheel, gate it, and judge what the gate made of it."""
        folder = self.scratch / case.name
        (folder / "tmp").mkdir(parents=True)
        package = Package.read(self.wheel)
        kernels.arm(package, ROOT)
        case.sabotage(package)
        wheel = package.write(folder / "wheel")
        outcome = self.runner.run(
            self.command(wheel, folder, case),
            env={**os.environ, "TMPDIR": str(folder / "tmp"), "GATE_INVOKED_FROM": str(folder)},
            cwd=ROOT,
            log=folder / "gate.log",
            timeout=case.seconds * self.patience,
        )
        found = FAILED.findall(outcome.output())
        return Result(
            case=case,
            phase=found[-1] if found else "",
            exit_code=outcome.returncode,
            seconds=outcome.seconds,
            problems=tuple(problems(case, outcome, found, folder)),
            log=outcome.log,
        )

    def command(self, wheel: Path, folder: Path, case: Case) -> list[str | Path]:
        command: list[str | Path] = [
            *(sys.executable, "-EsBm", "gate", "run", "--wheel", wheel, "--profile", "cpu"),
            "--fail-fast",
            *("--evidence", folder / "evidence"),
            *("--timeout", f"{case.timeout * self.patience:g}"),
            *(("--site", self.site) if self.site else ()),
        ]
        if case.tests:
            command += ["--suite", part_of_suite(case.tests, folder / "suite")]
        return command


def part_of_suite(wanted: Sequence[str], target: Path) -> Path:
    """Copy the real suite, of whose test functions only those wanted are left."""
    shutil.copytree(SUITE, target, ignore=shutil.ignore_patterns("__pycache__"))
    left = set(wanted)
    for path in target.rglob("test_*.py"):
        prefix = f"{path.relative_to(target).as_posix()}::"
        names = {test.removeprefix(prefix) for test in wanted if test.startswith(prefix)}
        left -= {prefix + name for name in _keep(path, names)}
    assert not left, f"the regression suite lacks {left}"
    return target


def _keep(path: Path, names: set[str]) -> set[str]:
    """Take all test functions but these out of a file; return those that are left."""
    source = path.read_text()
    lines: list[str | None] = list(source.splitlines())
    kept = set()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        if node.name in names:
            kept.add(node.name)
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines[first - 1 : node.end_lineno] = [None] * (node.end_lineno - first + 1)
    if not kept:
        path.unlink()
    else:
        path.write_text("".join(f"{line}\n" for line in lines if line is not None))
    return kept


def problems(case: Case, outcome: Outcome, phases: Sequence[str], folder: Path) -> Iterator[str]:
    """What the gate did otherwise than the case expects."""
    if outcome.stopped:
        yield f"the gate did not end: {outcome.stopped}"
    if outcome.survivors:
        yield f"left running: {outcome.survivors[0]}"
    if outcome.returncode != case.exit_code:
        yield f"exit status {outcome.returncode}, not {case.exit_code}"
    if case.phase not in phases[-1:] and case.exit_code:
        yield f"phase {phases[-1] if phases else 'none'} failed, not {case.phase}"
    output = outcome.output()
    for words in case.words:
        if words not in output:
            yield f"does not say {words!r}"
    if "Traceback (most recent call last)" in output and not case.tests and case.is_static:
        yield "the gate crashed"
    statements = [*(folder / "evidence").glob("statements/*")]
    if bool(statements) != (case.exit_code == 0):
        yield f"{len(statements)} statement(s) written"
    if left := sorted(path.name for path in (folder / "tmp").iterdir()):
        yield f"left in the temporary folder: {left[0]}"


def run_all(bench: Bench, cases: Sequence[Case], jobs: int) -> Iterator[Result]:
    """Run cases side by side; results come in order."""
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        yield from pool.map(bench.run, cases)
