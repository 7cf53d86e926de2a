"""Libraries as users have them: nothing is downloaded, and what they warn of is theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

BUILT = Path(sys.prefix) / "torch_extensions"
# What DeepSpeed compiles is kept with the environment that it is for.
os.environ |= {"HF_HUB_OFFLINE": "1", "TORCH_EXTENSIONS_DIR": str(BUILT)}


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="session")
def compiled() -> None:
    """Let DeepSpeed compile its all_reduce for CPUs once, not while a case's time runs."""
    for lock in BUILT.rglob("lock"):
        lock.unlink()  # of a session that was ended; this environment is used by one at a time
    build = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    subprocess.run([sys.executable, "-c", build], check=True, timeout=500)
