"""Layers of one tiny package from an index in a folder; nothing is downloaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gate import layer
from gate.errors import EnvironmentFailed
from gate.layer import Layers, Recipe
from gate.runner import Runner
from tests.gate.conftest import mini_wheel

RECIPE = Recipe(python=Path(sys.executable), requirements=("mini",), constraints=("mini==1.0",))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that pip's own configuration names; no other source can be reached."""
    wheel = mini_wheel(tmp_path / "simple" / "mini")
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    url = (tmp_path / "simple").as_uri()
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", url)
    monkeypatch.setenv("GATE_CACHE", str(tmp_path / "cache"))
    return wheel.parent


def make(tmp_path: Path, recipe: Recipe = RECIPE, *, fresh: bool = False) -> Path:
    workdir = tmp_path / "work"
    workdir.mkdir(exist_ok=True)
    with Layers(fresh=fresh).provide(recipe, runner=Runner(), workdir=workdir) as site:
        return site


def code(site: Path) -> Path:
    return site / "mini" / "__init__.py"


def test_a_layer_is_made_once(index: Path, tmp_path: Path) -> None:
    first = make(tmp_path)
    made = code(first).stat()
    (index / "index.html").unlink()  # a second install would fail
    assert make(tmp_path) == first
    assert code(first).stat().st_ctime_ns == made.st_ctime_ns


def test_a_fresh_one_can_be_asked_for(index: Path, tmp_path: Path) -> None:
    before = code(make(tmp_path)).stat().st_ctime_ns
    assert code(make(tmp_path, fresh=True)).stat().st_ctime_ns > before


def edit_in_place(file: Path) -> None:
    status = file.stat()
    file.chmod(0o644)
    file.write_text("answer = 43\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (edit_in_place, "mini/__init__.py was changed"),
        (lambda file: file.with_name("extra.py").write_text(""), "extra.py was added or removed"),
        (lambda file: file.unlink(), "mini/__init__.py was added or removed"),
    ],
)
def test_a_tampered_layer_is_rebuilt(
    damage: object,
    words: str,
    index: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    site = make(tmp_path)
    damage(code(site))  # type: ignore[operator]
    site = make(tmp_path)
    assert code(site).read_text() == "answer = 42\n"
    assert not code(site).with_name("extra.py").exists()
    assert words in capsys.readouterr().err


def test_a_layer_that_was_only_copied_is_kept(index: Path, tmp_path: Path) -> None:
    file = code(make(tmp_path))
    file.touch()  # as restoring a saved cache does
    touched = file.stat().st_ctime_ns
    make(tmp_path)
    assert file.stat().st_ctime_ns == touched


def test_an_interrupted_installation_is_done_again(index: Path, tmp_path: Path) -> None:
    site = make(tmp_path)
    next((tmp_path / "cache").glob("*.json")).unlink()
    code(site).unlink()
    assert code(make(tmp_path)).exists()


def test_its_files_are_read_only(index: Path, tmp_path: Path) -> None:
    assert code(make(tmp_path)).stat().st_mode & 0o222 == 0


def test_other_requirements_are_another_layer(index: Path, tmp_path: Path) -> None:
    other = Recipe(python=RECIPE.python, requirements=("mini>=1",), constraints=())
    assert make(tmp_path, other) != make(tmp_path)


def test_pip_settings_that_redirect_installs_are_ignored(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoy = tmp_path / "decoy"
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nuser = true\nindex-url = {(tmp_path / 'simple').as_uri()}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_TARGET", str(decoy))
    monkeypatch.setenv("PIP_PREFIX", str(decoy))
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")
    assert code(make(tmp_path)).exists()
    assert not decoy.exists()


def test_what_cannot_be_installed_is_named(index: Path, tmp_path: Path) -> None:
    recipe = Recipe(python=RECIPE.python, requirements=("mini==9",), constraints=())
    with pytest.raises(EnvironmentFailed, match="Could not install mini==9") as caught:
        make(tmp_path, recipe)
    assert "--site" in str(caught.value)


def test_no_python_is_an_error(index: Path, tmp_path: Path) -> None:
    recipe = Recipe(python=tmp_path / "python", requirements=("mini",), constraints=())
    with pytest.raises(EnvironmentFailed, match="Could not start"):
        make(tmp_path, recipe)


def test_a_cache_that_cannot_be_written_is_replaced(
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GATE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(layer.tempfile, "tempdir", str(tmp_path))
    assert make(tmp_path).is_relative_to(tmp_path / f"gefen-gate-{os.getuid()}")
    assert "cannot be written (Not a directory)" in capsys.readouterr().err
