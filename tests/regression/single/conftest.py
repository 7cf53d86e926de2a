"""Lets the tests here import the helper modules beside them, wherever the suite is copied."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
