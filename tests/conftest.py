"""Lets tests import the helper modules beside them and those of the regression tests."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = ("single", "worlds", "ranks", "own")
sys.path[:0] = [str(HERE), *(str(HERE / "regression" / folder) for folder in FOLDERS)]
from pool import ranks  # noqa: E402, F401 - a fixture
