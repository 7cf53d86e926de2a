"""Put small faults into the sources, one at a time, and count those that the tests notice.

Each mutant is judged as a wheel is: by the suite that the gate runs on it, the tests that run the
changed lines first, until one fails. The host side of the CUDA kernels is judged by tests/kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click

from ci.mutants.mutations import Mutant, draw
from ci.mutants.slots import CHECKOUT, Slot, slots
from ci.mutants.trace import Coverage, trace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
EQUIVALENT = HERE / "equivalent.toml"
FIRST = 40  # tests that are tried before the others are even collected


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is changed, and what must notice it.

    Attributes:
        sources: the folder whose modules are changed.
        except_for: those that cannot run here.
        tests: folders of tests that run in one process.
        ranks: a folder of tests that run in 2 and in 3 ranks.
        imports: what a process that forks the tests imports beforehand.
        marked: pytest's -m.
        count: how many mutants.
        whole, each: the least share that must be noticed, of all and in each file.
    """

    sources: str
    except_for: tuple[str, ...] = ()
    tests: tuple[tuple[str, ...], ...]
    ranks: str | None = None
    imports: tuple[str, ...] = ("pytest", "hypothesis")
    count: int
    whole: float
    each: float


TORCH = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
MORE = (
    "torch.distributed.checkpoint.state_dict",
    "torch.testing",
    "numpy",
    "pytest",
    "hypothesis",
)
TARGETS = {
    "gefen": Target(
        sources="src/gefen",
        tests=(
            ("tests/regression/single", "tests/regression/own", "tests/kernels"),
            ("tests/regression/worlds",),
        ),
        ranks="tests/regression/ranks",
        imports=(*TORCH, *MORE),
        count=600,
        whole=0.95,
        each=0.90,
    ),
    "gate": Target(sources="gate", tests=(("tests/gate",),), count=300, whole=0.90, each=0.0),
}


@dataclass
class Judge:
    """Has mutants tried by the tests, and remembers which tests notice most."""

    target: Target
    covered: Coverage
    noticed: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def starts(self, mutant: Mutant) -> list[dict[str, Any]]:
        """Return what to run for a mutant: those tests first that are likely to fail soon."""
        inside = mutant.function != "<module>"
        nodes = self.covered.tests(mutant.file, mutant.lines if inside else None)
        marks = self.noticed[mutant.file]
        nodes.sort(key=lambda node: (-marks[node], self.covered.seconds.get(node, 1.0), node))
        ranks = [
            node for node in nodes if self.target.ranks and node.startswith(self.target.ranks)
        ]
        forking = [node for node in nodes if "/worlds/" in node]
        alone = [node for node in nodes if node not in {*ranks, *forking}]
        parts = [(1, alone[:FIRST]), (1, alone[FIRST:]), (1, forking), (2, ranks), (3, ranks)]
        return [
            {"world": world, "nodes": part, "limit": 40 + 8 * self.covered.time(part)}
            for world, part in parts
            if part
        ]

    def judge(self, mutant: Mutant, slot: Slot) -> str | None:
        """Return the test that notices the mutant, or None."""
        starts = self.starts(mutant)
        if not starts:
            return None
        with slot.changed(mutant.file, mutant.text):
            red = slot.ask(starts)["red"]
        if red and "::" in red:
            self.noticed[mutant.file][red] += 1
        return None if red is None else str(red)


def equivalents() -> list[dict[str, str]]:
    """Return the entries of the list of mutants that change nothing which anybody could see."""
    return list(tomllib.loads(EQUIVALENT.read_text()).get("mutant", []))


def key(entry: dict[str, str]) -> tuple[str, str, str, str]:
    """Return what identifies the mutant of a list's entry."""
    return entry["file"], entry["function"], entry["before"], entry["after"]


def modules(target: Target, chosen: Sequence[str]) -> list[str]:
    """Return the files to change, relative to the checkout."""
    found = [
        path.relative_to(CHECKOUT).as_posix()
        for path in sorted((CHECKOUT / target.sources).rglob("*.py"))
        if "harness" not in path.parts
    ]
    return [file for file in found if not chosen or any(part in file for part in chosen)]


def tried(
    judge: Judge, mutants: Sequence[Mutant], free: SimpleQueue[Slot], known: dict[str, str]
) -> dict[Mutant, str | None]:
    """Judge all mutants, side by side; return what noticed each."""
    lock, done = threading.Lock(), Counter[bool]()

    def one(mutant: Mutant) -> str | None:
        name = json.dumps(mutant.identity)
        red = known.get(name)
        if red is None:
            slot = free.get()
            try:
                red = judge.judge(mutant, slot)
            finally:
                free.put(slot)
        with lock:
            done[red is not None] += 1
            if red is not None:
                known[name] = red
            else:
                click.echo(f"survived: {shown(mutant)}")
            if sum(done.values()) % 50 == 0:
                click.echo(f"{sum(done.values())} of {len(mutants)}, {done[False]} survived")
        return red

    with ThreadPoolExecutor(free.qsize()) as pool:
        return dict(zip(mutants, pool.map(one, mutants), strict=True))


def shown(mutant: Mutant) -> str:
    """Return a mutant as a person reads it."""
    where = f"{mutant.file}:{mutant.lines[0]} {mutant.function} ({mutant.operator})"
    return f"{where}\n  - {mutant.before}\n  + {mutant.after}"


def report(
    target: Target, found: dict[Mutant, str | None], excused: set[tuple[str, ...]]
) -> tuple[dict[str, Any], list[str]]:
    """Return the result as it is kept, and what is not good enough, as sentences."""
    counted = {mutant: red for mutant, red in found.items() if mutant.identity not in excused}
    totals, noticed = (
        Counter(m.file for m in counted),
        Counter(mutant.file for mutant, red in counted.items() if red),
    )
    survivors = sorted((m for m, red in counted.items() if red is None), key=lambda m: m.identity)
    share = sum(noticed.values()) / max(1, sum(totals.values()))
    problems = []
    if share < target.whole:
        problems.append(f"{share:.1%} were noticed; {target.whole:.0%} are required.")
    for file, total in totals.items():
        if noticed[file] < target.each * total:
            problems.append(f"{file}: {noticed[file]} of {total} were noticed.")
    result = {
        "mutants": len(found),
        "equivalent": len(found) - len(counted),
        "noticed": sum(noticed.values()),
        "score": round(share, 4),
        "files": {file: [noticed[file], total] for file, total in sorted(totals.items())},
        "survivors": [
            dict(zip(("file", "function", "before", "after"), mutant.identity, strict=True))
            for mutant in survivors
        ],
    }
    return result, problems


def stale(mutants: Sequence[Mutant], files: Sequence[str], whole: bool) -> list[str]:
    """Return what the list of equivalents says that is no longer so, as sentences."""
    drawn = {mutant.identity for mutant in mutants}
    return [
        f"{EQUIVALENT.name}: {entry['file']}: {entry['before']!r} is not drawn: remove it."
        for entry in equivalents()
        if whole and entry["file"] in files and key(entry) not in drawn
    ]


@click.command()
@click.argument("what", type=click.Choice(sorted(TARGETS)), default="gefen")
@click.option("--count", type=int, help="How many mutants; 600 of gefen and 300 of the gate.")
@click.option("--seed", default="gefen", show_default=True, help="Other seeds draw others.")
@click.option("--file", "chosen", multiple=True, help="Only files whose path has this in it.")
@click.option("--jobs", default=2, show_default=True, help="How many are tried side by side.")
@click.option(
    "--known",
    type=click.Path(path_type=Path),
    help="Keep in this file what noticed each mutant; try only the others next time.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the result to this file.")
@click.option("--list", "only_list", is_flag=True, help="Show the mutants; try none.")
def main(
    what: str,
    count: int | None,
    seed: str,
    chosen: tuple[str, ...],
    jobs: int,
    known: Path | None,
    out: Path | None,
    only_list: bool,
) -> None:
    """Change the sources of WHAT (gefen or gate) in small ways and see whether tests notice."""
    target = TARGETS[what]
    files = modules(target, chosen)
    mutants = draw(CHECKOUT, files, count or target.count, seed)
    if only_list:
        for mutant in mutants:
            click.echo(shown(mutant))
        return
    started = time.monotonic()
    excused = {key(entry) for entry in equivalents()}
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        slots(Path(folder), jobs, target.imports) as ready,
    ):
        covered = trace(target, ready, Path(folder))
        click.echo(f"{len(mutants)} mutants of {len(files)} files, {covered.count} tests")
        free: SimpleQueue[Slot] = SimpleQueue()
        for slot in ready:
            free.put(slot)
        seen = json.loads(known.read_text()) if known and known.exists() else {}
        try:
            found = tried(
                Judge(target, covered),
                [mutant for mutant in mutants if mutant.identity not in excused],
                free,
                seen,
            )
        finally:
            if known:
                known.write_text(json.dumps(seen, indent=0))
    found |= dict.fromkeys((m for m in mutants if m.identity in excused), None)
    result, problems = report(target, found, excused)
    problems += stale(mutants, files, whole=not chosen and count is None and seed == "gefen")
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    result = {"what": what, "seed": seed, "commit": head.stdout.strip(), **result}
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    click.echo(
        f"{what}: {result['noticed']} of {len(found) - result['equivalent']} mutants were noticed "
        f"({result['score']:.1%}), {result['equivalent']} are equivalent; "
        f"{time.monotonic() - started:.0f} s"
    )
    for problem in problems:
        click.echo(problem)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
