"""What is told of tests that fail, hang, crash or do not run: real pytest runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from gate import runner as runner_module
from gate.regressions import Subject
from tests.gate.conftest import MakeSuite
from tests.gate.suites import HEAD, RANKS, judge, judgement_of

pytestmark = pytest.mark.processes

NOTE = "open(f\"{os.environ['GATE_RECORDS']}/hangs-{os.environ.get('RANK')}\", 'w').close()"


@dataclass
class Clock:
    """A clock that leaps once ``count`` processes have noted that they hang."""

    records: Path
    count: int

    def monotonic(self) -> float:
        return time.monotonic() + 1e6 * (len(list(self.records.rglob("hangs-*"))) == self.count)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def test_it(): assert mini.answer == 43", "test_it: failed: assert 42 == 43"),
        ("def test_it(): pytest.skip('later')", "test_it: skipped: later"),
        ("@pytest.mark.xfail\ndef test_it(): assert 0", "test_it: skipped"),
        ("@pytest.mark.xfail\ndef test_it(): pass", "test_it: failed"),
        (
            "@pytest.mark.xfail(strict=False)\ndef test_it(): pass",
            "test_it: passed although expected to fail",
        ),
        ("def test_it(missing): pass", "test_it: error"),
        (
            "@pytest.fixture\ndef late():\n    yield\n    raise OSError\ndef test_it(late): pass",
            "test_it: error",
        ),
        ("def test_it(): os._exit(0)", "test_it: ended early: it left no completion record"),
        ("def test_it(): os._exit(3)", "test_it: exit status 3"),
        ("def test_it(): pytest.exit('enough', returncode=0)", "test_it: ended the tests, with 0"),
        ("def test_it(): os.kill(os.getpid(), 11)", "test_it: killed by SIGSEGV"),
        ("import atexit\ndef test_it(): atexit.register(os._exit, 7)", "did not reach its end"),
        (
            "import subprocess\ndef test_it():\n    subprocess.Popen(['sleep', '600'])",
            "left 1 process(es) running: sleep 600",
        ),
        (
            "def test_it():\n    open('mini.py', 'w').close()\n    sys.modules.pop('mini')\n"
            "    sys.path.insert(0, os.getcwd())\n    import mini",
            "mini was imported from",
        ),
    ],
)
def test_anything_but_passed_is_a_failure(
    code: str, words: str, subject: Subject, make_suite: MakeSuite
) -> None:
    _, failures = judge(subject, make_suite(single__test_it=HEAD + code + "\n"))
    lines = [f"{failure.where}: {failure.reason}" for failure in failures]
    assert any(words in line for line in lines), lines
    assert len(lines) == 1 or "imported from" in words, lines


def test_one_failing_test_is_one_failure_and_the_others_passed(
    subject: Subject, make_suite: MakeSuite
) -> None:
    code = (
        HEAD
        + "def helper():\n    assert mini.answer == 43, 'words'\n"
        + "def test_good(): pass\ndef test_bad():\n    helper()\ndef test_later(): pass\n"
    )
    came = judgement_of(subject, make_suite(single__test_it=code))
    (failure,) = came.failures
    assert failure.where == "single/test_it.py::test_bad"
    assert failure.tests == ("single: single/test_it.py::test_bad",)
    assert failure.reason == "failed: AssertionError: words"
    assert failure.place == "tests/regression/single/test_it.py:3"
    assert failure.files == ("single/junit-0.xml", "single/output.log")
    assert failure.told()[:2] == [failure.reason, "  assert 42 == 43"]
    assert came.passed == [
        "single: single/test_it.py::test_good",
        "single: single/test_it.py::test_later",
        "single: single/test_one.py::test_answer",
    ]
    assert came.missed == []


def test_a_test_that_is_called_off_is_missed_by_its_name(
    subject: Subject, make_suite: MakeSuite
) -> None:
    code = HEAD + "def test_it(request): del request.session.items[2]\ndef test_b(): pass\n"
    came = judgement_of(subject, make_suite(single__test_it=code))
    told = [(failure.where, failure.reason) for failure in came.failures]
    assert told == [("single/test_one.py::test_answer", "did not run")]
    assert came.passed == [f"single: single/test_it.py::test_{name}" for name in ("it", "b")]


@pytest.mark.parametrize("exit_first", [False, True])
def test_a_test_that_comes_back_under_another_name_is_missed(
    exit_first: bool, subject: Subject, make_suite: MakeSuite
) -> None:
    code = "def test_it(request): request.node.user_properties[:] = [('nodeid', 'renamed')]\n"
    suite = make_suite(single__test_it=code)
    came = judgement_of(subject, suite, exit_first=exit_first)
    assert [(failure.where, failure.reason, failure.tests) for failure in came.failures] == [
        ("renamed", "unexpected: passed", ()),
        ("single/test_it.py::test_it", "did not run", ("single: single/test_it.py::test_it",)),
    ]
    assert came.passed == ["single: single/test_one.py::test_answer"]


def test_a_crash_names_its_test_and_the_others_count(
    subject: Subject, make_suite: MakeSuite
) -> None:
    code = (
        HEAD
        + "import ctypes\ndef helper(): ctypes.string_at(0)\n"
        + "def test_before(): pass\ndef test_crash(): helper()\ndef test_after(): pass\n"
    )
    came = judgement_of(subject, make_suite(single__test_it=code))
    (failure,) = came.failures
    assert failure.where == "single/test_it.py::test_crash"
    assert failure.reason == "killed by SIGSEGV"
    assert 'single/test_it.py", line 3 in helper' in failure.detail
    assert failure.place == "tests/regression/single/test_it.py:3"
    assert str(subject.environment.root) not in failure.detail
    assert came.passed == [
        "single: single/test_it.py::test_before",
        "single: single/test_it.py::test_after",
        "single: single/test_one.py::test_answer",
    ]
    assert came.missed == []


@pytest.mark.parametrize(
    ("leave", "how"),
    [
        ("os._exit(0)", "rank 1 ended early: it left no completion record"),
        ("os._exit(3)", "rank 1 ended with exit status 3"),
        ("raise ValueError('first')", "failed: ValueError: first on rank 1"),
    ],
)
def test_who_left_first_is_told_before_what_failed_for_it(
    leave: str, how: str, subject: Subject, make_suite: MakeSuite
) -> None:
    code = HEAD + (
        "import torch.distributed as dist\n"
        "def test_it():\n"
        "    dist.init_process_group('gloo')\n"
        "    if os.environ['RANK'] == '1':\n"
        f"        {leave}\n"
        "    dist.barrier()\n"
    )
    (failure, *others) = judge(subject, make_suite(ranks__test_it=code), RANKS)[1]
    assert (failure.where, failure.reason) == ("ranks-2: ranks/test_it.py::test_it", how)
    # In the barrier, or already failing since its peer had left.
    assert "rank 0" in failure.detail
    assert others == []


def test_a_killed_rank_is_named_with_its_test_and_where_its_peer_was(
    subject: Subject, make_suite: MakeSuite
) -> None:
    code = (
        HEAD
        + "import threading\n"
        + "def wait_for_peer(): threading.Event().wait()\n"
        + "def test_before(): pass\n"
        + "def test_it():\n"
        + "    if os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\n"
        + "    wait_for_peer()\n"
    )
    came = judgement_of(subject, make_suite(ranks__test_it=code), RANKS)
    (failure,) = came.failures
    assert failure.where == "ranks-2: ranks/test_it.py::test_it"
    assert failure.reason == "rank 1 was killed by SIGKILL"
    assert "stacks of rank 0" in failure.detail
    assert "in wait_for_peer" in failure.detail
    assert came.passed == [
        "ranks-2: ranks/test_it.py::test_before",
        "ranks-2: ranks/test_rank.py::test_answer",
    ]
    assert came.missed == []


def test_a_hang_is_ended_and_shows_its_stack(
    subject: Subject, make_suite: MakeSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "time", Clock(subject.environment.root / "records", 1))
    code = f"import threading\ndef test_hang():\n    {NOTE}\n    threading.Event().wait()\n"
    _, failures = judge(subject, make_suite(single__test_it=HEAD + code), timeout=600)
    hung = next(failure for failure in failures if "hung" in failure.reason)
    assert "test_it.py" in hung.detail
    assert "in wait" in hung.detail
    assert "in _multicall" not in hung.detail
    assert [failure.where for failure in failures] == ["single/test_it.py::test_hang"]


def test_a_rank_that_leaves_early_with_success_is_a_failure(
    subject: Subject, make_suite: MakeSuite
) -> None:
    code = HEAD + "def test_it():\n    if os.environ['RANK'] == '1': os._exit(0)\n"
    _, failures = judge(subject, make_suite(ranks__test_it=code), RANKS)
    lines = [f"{failure.where}: {failure.reason}" for failure in failures]
    how = "rank 1 ended early: it left no completion record"
    assert lines == [f"ranks-2: ranks/test_it.py::test_it: {how}"]


def test_hanging_ranks_show_the_stack_of_each(
    subject: Subject, make_suite: MakeSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "time", Clock(subject.environment.root / "records", 2))
    code = (
        HEAD
        + "import threading\n"
        + f"def wait_for_peer():\n    {NOTE}\n    threading.Event().wait()\n"
        + "def test_it(): wait_for_peer()\n"
    )
    ((where, reason, detail),) = [
        (failure.where, failure.reason, failure.detail)
        for failure in judge(subject, make_suite(ranks__test_it=code), RANKS, timeout=600)[1]
    ]
    assert where == "ranks-2: ranks/test_it.py::test_it"
    assert reason == "hung: killed after 600 s"
    assert detail.count("in wait_for_peer") == 2
    assert "stacks of rank 1" in detail


def test_a_failing_rank_shows_where_its_peers_were(
    subject: Subject, make_suite: MakeSuite
) -> None:
    code = (
        HEAD
        + "import threading\n"
        + "def wait_for_peer(): threading.Event().wait()\n"
        + "def test_it():\n"
        + "    if os.environ['RANK'] == '0': wait_for_peer()\n"
        + "    assert mini.answer == 43\n"
    )
    _, failures = judge(subject, make_suite(ranks__test_it=code), RANKS)
    (failure,) = failures
    assert failure.where == "ranks-2: ranks/test_it.py::test_it"
    assert failure.reason == "failed: assert 42 == 43 on rank 1"
    assert "stacks of rank 0" in failure.detail
    assert "in wait_for_peer" in failure.detail


BROKEN_RECORDS = {
    "fifo": "os.remove(junit); os.mkfifo(junit)",
    "link": "os.remove(junit); os.symlink('/etc/passwd', junit)",
    "encoding": "open(junit, 'w').write('<?xml version=\"1.0\" encoding=\"nope\"?><a/>')",
    "half": "open(junit, 'r+').truncate(40)",
    "finished": "open(done, 'w').write('{')",
    "list": "open(done, 'w').write('[]')",
    "status": "open(done, 'w').write('{\"exitstatus\": 0, \"identity\": []}')",
}


@pytest.mark.parametrize("tampering", BROKEN_RECORDS.values(), ids=BROKEN_RECORDS)
def test_broken_records_are_failures(
    tampering: str, subject: Subject, make_suite: MakeSuite
) -> None:
    code = HEAD + (
        "import atexit\n"
        "folder = os.environ['GATE_RECORDS']\n"
        "junit, done = folder + '/junit-0.xml', folder + '/finished-0.json'\n"
        "def tamper():\n"
        "    if os.path.exists(junit) and 'GATE_ONLY_COLLECT' not in os.environ:\n"
        f"        {tampering}\n"
        "atexit.register(tamper)\n"
        "def test_it(): pass\n"
    )
    _, failures = judge(subject, make_suite(single__test_it=code))
    assert failures
