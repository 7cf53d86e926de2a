"""Ending the gate in any phase leaves no process and no statement."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from gate.report import PHASES
from tests.gate.conftest import ROOT, SITE, MakeSuite, gate_command, mini_wheel

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


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("environment", signal.SIGINT),
        ("install", signal.SIGTERM),
        ("identity", signal.SIGKILL),
        ("machine", signal.SIGHUP),
        ("machine", signal.SIGKILL),
        ("regressions", signal.SIGINT),
        ("regressions", signal.SIGKILL),
    ],
)
def test_no_process_and_no_statement(
    phase: str, number: signal.Signals, make_suite: MakeSuite, tmp_path: Path
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
    if number != signal.SIGKILL:
        assert "Interrupted by" in tail
        assert not list(scratch.iterdir()), "its working folders are gone too"
