"""Which tests run which line, and how long each test takes."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coverage import CoverageData

from ci.mutants.slots import Slot

LIMIT = 1800
PHASE = re.compile(r" \((setup|call|teardown)\)$")
CONFIGURATION = """\
[run]
source = {sources}
data_file = {folder}/data
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-imported, module-not-measured
"""


@dataclass
class Coverage:
    """Tests by file and line."""

    lines: dict[str, dict[int, set[str]]] = field(default_factory=lambda: defaultdict(dict))
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many tests there are."""
        return len(self.seconds)

    def tests(self, file: str, lines: Iterable[int] | None) -> list[str]:
        """Return the tests that run any of these lines, or any line at all."""
        found = self.lines.get(file, {})
        chosen = found if lines is None else lines
        nodes = set().union(*(found.get(line, set()) for line in chosen))
        return [node for node in nodes if node in self.seconds]

    def time(self, nodes: Iterable[str]) -> float:
        """Return the seconds that tests took, one after the other."""
        return sum(self.seconds.get(node, 1.0) for node in nodes)


def trace(target: Any, slots: Sequence[Slot], folder: Path) -> Coverage:
    """Run all tests once, each folder in a slot, and return what they ran.

    Raises:
        SystemExit: a test fails although nothing was changed.
    """
    starts = [[{"world": 1, "nodes": list(part), "limit": LIMIT}] for part in target.tests]
    if target.ranks:
        worlds = [{"world": w, "nodes": [target.ranks], "limit": LIMIT} for w in (2, 3)]
        starts.append(worlds)
    free = list(slots)

    def run(part: list[dict[str, Any]], number: int) -> tuple[Slot, Path, dict[str, Any]]:
        slot = free.pop()
        records = folder / f"trace{number}"
        records.mkdir()
        configuration = records / "coveragerc"
        sources = slot.root / target.sources
        configuration.write_text(CONFIGURATION.format(sources=sources, folder=records))
        _follow_children(slot, configuration)
        try:
            return slot, records, slot.ask(part, records)
        finally:
            _follow_children(slot, None)
            free.append(slot)

    found = Coverage()
    with ThreadPoolExecutor(len(slots)) as pool:
        for slot, records, answer in pool.map(run, starts, range(len(starts))):
            if answer["red"]:
                logs = sorted(Path(answer["folder"]).glob("*/log*"))
                tails = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
                raise SystemExit(f"{tails}\nwithout any change: {answer['red']}")
            _read(found, slot, records, Path(answer["folder"]))
    return found


def _follow_children(slot: Slot, configuration: Path | None) -> None:
    """Have each Python that tests start traced, too; or no longer."""
    (inside,) = slot.root.with_name(f"{slot.root.name}.venv").glob("lib/python*/site-packages")
    hook = inside / "trace.pth"  # after slot.pth, which says where coverage is
    hook.unlink(missing_ok=True)
    if configuration:
        told = f"os.environ['COVERAGE_PROCESS_START'] = {str(configuration)!r}"
        hook.write_text(f"import os, coverage; {told}; coverage.process_startup()\n")


def _read(found: Coverage, slot: Slot, records: Path, notes: Path) -> None:
    for file in notes.glob("*/rank*/seconds"):
        for node, spent in json.loads(file.read_text()).items():
            found.seconds[node] = max(found.seconds.get(node, 0.0), spent)
    for file in records.glob("data*"):
        data = CoverageData(str(file))
        data.read()
        for name in data.measured_files():
            inside = found.lines[os.path.relpath(name, slot.root)]
            for line, contexts in data.contexts_by_lineno(name).items():
                nodes = {_test(context) for context in contexts}
                inside.setdefault(line, set()).update(nodes - {""})


def _test(context: str) -> str:
    """The test of a context: of coverage's, or from what pytest tells the processes of a test."""
    told, _, traced = context.partition("|")
    return traced or PHASE.sub("", told)
