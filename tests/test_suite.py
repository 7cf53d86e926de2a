"""The regression suite can be collected as the gate does it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

SUITE = Path(__file__).parent / "regression"


def test_no_two_files_share_a_name() -> None:
    """Its folders are no packages, so that helper modules can be imported wherever it lies."""
    names = Counter(path.name for path in SUITE.rglob("*.py"))
    assert {name for name, count in names.items() if count > 1} == {"conftest.py"}
