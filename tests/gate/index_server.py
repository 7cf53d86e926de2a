"""Package indexes on loopback: a real one, watched, and one that answers as it is told."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LOGIN = ("ada", "s3cret-word")
# Ends with its standard input, so that it never outlives the tests.
PYPISERVER = """
import json, os, pathlib, sys, threading
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
import pypiserver

class Quiet(WSGIRequestHandler):
    def log_message(self, *arguments):
        pass

class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

settings = json.loads(sys.argv[1])
login, roots = settings.pop("login"), [pathlib.Path(settings.pop("root"))]
app = pypiserver.app(roots=roots, auther=lambda *given: list(given) == login, **settings)
server = make_server("127.0.0.1", 0, app, Server, Quiet)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
print(server.server_port, flush=True)
server.serve_forever()
"""


def nothing(_number: int) -> None:
    pass


@dataclass
class PypiServer:
    """pypiserver, of which every request is known and can be held up.

    Attributes:
        folder: where it keeps its files.
        url: where it is.
        requests: method and path of each request.
        users: who logged in for each upload.
        before: called with the number of an upload before the server sees it.
        after: called with the number of an upload when the server has stored it.
    """

    folder: Path
    url: str = ""
    requests: list[str] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    before: Callable[[int], None] = nothing
    after: Callable[[int], None] = nothing

    @property
    def uploads(self) -> int:
        return sum(request.startswith("POST") for request in self.requests)

    @property
    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.folder.iterdir())}


@contextmanager
def pypi_server(folder: Path, *, private: bool = False, **settings: Any) -> Iterator[PypiServer]:
    """A server that asks for ``LOGIN`` to upload, and where it is private to read as well."""
    folder.mkdir(parents=True, exist_ok=True)
    actions = ["update", "list", "download"] if private else ["update"]
    given = {"disable_fallback": True, "authenticate": actions, "login": LOGIN, **settings}
    arguments = json.dumps({"root": str(folder), **given})
    watched = PypiServer(folder)
    with subprocess.Popen(
        [sys.executable, "-Wignore", "-c", PYPISERVER, arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with _server(lambda request: _relay(request, watched, port)) as url:
            watched.url = url
            yield watched
        process.kill()


def _relay(request: BaseHTTPRequestHandler, watched: PypiServer, port: int) -> None:
    watched.requests.append(f"{request.command} {request.path}")
    number = watched.uploads if request.command == "POST" else 0
    body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
    if number:
        words = request.headers.get("Authorization", "").partition(" ")[2]
        watched.users.append(base64.b64decode(words).decode().partition(":")[0])
        watched.before(number)
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(request.command, request.path, body, dict(request.headers))
    with connection.getresponse() as response:
        data = response.read()
    connection.close()
    if number:
        watched.after(number)
    headers = {"Location": response.headers["Location"]} if "Location" in response.headers else {}
    answer(request, response.status, data, response.headers["Content-Type"], **headers)


@contextmanager
def stub_server(respond: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server that answers every request by calling ``respond``; yields its URL."""

    def read_first(request: BaseHTTPRequestHandler) -> None:
        request.rfile.read(int(request.headers.get("Content-Length", 0)))
        respond(request)

    with _server(read_first) as url:
        yield url


@contextmanager
def _server(respond: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(ConnectionError):  # whoever asked has gone
                respond(self)

        do_POST = do_GET

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(
    request: BaseHTTPRequestHandler,
    status: int,
    body: bytes | str = b"",
    content_type: str = "text/plain",
    **headers: str,
) -> None:
    """Send a whole answer."""
    data = body.encode() if isinstance(body, str) else body
    request.send_response(status)
    sizes = {"Content-Type": content_type, "Content-Length": str(len(data))}
    for name, value in {**sizes, **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(data)
