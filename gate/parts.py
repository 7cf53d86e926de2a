"""The parts of the regressions: what is started, in which order, and what each of them needs."""

from __future__ import annotations

import difflib
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gate.errors import UsageFailure
from gate.machine import Machine, Profile
from gate.parallel import Need

# Host memory of a test process, measured at 0.6 GiB on the CPU; CUDA maps more.
CPU_PROCESS_BYTES = 2**30
GPU_PROCESS_BYTES = 4 * 2**30
# Of tests in one process; those in "worlds" fork ranks of their own, and take longest.
FOLDERS = ("worlds", "own", "single")
# A suite without any of these is none.
REQUIRED = ("ranks", "single")


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

    def ids(self, nodes: Sequence[str]) -> list[str]:
        """Return what those of ``nodes`` that it runs are called in reports and statements."""
        return [f"{self.label}: {node}" for node in self.expected(nodes)]


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
