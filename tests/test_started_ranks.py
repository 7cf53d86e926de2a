"""The regressions that torchrun starts on each rank, from this checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "regression" / "ranks"


@pytest.mark.parametrize("world", [2, 3])
def test_on_ranks(world: int) -> None:
    python = (sys.executable, "-m")
    start = ("torch.distributed.run", "--standalone", "--nnodes=1", f"--nproc-per-node={world}")
    tests = ("pytest", "--exitfirst", "-q", f"--rootdir={SUITE.parent}", SUITE)
    done = subprocess.run(
        [*python, *start, "--no-python", *python, *tests],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
