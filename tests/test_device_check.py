"""What of the device check can be shown without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "ci" / "device_check.sh"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("arguments", [(), ("--out",), ("--fast", "x"), ("--wheel", "x")])
def test_usage(arguments: tuple[str, ...]) -> None:
    done = run("bash", SCRIPT, *arguments)
    assert done.returncode == 2
    assert "usage: ci/device_check.sh --out DIR" in done.stderr


def test_a_wheel_must_have_been_built(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    for wheel in (tmp_path / "dist", tmp_path / "absent.whl"):
        done = run("bash", SCRIPT, "--out", tmp_path / "out", "--wheel", wheel)
        assert done.returncode == 3
        assert "build one: ./ci/nox -s build" in done.stderr


def test_the_benchmark_runs(tmp_path: Path) -> None:
    """On the CPU and a tiny model: all figures but those that only a GPU has."""
    script, out = ROOT / "benchmarks" / "device.py", tmp_path / "new" / "device.json"
    small = ("--device", "cpu", "--small", "--repeat", "2")
    done = run(sys.executable, script, *small, "--out", out)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["backend"] == "reference"
    assert report["copy_bytes_per_second"] > 0
    assert [entry["dtype"] for entry in report["models"]] == ["bfloat16", "float32"]
    for entry in report["models"]:
        assert entry["least_bytes"] in (8 * entry["elements"], 14 * entry["elements"])
        assert len(entry["optimizers"]) == 5
        for figures in entry["optimizers"].values():
            assert figures["first_step"] > 0
            assert figures["step"] > 0
            assert figures["launches"] is None
