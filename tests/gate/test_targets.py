from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from gate import policy
from gate.errors import UsageFailure
from gate.policy import tomllib
from gate.targets import Target, choose, parse, pinned, torch_requirement
from tests.gate.conftest import ROOT

FLOOR = Target(name="floor", torch="torch==2.6.0")
NEWEST = Target(name="newest", torch="torch==2.13.0")
KNOWN = {"floor": FLOOR, "newest": NEWEST}


@pytest.mark.parametrize(
    ("spec", "requirement"),
    [
        ("2.12.0", "torch==2.12.0"),
        ("2.12.0+cu130", "torch==2.12.0+cu130"),
        (">=2.12", "torch>=2.12"),
        ("torch==2.13.0", "torch==2.13.0"),
    ],
)
def test_torch_specs(spec: str, requirement: str) -> None:
    assert torch_requirement(spec) == requirement


@pytest.mark.parametrize("spec", ["numpy", "latest", "", "2.x y"])
def test_what_is_no_torch_spec_is_refused(spec: str) -> None:
    with pytest.raises(UsageFailure, match="--torch"):
        torch_requirement(spec)


def chosen(**options: Any) -> tuple[Target, ...]:
    defaults = {"torch": (), "names": (), "site": None, "python": None, "known": KNOWN}
    return choose(**{**defaults, **options})


def test_one_environment_is_the_default() -> None:
    assert chosen() == (Target(),)
    assert Target().identity == pinned("torch").replace("==", "")


def test_each_torch_and_each_name_is_an_environment_in_the_order_given() -> None:
    torch = ("torch==2.12.0", "torch>=2.12")
    assert chosen(torch=torch) == tuple(Target(torch=each) for each in torch)
    assert chosen(names=("newest", "floor")) == (NEWEST, FLOOR)
    assert chosen(names=("newest", "all")) == (NEWEST, FLOOR)
    assert chosen(torch=torch[:1], names=("floor",)) == (Target(torch=torch[0]), FLOOR)


def test_what_is_asked_for_twice_is_run_once() -> None:
    assert chosen(torch=("torch==2.6.0", "torch==2.6.0"), names=("floor", "floor")) == (
        Target(torch="torch==2.6.0"),
        FLOOR,
    )


def test_every_environment_has_an_identity_of_its_own(tmp_path: Path) -> None:
    python = tmp_path / "python"
    targets = [*chosen(torch=("torch==2.6.0", "torch>=2.6"), names=("all",)), *chosen()]
    targets += [*chosen(python=python), *chosen(site=tmp_path)]
    targets += chosen(torch=("torch==2.6.0",), python=python)
    assert len({target.identity for target in targets}) == len(targets)


def test_a_python_is_for_those_that_name_none(tmp_path: Path) -> None:
    own = Target(name="own", torch="torch==2.6.0", python=tmp_path / "own")
    targets = chosen(names=("own", "floor"), known={**KNOWN, "own": own}, python=tmp_path / "new")
    assert [target.python for target in targets] == [tmp_path / "own", tmp_path / "new"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"names": ("oldest",)}, "known are floor, newest, all"),
        ({"names": ("--help",)}, "--environment '--help'"),
        ({"names": ("all",), "known": {}}, "has no entry"),
        ({"site": Path("/site"), "torch": ("torch==2.6.0",)}, "does not go with --torch"),
        ({"site": Path("/site"), "names": ("floor",)}, "does not go with --environment"),
    ],
)
def test_what_cannot_be_chosen_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageFailure, match=words):
        chosen(**options)


def test_environments_are_a_torch_or_a_table(tmp_path: Path) -> None:
    tables = {
        "floor": "2.6.0",
        "other": {"torch": ">=2.12", "python": "bin/python3.12"},
        "grafted": {"site": "~/site"},
    }
    assert parse(tables, tmp_path) == {
        "floor": FLOOR,
        "other": Target(name="other", torch="torch>=2.12", python=tmp_path / "bin/python3.12"),
        "grafted": Target(name="grafted", site=Path("~/site").expanduser()),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("floor", 2.6),
        ("floor", []),
        ("floor", "numpy==2"),
        ("floor", {}),
        ("floor", {"torch": "2.6.0", "site": "site"}),
        ("floor", {"torch": ""}),
        ("floor", {"torch": "2.6.0", "numpy": "2"}),
        ("a b", "2.6.0"),
        ("all", "2.6.0"),
        ("site", "2.6.0"),
        ("torch2.13.0", "2.6.0"),
        ("", "2.6.0"),
    ],
)
def test_malformed_environments_are_named(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(UsageFailure, match=rf"tool.gate.environments.{name}"):
        parse({name: value}, tmp_path)


def test_names_are_files_and_must_differ_in_more_than_case(tmp_path: Path) -> None:
    with pytest.raises(UsageFailure, match="differ only in case"):
        parse({"floor": "2.6.0", "Floor": "2.7.0"}, tmp_path)


def test_this_project_names_its_oldest_and_its_newest_torch() -> None:
    known = policy.load(ROOT).environments
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = (text for text in project["dependencies"] if Requirement(text).name == "torch")
    (lowest,) = Requirement(needed).specifier
    assert known["floor"].torch is not None
    floor = Requirement(known["floor"].torch)
    assert [each.version for each in floor.specifier] == [f"{lowest.version}.0"]
    assert known["newest"].torch == pinned("torch")
    assert {target.python for target in known.values()} == {Path(sys.executable)}
