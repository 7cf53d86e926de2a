"""The kernels under sanitizers, and that these notice what they are there for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cases import ADAM, LAYOUTS, Case, block_step, momentum
from emulation import SOURCES, build
from recording import Recorder

from gefen.codebook import BINS
from gefen.kernels.launch import Kernels
from gefen.kernels.packing import Geometry
from gefen.kernels.tasks import DenseMomentum, FactoredStep

# Real threads are slow, so blocks have few of them; all counts follow.
TINY = Geometry(threads=16, warp=4)

COMMON = ("-DEMULATED_THREADS", "-g", "-O0", "-pthread")
RACES = (*COMMON, "-fsanitize=thread")
ONLY = "-DBLOCK_STEP_ONLY"
ADDRESSES = (*COMMON, "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

# Short of a vector, within a tile of 256 elements, beyond it, and cut in chunks; unaligned too.
PERIODS = (1, 5, 8, 12, 64, 300, 2500)

FACTORED = ((20, 150, "contiguous"), (150, 8, "transposed"), (1, 3, "offset"))


def case(period: int, number: int) -> Case:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    layouts = [LAYOUTS[number % 4], LAYOUTS[number // 2 % 4]]
    blocks = 2 if period > 64 else 30
    pair = dtypes[number % 3], dtypes[number // 2 % 3]
    draws = number % 2 == 0
    return Case(blocks, period, *pair, *layouts, "normal", draws, number, number, True)


def record(path: Path, block_step_only: bool = False) -> None:
    """Every kernel, over all kinds of blocks."""
    recorder = Recorder()
    kernels = Kernels(recorder, torch.device("cpu"), 1, TINY, arena=0)
    drawn = [momentum(case(period, number)) for number, period in enumerate(PERIODS)]
    kernels.block_step([block_step(case(period, number)) for number, period in enumerate(PERIODS)])
    if block_step_only:
        recorder.write(path)
        return
    counts = torch.zeros(BINS, dtype=torch.int64)
    kernels.histogram([(m.grad, m.period) for m, _, _ in drawn], counts)
    outs = [torch.empty(m.grad.shape, dtype=torch.bfloat16) for m, _, _ in drawn]
    directions = [DenseMomentum(m, True, out) for (m, _, _), out in zip(drawn, outs, strict=True)]
    kernels.momentum_update(directions)
    factored = []
    for number, (rows, columns, layout) in enumerate(FACTORED):
        dtypes = (torch.float32, torch.bfloat16 if number else torch.float32)
        m, param, _ = momentum(Case(rows, columns, *dtypes, layout, layout, "normal", False, 1, 3))
        mean = torch.ones(columns) if number else None
        moments = torch.ones(rows), torch.ones(columns)
        factored.append(FactoredStep(param, m, *moments, ADAM, mean, (1, number)))
    kernels.factored_step(factored)
    recorder.write(path)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    record(tmp_path / "all")
    return tmp_path / "all"


@pytest.fixture
def short_recording(tmp_path: Path) -> Path:
    record(tmp_path / "block step", block_step_only=True)
    return tmp_path / "block step"


def replay(
    options: tuple[str, ...], recording: Path, sources: Path = SOURCES
) -> subprocess.CompletedProcess[str]:
    program = build(TINY, *options, main="replay.cpp", sources=sources)
    environment = os.environ | {
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    return subprocess.run(
        ["setarch", "-R", str(program), str(recording)],
        capture_output=True,
        text=True,
        timeout=250,
        env=environment,
    )


@pytest.mark.parametrize("options", [RACES, ADDRESSES], ids=["thread", "address"])
def test_kernels_are_clean(options: tuple[str, ...], recording: Path) -> None:
    done = replay(options, recording)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "replayed\n"


def changed(folder: Path, name: str, before: str, after: str) -> Path:
    """A copy of the sources in which the first ``before`` is ``after``."""
    shutil.copytree(SOURCES, folder)
    text = (folder / name).read_text()
    assert before in text
    (folder / name).write_text(text.replace(before, after, 1))
    return folder


def test_a_missing_barrier_is_noticed(short_recording: Path, tmp_path: Path) -> None:
    """Without it, blocks are joined while other threads still leave their peaks."""
    barrier = "        if (fits) {\n            __syncthreads();\n"
    sources = changed(tmp_path / "src", "blocks.cuh", barrier, "        if (fits) {\n")
    done = replay((*RACES, ONLY), short_recording, sources)
    assert done.returncode == 66
    assert "WARNING: ThreadSanitizer: data race" in done.stderr


def test_a_missing_guard_is_noticed(short_recording: Path, tmp_path: Path) -> None:
    """Without it, the tail of a tensor is written beyond its end."""
    guard = "to = size - number * WIDTH < WIDTH ? size - number * WIDTH : WIDTH;"
    sources = changed(tmp_path / "src", "vector.cuh", guard, "to = size < 0 ? 0 : WIDTH;")
    done = replay((*COMMON, ONLY, "-fsanitize=address"), short_recording, sources)
    assert done.returncode not in (0, 3)
    assert "ERROR: AddressSanitizer: heap-buffer-overflow" in done.stderr
