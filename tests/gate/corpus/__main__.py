"""Gate every sabotaged wheel of the corpus, and print what became of each.

Usage: python -m tests.gate.corpus [--wheel FILE] [--jobs N] [PART OF A NAME | PHASE]...
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from gate.runner import Runner, checked
from tests.gate.corpus.selftest import HEADING, ROOT, Bench, Result, run_all
from tests.gate.corpus.table import BROKEN, HONEST

PREPARING_SECONDS = 3600.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gate_selftest", description=__doc__.split("\n")[0])
    parser.add_argument(
        "parts",
        nargs="*",
        help="run only cases whose name contains, or whose phase is, one of these",
    )
    parser.add_argument("--wheel", type=Path, help="the wheel to sabotage; built if not given")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor on all time limits, for busy machines"
    )
    parser.add_argument("--site", type=Path, help="as the gate's: use the torch of this folder")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    return parser.parse_args()


def gate(command: str, *options: str | Path, scratch: Path, runner: Runner) -> None:
    outcome = runner.run(
        [sys.executable, "-EsBm", "gate", command, *options],
        env=os.environ,
        cwd=ROOT,
        log=scratch / f"{command}.log",
        timeout=PREPARING_SECONDS,
    )
    checked(outcome, f"`gate {command}` failed")


def prepare(given: argparse.Namespace, scratch: Path, runner: Runner) -> Path:
    """The wheel, built if none is given; the torch layer that all cases share is made as well."""
    if given.site is None:
        gate("machine", "--profile", "cpu", scratch=scratch, runner=runner)
    if given.wheel is not None:
        return given.wheel.resolve()
    gate("build", "--out", scratch / "dist", scratch=scratch, runner=runner)
    return next((scratch / "dist").glob("*.whl"))


def report(result: Result) -> None:
    print(result.row(), flush=True)
    for problem in result.problems:
        print(f"    {problem}")
    if result.problems:
        lines = result.log.read_text(errors="replace").splitlines()[-30:]
        print("\n".join(f"    | {line[:200]}" for line in lines))


def main() -> int:
    given = arguments()
    cases = [
        case
        for case in [*HONEST, *BROKEN]
        if not given.parts or any(part in case.name or part == case.phase for part in given.parts)
    ]
    if not cases:
        print("no case has such a name", file=sys.stderr)
        return 2
    runner = Runner()
    with tempfile.TemporaryDirectory(prefix="selftest-") as folder:
        wheel = prepare(given, Path(folder), runner)
        bench = Bench(
            wheel=wheel,
            scratch=Path(folder),
            runner=runner,
            patience=given.patience,
            site=given.site,
        )
        print(HEADING)
        started = time.monotonic()
        results = []
        for result in run_all(bench, cases, given.jobs):
            report(result)
            results.append(result)
    wrong = [result for result in results if result.problems]
    took = time.monotonic() - started
    print(f"{len(results)} cases, {len(wrong)} not as expected, in {took:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
