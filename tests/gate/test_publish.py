"""Publishing to a real index server, and to servers that misbehave."""

from __future__ import annotations

import hashlib
import json
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

from gate.errors import EnvironmentFailed, IndexFailing, IndexRefused, UsageFailure
from gate.index import SIMPLE_JSON
from gate.publish import ALREADY_THERE, UPLOADED
from tests.gate.conftest import SITE, Gate, gate_command
from tests.gate.index_server import LOGIN, PypiServer, answer, pypi_server, stub_server
from tests.gate.release import ENVIRON, Checkout


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
    assert "nothing was published" in message
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
    done = gate("publish", wheel, "--repository", server.url, **variables)
    assert done.returncode == 5
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
            released.wait(60)
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
        assert reached.wait(60)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
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


# Indexes that do not work


class Index:
    """An index of which the answers are chosen; ``files`` is what it lists."""

    def __init__(self, upload: int = 200, body: str = "") -> None:
        self.upload, self.body = upload, body
        self.files: dict[str, str] = {}
        self.uploads = self.listings = 0

    def __call__(self, request: BaseHTTPRequestHandler) -> None:
        if request.command == "POST":
            self.uploads += 1
            answer(request, self.upload, self.body)
            return
        self.listings += 1
        found = [
            {"filename": name, "url": name, "hashes": {"sha256": digest}}
            for name, digest in self.files.items()
        ]
        page = {"meta": {"api-version": "1.0"}, "name": "mini", "files": found}
        answer(request, 200, json.dumps(page), SIMPLE_JSON)


@pytest.fixture
def wheel(checkout: Checkout) -> Path:
    made = checkout.wheel()
    checkout.attest(made)
    return made


def test_an_index_that_fails(checkout: Checkout, wheel: Path) -> None:
    with stub_server(Index(500)) as url:
        message = checkout.refusal(IndexFailing, url)
    assert f"{url} did not accept {wheel.name}" in message
    assert f"perhaps sent: {wheel.name}" in message
    assert "run the same command again" in message


def test_a_wrong_password(checkout: Checkout, server: PypiServer, wheel: Path) -> None:
    wrong = {"TWINE_USERNAME": "ada", "TWINE_PASSWORD": "wrong"}
    message = checkout.refusal(IndexRefused, server.url, environ=wrong)
    assert f"403 Forbidden from {server.url}" in message
    assert f"refused: {wheel.name}" in message
    assert "check TWINE_USERNAME and TWINE_PASSWORD" in message
    assert server.files == {}


def test_an_index_that_does_not_show_what_it_took(checkout: Checkout, wheel: Path) -> None:
    index = Index()
    with stub_server(index) as url:
        message = checkout.refusal(IndexRefused, url, timeout=2)
    assert "Within 2 s the index did not show what was sent" in message
    assert f"uploaded: {wheel.name}" in message
    assert index.uploads == 1
    assert index.listings > 3


def test_an_index_that_takes_a_while_to_show_it(checkout: Checkout, wheel: Path) -> None:
    class Slow(Index):
        def __call__(self, request: BaseHTTPRequestHandler) -> None:
            # The first page, two before the upload, and two that come too early.
            if self.uploads and self.listings == 4:
                self.files[wheel.name] = sha256(wheel)
            super().__call__(request)

    with stub_server(Slow()) as url:
        assert how(checkout.publish(url)) == [UPLOADED]


def test_an_index_that_changes_what_it_took(checkout: Checkout, wheel: Path) -> None:
    class Altering(Index):
        def __call__(self, request: BaseHTTPRequestHandler) -> None:
            super().__call__(request)
            if self.uploads:
                self.files[wheel.name] = "0" * 64

    with stub_server(Altering()) as url:
        message = checkout.refusal(IndexRefused, url)
    assert f"the index has sha256 {'0' * 64}" in message


def test_an_index_whose_list_lags_behind_a_refusal(checkout: Checkout, wheel: Path) -> None:
    class Lagging(Index):
        def __call__(self, request: BaseHTTPRequestHandler) -> None:
            if self.uploads and self.listings == 4:
                self.files[wheel.name] = sha256(wheel)
            super().__call__(request)

    index = Lagging(400, "File already exists")
    with stub_server(index) as url:
        assert how(checkout.publish(url)) == [UPLOADED]
    assert index.uploads == 1


@pytest.mark.parametrize("command", ["GET", "POST"])
def test_an_index_that_hangs(command: str, checkout: Checkout, wheel: Path) -> None:
    released, index = threading.Event(), Index()

    def respond(request: BaseHTTPRequestHandler) -> None:
        if request.command == command:
            released.wait(60)
        index(request)

    with stub_server(respond) as url:
        message = checkout.refusal(EnvironmentFailed, url, timeout=4)
        released.set()
    words = "/simple/ does not answer" if command == "GET" else "hung: killed after 4 s"
    assert words in message
    said = "nothing was published" if command == "GET" else f"perhaps sent: {wheel.name}"
    assert said in message


def test_an_index_that_cannot_be_reached(checkout: Checkout, wheel: Path) -> None:
    message = checkout.refusal(EnvironmentFailed, "http://127.0.0.1:1/")
    assert "http://127.0.0.1:1/simple/ does not answer" in message
    assert "nothing was published" in message


# Which index


def test_the_simple_index_is_found(checkout: Checkout, wheel: Path) -> None:
    taken = Index()

    def devpi(request: BaseHTTPRequestHandler) -> None:
        if request.command == "POST" or request.path.startswith("/user/dev/+simple/"):
            taken(request)
            taken.files[wheel.name] = sha256(wheel)
        else:
            answer(request, 404)

    with stub_server(devpi) as url:
        message = checkout.refusal(UsageFailure, url + "user/")
        assert f"There is no package index at {url}user/simple/" in message
        assert taken.uploads == 0
        assert how(checkout.publish(url + "user/dev")) == [ALREADY_THERE]
        index = url + "user/dev/+simple"
        assert how(checkout.publish(url + "x/", index=index)) == [ALREADY_THERE]


@pytest.mark.parametrize(
    ("repository", "words"),
    [
        ("nowhere", "'nowhere' has no entry in [tool.gate.publish]"),
        ("http://index.example.org/", "has no entry"),
        ("http://ada:s3cret@127.0.0.1:1/", "must not hold a user name or password"),
    ],
)
def test_repositories_that_make_no_sense(
    repository: str, words: str, checkout: Checkout, wheel: Path
) -> None:
    assert words in checkout.refusal(UsageFailure, repository)


def test_a_named_index_is_not_told_where_to_look(checkout: Checkout, wheel: Path) -> None:
    table = '[tool.gate.publish.own]\nprofiles = ["cpu"]\n'
    urls = 'url = "http://127.0.0.1:1/"\nindex = "http://127.0.0.1:1/simple/"\n'
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write(table + urls)
    checkout.release()
    checkout.attest(wheel)
    message = checkout.refusal(UsageFailure, "own", index="http://127.0.0.1:2/simple/")
    assert "pyproject.toml says that it is http://127.0.0.1:1/simple/" in message


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
def test_usage_errors_exit_2(gate: Gate, arguments: list[str], words: str) -> None:
    done = gate("publish", *arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
