"""benchmarks/convergence.py on tiny sizes: what its tables rest on."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("convergence")


@pytest.fixture
def tables(script: ModuleType) -> ModuleType:
    return script.report


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A file like scikit-learn's, with 440 random images."""
    lines = np.random.default_rng(0).integers(0, 17, (440, 65))
    lines[:, 64] %= 10
    np.savetxt(tmp_path / "digits.csv.gz", lines, fmt="%d", delimiter=",")
    return tmp_path / "digits.csv.gz"


@pytest.fixture
def options(script: ModuleType, images: Path, tmp_path: Path) -> argparse.Namespace:
    arguments = "--task digits --optimizer adamw --optimizer hybrid --seeds 2 --steps 3"
    arguments += f" --lr 0.01 --lr 0.02 --digits {images} --results {tmp_path / 'r.jsonl'}"
    return script.command_line(arguments.split())


def done(script: ModuleType, options: argparse.Namespace, dtype: str = "float32") -> list[Any]:
    script.work(options, script.Results(options.results), dtype)
    if not options.results.exists():
        return []
    return [json.loads(line) for line in options.results.read_text().splitlines()]


def test_an_interrupted_grid_continues_where_it_was(
    script: ModuleType, options: argparse.Namespace
) -> None:
    whole = done(script, options)
    assert len({(x["optimizer"], x["lr"], x["seed"]) for x in whole}) == len(whole) == 8
    assert done(script, options) == whole
    kept = [line for line in whole if line["seed"] == 0]
    options.results.write_text("".join(json.dumps(line) + "\n" for line in kept))
    again = done(script, options)
    assert again[: len(kept)] == kept
    assert [x["curve"] for x in again] == [x["curve"] for x in whole]


@pytest.mark.parametrize("what", ["code", "data"])
def test_results_of_other_code_or_data_are_replaced(
    script: ModuleType, options: argparse.Namespace, what: str
) -> None:
    whole = done(script, options)
    options.results.write_text(json.dumps({**whole[0], what: "older", "final": 9.0}) + "\n")
    assert len(done(script, options)) == 1 + len(whole)
    lines = script.Results(options.results).lines()
    assert len(lines) == len(whole)
    assert all(line[what] != "older" for line in lines.values())


def test_shares_do_everything_once(script: ModuleType, options: argparse.Namespace) -> None:
    options.share = "2/2"
    half = done(script, options)
    assert len(half) == 4
    options.share = "1/2"
    both = done(script, options)
    assert len({(x["optimizer"], x["lr"], x["seed"]) for x in both}) == len(both) == 8


def test_bfloat16_waits_for_the_best_rate(
    script: ModuleType, tables: ModuleType, options: argparse.Namespace
) -> None:
    options.share = "1/2"
    half = done(script, options)
    assert done(script, options, "bfloat16") == half
    options.share = "1/1"
    whole = done(script, options)
    lines = done(script, options, "bfloat16")[len(whole) :]
    assert len(lines) == 4
    for line in lines:
        rivals = tables.of(whole, optimizer=line["optimizer"])
        assert line["lr"] == tables.best_rate(rivals)
        same = tables.of(rivals, lr=line["lr"], seed=line["seed"])[0]
        assert line["curve"] != same["curve"]
        assert line["final"] == pytest.approx(same["final"], abs=0.02)


def test_optimizers_start_from_the_same_weights_and_go_different_ways(
    script: ModuleType, options: argparse.Namespace
) -> None:
    # A refresh of the codebook after 50 steps shows only then.
    names = [x for x in script.ALL if not script.is_peer(x) and x != "gefen-refresh"]
    options.optimizer, options.lr, options.seeds = names, [0.0, 0.01], 1
    lines = done(script, options)
    assert len(lines) == 2 * len(names)
    still = [line["curve"] for line in lines if line["lr"] == 0]
    assert still == still[:1] * len(names)
    moved = [line["curve"] for line in lines if line["lr"] > 0]
    assert len({json.dumps(curve) for curve in [*moved, still[0]]}) == len(names) + 1


def test_the_loss_that_diverged_is_no_number(script: ModuleType, images: Path) -> None:
    task = script.TASKS["digits"]
    run = script.Run(
        task="digits", dtype="float32", optimizer="adamw", lr=math.inf, seed=0, steps=3
    )
    assert script.train(run, task, task.load(images))["final"] is None


def test_the_rate_warms_up_and_falls(script: ModuleType) -> None:
    factors = [script.rate_factor(step, 100) for step in range(1, 101)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[-1] == pytest.approx(0.1)


def test_state_bytes_are_those_of_the_checkpoint(script: ModuleType) -> None:
    model = torch.nn.Linear(16, 8, bias=False)
    (adamw,) = script.adamw(model, 0.1)
    model(torch.ones(1, 16)).sum().backward()
    adamw.step()
    assert script.state_bytes([adamw]) == 2 * 4 * 128 + 4
    assert script.state_bytes([adamw, adamw]) == 2 * 4 * 128 + 4


def test_a_text_is_predicted_token_by_token_and_validated_on_other_text(
    script: ModuleType,
) -> None:
    task = script.TASKS["words"]
    data = task.load(None)
    inputs, targets = task.batch(data, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (16, 32)
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert data.valid[0][:, 1:].equal(data.valid[1][:, :-1])
    assert 0 <= int(inputs.min()) <= int(inputs.max()) < data.classes
    trained = {tuple(row.tolist()) for row in data.train[0].unfold(0, 32, 1)}
    known = [tuple(row.tolist()) in trained for row in data.valid[0]]
    assert sum(known) < len(known) / 20  # some code says twice the same


def test_images_are_shifted_by_up_to_a_pixel(script: ModuleType, images: Path) -> None:
    data = script.TASKS["digits"].load(images)
    assert len(data.train[0]) == 40
    assert len(data.valid[0]) == 400
    centres = {tuple(image[1:-1, 1:-1].flatten().tolist()) for image in data.train[0]}
    batch, labels = script.TASKS["digits"].batch(data, torch.Generator().manual_seed(0), 99)
    assert batch.shape == (99, 8, 8)
    assert len(labels) == 99
    shifts = set()
    for image, label in zip(batch, labels, strict=True):
        found = [
            (i, j, int(want))
            for i in range(3)
            for j in range(3)
            for whole, want in zip(*data.train, strict=True)
            if image[i : i + 6, j : j + 6].equal(whole[1:7, 1:7])
        ]
        assert len(found) == 1
        assert found[0][2] == label
        shifts.add(found[0][:2])
    assert len(centres) == 40
    assert len(shifts) == 9


def line(optimizer: str, lr: float, seed: int, final: float | None, **more: Any) -> dict[str, Any]:
    fixed = {"task": "t", "dtype": "float32", "steps": 2, "code": "c", "parameters": 10}
    curve = [[1, final], [2, final]]
    mine = {"optimizer": optimizer, "lr": lr, "seed": seed, "final": final, "curve": curve}
    return {**fixed, "state_bytes": 80, **mine, **more}


def test_a_mean_is_judged_by_the_range_of_the_reference(tables: ModuleType) -> None:
    assert tables.verdict([1.2, 1.4], [1.0, 1.3]) == "within the spread (+0.150)"
    assert tables.verdict([1.4, 1.5], [1.0, 1.3]) == "worse (+0.300)"
    assert tables.verdict([0.8, 0.9], [1.0, 1.3]) == "better (-0.300)"


def test_the_best_rate_has_the_least_mean_and_did_not_diverge(tables: ModuleType) -> None:
    lines = [line("adamw", 0.1, 0, 1.0), line("adamw", 0.1, 1, None)]
    lines += [line("adamw", 0.2, 0, 3.0), line("adamw", 0.2, 1, 3.0)]
    lines += [line("adamw", 0.3, 0, 1.0), line("adamw", 0.3, 1, 4.0)]
    assert tables.best_rate(lines) == 0.3
    assert "| AdamW | diverged | 3.000 | **2.500** | 1.000 to 4.000 |" in tables.markdown(lines)


def test_each_kind_is_compared_to_its_own_reference(tables: ModuleType) -> None:
    finals = {"hybrid": 2.5, "muon": 2.0, "gefen": 1.5, "adamw": 1.0, "hybrid-plain": 3.0}
    text = tables.markdown([line(name, 0.1, 0, final) for name, final in finals.items()])
    rows = [row.split(" | ") for row in text.splitlines() if row.endswith("| 8.00 |")]
    assert [(row[0], row[3]) for row in rows] == [
        ("| AdamW", ""),
        ("| Gefen", "worse (+0.500)"),
        ("| Muon and AdamW", ""),
        ("| GefenMuonHybrid", "worse (+0.500)"),
        ("| hybrid-plain", "worse (+1.000)"),
    ]


def test_tables_are_put_between_the_marks(tables: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- tables -->\nold\n<!-- end of tables -->\n\nThe end.\n")
    for text in ("| new |", "| newer |"):
        tables.insert(page, text)
        whole = f"# Title\n\n<!-- tables -->\n\n{text}\n\n<!-- end of tables -->\n\nThe end.\n"
        assert page.read_text() == whole
    page.write_text("# Title\n")
    with pytest.raises(SystemExit, match="needs one line <!-- tables -->"):
        tables.insert(page, "| newest |")
    assert page.read_text() == "# Title\n"


def test_the_command_runs_and_reports(options: argparse.Namespace) -> None:
    command = [sys.executable, str(BENCHMARKS / "convergence.py"), "--task", "digits"]
    command += ["--digits", str(options.digits), "--results", str(options.results)]
    fixed = [*command, "--optimizer", "adamw", "--steps", "2", "--seeds", "1"]
    ran = subprocess.run(fixed, capture_output=True, text=True, check=True, timeout=300)
    assert ran.stdout.count("| AdamW |") == 3
    again = subprocess.run([*fixed, "--report"], capture_output=True, text=True, check=True)
    assert again.stdout == ran.stdout
    wrong = subprocess.run([*fixed, "--share", "3/2"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "must be like 1/2" in wrong.stderr
