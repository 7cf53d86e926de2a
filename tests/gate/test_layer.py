"""Layers of one tiny package from an index in a folder; nothing is downloaded."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from gate import layer
from gate.errors import EnvironmentFailed, Interrupted
from gate.layer import Layers, Recipe
from gate.runner import Runner
from tests.gate.conftest import mini_wheel

pytestmark = pytest.mark.processes

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
    workdir = make_folder(tmp_path)
    with Layers(fresh=fresh).provide(recipe, runner=Runner(), workdir=workdir) as site:
        return site


def make_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir(exist_ok=True)
    return folder


def lock_of(site: Path) -> Path:
    layer = next(parent for parent in site.parents if parent.parent.name == "cache")
    return layer.with_suffix(".lock")


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


def test_a_cold_cache_is_filled_once_by_two_gates(index: Path, tmp_path: Path) -> None:
    """Both look at once; the one that waits takes over what the other made."""
    made, start = [], Barrier(2)
    runners = [Runner(say=made.append), Runner(say=made.append)]

    def gate(number: int) -> int:
        workdir = tmp_path / f"work{number}"
        workdir.mkdir()
        start.wait(60)
        with Layers().provide(RECIPE, runner=runners[number], workdir=workdir) as site:
            return code(site).stat().st_ino

    with ThreadPoolExecutor() as pool:
        assert len(set(pool.map(gate, range(2)))) == 1
    assert len([line for line in made if "installing" in line]) == 1


def test_a_layer_in_use_is_not_rebuilt_under_its_user(index: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with Layers().provide(RECIPE, runner=Runner(), workdir=make_folder(tmp_path)) as site:
        used = code(site).stat().st_ino

        def refuse() -> None:
            if any("waiting" in line for line in said):
                raise Interrupted("waited long enough")

        other = Runner(on_tick=refuse, say=said.append)
        with (
            pytest.raises(Interrupted, match="long enough"),
            Layers(fresh=True).provide(RECIPE, runner=other, workdir=tmp_path),
        ):
            pass
        assert code(site).stat().st_ino == used
    assert code(make(tmp_path, fresh=True)).stat().st_ino != used


def test_a_fresh_layer_is_made_once_a_run(index: Path, tmp_path: Path) -> None:
    layers = Layers(fresh=True)
    found = []
    for _ in range(2):
        with layers.provide(RECIPE, runner=Runner(), workdir=make_folder(tmp_path)) as site:
            found.append(code(site).stat().st_ino)
    assert found[0] == found[1]


def test_the_layers_used_last_are_kept(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = [
        Recipe(python=RECIPE.python, requirements=("mini",), constraints=(f"mini<{number}",))
        for number in (2, 3, 4, 5)
    ]
    last, oldest, older = (make(tmp_path, recipe) for recipe in recipes[:3])
    unfinished = tmp_path / "cache" / "unfinished"
    unfinished.mkdir()
    unfinished.with_suffix(".lock").write_text("")
    monkeypatch.setattr(layer, "KEPT_LAYERS", 2)
    with Layers().provide(recipes[1], runner=Runner(), workdir=make_folder(tmp_path)):
        for age, site in enumerate((oldest, older, last)):
            os.utime(lock_of(site), (age, age))
        newest = make(tmp_path, recipes[3])
        assert [site.exists() for site in (newest, last, older)] == [True, True, False]
        assert oldest.exists(), "somebody uses it"
    assert not unfinished.exists()


def test_a_failed_installation_leaves_nothing(index: Path, tmp_path: Path) -> None:
    recipe = Recipe(python=RECIPE.python, requirements=("mini==9",), constraints=())
    with pytest.raises(EnvironmentFailed):
        make(tmp_path, recipe)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_good_layer_in_a_cache_that_cannot_be_written_is_used(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make(tmp_path)
    monkeypatch.setattr(layer, "unwritable", lambda folder: "read-only")
    monkeypatch.setattr(layer.tempfile, "tempdir", str(tmp_path))
    assert make(tmp_path) == site
    edit_in_place(code(site))
    assert make(tmp_path) != site


def test_a_clock_set_back_hides_no_change(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the clock was set back, a later write can get the very times that were noted."""
    site = make(tmp_path)
    noted, cache = layer._stamp, tmp_path / "cache"
    manifest = next(cache.glob("*.json"))
    entries = json.loads(manifest.read_text())
    name = str(code(site).relative_to(next(cache.glob("*.lock")).with_suffix("")))
    stamp = entries[name][1:]
    stamp[2] = manifest.stat().st_ctime_ns  # what was written when the manifest was, or later
    entries[name][1:] = stamp
    manifest.write_text(json.dumps(entries))
    edit_in_place(code(site))
    monkeypatch.setattr(
        layer, "_stamp", lambda path: tuple(stamp) if path == code(site) else noted(path)
    )
    monkeypatch.setattr(layer, "_manifest_time", lambda _manifest: stamp[2])
    assert code(make(tmp_path)).read_text() == "answer = 42\n"


def test_without_a_home_the_cache_is_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("GATE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(layer.Path, "home", no_home)
    monkeypatch.setattr(layer.tempfile, "tempdir", str(tmp_path))
    assert layer.cache_directory() == tmp_path / f"gefen-gate-{os.getuid()}"


def test_a_substitute_that_is_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer.tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"gefen-gate-{os.getuid()}").symlink_to(tmp_path)
    monkeypatch.setenv("GATE_CACHE", "/proc/nowhere")
    with pytest.raises(EnvironmentFailed, match="somebody else"):
        make(tmp_path)


def test_a_cache_with_a_colon_in_its_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATE_CACHE", "/a:b")
    with pytest.raises(EnvironmentFailed, match="set GATE_CACHE to another directory"):
        layer.cache_directory()


def test_a_layer_that_is_changed_while_this_run_uses_it_is_an_error(
    index: Path, tmp_path: Path
) -> None:
    layers, workdir = Layers(), make_folder(tmp_path)
    with layers.provide(RECIPE, runner=Runner(), workdir=workdir) as site:
        edit_in_place(code(site))
        with (
            pytest.raises(EnvironmentFailed, match="was changed while it was in use"),
            layers.provide(RECIPE, runner=Runner(), workdir=workdir),
        ):
            pass
    with layers.provide(RECIPE, runner=Runner(), workdir=workdir) as site:
        assert code(site).read_text() == "answer = 42\n"
