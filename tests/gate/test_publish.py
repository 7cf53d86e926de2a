"""Publishing to a real index server, and to servers that misbehave."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from gate import cli
from gate.errors import IndexRefused
from gate.publish import ALREADY_THERE, UPLOADED
from tests.gate.conftest import SITE, Gate, gate_command
from tests.gate.index_server import LOGIN, PypiServer, answer, pypi_server, stub_server
from tests.gate.release import ENVIRON, Checkout

pytestmark = pytest.mark.processes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PypiServer]:
    with pypi_server(tmp_path / "index") as running:
        yield running


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout.make(tmp_path / "checkout")


@pytest.fixture
def wheels(checkout: Checkout) -> list[Path]:
    made = [checkout.wheel(), checkout.wheel("1")]
    checkout.attest(*made)
    return made


def how(published: list[Any]) -> list[str]:
    return [file.how for file in published]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# From the source to an installation


def test_build_gate_publish_install(
    gate: Gate, checkout: Checkout, server: PypiServer, tmp_path: Path
) -> None:
    checkout.with_gate()
    home, decoys = tmp_path / "home", []
    home.mkdir()

    def decoy(request: BaseHTTPRequestHandler) -> None:
        decoys.append(request.path)
        answer(request, 200)

    with stub_server(decoy) as other:
        section = f"repository = {other}\nusername = a\npassword = b\n"
        names = ("pypi", "testpypi", "x")
        sections = "".join(f"[{name}]\n{section}" for name in names)
        (home / ".pypirc").write_text(f"[distutils]\nindex-servers = pypi testpypi x\n{sections}")
        (home / ".netrc").write_text("machine 127.0.0.1 login wrong password wrong\n")
        variables = {
            **ENVIRON,
            "HOME": str(home),
            "PYTHONPATH": str(checkout.root),
            "TWINE_REPOSITORY": "x",
            "TWINE_REPOSITORY_URL": other,
            "HTTP_PROXY": other,
            "http_proxy": other,
        }
        assert gate("build", **variables).returncode == 0
        options = ("--profile", "cpu", "--site", SITE)
        gated = gate("run", "v1.0", "--wheel", checkout.root / "dist", *options, **variables)
        assert gated.returncode == 0, gated.stderr
        files = sorted((checkout.root / "dist").glob("mini*"))
        done = gate("publish", *files, "--repository", server.url, **variables)
    assert done.returncode == 0, done.stderr
    assert [path.suffix for path in files] == [".whl", ".gz"]
    assert server.files == {path.name: path.read_bytes() for path in files}
    assert done.stdout == "".join(f"{f.name}  sha256 {sha256(f)}  uploaded\n" for f in files)
    assert f"gate: {files[0].name}: cpu, site" in done.stderr
    assert ": unsigned\n" in done.stderr
    assert f"{server.url} requires any profile; no signature" in done.stderr
    assert server.users == [LOGIN[0]] * 2
    assert not decoys
    assert LOGIN[1] not in done.stdout + done.stderr

    assert install(files[0], server.url, tmp_path / "clean") == "42"


def install(wheel: Path, url: str, environment: Path) -> str:
    """Install from the index, by hash, into a new environment; return what the package says."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    requirements = environment / "requirements.txt"
    requirements.write_text(f"mini==1.0 --hash=sha256:{sha256(wheel)}\n")
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", python, "install"]
    options = ["--require-hashes", "--no-cache-dir", "--index-url", url + "simple/"]
    neutral = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    subprocess.run([*pip, *options, "-r", requirements], check=True, env=neutral, cwd="/")
    code = "import mini; print(mini.answer)"
    done = subprocess.run([python, "-Ic", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


# What the index already holds


def test_what_is_there_is_not_sent_again(
    checkout: Checkout, server: PypiServer, wheels: list[Path]
) -> None:
    (server.folder / wheels[0].name).write_bytes(wheels[0].read_bytes())
    assert how(checkout.publish(server.url)) == [UPLOADED, ALREADY_THERE]
    assert server.uploads == 1
    assert set(server.files) == {wheel.name for wheel in wheels}
    # All of it is there: no login is needed either.
    assert how(checkout.publish(server.url, environ={})) == [ALREADY_THERE] * 2
    assert server.uploads == 1


def test_other_bytes_under_a_name_stop_everything(
    checkout: Checkout, server: PypiServer, wheels: list[Path]
) -> None:
    (server.folder / wheels[1].name).write_bytes(b"other")
    message = checkout.refusal(IndexRefused, server.url)
    assert hashlib.sha256(b"other").hexdigest() in message
    assert f"{wheels[1].name}: the index has sha256" in message
    assert "raise the version" in message
    assert "state: nothing was published" in message
    assert server.uploads == 0


def test_the_process_exits_6(gate: Gate, checkout: Checkout, server: PypiServer) -> None:
    checkout.with_gate()
    wheel = checkout.wheel()
    checkout.attest(wheel)
    (server.folder / wheel.name).write_bytes(b"other")
    variables = {**ENVIRON, "PYTHONPATH": str(checkout.root)}
    done = gate("publish", wheel, "--repository", server.url, **variables)
    assert done.returncode == 6
    assert "holds other bytes" in done.stderr
    checkout.wheel(code=b"answer = 43\n")
    advised = {**variables, "GATE_PROGRAM": "ci/nox -s gate --"}
    done = gate("publish", wheel, "--repository", server.url, **advised)
    assert done.returncode == 5
    assert f"next:  gate these bytes: ci/nox -s gate -- run --wheel {wheel}\n" in done.stderr
    assert server.uploads == 0


# Uploads that break off


@pytest.mark.parametrize(("number", "arrived"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_an_interrupted_upload_is_finished_by_running_it_again(
    number: signal.Signals,
    arrived: bool,
    checkout: Checkout,
    server: PypiServer,
) -> None:
    checkout.with_gate()
    wheels = [checkout.wheel("1"), checkout.wheel("2"), checkout.wheel("3")]
    checkout.attest(*wheels)
    reached, released = threading.Event(), threading.Event()

    def hold(upload: int) -> None:
        if upload == 2:
            reached.set()
            released.wait(120)
            if not arrived:
                raise ConnectionError

    setattr(server, "after" if arrived else "before", hold)
    process = subprocess.Popen(
        gate_command("publish", *wheels, "--repository", server.url),
        env={**os.environ, **ENVIRON, "PYTHONPATH": str(checkout.root)},
        cwd=checkout.root,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert reached.wait(120)
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
        released.set()
    assert process.returncode == 128 + number
    assert f"uploaded: {wheels[0].name}; perhaps sent: {wheels[1].name}; " in said
    assert f"not sent: {wheels[2].name}" in said
    assert set(server.files) == {wheel.name for wheel in wheels[: 2 if arrived else 1]}

    setattr(server, "after" if arrived else "before", lambda _number: None)
    there = [ALREADY_THERE, ALREADY_THERE if arrived else UPLOADED, UPLOADED]
    assert how(checkout.publish(server.url, *wheels)) == there
    assert server.files == {wheel.name: wheel.read_bytes() for wheel in wheels}


def test_an_upload_without_an_answer_may_have_arrived(
    checkout: Checkout, server: PypiServer, wheels: list[Path]
) -> None:
    def cut(_number: int) -> None:
        raise ConnectionError

    server.after = cut
    assert how(checkout.publish(server.url)) == [UPLOADED] * 2
    assert server.uploads == 2
    assert server.files == {wheel.name: wheel.read_bytes() for wheel in wheels}


def test_what_was_verified_is_what_is_sent(
    checkout: Checkout, server: PypiServer, wheels: list[Path]
) -> None:
    attested = {wheel.name: wheel.read_bytes() for wheel in wheels}

    def swap(_number: int) -> None:
        for wheel in wheels:
            wheel.write_bytes(b"other")

    server.before = swap
    checkout.publish(server.url)
    assert server.files == attested


def test_a_wrong_password(checkout: Checkout, server: PypiServer, wheels: list[Path]) -> None:
    wrong = {"TWINE_USERNAME": "ada", "TWINE_PASSWORD": "wrong"}
    message = checkout.refusal(IndexRefused, server.url, environ=wrong)
    assert f"403 Forbidden from {server.url}" in message
    assert f"refused: {wheels[1].name}; not sent: {wheels[0].name}" in message
    assert "check TWINE_USERNAME and TWINE_PASSWORD" in message
    assert server.files == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x.whl"], "--repository"),
        (["--repository", "pypi"], "WHEEL"),
        (["x.whl", "--repository"], "--repository"),
        (["x.whl", "--repository", "--evidence"], "--repository"),
        (["x.whl", "--repository", ""], "--repository"),
        (["x.whl", "--repository", "pypi", "--index", "-v"], "--index"),
        (["x.whl", "--repository", "pypi", "--timeout", "0"], "--timeout"),
        (["absent.whl", "--repository", "pypi"], "absent.whl"),
    ],
)
def test_usage_errors_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(["publish", *arguments]) == 2
    assert words in capsys.readouterr().err
