"""Several environments in one run, and several processes for the tests of one."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from gate import pipeline, session
from gate.errors import GateError
from gate.machine import PROFILES
from gate.parallel import Capacity
from gate.pipeline import Options
from gate.report import Display
from gate.targets import Target
from tests.gate.conftest import SITE, MakeSuite, mini_wheel

pytestmark = pytest.mark.processes

ONE_PROCESS = "import os\n\ndef test_threads():\n    assert os.environ['OMP_NUM_THREADS'] == '1'\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two cores on any machine, and no ranks, which are the subject of other tests."""
    monkeypatch.setattr(pipeline, "this_machine", lambda: Capacity(cores=2, memory=2**33))
    monkeypatch.setitem(PROFILES["cpu"].__dict__, "worlds", ())
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def options(tmp_path: Path, suite: Path, *targets: Target) -> Options:
    return Options(
        wheels=(str(mini_wheel(tmp_path / "dist")),),
        base=tmp_path,
        profile="cpu",
        targets=targets,
        evidence=tmp_path / "evidence",
        suite=suite,
        summary=tmp_path / "summary.md",
    )


def test_one_environment_that_fails_does_not_hide_the_verdict_of_another(
    tmp_path: Path,
    make_suite: MakeSuite,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "rights_to_confine", lambda: 0)
    (tmp_path / "empty").mkdir()
    targets = (
        Target(name="floor", site=SITE),
        Target(name="broken", site=tmp_path / "empty"),
        Target(name="newest", site=SITE),
    )
    with pytest.raises(GateError, match=r"^1 of 3 failed: mini-1.0-\S+ in broken.$") as caught:
        pipeline.run(options(tmp_path, make_suite(), *targets), Display())
    assert caught.value.exit_code == 3
    shown = capsys.readouterr().err
    verdicts = [line for line in shown.splitlines() if " in " in line and "gate: mini" in line]
    assert ["floor passed" in verdicts[0], "broken FAILED" in verdicts[1]] == [True, True]
    assert "newest passed profile cpu: 1 tests" in verdicts[2]
    assert "lacks torch, numpy, pytest" in shown
    assert "  floor   [3/8] environment" in shown

    statements = [
        json.loads(path.read_text()) for path in (tmp_path / "evidence").rglob("*.intoto.json")
    ]
    runs = [each["predicate"]["configuration"][0]["annotations"] for each in statements]
    assert sorted(run["environmentId"] for run in runs) == ["floor", "newest"]
    assert [run["environment"]["confined"] for run in runs] == [False, False]
    assert all(run["started"] <= run["finished"] for run in runs)
    reports = {
        (report["environment"], report["result"])
        for report in map(
            json.loads, (p.read_text() for p in (tmp_path / "evidence").rglob("report.json"))
        )
    }
    assert reports == {("floor", "passed"), ("broken", "failed"), ("newest", "passed")}
    summary = (tmp_path / "summary.md").read_text()
    assert "2 of 3 runs passed" in summary
    assert "2 of 3 runs passed" in (tmp_path / "evidence" / "report.html").read_text()
    assert "running" not in summary
    assert not list((tmp_path / "tmp").iterdir())


def test_tests_of_one_process_are_shared_out_and_all_count(
    tmp_path: Path, make_suite: MakeSuite
) -> None:
    suite = make_suite(single__test_two=ONE_PROCESS, single__test_three=ONE_PROCESS)
    (report,) = pipeline.run(options(tmp_path, suite, Target(site=SITE)), Display())
    assert report.passed_tests == [
        "single: single/test_one.py::test_answer",
        "single: single/test_two.py::test_threads",
        "single: single/test_three.py::test_threads",
    ]
    records = next((tmp_path / "evidence").rglob("records"))
    assert sorted(path.name for path in records.iterdir()) == ["collect", "single.1", "single.2"]
    details = [phase.detail for phase in report.phases if phase.name == "regressions"]
    assert details == ["single.1: 2 passed", "single.2: 1 passed"]


def test_a_failure_in_any_share_is_a_failure_that_is_told_before_the_verdict(
    tmp_path: Path, make_suite: MakeSuite, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = make_suite(single__test_two="def test_bad():\n    assert not 'reached'\n")
    given = options(tmp_path, suite, Target(site=SITE))
    verdict = r"mini-1.0-\S+ FAILED profile cpu: 1 of 2 tests failed, 1 passed; pytest took"
    with pytest.raises(GateError, match=verdict) as caught:
        pipeline.run(given, Display())
    assert caught.value.exit_code == 1
    told = capsys.readouterr().err.partition("FAILED 1 of 2: ")[2].splitlines()
    again = f"run --wheel {given.wheels[0]} --profile cpu --site {SITE} --suite {suite}"
    assert told[:4] == [
        "single/test_two.py::test_bad",
        "  failed: AssertionError: assert not 'reached'",
        "  at tests/regression/single/test_two.py:2",
        f"  again: python -m gate {again} --evidence {given.evidence}"
        " --only single/test_two.py::test_bad",
    ]
    assert "report.html" in told[4]
    report = json.loads(next((tmp_path / "evidence").rglob("report.json")).read_text())
    assert report["passed_tests"] == ["single: single/test_one.py::test_answer"]
    folder = next((tmp_path / "evidence").rglob("report.json")).parent
    (failure,) = report["failures"]
    assert all((folder / name).is_file() for name in failure["files"])
    assert report["commit"]
    assert not list((tmp_path / "evidence").rglob("*.intoto.json"))


def test_the_first_failure_ends_all_parts_if_asked_to(
    tmp_path: Path, make_suite: MakeSuite
) -> None:
    for_ever = "import threading\n\ndef test_it():\n    threading.Event().wait()\n"
    suite = make_suite(
        single__test_one="def test_bad():\n    assert not 'reached'\n", single__test_two=for_ever
    )
    given = replace(options(tmp_path, suite, Target(site=SITE)), timeout=100, fail_fast=True)
    with pytest.raises(GateError, match="1 of 2 tests failed, 0 passed, 1 without a result"):
        pipeline.run(given, Display())
    report = json.loads(next((tmp_path / "evidence").rglob("report.json")).read_text())
    phases = [phase["status"] for phase in report["phases"] if phase["name"] == "regressions"]
    assert sorted(phases) == ["failed", "interrupted"]
    assert report["result"] == "failed"


def test_a_part_of_the_tests_is_no_evidence_and_takes_none_back_unless_it_fails(
    tmp_path: Path, make_suite: MakeSuite, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = make_suite(single__test_two="import os\n\ndef test_a(): pass\n\ndef test_b(): pass\n")
    given = options(tmp_path, suite, Target(site=SITE))
    pipeline.run(given, Display())
    (statement,) = (tmp_path / "evidence").rglob("*.intoto.json")
    for page in ("report.html", "report.md"):
        shown = (tmp_path / "evidence" / page).read_text()
        assert f"(statements/{statement.name}), `unsigned`" in shown or (
            f'<a href="statements/{statement.name}">statements/{statement.name}</a>, unsigned'
            in shown
        )
    files = {path: path.read_bytes() for path in (tmp_path / "evidence/runs").rglob("*.json")}

    one = replace(given, only=("tests/regression/single/test_two.py::test_b",))
    (report,) = pipeline.run(one, Display())
    assert report.result == "partial"
    assert report.passed_tests == ["single: single/test_two.py::test_b"]
    assert "those that --only names, which is no evidence" in capsys.readouterr().err
    assert list((tmp_path / "evidence").rglob("*.intoto.json")) == [statement]
    assert {path: path.read_bytes() for path in files} == files

    with pytest.raises(GateError, match="no such test") as caught:
        pipeline.run(replace(given, only=("single/test_two.py::test_c",)), Display())
    assert caught.value.exit_code == 2
    assert caught.value.next_step == "try --only single/test_two.py::test_b"
    assert statement.exists()

    (suite / "single/test_one.py").write_text("def test_bad(): assert 0\n")
    with pytest.raises(GateError, match="1 of 1 tests failed, 0 passed, of those that --only"):
        pipeline.run(replace(given, only=("single: single/test_one.py",)), Display())
    assert not statement.exists()
