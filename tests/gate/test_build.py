from __future__ import annotations

import hashlib
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from gate import build as module
from gate import kernels
from gate.build import build
from gate.errors import BuildFailed
from gate.repository import Repository
from gate.runner import Runner

pytestmark = pytest.mark.processes

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "demo"
version = "1.0"
readme = "README.md"
requires-python = ">=3.10"
[tool.hatch.build.targets.wheel]
packages = ["src/demo"]
[tool.hatch.build.targets.sdist]
include = ["/src", "/README.md", "/hatch_build.py"]
"""


@pytest.fixture
def project(tmp_path: Path) -> Repository:
    root = tmp_path / "a project"
    (root / "src" / "demo").mkdir(parents=True)
    (root / "src" / "demo" / "__init__.py").write_text("answer = 42\n")
    (root / "README.md").write_text("# demo\n")
    (root / "pyproject.toml").write_text(PYPROJECT)
    return Repository(runner=Runner(), root=root)


def test_it_replaces_an_earlier_build_and_nothing_else(
    project: Repository, tmp_path: Path
) -> None:
    out = tmp_path / "dist"
    out.mkdir()
    for name in ("demo-0.9-py3-none-any.whl", "other-1.0-py3-none-any.whl", "notes.txt"):
        (out / name).write_text("")
    wheel = build(project, out, Runner())
    assert wheel == out / "demo-1.0-py3-none-any.whl"
    assert sorted(path.name for path in out.iterdir()) == [
        "SHA256SUMS",
        "demo-1.0-py3-none-any.whl",
        "demo-1.0.tar.gz",
        "notes.txt",
        "other-1.0-py3-none-any.whl",
    ]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert f"{digest}  {wheel.name}\n" in (out / "SHA256SUMS").read_text()


def test_permissions_do_not_depend_on_the_umask(project: Repository, tmp_path: Path) -> None:
    for path in project.root.rglob("*.py"):
        path.chmod(0o600)
    before = os.umask(0o077)
    try:
        wheel = build(project, tmp_path / "dist", Runner())
    finally:
        os.umask(before)
    with zipfile.ZipFile(wheel) as archive:
        modes = {info.external_attr >> 16 & 0o777 for info in archive.infolist()}
    assert modes == {0o644}


def test_a_build_that_is_not_reproducible_is_refused(project: Repository, tmp_path: Path) -> None:
    hook = "[tool.hatch.build.hooks.custom]\n"
    (project.root / "pyproject.toml").write_text(PYPROJECT + hook)
    (project.root / "hatch_build.py").write_text(
        "import os\n"
        "from hatchling.builders.hooks.plugin.interface import BuildHookInterface\n"
        "class Hook(BuildHookInterface):\n"
        "    def initialize(self, version, build_data):\n"
        "        open('src/demo/zone.py', 'w').write(repr(os.environ['TZ']))\n"
    )
    with pytest.raises(BuildFailed, match=r"demo-1.0-py3-none-any.whl"):
        build(project, tmp_path / "dist", Runner())
    assert not (tmp_path / "dist").exists()


def test_a_broken_build_shows_why(project: Repository, tmp_path: Path) -> None:
    (project.root / "README.md").unlink()
    with pytest.raises(BuildFailed, match=r"README\.md"):
        build(project, tmp_path / "dist", Runner())


@pytest.mark.parametrize("value", ["0", "", " ", "1", "1700000000"])
def test_odd_epochs_are_usable(
    value: str, project: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
    assert module._epoch(project) == max(int(value.strip() or 0), module.EARLIEST_EPOCH)


def test_an_epoch_that_is_no_number_is_named(
    project: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(BuildFailed, match="SOURCE_DATE_EPOCH='yesterday'"):
        module._epoch(project)


def test_this_project_ships_its_package_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One of the architectures: each takes many seconds.
    monkeypatch.setattr(kernels, "ARCHS", ("compute_75",))
    wheel = build(Repository(runner=Runner()), tmp_path, Runner())
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    version = wheel.name.split("-")[1]
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"gefen", f"gefen_cuda-{version}.dist-info"}
    assert "gefen/py.typed" in names
    folder = "gefen/kernels/cubin/"
    assert {folder + "compute_75.ptx", folder + "manifest.json"} < set(names)
    assert any(name.startswith("gefen/kernels/src/") and name.endswith(".cu") for name in names)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        files = [name.partition("/")[2] for name in sdist.getnames()]
    inside = {name.partition("/")[0] for name in files}
    assert not any("/cubin" in name for name in files), "an sdist holds sources only"
    assert any(name.startswith("src/gefen/kernels/src/") for name in files)
    assert inside - {""} <= {
        *("src", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO"),
        ".gitignore",
    }
