"""Lets tests use the helpers of the regression tests, which are the same as for users."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "regression" / "single"))
