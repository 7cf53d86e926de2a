"""The gate as a real process in surroundings that are full, closed, shared or strange.

Where the kernel allows it, they are real: file systems and networks of the test's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gate.environment import DISK_ERRORS, TEST_LAYER
from gate.evidence import verify
from gate.targets import pins
from tests.gate.conftest import ROOT, SITE, MakeSuite, gate_command, mini_wheel
from tests.gate.wheel_builder import WheelBuilder

pytestmark = pytest.mark.processes

# One start of tests is enough where ranks are not the subject.
QUICK = """
from gate import cli
from gate.machine import PROFILES
object.__setattr__(PROFILES["cpu"], "worlds", ())
cli.main()
"""
ALONE = """
import fcntl, os, socket, struct, sys
with socket.socket() as interface:
    request = struct.pack("16sH14x", b"lo", 1)  # up
    fcntl.ioctl(interface, 0x8914, request)
for part in ("all", "default", "lo"):
    with open(f"/proc/sys/net/ipv6/conf/{part}/disable_ipv6", "w") as file:
        file.write("1")
socket.sethostname("no-such-host.invalid")
os.umask(0o077)
os.execv(sys.argv[1], sys.argv[1:])
"""
SMALL_DISK = 'mount -t tmpfs -o size="$0" none "$1" && shift && exec "$@"'


@cache
def namespaces(*kinds: str) -> tuple[str, ...]:
    """A command that gives the next one surroundings of its own; none where that is forbidden."""
    for user in ((), ("--user", "--map-root-user")):
        command = ("unshare", *user, *kinds)
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return ()


def on_small_disk(folder: Path, size: str, *command: str | Path) -> list[str | Path]:
    """``command`` with a file system of this size at ``folder``, or files limited to it."""
    folder.mkdir()
    if own := namespaces("--mount"):
        return [*own, "sh", "-c", SMALL_DISK, size, folder, *command]
    return ["prlimit", f"--fsize={size.replace('m', '000000').replace('k', '000')}", *command]


def call(command: list[str | Path], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=280
    )


def run_options(wheel: Path, suite: Path, evidence: Path) -> list[str | Path]:
    options = ["--profile", "cpu", "--site", SITE, "--suite", suite, "--evidence", evidence]
    return ["run", "--wheel", wheel, *options]


def test_ranks_need_no_ipv6_no_host_name_and_no_home(
    make_suite: MakeSuite, tmp_path: Path
) -> None:
    evidence = tmp_path / "evidence"
    gate = gate_command(*run_options(mini_wheel(tmp_path), make_suite(), evidence))
    own = namespaces("--net", "--uts")
    alone = [*own, sys.executable, "-c", ALONE] if own else []
    done = call([*alone, *gate], HOME="/proc/self", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "passed profile cpu: 3 tests" in done.stderr
    statement = next(evidence.rglob("*.intoto.json"))
    assert statement.stat().st_mode & 0o777 == 0o644


def test_a_disk_that_fills_up_while_a_layer_is_made(tmp_path: Path) -> None:
    index, disk = tmp_path / "index", tmp_path / "disk"
    for pin in map(Requirement, pins()):
        if pin.name in TEST_LAYER and (pin.marker is None or pin.marker.evaluate()):
            builder = WheelBuilder(name=pin.name, version=str(pin.specifier)[2:])
            builder.add("demo/zeros.bin", bytes(30_000_000)).write(index)
    show = ["sh", "-c", '"$@"; code=$?; ls -A "$GATE_CACHE"; exit $code', "sh"]
    done = call(
        on_small_disk(disk, "16m", *show, *gate_command("machine")),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(index),
        GATE_CACHE=str(disk),
    )
    assert done.returncode == 3, done.stderr
    assert any(os.strerror(number) in done.stderr for number in DISK_ERRORS)
    (left,) = done.stdout.split()
    assert left.endswith(".lock"), "nothing half made is left"


def test_a_disk_that_fills_up_while_the_wheel_is_installed(
    make_suite: MakeSuite, tmp_path: Path
) -> None:
    builder = WheelBuilder(name="mini").drop("demo/__init__.py").drop("demo/py.typed")
    builder.drop("demo/kernels/step.cu").add("mini/__init__.py", b"answer = 42\n")
    wheel = builder.add("mini/zeros.bin", bytes(30_000_000)).write(tmp_path / "dist")
    disk, evidence = tmp_path / "disk", tmp_path / "evidence"
    gate = gate_command(*run_options(wheel, make_suite(), evidence))
    done = call(on_small_disk(disk, "16m", *gate), TMPDIR=str(disk))
    assert done.returncode == 3, done.stderr
    assert "pip could not install mini" in done.stderr
    assert not list(evidence.rglob("*.intoto.json"))


def test_a_disk_that_fills_up_while_evidence_is_written(
    make_suite: MakeSuite, tmp_path: Path
) -> None:
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    options = run_options(mini_wheel(tmp_path), make_suite(), disk / "evidence")
    keep = 'mkdir "$COPY"; "$@"; code=$?; cp -r "$DISK"/. "$COPY"; exit $code'
    quick = ["sh", "-c", keep, "sh", sys.executable, "-c", QUICK, *options]
    done = call(on_small_disk(disk, "16k", *quick), DISK=str(disk), COPY=str(copy))
    assert done.returncode == 3, done.stderr
    assert "[8/8] evidence" in done.stderr
    assert "The machine refused" in done.stderr or "cannot write" in done.stderr
    assert not list(copy.rglob("*.intoto.json"))


def test_two_gates_at_once_leave_evidence_that_holds(
    make_suite: MakeSuite, tmp_path: Path
) -> None:
    wheel, evidence = mini_wheel(tmp_path), tmp_path / "evidence"
    options = run_options(wheel, make_suite(), evidence)
    gates = [
        subprocess.Popen(
            [sys.executable, "-c", QUICK, *map(str, options)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [gate.communicate(timeout=280)[1] for gate in gates]
    assert [gate.returncode for gate in gates] == [0, 0], said
    (verified,) = verify([wheel], evidence=evidence)
    assert verified.profiles == {"cpu"}
    report = json.loads(next(evidence.rglob("report.json")).read_text())
    assert report["result"] == "passed"


def test_a_temporary_folder_with_a_colon_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    done = call(
        gate_command("run", "--wheel", mini_wheel(tmp_path), "--site", SITE),
        TMPDIR=str(tmp_path / "a:b"),
    )
    assert done.returncode == 3
    assert "set TMPDIR to another directory" in done.stderr
    assert "Traceback" not in done.stderr
