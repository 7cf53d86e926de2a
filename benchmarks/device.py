"""Step times, launches and memory on one device, beside torch's fused AdamW and Muon.

Measures a real GPU with ``--device cuda``. ``--device cpu --small`` only shows that this file
works: no launches are counted there, and the times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gefen
from gefen import Gefen, GefenMuonHybrid, split_params_for_muon
from gefen.errors import CudaUnavailable
from gefen.kernels import cuda

Step = Callable[[], object]
WARM_UP = 3
# What the block step of bfloat16 parameters must move: gradient read, parameter and index read
# and written, per element.
LEAST_BYTES = {torch.bfloat16: 8, torch.float32: 14}


@dataclass(frozen=True)
class Size:
    """The shapes of GPT-2: of the published small one, and of the largest."""

    name: str
    width: int
    layers: int
    tokens: int
    positions: int


SIZES = [Size("GPT-2 small", 768, 12, 50257, 1024), Size("GPT-2 XL", 1600, 48, 50257, 1024)]
SMALL = [Size("tiny", 16, 2, 40, 8)]


class Layer(nn.Module):
    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(width, **options)
        self.attention = nn.Linear(width, 3 * width, **options)
        self.projection = nn.Linear(width, width, **options)
        self.second_norm = nn.LayerNorm(width, **options)
        self.inner = nn.Linear(width, 4 * width, **options)
        self.outer = nn.Linear(4 * width, width, **options)


class Model(nn.Module):
    """Parameters with random gradients; nothing is computed with them."""

    def __init__(self, size: Size, **options: Any) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(size.tokens, size.width, **options)
        self.position_embedding = nn.Embedding(size.positions, size.width, **options)
        self.layers = nn.ModuleList(Layer(size.width, **options) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, **options)
        for param in self.parameters():
            param.grad = torch.randn_like(param) * 0.02


def adamw(model: Model) -> Step:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True).step


def muon(model: Model) -> Step:
    """torch's Muon on the matrices that ours takes, its fused AdamW on the rest."""
    matrices, others = split_params_for_muon(model)
    first = torch.optim.Muon([param for _, param in matrices], lr=1e-5)
    second = torch.optim.AdamW([param for _, param in others], lr=1e-5, fused=True)
    return lambda: (first.step(), second.step())


OPTIMIZERS: dict[str, Callable[[Model], Step]] = {
    "torch AdamW, fused": adamw,
    "Gefen, block": lambda model: (
        Gefen(model.named_parameters(), lr=1e-5, factored_v_2d=False).step
    ),
    "Gefen, factored": lambda model: Gefen(model.named_parameters(), lr=1e-5).step,
    "torch Muon and AdamW": muon,
    "GefenMuonHybrid": lambda model: GefenMuonHybrid(model, lr=1e-5).step,
}


@dataclass(frozen=True)
class Figures:
    """Of one optimizer on one model: seconds, bytes, and kernels launched by a step.

    ``state`` is what the first step leaves allocated, ``peak`` what a later one needs beyond
    what is there before it; both are None where torch does not count them.
    """

    first_step: float
    step: float
    spread: float
    launches: int | None
    state: int | None
    peak: int | None


class Device:
    """Times and counts what happens on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"

    def seconds(self, call: Step, repeat: int = 1) -> list[float]:
        """Of each call, from start to the end of all that it queued."""
        taken = []
        for _ in range(repeat):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            taken.append(time.perf_counter() - start)
        return taken

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else 0

    def launches(self, call: Step) -> int | None:
        """Kernels, not copies or fills, that a call runs."""
        if not self.is_cuda:
            return None
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            call()
            self.wait()
        cuda_type = torch.autograd.DeviceType.CUDA
        names = [event.name for event in profile.events() if event.device_type == cuda_type]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in names)

    def copy_rate(self, size: int) -> float:
        """Bytes read and written per second by torch's copy of ``size`` bytes."""
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        taken = self.seconds(lambda: target.copy_(source), 20)
        return 2 * size / statistics.median(taken[WARM_UP:])


def measured(device: Device, make: Callable[[Model], Step], model: Model, repeat: int) -> Figures:
    before = device.allocated()
    step = make(model)
    (first,) = device.seconds(step)
    state = device.allocated() - before
    device.seconds(step, WARM_UP)
    if device.is_cuda:
        torch.cuda.reset_peak_memory_stats(device.device)
    taken = sorted(device.seconds(step, repeat))
    peak = torch.cuda.max_memory_allocated(device.device) if device.is_cuda else None
    return Figures(
        first_step=first,
        step=statistics.median(taken),
        spread=taken[-1] - taken[0],
        launches=device.launches(step),
        state=state if device.is_cuda else None,
        peak=None if peak is None else peak - before - state,
    )


def models(device: Device, sizes: list[Size], repeat: int) -> Iterator[dict[str, Any]]:
    for size in sizes:
        for dtype in LEAST_BYTES:
            elements, optimizers = 0, {}
            for name, make in OPTIMIZERS.items():
                torch.manual_seed(0)
                model = Model(size, device=device.device, dtype=dtype)
                elements = sum(param.numel() for param in model.parameters())
                optimizers[name] = measured(device, make, model, repeat)
                print(shown(size, dtype, name, optimizers[name]), flush=True)
                del model
                gc.collect()
            yield {
                "model": size.name,
                "dtype": str(dtype).removeprefix("torch."),
                "elements": elements,
                "least_bytes": LEAST_BYTES[dtype] * elements,
                "optimizers": {name: asdict(figures) for name, figures in optimizers.items()},
            }


def shown(size: Size, dtype: torch.dtype, name: str, figures: Figures) -> str:
    launches = "" if figures.launches is None else f"{figures.launches:6} launches"
    return (
        f"{size.name:12} {str(dtype)[6:]:9} {name:22} first {figures.first_step * 1e3:9.2f} ms  "
        f"step {figures.step * 1e3:9.3f} ms {launches}"
    )


def facts(device: Device) -> dict[str, Any]:
    """What the figures depend on. Loads the kernels, which is timed."""
    name, loaded, seconds = "cpu", "none", 0.0
    if device.is_cuda:
        properties = torch.cuda.get_device_properties(device.device)
        name = f"{properties.name}, sm_{properties.major}{properties.minor}"
        torch.zeros(1, device=device.device)
        start = time.perf_counter()
        try:
            code = cuda.driver(device.device).code
            loaded = f"{code.arch}, {code.origin}"
        except CudaUnavailable as error:
            loaded = f"none: {error}"
        seconds = time.perf_counter() - start
    return {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gefen": gefen.__version__,
        "backend": gefen.kernels.active_backend(device.device),
        "kernels": loaded,
        "load_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--small", action="store_true", help="a model that takes no time")
    parser.add_argument("--repeat", type=int, default=15, help="steps timed; default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = Device(options.device)
    report = facts(device)
    print(json.dumps(report), flush=True)
    report["copy_bytes_per_second"] = device.copy_rate(1 << 16 if options.small else 1 << 31)
    report["models"] = []
    for figures in models(device, SMALL if options.small else SIZES, options.repeat):
        report["models"].append(figures)
        # After each, so that a run that is cut short leaves what it has.
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print_shares(report)


def print_shares(report: dict[str, Any]) -> None:
    """The block step's bytes per second, as a share of what a copy reaches."""
    for entry in report["models"]:
        step = entry["optimizers"]["Gefen, block"]["step"]
        rate = entry["least_bytes"] / step
        share = rate / report["copy_bytes_per_second"]
        print(f"{entry['model']} {entry['dtype']}: block step at {share:.0%} of the copy limit")


if __name__ == "__main__":
    main()
