from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from gate import runner as module
from gate.errors import EnvironmentFailed, Interrupted
from gate.harness.supervise import rights_to_confine
from gate.runner import Outcome, Runner, checked, in_background
from tests.gate.conftest import ROOT


def run(tmp_path: Path, *command: str, timeout: float = 60.0, **options: object) -> Outcome:
    return Runner().run(
        command,
        env={"PATH": os.defpath},
        cwd=tmp_path,
        log=tmp_path / "log",
        timeout=timeout,
        **options,  # type: ignore[arg-type]
    )


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_success_keeps_the_output(tmp_path: Path) -> None:
    outcome = run(tmp_path, "sh", "-c", "echo out; echo err >&2")
    assert outcome.ok
    assert outcome.output() == "out\nerr\n"


def test_a_command_reads_a_file_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("given")
    assert run(tmp_path, "cat", stdin=tmp_path / "input").output() == "given"
    assert run(tmp_path, "cat").output() == ""


@pytest.mark.parametrize(
    ("script", "words"),
    [("exit 3", "exit status 3"), ("kill -SEGV $$", "killed by SIGSEGV")],
)
def test_failure_says_how(tmp_path: Path, script: str, words: str) -> None:
    outcome = run(tmp_path, "sh", "-c", script)
    assert not outcome.ok
    assert outcome.describe() == words


def test_the_environment_is_exactly_the_one_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAK", "1")
    names = {line.partition("=")[0] for line in run(tmp_path, "env").output().splitlines()}
    # Python itself adds LC_CTYPE where no locale is given.
    assert names - {"LC_CTYPE"} == {"PATH"}


def test_a_missing_command_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="/nowhere/tool"):
        run(tmp_path, "/nowhere/tool")


def test_a_hang_is_killed_with_everything_it_started(tmp_path: Path) -> None:
    asked: list[int] = []
    outcome = run(
        tmp_path,
        "sh",
        "-c",
        "setsid sleep 600 & echo $!; sleep 600",
        timeout=3,
        on_timeout=asked.append,
    )
    assert "hung: killed after 3 s" in outcome.describe()
    assert len(asked) == 1
    assert not alive(int(outcome.output()))


def test_a_process_left_behind_is_a_failure_and_is_killed(tmp_path: Path) -> None:
    # It holds standard output and has moved to a session of its own.
    outcome = run(tmp_path, "sh", "-c", "setsid sleep 600 & echo $!")
    assert not outcome.ok
    assert outcome.describe() == "left 1 process(es) running: sleep 600"
    assert not alive(int(outcome.output()))


def test_a_chain_of_forks_is_noticed_and_ended(tmp_path: Path) -> None:
    chain = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while os.getppid() and not os.path.exists('stop'):\n"
        "        if os.fork(): os._exit(0)\n"
        "        open('alive', 'w').write(str(os.getpid()))\n"
    )
    try:
        outcome = run(tmp_path, sys.executable, "-c", chain)
        assert not outcome.ok
        assert "left 1 process(es) running" in outcome.describe()
        last = (tmp_path / "alive").read_text()
        assert (tmp_path / "alive").read_text() == last
        assert not alive(int(last or 0))
    finally:
        (tmp_path / "stop").touch()


def test_killing_the_supervisor_leaves_no_process(tmp_path: Path) -> None:
    outcome = run(tmp_path, "sh", "-c", "setsid sleep 600 & echo $!; kill -9 $PPID; sleep 600")
    assert outcome.describe() == "its supervisor was killed"
    assert not alive(int(outcome.output()))


@pytest.mark.parametrize(
    "command", [["yes"], ["head", "-c", "2M", "/dev/zero"]], ids=lambda c: c[0]
)
def test_endless_output_is_stopped(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OUTPUT_LIMIT", 2**20)
    assert "printed more than 1 MiB" in run(tmp_path, *command).describe()


def test_killing_the_gate_leaves_no_process(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from gate.runner import Runner\n"
        "Runner().run(['sh', '-c', 'setsid sleep 600 & echo $!; exec sleep 600'],"
        "env={'PATH': '/usr/bin:/bin'}, cwd=Path(sys.argv[1]),"
        "log=Path(sys.argv[1], 'log'), timeout=600)"
    )
    gate = subprocess.Popen([sys.executable, "-c", program, tmp_path], cwd=ROOT)
    log = tmp_path / "log"
    while not (log.exists() and log.read_text().endswith("\n")):
        assert gate.poll() is None
    grandchild = int(log.read_text())
    assert alive(grandchild)
    supervisor = int(Path(f"/proc/{gate.pid}/task/{gate.pid}/children").read_text())
    handle = os.pidfd_open(supervisor)

    gate.send_signal(signal.SIGKILL)
    gate.wait()

    # Readable once the supervisor, which nobody waits for any more, has ended.
    assert select.select([handle], [], [], 30)[0]
    assert not alive(grandchild)


def test_work_in_the_background_ends_with_the_body(tmp_path: Path) -> None:
    def task(runner: Runner) -> Outcome:
        command, log = ["sleep", "600"], tmp_path / "log"
        return runner.run(command, env={"PATH": os.defpath}, cwd=tmp_path, log=log, timeout=600)

    with in_background(Runner(), task) as result:
        pass
    with pytest.raises(Interrupted, match="no longer needed"):
        result()


def test_checked_shows_the_tail_and_the_next_step(tmp_path: Path) -> None:
    outcome = run(tmp_path, "sh", "-c", "echo no space left; exit 1")
    with pytest.raises(EnvironmentFailed, match="no space left") as caught:
        checked(outcome, "Could not install torch", next_step="free some space")
    assert "next:  free some space" in str(caught.value)


def test_a_confined_command_changes_files_in_its_folder_only(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    (other / "old").write_text("old")
    script = "echo a > own/a; mv own/a own/b; : > /dev/null; rm other/old; echo c > other/c"
    outcome = run(tmp_path, "sh", "-c", script, writable=own)
    assert sorted(path.name for path in own.iterdir()) == ["b"]
    assert [path.name for path in other.iterdir()] == (["old"] if rights_to_confine() else ["c"])
    assert outcome.unconfined == (not rights_to_confine())


SUPERVISOR = """
import importlib.util, sys
specification = importlib.util.spec_from_file_location("supervise", {path!r})
supervise = importlib.util.module_from_spec(specification)
specification.loader.exec_module(supervise)
{change}
supervise.main()
"""


def supervised_by(folder: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands supervised by a program that differs from the real one."""
    script = folder / "supervisor.py"
    script.write_text(SUPERVISOR.format(path=str(module.SUPERVISOR), change=change))
    monkeypatch.setattr(module, "SUPERVISOR", script)
    monkeypatch.setattr(module, "_told_unconfined", Event())


@pytest.mark.parametrize(
    "change",
    [
        "supervise.CREATE_RULESET = 9999",  # a system call that no kernel has
        "supervise.RIGHTS = {9: 0}",  # a kernel that is too old
    ],
)
def test_where_nothing_can_be_confined_that_is_said_once(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised_by(tmp_path, change, monkeypatch)
    own, other, said = tmp_path / "own", tmp_path / "other", []
    own.mkdir()
    runner = Runner(say=said.append)
    for number, writable in enumerate((None, own, own)):
        outcome = runner.run(
            ["sh", "-c", f"echo {number} > other"],
            env={"PATH": os.defpath},
            cwd=tmp_path,
            log=tmp_path / "log",
            timeout=60,
            writable=writable,
        )
        assert outcome.ok
        assert outcome.unconfined == (writable is not None)
        assert other.read_text() == f"{number}\n"
        assert len(said) == min(number, 1)
    assert "cannot keep tests from changing files outside" in said[0]


def test_what_should_be_confined_and_is_not_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = "supervise.RESTRICT_SELF = 9999; supervise.rights_to_confine = lambda: 0x3FF2"
    supervised_by(tmp_path, change, monkeypatch)
    with pytest.raises(EnvironmentFailed, match="Could not start touch"):
        run(tmp_path, "touch", "file", writable=tmp_path)
    assert not (tmp_path / "file").exists()


def test_a_confined_command_moves_files_between_its_folders(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "a").mkdir(parents=True)
    (own / "b").mkdir()
    script = "import os; open('own/a/x', 'w').close(); os.replace('own/a/x', 'own/b/x')"
    assert run(tmp_path, sys.executable, "-c", script, writable=own).ok
