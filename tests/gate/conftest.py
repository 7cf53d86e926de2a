"""The gate as a real process, on tiny wheels and tiny suites."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from gate.environment import Environment, clean_environment, install
from gate.layer import Layers
from gate.regressions import Subject
from gate.runner import Runner
from gate.targets import Target
from gate.wheels import Wheel
from tests.gate.wheel_builder import WheelBuilder, as_wheel

ROOT = Path(__file__).parent.parent.parent
# Holds torch, numpy and pytest: the test layer of a gate that must not download anything.
SITE = Path(sysconfig.get_path("purelib"))
GREEN = {
    "single/test_one.py": "import mini\n\ndef test_answer():\n    assert mini.answer == 42\n",
    "ranks/test_rank.py": "import mini\n\ndef test_answer():\n    assert mini.answer == 42\n",
}

Gate = Callable[..., subprocess.CompletedProcess[str]]
MakeSuite = Callable[..., Path]


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Run ``python -m gate`` with these arguments, as a user would, in a directory of its own."""

    def call(
        *arguments: str | Path, cwd: Path = tmp_path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            gate_command(*arguments),
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
            capture_output=True,
            text=True,
            timeout=280,
        )

    return call


def gate_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "gate", *map(str, arguments)]


def mini_wheel(folder: Path, code: bytes = b"answer = 42\n", **options: str) -> Path:
    builder = WheelBuilder(name="mini", **options).drop("demo/__init__.py").drop("demo/py.typed")
    return builder.drop("demo/kernels/step.cu").add("mini/__init__.py", code).write(folder)


def clean(runner: Runner) -> AbstractContextManager[Environment]:
    """A clean environment on this interpreter's own torch."""
    return clean_environment(Target(site=SITE), requires_dist=(), runner=runner, layers=Layers())


@pytest.fixture
def make_suite(tmp_path: Path) -> MakeSuite:
    """Write a regression suite: a green one, with these files added or replaced."""

    def make(**files: str) -> Path:
        suite = tmp_path / "suite"
        changed = {name.replace("__", "/") + ".py": text for name, text in files.items()}
        for name, text in {**GREEN, **changed}.items():
            path = suite / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return suite

    return make


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Environment]:
    """A clean environment, below a folder that the test may litter."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with clean(Runner()) as made:
        yield made


@pytest.fixture
def subject(environment: Environment, tmp_path: Path) -> Subject:
    """The package ``mini``, installed from a wheel."""
    return installed(environment, tmp_path, "answer = 42\n")


def installed(environment: Environment, folder: Path, code: str) -> Subject:
    """A package ``mini`` of this code, installed from a wheel made below ``folder``."""
    install(environment, mini_wheel(folder / "wheels", code.encode()), Runner())
    return Subject(environment=environment, distribution="mini", package="mini")


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    """A wheel that could have been gated."""
    return as_wheel(WheelBuilder().write(tmp_path / "dist"))


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    """An evidence folder with the reports of a run."""
    folder = tmp_path / "gate-evidence"
    (folder / "runs").mkdir(parents=True)
    (folder / "runs/report.json").write_text("{}")
    (folder / "runs/junit.xml").write_text("<testsuites/>")
    return folder
