from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

import gefen
from gefen import kernels
from gefen import report as main
from gefen.errors import CudaUnavailable
from gefen.kernels import images


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=cwd
    )


def test_report(tmp_path: Path) -> None:
    done = run("-W", "error", "-m", "gefen", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for wanted in (
        f"gefen {re.escape(gefen.__version__)} ",
        f"torch {re.escape(torch.__version__)}",
        rf"numpy {re.escape(numpy.__version__)}",
        rf"python {sys.version_info.major}\.{sys.version_info.minor}\.",
        "platform ",
        r"cpu: reference, \w.*, \d+ of \d+ threads",
        "kernel architectures: ",
        "cuda",
    ):
        assert re.search(wanted, done.stdout), done.stdout


def test_report_of_embedded_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"sm_90.cubin": "", "compute_75.ptx": ""}
    found = images.Manifest(compiler="NVRTC 12.9.86", files=files)
    monkeypatch.setattr(images, "manifest", lambda: found)
    assert "kernel architectures: sm_90, compute_75, by NVRTC 12.9.86" in list(main.report())


def test_report_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, of which one cannot run the kernels."""
    code = images.Code("sm_90", "embedded", b"")

    def driver(device: torch.device) -> SimpleNamespace:
        if device.index == 1:
            raise CudaUnavailable("no usable code for sm_60 is embedded")
        return SimpleNamespace(code=code)

    properties = SimpleNamespace(name="H200", major=9, minor=0, total_memory=141 * 2**30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: properties)
    monkeypatch.setattr(kernels, "active_backend", lambda device: f"backend {device}")
    monkeypatch.setattr(main.cuda, "driver", driver)
    lines = [line for line in main.report() if line.startswith("cuda:")]
    assert lines == [
        "cuda:0: backend cuda:0 (sm_90, embedded), H200, sm_90, 141 GiB",
        "cuda:1: backend cuda:1 (the kernels cannot run: no usable code for sm_60 is embedded), "
        "H200, sm_90, 141 GiB",
    ]


def test_import_is_light(tmp_path: Path) -> None:
    """No effect but defining names; neither DTensor nor the compiler, which take seconds."""
    done = run(
        "-c",
        "import torch, numpy, random, sys, logging, warnings\n"
        "warnings.simplefilter('error')\n"
        "seeds = torch.random.get_rng_state().sum(), random.getstate()\n"
        "before, threads = set(sys.modules), torch.get_num_threads()\n"
        "import gefen\n"
        "assert (torch.random.get_rng_state().sum(), random.getstate()) == seeds\n"
        "assert threads == torch.get_num_threads() and not torch.cuda.is_initialized()\n"
        "assert not logging.getLogger().handlers and not logging.getLogger('gefen').handlers\n"
        "new = {name for name in set(sys.modules) - before if not name.startswith('gefen')}\n"
        "heavy = [n for n in new if n.startswith(('torch.distributed.tensor', 'torch._dynamo'))]\n"
        "assert not heavy, heavy\n",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""


def test_active_backend() -> None:
    assert kernels.active_backend("cpu") == "reference"
    assert kernels.active_backend(torch.device("cpu"), fused=False) == "reference"


def test_cuda_without_kernels_warns_once() -> None:
    kernels._warn_no_kernels.cache_clear()
    with pytest.warns(UserWarning, match="the reference runs on CUDA tensors"):
        assert kernels.active_backend("cuda:0") == "reference"
    # Warnings are errors here, so a second one would raise.
    assert kernels.active_backend("cuda:1") == "reference"
    kernels._warn_no_kernels.cache_clear()
    assert kernels.active_backend("cuda:0", fused=False) == "reference"
