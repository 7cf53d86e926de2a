"""A CPU step in plain torch operations (fused=False): gefen-cuda beside gefen-x.

- "first", "step": wall time of the first and of a later step over 8 matrices of 1024 x 1024 and
  8 vectors of 1024; GefenMuon over 4 matrices of 192 x 192 only, because gefen-x multiplies
  bfloat16 matrices natively, which takes minutes at 1024 x 1024 on many CPUs.
- "memory": peak resident memory during a later step above what was resident before it, over
  16.8 million float32 elements in one matrix of 4096 x 4096 or in 64 of 512 x 512. Needs Linux:
  the kernel keeps the peak (VmHWM) and can be told to forget it.

Threads that wait for each other suffer from any other load; on a busy machine use --threads 1.

    python benchmarks/step.py [--peer-python PATH] [--threads N]
"""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from peer import Figures, compare, seconds

MIXED = [(1024, 1024)] * 8 + [(1024,)] * 8
SMALL = [(192, 192)] * 4
ONE = [(4096, 4096)]
MANY = [(512, 512)] * 64


def optimizer(kind: str, shapes: list[tuple[int, ...]], dtype: str) -> Any:
    import torch

    import gefen

    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(1)
    params = []
    for number, shape in enumerate(shapes):
        param = torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype)))
        param.grad = torch.randn(shape, generator=generator).to(param.dtype)
        params.append((f"p{number}", param))
    make: dict[str, Callable[..., Any]] = {
        "Gefen factored": gefen.Gefen,
        "Gefen block": partial(gefen.Gefen, factored_v_2d=False),
        "GefenMuon": gefen.GefenMuon,
    }
    return make[kind](params, fused=False)


def times(kind: str, shapes: list[tuple[int, ...]], repeat: int) -> Figures:
    figures = {}
    for dtype in ("float32", "bfloat16"):
        stepper = optimizer(kind, shapes, dtype)
        figures[f"{kind} {dtype} first"] = seconds(stepper.step)
        figures[f"{kind} {dtype} step"] = seconds(stepper.step, repeat)
    return figures


def memory(label: str, kind: str, shapes: list[tuple[int, ...]]) -> Figures:
    stepper = optimizer(kind, shapes, "float32")
    stepper.step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    stepper.step()
    return {f"{kind} {label} memory": resident("VmHWM") - before}


def resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


PARTS = {
    "factored": partial(times, "Gefen factored", MIXED, 5),
    "block": partial(times, "Gefen block", MIXED, 5),
    "muon": partial(times, "GefenMuon", SMALL, 5),
    "one": partial(memory, "4096 x 4096", "Gefen factored", ONE),
    "many": partial(memory, "64 of 512 x 512", "Gefen factored", MANY),
}

if __name__ == "__main__":
    compare(__file__, PARTS)
