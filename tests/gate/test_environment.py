from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gate import environment as module
from gate.environment import Environment, clean_environment, recipe
from gate.errors import EnvironmentFailed, WheelRejected
from gate.layer import Layers
from gate.runner import Runner
from gate.targets import Target
from tests.gate.conftest import SITE, clean
from tests.gate.wheel_builder import WheelBuilder

PROBE = """
import json, sys, os
print(json.dumps({"path": sys.path, "prefix": sys.prefix, "environ": dict(os.environ)}))
"""


def ask(environment: Environment, code: str) -> str:
    outcome = Runner().run(
        [environment.python, "-IBc", code],
        env=environment.variables,
        cwd=environment.cwd,
        log=environment.root / "logs" / "ask.log",
        timeout=60,
    )
    assert outcome.ok, outcome.output()
    return outcome.output()


def test_nothing_of_the_surroundings_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoys = {
        "PYTHONPATH": str(tmp_path),
        "PYTHONSTARTUP": str(tmp_path / "start.py"),
        "VIRTUAL_ENV": str(tmp_path),
        "CONDA_PREFIX": str(tmp_path),
        "PIP_TARGET": str(tmp_path),
        "PYTEST_ADDOPTS": "-k nothing",
        "RANK": "1",
        "WORLD_SIZE": "7",
        "MASTER_ADDR": "example.invalid",
        "SLURM_PROCID": "3",
    }
    for name, value in decoys.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with clean(Runner()) as made:
        seen = json.loads(ask(made, PROBE))
        roots = (str(made.root), str(SITE), sys.base_prefix)
        assert all(entry.startswith(roots) for entry in seen["path"])
        assert not decoys.keys() & seen["environ"].keys()
        assert seen["environ"]["CUDA_VISIBLE_DEVICES"] == "0"
        assert not (made.site / "pip").exists()
    assert not made.root.exists()


def test_the_wheel_goes_into_it_and_nowhere_else(environment: Environment, tmp_path: Path) -> None:
    # A folder name that URL parsing would cut.
    wheel = WheelBuilder().write(tmp_path / "a b#c%20é")
    (tmp_path / "a b#c%20é" / "demo.egg-info").mkdir()
    module.install(environment, wheel, Runner())
    answer = ask(environment, "import demo; print(demo.__file__, demo.answer)")
    assert answer == f"{environment.site}/demo/__init__.py 42\n"


def test_the_second_of_two_builds_of_one_version_is_the_one_installed(tmp_path: Path) -> None:
    for answer in (b"answer = 1\n", b"answer = 2\n"):
        wheel = WheelBuilder().drop("demo/__init__.py").add("demo/__init__.py", answer)
        with clean(Runner()) as made:
            module.install(made, wheel.write(tmp_path / str(len(answer))), Runner())
            assert ask(made, "import demo; print(demo.answer)") == answer.decode()[-2:]


def test_a_wheel_that_pip_refuses_is_rejected(environment: Environment, tmp_path: Path) -> None:
    wheel = WheelBuilder(tag="cp27-cp27m-win32").write(tmp_path)
    with pytest.raises(WheelRejected, match="not a supported wheel"):
        module.install(environment, wheel, Runner())


def test_a_site_without_the_test_layer_is_named(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    with (
        pytest.raises(EnvironmentFailed, match="lacks torch, pytest"),
        clean_environment(
            Target(site=tmp_path), requires_dist=(), runner=Runner(), layers=Layers()
        ),
    ):
        pass


def test_the_layer_holds_what_the_wheel_requires_and_nothing_optional() -> None:
    python = Path(sys.executable)
    plain = recipe(python, None, ("torch>=2.6", "numpy"))
    assert plain == recipe(python, None, ())
    requires = ("numba>=0.6", 'ninja; extra == "jit"', 'six; python_version < "3"')
    more = recipe(python, None, requires)
    assert set(more.requirements) - set(plain.requirements) == {"numba>=0.6"}


def test_another_torch_replaces_the_pin_and_what_it_requires_is_not_pinned() -> None:
    other = recipe(Path(sys.executable), "torch==2.12.0", ())
    assert "torch==2.12.0" in other.requirements
    assert {Requirement(pin).name for pin in other.constraints} == {
        "numpy",
        "pytest",
        "hypothesis",
        "packaging",
    }
