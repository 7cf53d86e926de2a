"""Every wheel that is wrong on sight is refused for that reason, and odd ones are not.

Those that misbehave only once they run need minutes: ``nox -s gate_selftest`` gates them all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gate.cli import call
from tests.gate.corpus import kernels
from tests.gate.corpus.case import Case
from tests.gate.corpus.honest import ODD
from tests.gate.corpus.package import Package
from tests.gate.corpus.selftest import FAILED, ROOT
from tests.gate.corpus.table import BROKEN

STATIC = [case for case in BROKEN if case.is_static]
LATER = [case for case in BROKEN if not case.is_static]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out],
        cwd=ROOT,
        check=True,
    )
    return next(out.glob("*.whl"))


@pytest.mark.parametrize("case", STATIC, ids=lambda case: case.name)
def test_refused(
    case: Case,
    wheel: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = Package.read(wheel)
    kernels.arm(package, ROOT)
    case.sabotage(package)
    broken = package.write(tmp_path)
    status = call(["run", "--wheel", str(broken), "--evidence", str(tmp_path / "evidence")])
    said = capsys.readouterr().err
    assert status == case.exit_code, said
    assert FAILED.findall(said)[-1:] == [case.phase], said
    for words in case.words:
        assert words in said
    assert not (tmp_path / "evidence").exists()


@pytest.mark.parametrize("change", ODD, ids=lambda change: change.__name__)
def test_odd_but_honest(change, wheel: Path, tmp_path: Path, capsys) -> None:
    package = Package.read(wheel)
    kernels.arm(package, ROOT)
    change(package)
    assert call(["inspect", str(package.write(tmp_path))]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("case", LATER, ids=lambda case: case.name)
def test_caught_later(case: Case, wheel: Path, tmp_path: Path, capsys) -> None:
    """What only shows once the wheel runs must get that far."""
    package = Package.read(wheel)
    kernels.arm(package, ROOT)
    case.sabotage(package)
    assert call(["inspect", str(package.write(tmp_path))]) == 0, capsys.readouterr().err


def test_the_corpus_is_large_and_no_case_comes_twice() -> None:
    names = [case.name for case in BROKEN]
    assert len(names) == len(set(names))
    assert len(STATIC) >= 40
    assert len(LATER) >= 30
    assert all(case.words and all(case.words) for case in BROKEN)
