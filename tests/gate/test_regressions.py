"""Only a complete, green result passes: real pytest runs of suites that are not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gate import regressions as module
from gate import runner as runner_module
from gate.environment import Environment
from gate.errors import IdentityMismatch, RegressionFailed
from gate.judge import Judgement
from gate.machine import PROFILES
from gate.parts import Run
from gate.regressions import Inventory, Subject, collect, prepare
from gate.runner import Runner
from tests.gate.conftest import MakeSuite, installed
from tests.gate.suites import HEAD, RANKS, SINGLE, judge, judgement_of

pytestmark = pytest.mark.processes


def test_a_green_suite_passes(subject: Subject, make_suite: MakeSuite) -> None:
    passed, failures = judge(subject, make_suite())
    assert failures == []
    assert passed == ["single: single/test_one.py::test_answer"]


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


def test_ranks_run_under_torchrun(subject: Subject, make_suite: MakeSuite) -> None:
    code = (
        HEAD
        + "@pytest.mark.parametrize('name', ['RANK', 'LOCAL_RANK', 'MASTER_PORT'])\n"
        + "def test_it(name): assert os.environ[name] and os.environ['WORLD_SIZE'] == '2'\n"
    )
    passed, failures = judge(subject, make_suite(ranks__test_it=code), RANKS)
    assert failures == []
    assert "ranks-2: ranks/test_it.py::test_it[RANK]" in passed


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
