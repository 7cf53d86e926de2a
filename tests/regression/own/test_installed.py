"""Two packages in one folder: what users get to see, tried on copies of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gefen
from gefen import installed
from gefen.errors import UnsupportedFeatureError

REPAIR = "To repair: pip uninstall -y gefen-x gefen-cuda && pip install gefen-cuda"

# What gefen-x 0.5.0 installs into gefen/, but for the sources of its kernels.
GEFEN_XS = """
__init__.py dcp.py gefen.py gefen_muon.py hybrid.py kernels/__init__.py kernels/_build_notice.py
kernels/automatic_gefen_fused.py kernels/automatic_vmean.py kernels/exact_histogram_fused.py
kernels/period_variance.py params.py partitioning.py py.typed quantization.py tools/README.md
tools/__init__.py tools/find_lr.py tools/lr_calibration.py tools/run_model_calibration.py
""".split()  # noqa: SIM905


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that holds a copy of the package, as site-packages would."""
    ignored = shutil.ignore_patterns("__pycache__", "cubin")
    shutil.copytree(Path(gefen.__file__).parent, tmp_path / "gefen", ignore=ignored)
    return tmp_path


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=site,
        env={**os.environ, "PYTHONPATH": str(site)},
    )


def test_alone(site: Path) -> None:
    done = run(site, "-W", "error", "-m", "gefen")
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout
    assert "pip" not in done.stdout


def test_over_gefen_x(site: Path) -> None:
    """Works, and says what would break it."""
    for name in GEFEN_XS:
        path = site / "gefen" / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text("")
    done = run(site, "-c", "import gefen; gefen.Gefen")
    assert done.returncode == 0, done.stderr
    assert "UserWarning: gefen-x is installed over gefen-cuda" in done.stderr
    assert REPAIR in done.stderr


def test_under_gefen_x(site: Path) -> None:
    (site / "gefen" / "__init__.py").write_text("class Gefen: ...\n")
    done = run(site, "-m", "gefen")
    assert done.returncode == 1
    assert f"{site / 'gefen' / '__init__.py'} is not of gefen-cuda" in done.stderr
    assert REPAIR in done.stderr


ALONE = """
import os, runpy, sys
here = os.getcwd()
sys.path[:] = [p for p in sys.path if p == here or not os.path.isdir(os.path.join(p, "gefen"))]
"""
"""Puts a checkout or an installed package, which a folder without __init__.py yields to, aside."""


def test_after_gefen_x_was_removed(site: Path) -> None:
    for name in GEFEN_XS:
        (site / "gefen" / name).unlink(missing_ok=True)
    done = run(site, "-c", ALONE + "runpy.run_module('gefen', run_name='__main__')")
    assert done.returncode == 1
    assert "Files of gefen-cuda are missing" in done.stderr
    assert REPAIR in done.stderr
    done = run(site, "-c", ALONE + "from gefen import Gefen")
    assert "cannot import name 'Gefen' from 'gefen' (unknown location)" in done.stderr


def test_elsewhere(site: Path) -> None:
    """gefen-x in another folder of the path: nothing is broken, but the report names it."""
    other = site / "gefen_x-0.5.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: gefen-x\nVersion: 0.5.0\n")
    (other / "top_level.txt").write_text("gefen\n")
    done = run(site, "-m", "gefen")
    assert done.returncode == 0, done.stderr
    assert f"also installed as gefen: gefen-x. {REPAIR}" in done.stdout


def test_what_others_are_called() -> None:
    assert installed.repair(["gefen", "gefen-x"]).startswith(
        "To repair: pip uninstall -y gefen gefen-x gefen-cuda"
    )
    assert installed.broken(gefen) is None


@pytest.mark.parametrize("name", ["GefenDCPState", "GefenSavePlanner", "GefenFileSystemWriter"])
def test_names_of_gefen_x_say_what_to_use(name: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=rf"{name} of gefen-x.*torch\.distributed"):
        getattr(gefen, name)(object(), path="x")


def test_other_names_are_missing_as_ever() -> None:
    with pytest.raises(AttributeError, match="module 'gefen' has no attribute 'Adam'"):
        gefen.Adam  # noqa: B018
    assert not hasattr(gefen, "Lion")
