"""Several environments in one run, and several processes for the tests of one."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from datetime import datetime, timedelta
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


def test_a_failure_in_any_share_is_a_failure(tmp_path: Path, make_suite: MakeSuite) -> None:
    suite = make_suite(single__test_two="def test_bad():\n    assert not 'reached'\n")
    with pytest.raises(GateError, match="test_bad: failed") as caught:
        pipeline.run(options(tmp_path, suite, Target(site=SITE)), Display())
    assert caught.value.exit_code == 1
    assert not list((tmp_path / "evidence").rglob("*.intoto.json"))


def test_the_first_failure_ends_all_parts_if_asked_to(
    tmp_path: Path, make_suite: MakeSuite
) -> None:
    for_ever = "import threading\n\ndef test_it():\n    threading.Event().wait()\n"
    suite = make_suite(
        single__test_one="def test_bad():\n    assert not 'reached'\n", single__test_two=for_ever
    )
    given = replace(options(tmp_path, suite, Target(site=SITE)), timeout=100, fail_fast=True)
    with pytest.raises(GateError, match="test_bad: failed") as caught:
        pipeline.run(given, Display())
    assert "hung" not in str(caught.value)
    report = json.loads(next((tmp_path / "evidence").rglob("report.json")).read_text())
    phases = [phase["status"] for phase in report["phases"] if phase["name"] == "regressions"]
    assert phases == ["failed", "interrupted"]
    assert report["result"] == "failed"


def test_a_clock_that_jumps_does_not_turn_the_times_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = iter((1000.0, 1061.5))
    monkeypatch.setattr(session.time, "monotonic", lambda: next(ticks))
    clock = session._Clock()
    monkeypatch.setattr(session, "datetime", None)  # whatever the wall clock shows now
    began, ended = map(datetime.fromisoformat, (clock.started, clock.now()))
    assert timedelta(seconds=61) <= ended - began <= timedelta(seconds=62)
    assert began.tzinfo is not None
