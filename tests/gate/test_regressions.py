"""Only a complete, green result passes: real pytest runs of suites that are not."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from gate import regressions as module
from gate import runner as runner_module
from gate.environment import Environment
from gate.errors import IdentityMismatch, RegressionFailed
from gate.judge import Judgement
from gate.machine import PROFILES, Machine
from gate.parts import Run, plan
from gate.regressions import Inventory, Subject, collect, prepare
from gate.report import Failure
from gate.runner import Runner
from tests.gate.conftest import MakeSuite, installed

pytestmark = pytest.mark.processes

SINGLE = Run(folder="single", world=1)
RANKS = Run(folder="ranks", world=2)
HEAD = "import os, sys, pytest, mini\n"


def judge(
    subject: Subject, suite: Path, run: Run = SINGLE, timeout: float = 240.0
) -> tuple[list[str], list[Failure]]:
    judgement = judgement_of(subject, suite, run, timeout)
    return judgement.passed, judgement.failures


def judgement_of(
    subject: Subject,
    suite: Path,
    run: Run = SINGLE,
    timeout: float = 240.0,
    exit_first: bool = False,
) -> Judgement:
    records = subject.environment.root / "records"
    copy = prepare(subject, suite)
    inventory = collect(subject, copy, records / "collect", Runner())
    return module.run(
        subject,
        copy,
        run,
        inventory,
        folder=records / run.label,
        runner=Runner(),
        profile=PROFILES["cpu"],
        timeout=timeout,
        exit_first=exit_first,
    )


NOTE = "open(f\"{os.environ['GATE_RECORDS']}/hangs-{os.environ.get('RANK')}\", 'w').close()"


@dataclass
class Clock:
    """A clock that leaps once ``count`` processes have noted that they hang."""

    records: Path
    count: int

    def monotonic(self) -> float:
        return time.monotonic() + 1e6 * (len(list(self.records.rglob("hangs-*"))) == self.count)


def test_a_green_suite_passes(subject: Subject, make_suite: MakeSuite) -> None:
    passed, failures = judge(subject, make_suite())
    assert failures == []
    assert passed == ["single: single/test_one.py::test_answer"]


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


def test_every_rank_test_gets_a_result_unless_that_takes_too_long(
    subject: Subject, make_suite: MakeSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def test_a(): assert 0\ndef test_b(): assert 0\ndef test_c(): pass\n"
    suite = make_suite(ranks__test_it=code)
    tests = [f"ranks-2: ranks/test_it.py::test_{name}" for name in "abc"]
    rest = ["ranks-2: ranks/test_rank.py::test_answer"]
    came = judgement_of(subject, suite, RANKS)
    assert [failure.where for failure in came.failures] == tests[:2]
    assert came.failures[1].files[0] == "ranks-2.again-2/junit-0.xml"
    assert (came.passed, came.missed) == ([*tests[2:], *rest], [])

    shutil.rmtree(subject.environment.root / "records")
    for copy in subject.environment.root.glob("suite*"):
        shutil.rmtree(copy)
    monkeypatch.setattr(module, "GO_ON_SECONDS", 0.0)
    came = judgement_of(subject, suite, RANKS)
    assert [failure.where for failure in came.failures] == tests[:1]
    assert (came.passed, came.missed) == ([], [*tests[1:], *rest])


def test_the_first_failing_test_ends_its_process_if_asked_to(
    subject: Subject, make_suite: MakeSuite
) -> None:
    suite = make_suite(single__test_it="def test_a(): assert 0\ndef test_b(): assert 0\n")
    came = judgement_of(subject, suite, exit_first=True)
    assert [failure.tests for failure in came.failures] == [("single: single/test_it.py::test_a",)]
    assert came.missed == [
        "single: single/test_it.py::test_b",
        "single: single/test_one.py::test_answer",
    ]


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
    assert "barrier" in failure.detail
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


@pytest.mark.parametrize(
    "hook",
    [
        "def pytest_collection_modifyitems(items):\n"
        "    items[:] = [item for item in items if 'test_one' not in item.nodeid]\n",
        "collect_ignore_glob = ['*']\n",
    ],
)
def test_a_test_that_is_not_collected_is_missed(
    hook: str, subject: Subject, make_suite: MakeSuite
) -> None:
    with pytest.raises(RegressionFailed, match=r"test_answer exists but was not collected"):
        judge(subject, make_suite(single__conftest=hook))


def test_a_file_that_cannot_be_imported_is_a_failure_of_its_tests_and_of_no_others(
    subject: Subject, make_suite: MakeSuite
) -> None:
    code = "from mini import absent\n\ndef test_a(): pass\n\ndef test_b(): pass\n"
    came = judgement_of(subject, make_suite(single__test_it=code))
    (failure,) = came.failures
    assert failure.where == "single/test_it.py"
    assert failure.tests == tuple(f"single: single/test_it.py::test_{name}" for name in "ab")
    words = "cannot be collected: ImportError: cannot import name 'absent' from 'mini'"
    assert failure.reason.startswith(words)
    assert came.passed == ["single: single/test_one.py::test_answer"]
    assert came.missed == []


@pytest.mark.parametrize("head", ["", "from mini import absent\n"], ids=["imported", "broken"])
def test_tests_of_what_is_ours_alone_are_known_by_their_marker(
    head: str, subject: Subject, make_suite: MakeSuite
) -> None:
    suite = make_suite(
        own__test_state=head + "def test_keys(): pass\n",
        own__conftest="import pytest\n\ndef pytest_collection_modifyitems(items):\n"
        "    for item in items:\n        if 'own/' in item.nodeid:\n"
        "            item.add_marker(pytest.mark.own)\n",
        single__test_marked=f"import pytest\n{head}pytestmark = pytest.mark.own\n"
        "def test_it(): pass\n",
        single__test_some=f"import pytest\n{head}@pytest.mark.own\ndef test_own(): pass\n"
        "def test_public(): pass\n",
    )
    inventory = collect(
        subject, prepare(subject, suite), subject.environment.root / "records", Runner()
    )
    assert inventory.own == {
        "own/test_state.py::test_keys",
        "single/test_marked.py::test_it",
        "single/test_some.py::test_own",
    }
    assert len(inventory.tests) == 6


def test_an_import_error_is_reported_while_collecting(
    environment: Environment, make_suite: MakeSuite, tmp_path: Path
) -> None:
    subject = installed(environment, tmp_path, "import absent\n")
    with pytest.raises(RegressionFailed, match="No module named 'absent'"):
        judge(subject, make_suite())


def test_files_changed_after_the_installation_are_noticed(
    subject: Subject, make_suite: MakeSuite
) -> None:
    (subject.environment.site / "mini" / "__init__.py").write_text("answer = 42  # patched\n")
    with pytest.raises(IdentityMismatch, match="does not match the wheel's RECORD"):
        judge(subject, make_suite())


def test_surrounding_configuration_is_not_read(
    subject: Subject, make_suite: MakeSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = subject.environment.root
    (root / "conftest.py").write_text("raise SystemExit('read')\n")
    (root.parent / "pytest.ini").write_text("[pytest]\naddopts = --nonsense\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
    assert judge(subject, make_suite())[1] == []


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


def test_ranks_run_under_torchrun(subject: Subject, make_suite: MakeSuite) -> None:
    code = (
        HEAD
        + "@pytest.mark.parametrize('name', ['RANK', 'LOCAL_RANK', 'MASTER_PORT'])\n"
        + "def test_it(name): assert os.environ[name] and os.environ['WORLD_SIZE'] == '2'\n"
    )
    passed, failures = judge(subject, make_suite(ranks__test_it=code), RANKS)
    assert failures == []
    assert "ranks-2: ranks/test_it.py::test_it[RANK]" in passed


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


PATCHES = {
    "reports": "import _pytest.reports as r\nr.TestReport.from_item_and_call = classmethod("
    "lambda cls, item, call, f=r.TestReport.from_item_and_call.__func__: "
    "(setattr(call, 'excinfo', None), f(cls, item, call))[1])\n",
    "runtest": "import _pytest.python as p; p.Function.runtest = lambda self: None\n",
}


@pytest.mark.parametrize("code", PATCHES.values(), ids=PATCHES)
def test_a_package_that_makes_every_test_pass_is_found_out(
    code: str, environment: Environment, make_suite: MakeSuite, tmp_path: Path
) -> None:
    subject = installed(environment, tmp_path, "answer = 41\n" + code)
    with pytest.raises(IdentityMismatch, match=r"Importing mini replaced _pytest\."):
        judge(subject, make_suite())


@pytest.mark.parametrize("run", [SINGLE, RANKS], ids=lambda run: run.label)
def test_a_package_that_makes_tests_pass_once_it_is_used_is_found_out(
    run: Run, environment: Environment, make_suite: MakeSuite, tmp_path: Path
) -> None:
    code = "answer = 42\ndef late():\n    " + PATCHES["runtest"]
    subject = installed(environment, tmp_path, code)
    calls = HEAD + "def test_it(): mini.late()\ndef test_later(): assert mini.answer == 43\n"
    suite = make_suite(single__test_it=calls, ranks__test_calls=calls)
    passed, failures = judge(subject, suite, run)
    reasons = [failure.reason for failure in failures]
    assert passed == []
    assert "A test that must fail did not come back as failed: passed." in reasons
    assert "the package replaced _pytest.python.Function.runtest" in reasons


def test_an_exit_that_is_forced_is_noticed(
    environment: Environment, make_suite: MakeSuite, tmp_path: Path
) -> None:
    code = "answer = 42\ndef late():\n    import atexit, os\n    atexit.register(os._exit, 0)\n"
    subject = installed(environment, tmp_path, code)
    _, failures = judge(subject, make_suite(single__test_it=HEAD + "def test_it(): mini.late()\n"))
    assert any("did not reach its end" in failure.reason for failure in failures)


ROOT_OF = "import os, sys; root = os.environ['GATE_RECORDS'].rpartition('/records')[0]\n"
REWRITES = {
    "suite": "open(root + '/suite/single/test_one.py', 'a').write('# changed')\n",
    "harness": "open(root + '/harness/gate_harness.py', 'a').write('# changed')\n",
    "itself": "open(__file__, 'a').write('# changed')\n",
    "settings": "open(root + '/pytest.ini', 'a').write('# changed')\n",
}


@pytest.mark.parametrize("code", REWRITES.values(), ids=REWRITES)
def test_a_package_that_rewrites_the_tests_is_found_out(
    code: str, environment: Environment, make_suite: MakeSuite, tmp_path: Path
) -> None:
    subject = installed(environment, tmp_path, ROOT_OF + code)
    with pytest.raises(IdentityMismatch, match=r"was changed|does not match"):
        judge(subject, make_suite())


def test_files_changed_while_the_tests_run_are_a_failure(
    subject: Subject, make_suite: MakeSuite
) -> None:
    code = HEAD + "def test_it(): open(__file__, 'a').write('# changed')\n"
    passed, failures = judge(subject, make_suite(single__test_it=code))
    assert passed == []
    assert [failure.reason for failure in failures] == [
        "suite/single/test_it.py was changed while the tests ran"
    ]


def test_a_file_that_the_package_leaves_beside_its_own_takes_no_result_away(
    subject: Subject, make_suite: MakeSuite
) -> None:
    code = HEAD + "def test_it(): open(mini.__file__ + '.cache', 'w').close()\n"
    passed, failures = judge(subject, make_suite(single__test_it=code))
    name = "site-packages/mini/__init__.py.cache"
    assert [failure.reason for failure in failures] == [f"{name} was changed while the tests ran"]
    assert passed == [
        "single: single/test_it.py::test_it",
        "single: single/test_one.py::test_answer",
    ]


def test_code_from_elsewhere_is_noticed(subject: Subject, make_suite: MakeSuite) -> None:
    code = HEAD + (
        "import importlib.util as u\n"
        "def test_it(tmp_path_factory):\n"
        "    spec = u.spec_from_file_location('other', '/OUTSIDE/stray.py')\n"
        "    sys.modules['other'] = u.module_from_spec(spec)\n"
    )
    _, failures = judge(subject, make_suite(single__test_it=code))
    assert any("/OUTSIDE/stray.py was imported" in failure.reason for failure in failures)


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


@pytest.mark.parametrize("then", ["signal.pause()", "pass"], ids=["waits", "ends"])
def test_a_folder_that_grows_without_end_is_stopped(
    then: str, subject: Subject, make_suite: MakeSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "FOLDER_LIMIT", 2**20)
    code = HEAD + (
        "import signal\n"
        "def test_it():\n"
        "    with open(os.environ['GATE_RECORDS'] + '/big', 'wb') as file:\n"
        "        file.write(bytes(2**21))\n"
        f"    {then}\n"
    )
    _, failures = judge(subject, make_suite(single__test_it=code))
    assert "wrote more than 1 MiB" in failures[0].reason


INVENTORY = [
    *(f"single/test_a.py::test_{number}" for number in range(5)),
    "single/test_b.py::test_0",
    "single/test_c.py::test_0",
    "single/test_c.py::test_1",
    "ranks/test_d.py::test_0",
]


@pytest.mark.parametrize("processes", [1, 2, 3, 9])
def test_every_test_is_in_exactly_one_share(processes: int) -> None:
    machine = Machine(facts={"gpus": []})
    parts = plan(PROFILES["cpu"], machine, INVENTORY, processes)
    single = [part for part in parts if part.folder == "single"]
    assert len(single) == min(processes, 3)
    ran = [node for part in single for node in part.expected(INVENTORY)]
    assert sorted(ran) == sorted(INVENTORY[:-1])
    assert len({part.name for part in parts}) == len(parts)
    assert {part.label for part in single} == {"single"}
    assert max(len(part.expected(INVENTORY)) for part in single) == (8 if processes == 1 else 5)
    assert [part.world for part in parts if part.folder == "ranks"] == [3, 2]
    quick = plan(PROFILES["cpu"], machine, INVENTORY, processes, quick_first=True)
    assert quick == parts[::-1]
    assert (parts[0].folder, quick[0].folder) == ("ranks", "single")


def test_processes_on_gpus_are_no_more_than_gpus() -> None:
    machine = Machine(facts={"gpus": [{"arch": "sm_90"}] * 2})
    parts = plan(PROFILES["multi-gpu"], machine, INVENTORY, 16)
    assert [(part.name, part.need(PROFILES["multi-gpu"]).gpus) for part in parts] == [
        ("ranks-2", 2),
        ("single.1", 1),
        ("single.2", 1),
    ]


def test_a_start_sees_only_the_gpus_it_was_given(subject: Subject, make_suite: MakeSuite) -> None:
    code = HEAD + "def test_it(): assert os.environ['CUDA_VISIBLE_DEVICES'] == '3,GPU-1'\n"
    suite = prepare(subject, make_suite(single__test_it=code))
    inventory = Inventory(tests=["single/test_it.py::test_it"])
    judgement = module.run(
        subject,
        suite,
        Run(folder="single", world=1, files=("single/test_it.py",), share=2),
        inventory,
        folder=subject.environment.root / "records",
        runner=Runner(),
        profile=PROFILES["cpu"],
        timeout=240,
        gpus=("3", "GPU-1"),
    )
    assert judgement == Judgement(passed=["single: single/test_it.py::test_it"])
