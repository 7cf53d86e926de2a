from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.version import Version

from gate.errors import EnvironmentFailed
from gate.fetch import fetch
from gate.runner import Runner
from tests.gate.conftest import SITE, Gate
from tests.gate.wheel_builder import WheelBuilder

pytestmark = pytest.mark.processes


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """A simple index: the folders below ``tmp_path / "index"``, one for each project."""
    (tmp_path / "index").mkdir()
    handler = partial(Quiet, directory=tmp_path / "index")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def get(index: str, folder: Path, version: str = "1.0") -> Path:
    folder.mkdir()
    return fetch("Some.Name", Version(version), index=index, folder=folder, runner=Runner())


def test_the_bytes_of_the_index_and_nothing_else(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever pip's configuration says, and whatever the wheel requires.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    # Proxies are for other machines.
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1/")
    metadata = (
        "Metadata-Version: 2.4\nName: some-name\nVersion: {version}\nRequires-Dist: absent\n"
    )
    project = tmp_path / "index/some-name"
    for version in ("1.0", "1.1"):
        WheelBuilder(name="some_name", version=version, metadata=metadata).write(project)
    wheel = get(index, tmp_path / "1")
    assert wheel.name == "some_name-1.0-py3-none-any.whl"
    assert wheel.read_bytes() == (project / wheel.name).read_bytes()


def test_what_an_index_lacks(index: str, tmp_path: Path) -> None:
    WheelBuilder(name="some_name").write(tmp_path / "index/some-name")
    with pytest.raises(EnvironmentFailed, match=r"(?s)download Some.Name==2.0 from .*try again"):
        get(index, tmp_path / "1", "2.0")
    (tmp_path / "index/some-name/some_name-2.0.tar.gz").write_text("sdists are not built")
    with pytest.raises(EnvironmentFailed, match="No matching distribution"):
        get(index, tmp_path / "2", "2.0")


def test_a_run_gates_what_it_downloads(gate: Gate, index: str, tmp_path: Path) -> None:
    run = ("run", "v1.0", "--no-tag-check", "--from", index, "--site", SITE)
    done = gate(*run, "--evidence", tmp_path / "evidence")
    assert done.returncode == 3
    assert f"Could not download gefen-cuda==1.0 from {index}" in done.stderr
    wheel = WheelBuilder(name="gefen_cuda").write(tmp_path / "index/gefen-cuda")
    done = gate(*run, "--evidence", tmp_path / "evidence")
    assert done.returncode == 4
    assert wheel.name in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "testpypi"], "--from needs the TAG"),
        (["v1.0", "--from", "testpypi", "--wheel", "x.whl"], "and no --wheel"),
        (["v1.0", "--no-tag-check", "--from", "nowhere"], "known are testpypi, pypi"),
        (["v1.0", "--from", "--fresh"], "--from needs a value"),
        (["v1.0", "--from", ""], "--from needs a value"),
    ],
)
def test_usage(gate: Gate, arguments: list[str], words: str) -> None:
    done = gate("run", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
