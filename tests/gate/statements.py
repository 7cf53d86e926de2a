"""Statements as a gate run writes them, without the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gate.evidence import write_statement as write
from gate.wheels import Wheel

ENVIRONMENT = {"id": "torch2.13.0", "torch": "2.13.0", "python": "3.11.7", "gpus": []}
SUITE, OTHER_SUITE = "a" * 64, "b" * 64
COMMIT = "c" * 40


def write_statement(evidence: Path, wheel: Wheel, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "profile": "cpu",
        "environment": ENVIRONMENT,
        "suite_digest": SUITE,
        "commit": COMMIT,
        "executed_archs": [],
        "embedded_archs": ["sm_90"],
        "passed_tests": ["single/test_a.py::test_a", "ranks/test_b.py::test_b[0]"],
        "files": sorted((evidence / "runs").iterdir()),
        "started": "2026-01-01T00:00:00Z",
        "finished": "2026-01-01T00:01:00Z",
    }
    return write(evidence, wheel=wheel, **{**values, **changes})
