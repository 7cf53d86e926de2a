"""What a person reads in report.html and report.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gate import evidence, page
from gate.statement import BadSignature
from gate.wheels import Wheel

PASSED: dict[str, Any] = {
    "wheel": "gefen_cuda-0.1.0-py3-none-any.whl",
    "sha256": "ab" * 32,
    "profile": "cpu",
    "environment": "torch2.13.0",
    "result": "passed",
    "phases": [
        {"name": "audit", "status": "passed", "began": 5.0, "seconds": 1.0, "detail": "33 files"},
        {"name": "regressions", "status": "passed", "began": 6.0, "seconds": 3.0, "detail": ""},
    ],
    "passed_tests": ["single/test_a.py::test_b", "single/test_a.py::test_c"],
    "failures": [],
    "uncovered": ["gpu: no GPU"],
    "facts": {"torch": "2.13.0", "gpus": [{"name": "H200", "arch": "sm_90"}]},
    "embedded_archs": ["sm_80", "sm_90"],
    "executed_archs": ["sm_90"],
}
HANG = {"where": "ranks-2: rank 1", "reason": "hung", "detail": 'File "x.py", line 3 in step'}
FAILED = {**PASSED, "environment": "floor", "result": "failed", "failures": [HANG], "facts": {}}


Written = Callable[..., tuple[str, str]]
"""Writes a page about records; returns it as HTML and as Markdown."""


class Text(HTMLParser):
    """The page as a person's eyes and a browser's network see it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(*records: object) -> tuple[str, str]:
        for number, record in enumerate(records):
            folder = tmp_path / "runs" / "wheel" / str(number)
            folder.mkdir(parents=True)
            text = record if isinstance(record, str) else json.dumps(record)
            (folder / "report.json").write_text(text)
        html, markdown = page.write(tmp_path)
        return html.read_text(), markdown.read_text()

    return write


def shown(html: str) -> str:
    return " ".join(" ".join(Text(html).words).split())


def test_every_wheel_has_a_cell_for_each_environment_and_profile(written: Written) -> None:
    other = {**PASSED, "wheel": "other-1-py3-none-any.whl", "profile": "gpu"}
    html, markdown = written(PASSED, FAILED, other)
    assert "2 of 3 runs passed" in shown(html)
    assert "2 of 3 runs passed" in markdown
    assert html.count("<td") == 6
    assert shown(html).count("not run") == 3
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {5}


def test_failures_come_with_their_log_and_before_what_passed(written: Written) -> None:
    html, markdown = written(PASSED, FAILED)
    for text in (shown(html), markdown):
        assert "ranks-2: rank 1" in text
        assert 'File "x.py", line 3 in step' in text
    assert html.index('id="run-2"') < html.index('id="run-1"')
    assert markdown.index("`floor`: failed") < markdown.index("`torch2.13.0`: passed")


def test_alike_failures_are_one_and_different_logs_are_all_shown(written: Written) -> None:
    failures = [{**HANG, "where": f"rank {n}", "detail": "same"} for n in range(3)]
    html, _ = written({**FAILED, "failures": [*failures, {**HANG, "detail": "other"}]})
    assert html.count("<pre") == 2
    assert "rank 0 and 2 more : hung" in shown(html)


def test_executed_and_embedded_gpu_code_are_told_apart(written: Written) -> None:
    html, markdown = written(PASSED)
    for text in (shown(html), markdown):
        assert "sm_80 embedded only" in text
        assert "sm_90 executed" in text
        assert "H200" in text


def test_the_timeline_shows_when_each_phase_ran(written: Written) -> None:
    html, _ = written(PASSED)
    assert "left: 0.00%; width: 25.00%" in html
    assert "left: 25.00%; width: 75.00%" in html


def test_a_log_cannot_inject_anything(written: Written) -> None:
    hostile = "<script src=//evil></script> `a` ```\n# heading | cell"
    html, markdown = written(
        {**FAILED, "failures": [{**HANG, "reason": hostile, "detail": hostile}]}
    )
    assert "script" not in Text(html).tags
    assert hostile.split("\n")[0] in shown(html)
    assert f"````text\n{hostile}\n````" in markdown
    assert "\n# heading | cell\n**" not in markdown


def test_the_page_needs_no_network(written: Written) -> None:
    html, _ = written(PASSED, FAILED)
    assert all(link.startswith(("#run-", "runs/wheel/")) for link in Text(html).links)
    assert "url(" not in html
    assert "default-src 'none'" in html


@pytest.mark.parametrize("text", ["", "[]", "null", '{"wheel": 3}', '{"wheel": "w", "phases": 1}'])
def test_an_unreadable_record_is_named_beside_the_others(written: Written, text: str) -> None:
    html, markdown = written(PASSED, text)
    for shown_text in (shown(html), markdown):
        assert "runs/wheel/1/report.json" in shown_text
        assert "1 of 1 run passed" in shown_text
    assert 'class="verdict failed"' in html


def test_long_logs_end_with_their_end() -> None:
    text = page.tail("\n".join(map(str, range(1000))), 3)
    assert text.splitlines() == ["[997 lines before these are in the log]", "997", "998", "999"]


TEST = "single: single/test_a.py::test_d"
BROKEN = {
    "where": "single/test_a.py::test_d",
    "reason": "failed: assert 1 == 2",
    "detail": "E   assert 1 == 2",
    "tests": [TEST],
    "place": "tests/regression/single/test_a.py:7",
    "again": "python -m gate run --wheel w.whl --only single/test_a.py::test_d",
    "files": ["records/single/junit-0.xml", "records/single/a b.log", "../../outside", "/etc/x"],
}
RED: dict[str, Any] = {
    **FAILED,
    "commit": "0123abcd",
    "failures": [BROKEN],
    "passed_tests": ["single: single/test_a.py::test_b", "own: own/test_b.py::test_c"],
    "missed_tests": ["own: own/test_b.py::test_d"],
    "own_tests": ["own: own/test_b.py::test_c", "own: own/test_b.py::test_d"],
}


def test_a_failing_test_is_shown_opened_with_its_place_command_and_files(
    written: Written,
) -> None:
    html, markdown = written(RED)
    for text in (shown(html), markdown):
        for words in ("where", "reason", "place", "again"):
            assert BROKEN[words] in text
        assert "0123abcd" in text
    assert html.count("<details open>") == 1
    links = ["runs/wheel/0/records/single/junit-0.xml", "runs/wheel/0/records/single/a%20b.log"]
    assert [link for link in Text(html).links if "single" in link] == links
    assert f"]({links[1]})" in markdown
    assert "outside" not in html + markdown
    assert "/etc/x" not in html + markdown


def test_what_is_ours_alone_is_counted_apart_and_every_test_is_listed(written: Written) -> None:
    html, markdown = written(RED)
    for text in (shown(html), markdown):
        assert "public interface: 1 of 2 tests kept" in text
        assert "own: 1 of 2 tests kept" in text
    assert f"failed {TEST}" in shown(html)
    assert "no result own: own/test_b.py::test_d" in shown(html)


def test_the_times_add_up(written: Written) -> None:
    times = ((1.0, 2.0, "audit"), (4.0, 5.0, "regressions"), (5.0, 6.0, "regressions"))
    phases = [
        {"name": name, "status": "passed", "began": began, "seconds": seconds, "detail": ""}
        for began, seconds, name in times
    ]
    never = {**phases[1], "status": "waiting", "began": 0.0, "seconds": 0.0}
    html, markdown = written({**PASSED, "phases": [*phases, never]})
    for text in (shown(html), markdown):
        assert "10.0 s: pytest 7.0 s, other phases 2.0 s, waiting 1.0 s" in text
        assert "2 parts of the tests, side by side, took 11.0 s" in text
    assert "left: 0.00%; width: 20.00%" in html


def test_single_tests_stand_apart_and_count_for_nothing(written: Written) -> None:
    html, markdown = written(PASSED, {**PASSED, "result": "partial", "only": ["single/test_x.py"]})
    for text in (shown(html), markdown):
        assert "1 of 1 run passed" in text
        assert "no evidence" in text
        assert "single/test_x.py" in text
    assert html.count("<td") == 1


def refuse(_message: bytes, _signature: bytes) -> tuple[str, ...]:
    raise BadSignature("is signed with a key that nobody knows")


@pytest.mark.parametrize(
    ("signers", "words"),
    [
        (lambda message, signature: ("ann",) if signature == b"of " + message else (), "by ann"),
        (refuse, "is signed with a key that nobody knows"),
        (None, "unsigned"),
    ],
)
def test_a_run_shows_its_statement_and_who_signed_it(
    signers: Any, words: str, written: Written, wheel: Wheel, tmp_path: Path
) -> None:
    written(PASSED)
    path = evidence.write_statement(
        tmp_path,
        wheel=wheel,
        profile="cpu",
        environment={"id": "torch2.13.0"},
        suite_digest="ab" * 32,
        commit=None,
        executed_archs=(),
        embedded_archs=(),
        passed_tests=["a"],
        files=[tmp_path / "runs/wheel/0/report.json"],
        started="2026-01-01T00:00:00Z",
        finished="2026-01-01T00:00:01Z",
        sign=(lambda message: b"of " + message) if signers else None,
    )
    for page_file in page.write(tmp_path, signers or refuse):
        assert f"statements/{path.name}" in page_file.read_text()
        assert words in page_file.read_text()
    (tmp_path / "runs/wheel/0/report.json").write_text(json.dumps({**PASSED, "commit": "other"}))
    for page_file in page.write(tmp_path, signers or refuse):
        assert path.name not in page_file.read_text()
