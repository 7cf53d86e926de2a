from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import gefen
from gefen import kernels


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
        "kernel architectures",
        "cuda",
    ):
        assert re.search(wanted, done.stdout), done.stdout


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
