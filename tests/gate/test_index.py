from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from gate.errors import EnvironmentFailed, IndexFailing, IndexRefused
from gate.index import SIMPLE_HTML, SIMPLE_JSON, Held, Index
from tests.gate.index_server import LOGIN, answer, pypi_server, stub_server

BYTES = b"the bytes of a wheel"
SHA256 = hashlib.sha256(BYTES).hexdigest()
NAME = "demo-1.0+cpu-py3-none-any.whl"


def index(simple: str, **options: Any) -> Index:
    return Index(simple=simple, **{"proxies": {}, **options})


def page(**changes: Any) -> str:
    file = {"filename": NAME, "url": "../../files/x.whl", "hashes": {"sha256": SHA256}}
    return json.dumps({"meta": {"api-version": "1.4"}, "name": "demo", "files": [file], **changes})


def listing(kind: str, body: str) -> dict[str, Held] | None:
    """What is read from this answer."""
    with stub_server(lambda request: answer(request, 200, body, kind)) as url:
        return index(url + "simple/").files("Demo")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (SIMPLE_JSON, page()),
        ("application/json; charset=utf-8", page()),
        (SIMPLE_JSON, page().replace(SHA256, SHA256.upper())),
        ("text/html", f'<a href="../../files/{NAME}#sha256={SHA256}">x</a>'),
        (SIMPLE_HTML, f"<A class=b HREF=/files/{NAME.replace('+', '%2B')}#sha256={SHA256}>x</A>"),
        ("text/html", f'<base href="/files/"><a href="{NAME}#sha256={SHA256}">x</a>'),
    ],
)
def test_both_forms_of_the_simple_index_are_read(kind: str, body: str) -> None:
    found = listing(kind, body)
    assert found is not None
    assert list(found) == [NAME]
    assert found[NAME].sha256 == SHA256
    assert found[NAME].url.startswith("http://127.0.0.1:")
    assert "/files/" in found[NAME].url


def test_a_proxy_is_for_other_machines() -> None:
    asked: list[str] = []

    def proxy(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        answer(request, 200, page(), SIMPLE_JSON)

    with stub_server(proxy) as other, stub_server(lambda request: answer(request, 404)) as url:
        assert index(url, proxies={"http": other}).files("demo") is None
        assert asked == []
        assert index("http://index.invalid/", proxies={"http": other}).files("demo") is not None
    assert asked == ["http://index.invalid/demo/"]


@pytest.mark.parametrize(
    ("kind", "body", "why"),
    [
        (SIMPLE_JSON, "{", "no simple index"),
        (SIMPLE_JSON, "[]", "no simple index"),
        (SIMPLE_JSON, page(files=[{"filename": NAME}]), "no simple index"),
        (SIMPLE_JSON, page(files=[3]), "no simple index"),
        (SIMPLE_JSON, page(meta={"api-version": "2.0"}), "version 2.0 of the API"),
        (SIMPLE_JSON, page().replace(SHA256, "abc"), "'abc' is no sha256"),
        ("text/html", f'<a href="/{NAME}#sha256=abc">x</a>', "'abc' is no sha256"),
        ("text/plain", "hello", "content type is text/plain"),
        (
            "text/html",
            f'<a href="/a/{NAME}#sha256={SHA256}">x</a><a href="/b/{NAME}">x</a>',
            "twice, with different digests",
        ),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(kind: str, body: str, why: str) -> None:
    with pytest.raises(IndexRefused, match=why) as caught:
        listing(kind, body)
    assert caught.value.exit_code == 6


@pytest.mark.parametrize("algorithm", ["sha256", "md5"])
@pytest.mark.parametrize("private", [False, True])
def test_a_real_index_tells_the_digest(tmp_path: Path, algorithm: str, private: bool) -> None:
    with pypi_server(tmp_path / "index", private=private, hash_algo=algorithm) as server:
        (server.folder / "demo-1.0.tar.gz").write_bytes(BYTES)
        asked = index(server.url + "simple/", login=LOGIN)
        assert asked.exists()
        assert asked.files("absent") is None
        found = asked.files("demo")
        assert found is not None
        file = found["demo-1.0.tar.gz"]
        assert (file.sha256 is None) == (algorithm == "md5")
        assert asked.sha256(file) == SHA256


def test_a_private_index_needs_a_login(tmp_path: Path) -> None:
    with pypi_server(tmp_path / "index", private=True) as server:
        for login in (None, ("ada", "wrong")):
            with pytest.raises(IndexRefused, match=r"answers 40[13]") as caught:
                index(server.url + "simple/", login=login).files("demo")
            assert "set TWINE_USERNAME and TWINE_PASSWORD" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, IndexRefused), (403, IndexRefused), (500, IndexFailing), (503, IndexFailing),
     (429, IndexFailing)],
)  # fmt: skip
def test_an_answer_of_another_status(status: int, error: type[IndexRefused]) -> None:
    with (
        stub_server(lambda request: answer(request, status)) as url,
        pytest.raises(error, match=f"answers {status}") as caught,
    ):
        index(url).files("demo")
    assert caught.type is error


def redirecting(to: Callable[[str], str]) -> Callable[[BaseHTTPRequestHandler], None]:
    def respond(request: BaseHTTPRequestHandler) -> None:
        if request.path == "/demo/":
            answer(request, 301, Location=to(request.headers["Host"]))
        else:
            answer(request, 200, page(), SIMPLE_JSON)

    return respond


def test_redirects_are_followed_on_the_same_host_only() -> None:
    with stub_server(redirecting(lambda _host: "/simple/demo/")) as url:
        assert list(index(url).files("demo") or ()) == [NAME]
    # As pypiserver does with projects that it does not have.
    with stub_server(redirecting(lambda _host: "https://pypi.org/simple/demo/")) as url:
        assert index(url).files("demo") is None
    with (
        stub_server(redirecting(lambda _host: "/demo/")) as url,
        pytest.raises(IndexRefused, match="more than 5 times"),
    ):
        index(url).files("demo")


def test_the_login_does_not_follow_to_another_host() -> None:
    seen: list[str | None] = []

    def elsewhere(request: BaseHTTPRequestHandler) -> None:
        seen.append(request.headers["Authorization"])
        answer(request, 401)

    with stub_server(elsewhere) as other, stub_server(elsewhere) as url:
        file = Held(name="x", url=other + "x", sha256=None)
        with pytest.raises(IndexRefused, match="answers 401"):
            index(url, login=LOGIN).sha256(file)
    assert seen == [None]


@pytest.mark.parametrize("when", ["at once", "in its headers", "in its body"])
def test_an_index_that_hangs_is_given_up(when: str) -> None:
    release = threading.Event()

    def hang(request: BaseHTTPRequestHandler) -> None:
        if when != "at once":
            request.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n")
        if when == "in its body":
            request.wfile.write(b"Content-Length: 1000\r\n\r\n<a")
        # A byte now and then must not keep anyone waiting.
        while not release.wait(0.05):
            request.wfile.write(b"x")

    with stub_server(hang) as url:
        try:
            with pytest.raises(EnvironmentFailed, match=r"no complete answer|timed out") as caught:
                index(url, timeout=0.3).files("demo")
        finally:
            release.set()
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/", "http://127.0.0.1:x/", "http://index.invalid/", "ftp://x/"],
)
def test_an_index_that_cannot_be_reached(url: str) -> None:
    with pytest.raises(EnvironmentFailed, match="does not answer") as caught:
        index(url).files("demo")
    assert url in str(caught.value)


def test_a_file_that_is_listed_but_missing() -> None:
    with stub_server(lambda request: answer(request, 404)) as url:
        with pytest.raises(IndexRefused, match="does not have it"):
            index(url).sha256(Held(name="x", url=url + "x", sha256=None))
        assert not index(url).exists()


def test_an_endless_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gate.index.MAX_PAGE_BYTES", 1000)
    with pytest.raises(EnvironmentFailed, match="longer than 1000 bytes"):
        listing("text/html", "x" * 1001)
