"""Ending a build or a publication anywhere leaves no process and nothing half done."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from gate.upload import Twine
from tests.gate.index_server import answer, pypi_server, stub_server
from tests.gate.release import ENVIRON, Checkout
from tests.gate.test_interrupt import PROGRAM, processes_mentioning

pytestmark = pytest.mark.processes

# What a build does, and when the signal comes: while the command with this log runs, or at a
# function that moves the files to where they belong.
BUILD = """
import os, pathlib, shutil, sys
from gate import build, cli, report, runner

moment, number = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]
running, run = [], runner.Runner.run

def strike(when):
    global moment
    if when == moment:
        moment = ""
        os.kill(os.getpid(), number)

def noted(self, *arguments, log, **options):
    running.append(log.stem)
    return run(self, *arguments, log=log, **options)

def striking(function, when):
    def call(*arguments):
        result = function(*arguments)
        strike(when)
        return result
    return call

runner.Runner.run = noted
report.Display.tick = lambda _display: running and strike(running[-1])
shutil.copyfile = striking(shutil.copyfile, "copied")
pathlib.Path.replace = striking(pathlib.Path.replace, "moved")
cli.main()
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout.make(tmp_path / "checkout").with_gate()


def end(
    checkout: Checkout, scratch: Path, number: signal.Signals, program: str, *arguments: object
) -> str:
    """Run a program that ends itself by a signal; return what it says."""
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=checkout.root,
        env={**os.environ, **ENVIRON, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 128 + number, done.stderr
    assert f"Interrupted by {number.name}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not processes_mentioning(str(scratch))
    assert not list(scratch.iterdir())
    return done.stderr


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("first--sdist", signal.SIGINT),
        ("second--wheel", signal.SIGHUP),
        ("copied", signal.SIGINT),
        ("moved", signal.SIGTERM),
    ],
)
def test_a_signal_while_building(
    moment: str, number: signal.Signals, checkout: Checkout, tmp_path: Path
) -> None:
    out = checkout.root / "dist"
    out.mkdir()
    old = {"mini-0.9-py3-none-any.whl": "old", "mini-0.9.tar.gz": "old", "SHA256SUMS": "old"}
    for name, text in old.items():
        (out / name).write_text(text)
    end(checkout, tmp_path / "scratch", number, BUILD, moment, int(number), "build")
    names = {path.name for path in out.iterdir()}
    if moment != "moved":
        assert {name: (out / name).read_text() for name in names} == old
        return
    # Too late: then all of it is there.
    assert len(names) == 3
    for line in (out / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
        names.discard(name)
    assert names == {"SHA256SUMS"}


@pytest.mark.parametrize(
    ("phase", "moment", "number", "words"),
    [
        ("verify", "running", signal.SIGTERM, "nothing was published"),
        ("metadata", "running", signal.SIGINT, "nothing was published"),
        ("upload", "begin", signal.SIGINT, "nothing was published; not sent: {0}, {1}"),
        ("confirm", "begin", signal.SIGINT, "uploaded: {0}, {1}"),
    ],
)
def test_a_signal_while_publishing(
    phase: str,
    moment: str,
    number: signal.Signals,
    words: str,
    checkout: Checkout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheels = [checkout.wheel("1"), checkout.wheel("2")]
    checkout.attest(*wheels)
    with pypi_server(tmp_path / "index") as server:
        publish = ("publish", *wheels, "--repository", server.url)
        scratch = tmp_path / "scratch"
        said = end(checkout, scratch, number, PROGRAM, phase, moment, int(number), *publish)
        assert f"  state: {words.format(*(wheel.name for wheel in wheels))}\n" in said
        assert "next:  run the same command again" in said
        assert server.uploads == (2 if phase == "confirm" else 0)
        # The same command again does the rest; its check of metadata takes a second.
        monkeypatch.setattr(Twine, "check", lambda _self, _files: "")
        checkout.publish(server.url, *wheels)
        assert server.uploads == 2
        assert server.files == {wheel.name: wheel.read_bytes() for wheel in wheels}


def test_a_signal_while_the_index_does_not_answer(checkout: Checkout, tmp_path: Path) -> None:
    wheel = checkout.wheel()
    checkout.attest(wheel)
    asked, released, requests = threading.Event(), threading.Event(), []

    def hang(request: BaseHTTPRequestHandler) -> None:
        requests.append(request.command)
        asked.set()
        released.wait(120)
        answer(request, 404)

    with stub_server(hang) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "gate", "publish", wheel, "--repository", url],
            cwd=checkout.root,
            env={**os.environ, **ENVIRON},
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert asked.wait(120)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=120)
            released.set()
    assert process.returncode == 128 + signal.SIGINT
    assert "state: nothing was published" in said
    assert requests == ["GET"]
