"""Ending the gate in any phase leaves no process and no statement."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gate.report import PHASES
from gate.scratch import sweep
from tests.gate.conftest import ROOT, SITE, MakeSuite, gate_command, mini_wheel
from tests.gate.wheel_builder import WheelBuilder

pytestmark = pytest.mark.processes

HANG = "import threading\ndef test_hang():\n    threading.Event().wait()\n"


def processes_mentioning(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
                if text.encode() in environment + (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until_gone(pids: list[int]) -> None:
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([handle], [], [], 30)[0], f"process {pid} is still there"
        os.close(handle)


# What happens in a phase, and when the signal comes: as it begins, while a command runs in it, or
# once the statement is there.
PROGRAM = """
import os, sys
from contextlib import contextmanager
from pathlib import Path
from gate import cli, evidence, report
from gate.machine import PROFILES

wanted, moment, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
del sys.argv[1:4]
object.__setattr__(PROFILES["cpu"], "worlds", ())
original, current = report.Display.phase, []

def strike(when):
    if moment == when and wanted in current:
        current.clear()
        os.kill(os.getpid(), number)

@contextmanager
def phase(self, made, name, *rest, **options):
    with original(self, made, name, *rest, **options) as entered:
        current.append(name)
        strike("begin")
        yield entered
    if name in current:
        current.remove(name)

def write_statement(*arguments, **options):
    path = written(*arguments, **options)
    assert path.exists()
    strike("written")
    return path

report.Display.phase = phase
def tick(_display):
    strike("running")
    if any(Path(os.environ.get("GATE_CACHE", "/nowhere")).glob("*/bin")):
        strike("layer")

report.Display.tick = tick
written, evidence.write_statement = evidence.write_statement, write_statement
cli.main()
"""


@pytest.mark.parametrize(
    ("phase", "moment", "number"),
    [
        ("resolve", "begin", signal.SIGINT),
        ("audit", "begin", signal.SIGTERM),
        ("environment", "running", signal.SIGINT),
        ("install", "running", signal.SIGTERM),
        ("identity", "running", signal.SIGINT),
        ("machine", "begin", signal.SIGHUP),
        ("regressions", "begin", signal.SIGTERM),
        ("regressions", "running", signal.SIGINT),
        ("evidence", "running", signal.SIGTERM),
        ("evidence", "written", signal.SIGINT),
    ],
)
def test_a_signal_in_any_phase(
    phase: str, moment: str, number: signal.Signals, make_suite: MakeSuite, tmp_path: Path
) -> None:
    scratch, evidence = tmp_path / "scratch", tmp_path / "evidence"
    scratch.mkdir()
    options = ("--profile", "cpu", "--site", SITE, "--suite", make_suite(), "--evidence", evidence)
    command = ("run", "--wheel", mini_wheel(tmp_path), *options)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, phase, moment, str(int(number)), *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 128 + number, done.stderr
    assert f"Interrupted by {number.name}" in done.stderr
    assert not list(tmp_path.rglob("*.intoto.json"))
    assert not processes_mentioning(str(scratch))
    assert not list(scratch.iterdir())
    reports = [json.loads(path.read_text()) for path in evidence.rglob("report.json")]
    assert [report["result"] for report in reports] == ["interrupted"] * len(reports)
    assert len(reports) == (phase not in ("resolve", "audit"))


def test_a_signal_while_a_layer_is_made(tmp_path: Path) -> None:
    cache, index = tmp_path / "cache", tmp_path / "index"
    index.mkdir()
    for name in ("torch", "numpy", "pytest"):
        WheelBuilder(name=name).write(index)
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "GATE_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "environment", "layer", "15", "machine"],
        cwd=ROOT,
        env={**os.environ, **pip, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert [path.suffix for path in cache.iterdir()] == [".lock"], "nothing half made is left"


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("environment", signal.SIGKILL),
        ("identity", signal.SIGKILL),
        ("machine", signal.SIGINT),
        ("regressions", signal.SIGKILL),
    ],
)
def test_no_process_and_no_statement(
    phase: str,
    number: signal.Signals,
    make_suite: MakeSuite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scratch, evidence = tmp_path / "scratch", tmp_path / "evidence"
    scratch.mkdir()
    arguments = ("--profile", "cpu", "--site", SITE, "--suite", make_suite(single__test_hang=HANG))
    gate = subprocess.Popen(
        gate_command("run", "--wheel", mini_wheel(tmp_path), *arguments, "--evidence", evidence),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        text=True,
    )
    before = f"/{len(PHASES)}] {PHASES[PHASES.index(phase) - 1]}"
    with gate:
        assert gate.stderr is not None
        for line in gate.stderr:
            if before in line:
                break
        children = processes_mentioning(str(scratch))
        gate.send_signal(number)
        tail = gate.stderr.read()
    code = gate.returncode

    wait_until_gone(sorted({*children, *processes_mentioning(str(scratch))}))
    assert not list(tmp_path.rglob("*.intoto.json"))
    assert code == (-9 if number == signal.SIGKILL else 128 + number), tail
    if number == signal.SIGKILL:
        monkeypatch.setattr(tempfile, "tempdir", str(scratch))
        sweep()  # as the next gate does
    else:
        assert "Interrupted by" in tail
    assert not list(scratch.iterdir()), "its working folders are gone too"
