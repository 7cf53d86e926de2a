"""Publishing to indexes that misbehave, and finding out which index is meant."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from gate.errors import EnvironmentFailed, IndexFailing, IndexRefused, UsageFailure
from gate.index import SIMPLE_JSON
from gate.publish import ALREADY_THERE, UPLOADED, Published
from gate.upload import Twine
from tests.gate.index_server import answer, stub_server
from tests.gate.release import Checkout

pytestmark = pytest.mark.processes


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout.make(tmp_path / "checkout")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
def wheel(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Of no interest here, and it takes a second.
    monkeypatch.setattr(Twine, "check", lambda _self, _files: "")
    made = checkout.wheel()
    checkout.attest(made)
    return made


def how(published: list[Published]) -> list[str]:
    return [file.how for file in published]


def test_an_index_that_fails(checkout: Checkout, wheel: Path) -> None:
    with stub_server(Index(500)) as url:
        message = checkout.refusal(IndexFailing, url)
    assert f"{url} did not accept {wheel.name}" in message
    assert f"perhaps sent: {wheel.name}" in message
    assert "run the same command again" in message


class Clock:
    """Time that passes as fast as it is asked for."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1
        return self.now

    def sleep(self, _seconds: float) -> None:
        pass


def test_an_index_that_does_not_show_what_it_took(
    checkout: Checkout, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gate.publish.time", Clock())
    index = Index()
    with stub_server(index) as url:
        message = checkout.refusal(IndexRefused, url)
    assert "Within 30 s the index did not show what was sent" in message
    assert f"uploaded: {wheel.name}" in message
    assert index.uploads == 1
    assert index.listings > 5


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
