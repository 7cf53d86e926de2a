from __future__ import annotations

import re
import sys
from datetime import datetime, timedelta

import pytest

from gate import report as module
from gate.errors import GateError
from gate.report import Display, Failure, Phase, Report


def report(**phases: tuple[float, float]) -> Report:
    made = Report(wheel="w.whl", profile="cpu", passed_tests=["a", "b"])
    made.phases = [
        Phase(name=name.rstrip("_"), status="passed", began=began, seconds=seconds)
        for name, (began, seconds) in phases.items()
    ]
    return made


def test_time_is_not_counted_twice_where_phases_overlap() -> None:
    made = report(audit=(0, 1), identity=(2, 2), regressions=(4, 6), regressions_=(5, 9))
    assert made.span() == (0, 14)
    assert made.seconds("identity", "regressions") == 12
    assert made.verdict() == (
        "passed profile cpu: 2 tests; pytest took 12.0 s, everything else 2.0 s"
    )


def test_a_part_that_never_ran_takes_no_time() -> None:
    made = report(audit=(5, 1), regressions=(7, 2))
    made.phases.append(Phase(name="regressions"))
    assert made.span() == (5, 4)
    assert made.seconds("regressions") == 2


def test_a_run_begins_with_its_first_phase() -> None:
    made = report(build=(3, 1), audit=(5, 1))
    made.stamp(now=64.5)
    began, ended = map(datetime.fromisoformat, (made.started, made.finished))
    assert timedelta(seconds=61) <= ended - began <= timedelta(seconds=62)
    assert began.tzinfo is not None


def test_lines_of_a_lane_carry_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    made = Report(wheel="w.whl")
    floor, newest = display.lane("floor "), display.lane("newest")
    with floor.phase(made, "regressions", "3 tests"), newest.phase(made, "install") as phase:
        phase.detail = "done"
        floor.say("words")
    lines = capsys.readouterr().err.splitlines()
    shown = [re.sub(r" +", " ", re.sub(r"\d+\.\d s", "N s", line)) for line in lines]
    assert shown == [
        " floor [7/8] regressions 3 tests",
        "floor: words",
        " newest [4/8] install N s ok done",
        " floor [7/8] regressions N s ok",
    ]
    assert len({line.index("[") for line in lines if "[" in line}) == 1


def test_a_failed_phase_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    made = Report(wheel="w.whl")
    for error, status in ((GateError("x"), "failed"), (OSError("x"), "failed")):
        with pytest.raises(type(error)), Display().phase(made, "install"):
            raise error
        assert made.phases[-1].status == status
    with pytest.raises(KeyboardInterrupt), Display().phase(made, "install"):
        raise KeyboardInterrupt
    assert made.phases[-1].status == "interrupted"
    assert capsys.readouterr().err.count("FAILED") == 2


def test_a_phase_may_be_announced_before_it_runs() -> None:
    made = Report(wheel="w.whl")
    made.phases.append(waiting := Phase(name="regressions"))
    assert waiting.status == "waiting"
    with Display().phase(made, "regressions", phase=waiting):
        assert made.phases == [waiting]
        assert waiting.status == "running"
    assert waiting.status == "passed"


def test_a_terminal_shows_what_is_running_on_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    display, made = Display(), Report(wheel="w.whl")
    with display.lane("floor").phase(made, "regressions", "single: 3 tests"):
        now[0] += 5
        display.tick()
        with display.lane("newest").phase(made, "install"):
            now[0] += 2
            display.tick()
    shown = capsys.readouterr().err.split("\r\x1b[K")
    assert "  floor  [7/8] regressions      5 s          single: 3 test" in shown, (
        "cut at the edge"
    )
    assert "  floor [7/8] regressions 7 s | newest [4/8] install 2 s" in shown


def test_no_phase_takes_less_than_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter((0.0, *[0.0009] * 9))  # rounds up to when it began
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    made = Report(wheel="w.whl")
    with Display().phase(made, "machine"):
        pass
    assert "  0.0 s" in capsys.readouterr().err


def test_a_foreign_wheel_is_told_what_it_keeps_of_the_public_interface() -> None:
    made = Report(wheel="w.whl", profile="cpu", foreign=True, tests=5)
    made.passed_tests, made.own_tests = ["a", "o"], ["o", "p"]
    made.missed_tests = ["b"]
    made.failures = [Failure(where="x.py", reason="error", tests=("c", "p"))]
    said = "2 of 5 tests failed, 2 passed, 1 without a result"
    kept = "public interface: 1 of 3 kept; own: 1 of 2"
    assert f"FAILED profile cpu: {said}, {kept}; pytest" in made.verdict()
    made.foreign = False
    assert "public" not in made.verdict()
