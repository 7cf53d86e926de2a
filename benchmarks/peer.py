"""Run one measurement in two interpreters: this one and one with the package gefen-x.

A benchmark script calls :func:`compare` with a function that measures whatever ``import gefen``
finds and returns seconds or bytes by name. The script is started again as a child process in
each interpreter, in turns; of repeated measurements the least counts, which is the one least
disturbed by other load. gefen-x is run as published, through its public classes only.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Mapping
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = "gefen-x==0.5.0"
CONSTRAINTS = HERE.parent / "ci" / "constraints.txt"
OURS, PEER = "gefen-cuda", "gefen-x"
CHILD_SECONDS = 240

Figures = dict[str, float]
Measurement = Callable[[], Figures]


def compare(script: str, parts: Mapping[str, Measurement], turns: int = 1) -> None:
    """Command line of a benchmark: measure every part in both interpreters, print and save."""
    title = sys.modules["__main__"].__doc__ or ""
    parser = argparse.ArgumentParser(
        description=title, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer-python",
        type=Path,
        metavar="PATH",
        help=f"an interpreter that has {PACKAGE}; by default one is made in the user's cache",
    )
    parser.add_argument("--turns", type=int, default=turns, help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="of torch; default: as many as it likes")
    parser.add_argument("--part", choices=parts, help="in a child: measure this, print JSON")
    options = parser.parse_args()
    if options.part:
        print(json.dumps({"package": installed(), "figures": parts[options.part]()}))
        return
    pythons = {OURS: Path(sys.executable), PEER: options.peer_python or peer_python()}
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    figures: dict[str, Figures] = {OURS: {}, PEER: {}}
    with tempfile.TemporaryDirectory() as cache:
        for part, turn in itertools.product(parts, range(options.turns)):
            for package, python in pythons.items():
                note(f"{part}, turn {turn + 1} of {options.turns}: {package}")
                keep_least(figures[package], measured(python, script, part, package, cache))
    print_table(figures)
    save(Path(script).stem, figures, options.threads)


def measured(python: Path, script: str, part: str, package: str, cache: str) -> Figures:
    """Figures of one part from a new process of ``python``; ``cache`` is for its compiler."""
    done = subprocess.run(
        [python, script, "--part", part],
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
        env={**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": ""},
    )
    if done.returncode:
        sys.exit(f"{part} failed with {package} in {python}:\n{done.stderr[-3000:]}")
    report = json.loads(done.stdout.splitlines()[-1])
    if not report["package"].startswith(package):
        sys.exit(f"{python} has {report['package']}, not {package}")
    return dict(report["figures"])


def installed() -> str:
    """Which distribution provides ``gefen`` here, with its version."""
    for name in (OURS, PEER):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "no gefen"


def peer_python(*more: str) -> Path:
    """The interpreter of a cached environment with gefen-x, the pinned torch, and ``more``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = cache / "gefen-benchmarks" / "+".join((PACKAGE, *more))
    python = root / "bin" / "python"
    ready = root / "ready"
    if not ready.exists():
        note(f"installing {' '.join((PACKAGE, *more))} into {root}")
        venv.create(root, clear=True, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS]
        subprocess.run([*pip, PACKAGE, "torch", *more], check=True)
        ready.touch()
    return python


def keep_least(known: Figures, new: Figures) -> None:
    for name, value in new.items():
        known[name] = min(value, known.get(name, value))


def print_table(figures: dict[str, Figures]) -> None:
    names = list(figures[OURS] | figures[PEER])
    width = max(map(len, names))
    print(f"{'':{width}}  {OURS:>12} {PEER:>12} {'ratio':>7}")
    for name in names:
        ours, peer = figures[OURS].get(name), figures[PEER].get(name)
        ratio = f"{peer / ours:7.1f}" if ours and peer is not None else ""
        print(f"{name:{width}}  {shown(name, ours):>12} {shown(name, peer):>12} {ratio}")


def shown(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name.endswith("memory"):
        return f"{value / 2**20:.1f} MiB"
    return f"{value / 1e3:.1f} kB" if name.endswith("bytes") else f"{value * 1e3:.1f} ms"


def save(name: str, figures: dict[str, Figures], threads: int | None) -> None:
    """Write the figures (seconds, bytes) and what they depend on to results/NAME.json."""
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    report = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "threads": threads or "default",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "compared": [installed(), PACKAGE.replace("==", " ")],
        "figures": figures,
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def note(text: str) -> None:
    print(f"+ {text}", file=sys.stderr, flush=True)


def seconds(call: Callable[[], object], repeat: int = 1) -> float:
    """Least wall time of ``repeat`` calls."""
    taken = []
    for _ in range(repeat):
        gc.collect()
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)
