"""The regression that refuses a fallback on a GPU, made to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUITE = Path(__file__).parent / "regression"


def test_a_fallback_on_a_gpu_fails() -> None:
    """On a machine whose torch cannot use a GPU at all, which is the plainest fallback."""
    test = "single/test_backend.py::test_the_kernels_run"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", test],
        cwd=SUITE,
        env={**os.environ, "GEFEN_TEST_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout
    assert "1 failed" in done.stdout
    assert "reference" in done.stdout
