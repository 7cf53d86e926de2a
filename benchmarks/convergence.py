"""Does it train as well? Small models with AdamW, Gefen, Muon, the hybrid and their peers.

Every run (task, dtype, optimizer, learning rate, seed) is a line of JSON in --results; runs that
are there are not repeated, so this can be stopped, continued and, with --share, split. First all
learning rates in float32; then, with bfloat16 autocast, the best of them for each optimizer.
Afterwards the tables are printed as markdown. See tasks.py for what is trained.

- For a seed, all optimizers start from the same weights and see the same batches.
- All have one learning rate for all parameters, no weight decay, and else their defaults; torch's
  Muon has the hybrid's routing, AdamW beside it and adjust_lr_fn="match_rms_adamw".
- The rate warms up over the first 5 % of the steps and falls to a tenth along a cosine.
- "final" is the validation loss (float32), averaged over the last 3 of 20 evaluations.

gefen-x and bitsandbytes run in an interpreter of their own. Half an hour on one core.

    python benchmarks/convergence.py [--task T]... [--optimizer O]... [--seeds N] [--share 1/2]
    python benchmarks/convergence.py --report --docs docs/convergence.md
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import report
import torch
from peer import HERE, OURS, PACKAGE, PEER, note, peer_python
from tasks import TASKS, Data, Task
from torch import nn
from torch.nn import functional as F

EIGHT = "bitsandbytes"
MORE = (f"{EIGHT}==0.50.2", "scikit-learn")
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
DTYPES = ("float32", "bfloat16")
EVALUATIONS, AVERAGED = 20, 3
WARM_UP, LEAST_RATE = 0.05, 0.1

Stepper = Any
Make = Callable[[nn.Module, float], list[Stepper]]


def adamw(model: nn.Module, lr: float) -> list[Stepper]:
    return [torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)]


def adamw8bit(model: nn.Module, lr: float) -> list[Stepper]:
    import bitsandbytes

    return [bitsandbytes.optim.AdamW8bit(model.parameters(), lr=lr, weight_decay=0)]


def gefen(model: nn.Module, lr: float, **settings: Any) -> list[Stepper]:
    import gefen

    return [gefen.Gefen(model.named_parameters(), lr=lr, **settings)]


def muon(model: nn.Module, lr: float, **settings: Any) -> list[Stepper]:
    from gefen import split_params_for_muon

    hidden, others = ([param for _, param in half] for half in split_params_for_muon(model))
    settings = {"weight_decay": 0, "adjust_lr_fn": "match_rms_adamw", **settings}
    rest = torch.optim.AdamW(others, lr=lr, weight_decay=0)
    return [torch.optim.Muon(hidden, lr=lr, **settings), rest]


def hybrid(model: nn.Module, lr: float, **settings: Any) -> list[Stepper]:
    import gefen

    return [gefen.GefenMuonHybrid.from_model(model, lr=lr, **settings)]


def control(model: nn.Module, lr: float, **settings: bool) -> list[Stepper]:
    from controls import Control

    return [Control(model.parameters(), lr, **settings)]


# Name: the distribution that it needs, and what makes it.
OPTIMIZERS: dict[str, tuple[str, Make]] = {
    "adamw": ("torch", adamw),
    "gefen": (OURS, gefen),
    "gefen-x": (PEER, gefen),
    "adamw8bit": (EIGHT, adamw8bit),
    "muon": ("torch", muon),
    "hybrid": (OURS, hybrid),
    "gefen-x-hybrid": (PEER, hybrid),
}
# Not run unless named: parts of the above changed one by one, to find what a difference is due to.
VARIANTS: dict[str, tuple[str, Make]] = {
    "gefen-block": (OURS, partial(gefen, factored_v_2d=False)),
    "gefen-random": (OURS, partial(gefen, stochastic_round=True)),
    "gefen-vectors": (OURS, partial(gefen, force_1d_period_one=True)),
    "gefen-refresh": (OURS, partial(gefen, codebook_refresh_every=50)),
    "adamw-factored": (OURS, partial(control, factored=True)),
    "adamw-quantised": (OURS, partial(control, quantised=True)),
    "hybrid-tuned3": (OURS, partial(hybrid, ns_schedule="tuned3")),
    "hybrid-tuned4": (OURS, partial(hybrid, ns_schedule="tuned4")),
    "hybrid-block": (OURS, partial(hybrid, backup_factored_v_2d=False)),
    "hybrid-tuned3-block": (
        OURS,
        partial(hybrid, ns_schedule="tuned3", backup_factored_v_2d=False),
    ),
    "hybrid-adamw": (OURS, partial(hybrid, backup_optimizer="adamw")),
    "hybrid-plain": (OURS, partial(hybrid, normuon=False)),
    "hybrid-muon": (OURS, partial(hybrid, normuon=False, backup_optimizer="adamw")),
}
ALL = OPTIMIZERS | VARIANTS


@dataclass(frozen=True, kw_only=True)
class Run:
    """What tells a line of the results from the others."""

    task: str
    dtype: str
    optimizer: str
    lr: float
    seed: int
    steps: int


@dataclass(frozen=True)
class Results:
    """The file of results: of equal runs, the last line counts."""

    path: Path

    def lines(self) -> dict[Run, dict[str, Any]]:
        if not self.path.exists():
            return {}
        lines = map(json.loads, self.path.read_text(encoding="utf-8").splitlines())
        return {Run(**{name: line[name] for name in Run.__annotations__}): line for line in lines}

    def add(self, line: dict[str, Any]) -> None:
        # One write to a file opened for appending: processes that share the work never mix lines.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def train(run: Run, task: Task, data: Data) -> dict[str, Any]:
    """Figures of one run."""
    start = time.perf_counter()
    torch.manual_seed(run.seed)
    model = task.model(data.classes)
    optimizers = ALL[run.optimizer][1](model, run.lr)
    generator = torch.Generator().manual_seed(run.seed)
    marks = {math.ceil(run.steps * part / EVALUATIONS) for part in range(1, EVALUATIONS + 1)}
    curve = []
    for step in range(1, run.steps + 1):
        set_rate(optimizers, run.lr * rate_factor(step, run.steps))
        inputs, targets = task.batch(data, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=run.dtype == "bfloat16"):
            loss = mean_loss(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step in marks:
            curve.append((step, validation_loss(model, data)))
    last = [loss for _, loss in curve[-AVERAGED:] if loss is not None]
    return {
        "final": round(sum(last) / len(last), 5) if len(last) == AVERAGED else None,
        "curve": curve,
        "parameters": sum(param.numel() for param in model.parameters()),
        "state_bytes": state_bytes(optimizers),
        "seconds": round(time.perf_counter() - start, 2),
    }


def rate_factor(step: int, steps: int) -> float:
    """Of the learning rate, in the steps 1 to ``steps``."""
    warm = max(1, round(steps * WARM_UP))
    if step <= warm:
        return step / warm
    done = (step - warm) / max(1, steps - warm)
    return LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def set_rate(optimizers: list[Stepper], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, data: Data) -> float | None:
    """None where it is not finite, for which JSON has no number."""
    loss = mean_loss(model(data.valid[0]), data.valid[1]).item()
    return round(loss, 5) if math.isfinite(loss) else None


def state_bytes(optimizers: list[Stepper]) -> int:
    """Of all tensors in the optimizers' checkpoints, each counted once."""
    found: dict[int, int] = {}
    pending: list[Any] = [optimizer.state_dict() for optimizer in optimizers]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            found[item.data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, (list, tuple)):
            pending += item
    return sum(found.values())


@cache
def code(package: str) -> str:
    """What computes the steps: for this checkout's package, a digest of its sources too."""
    version = f"{package} {importlib.metadata.version(package)}"
    if package != OURS:
        return version
    import gefen

    whole = hashlib.sha256()
    for source in sorted(Path(gefen.__file__).parent.rglob("*.py")):
        whole.update(source.read_bytes())
    return f"{version} {whole.hexdigest()[:12]}"


def task_digest(task: Task, data: Data) -> str:
    """Of the data and of a model before training."""
    torch.manual_seed(0)
    weights = [value.numpy().tobytes() for value in task.model(data.classes).state_dict().values()]
    return hashlib.sha256(b"".join([data.digest().encode(), *weights])).hexdigest()[:12]


def planned(options: argparse.Namespace, results: Results, dtype: str) -> Iterator[Run]:
    """All runs in this dtype, those of one seed next to each other."""
    steps = {task: options.steps or TASKS[task].steps for task in options.task}
    pairs = list(itertools.product(options.task, options.optimizer))
    if dtype == "float32":
        rates = {pair: list(options.lr) for pair in pairs}
    else:
        known = results.lines().items()
        rates = {(t, o): best_in_float32(options, known, t, o, steps[t]) for t, o in pairs}
    for seed, (task, optimizer) in itertools.product(range(options.seeds), pairs):
        for lr in rates[task, optimizer]:
            yield Run(
                task=task, dtype=dtype, optimizer=optimizer, lr=lr, seed=seed, steps=steps[task]
            )


def best_in_float32(
    options: argparse.Namespace,
    known: Iterable[tuple[Run, dict[str, Any]]],
    task: str,
    optimizer: str,
    steps: int,
) -> list[float]:
    """The best learning rate in float32, or none while not all are known."""
    wanted = {
        Run(task=task, dtype="float32", optimizer=optimizer, lr=lr, seed=seed, steps=steps)
        for lr, seed in itertools.product(options.lr, range(options.seeds))
    }
    lines = [line for run, line in known if run in wanted]
    if len(lines) < len(wanted):
        note(f"bfloat16 waits for all of float32: {task}, {optimizer}")
        return []
    return [report.best_rate(lines)]


def is_peer(optimizer: str) -> bool:
    """Whether it is for the interpreter with the other packages."""
    return ALL[optimizer][0] in (PEER, EIGHT)


def work(options: argparse.Namespace, results: Results, dtype: str) -> None:
    """Do the planned runs that this interpreter is for and that are not there yet."""
    data = {name: TASKS[name].load(options.digits) for name in options.task}
    digests = {name: task_digest(TASKS[name], data[name]) for name in data}
    known = results.lines()
    first, count = map(int, options.share.split("/"))
    mine = [
        run
        for number, run in enumerate(planned(options, results, dtype))
        if number % count == first - 1 and is_peer(run.optimizer) == bool(options.peer)
    ]
    for number, run in enumerate(mine, start=1):
        proof = {"data": digests[run.task], "code": code(ALL[run.optimizer][0])}
        line = known.get(run)
        if line and {name: line[name] for name in proof} == proof:
            continue
        figures = train(run, TASKS[run.task], data[run.task])
        results.add({**asdict(run), **proof, "torch": torch.__version__, **figures})
        note(f"{number} of {len(mine)}: {run} {figures['final']} in {figures['seconds']} s")


def peer_work(options: argparse.Namespace, arguments: list[str], dtype: str) -> None:
    """The same in the interpreter with the other packages."""
    command = [options.peer_python, __file__, *arguments, "--peer", dtype]
    command += ["--digits", options.digits] if options.digits else []
    done = subprocess.run(list(map(str, command)), env={**os.environ, "PYTHONPATH": ""})
    if done.returncode:
        sys.exit(f"Failed in {options.peer_python}: see above")


def digits_table(python: Path) -> Path:
    """Where scikit-learn in ``python`` has its images."""
    find = "import sklearn; print(sklearn.__path__[0])"
    done = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()) / "datasets" / "data" / "digits.csv.gz"


def share(text: str) -> str:
    """Checked: I/N with 1 <= I <= N."""
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"must be like 1/2, not {text!r}")
    return text


def command_line(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", action="append", choices=TASKS, help="default: all")
    add("--optimizer", action="append", choices=ALL, help=f"default: {', '.join(OPTIMIZERS)}")
    add("--lr", action="append", type=float, help=f"default: {', '.join(map(str, RATES))}")
    add("--dtype", action="append", choices=DTYPES, help="default: both")
    add("--seeds", type=int, default=3, help="default: %(default)s")
    add("--steps", type=int, help="default: as tasks.py says")
    add("--share", type=share, default="1/1", metavar="I/N", help="do the I-th of N shares")
    add("--results", type=Path, default=HERE / "results" / "convergence.jsonl", metavar="PATH")
    add("--threads", type=int, default=1, help="of torch; default: %(default)s")
    add("--peer-python", type=Path, metavar="PATH", help=f"has {PACKAGE} and {', '.join(MORE)}")
    add("--digits", type=Path, metavar="PATH", help="digits.csv.gz; default: of --peer-python")
    add("--report", action="store_true", help="run nothing, print the tables")
    add("--docs", type=Path, metavar="PATH", help="write the tables there too, between marks")
    add("--peer", choices=DTYPES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.task = options.task or list(TASKS)
    options.optimizer = options.optimizer or list(OPTIMIZERS)
    options.lr, options.dtype = options.lr or list(RATES), options.dtype or list(DTYPES)
    return options


def main() -> None:
    options = command_line()
    results = Results(options.results.absolute())
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    if options.peer:
        work(options, results, options.peer)
        return
    if not options.report:
        run_all(options, results)
    tables = report.markdown(list(results.lines().values()))
    print(tables)
    if options.docs:
        report.insert(options.docs, tables)


def run_all(options: argparse.Namespace, results: Results) -> None:
    others = any(map(is_peer, options.optimizer))
    if others or ("digits" in options.task and not options.digits):
        options.peer_python = options.peer_python or peer_python(*MORE)
    if "digits" in options.task and not options.digits:
        options.digits = digits_table(options.peer_python)
    for dtype in options.dtype:
        work(options, results, dtype)
        if others:
            peer_work(options, sys.argv[1:], dtype)


if __name__ == "__main__":
    main()
