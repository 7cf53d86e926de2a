from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from gate.errors import EnvironmentFailed
from gate.runner import Runner
from gate.upload import Access, Twine
from tests.gate.index_server import LOGIN, answer, stub_server
from tests.gate.release import ENVIRON, METADATA
from tests.gate.wheel_builder import WheelBuilder

TESTPYPI = "https://test.pypi.org/legacy/"


def twine(tmp_path: Path, **environ: str) -> Twine:
    return Twine(runner=Runner(), scratch=tmp_path, access=Access.of(environ))


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return WheelBuilder(metadata=METADATA).write(tmp_path)


@pytest.mark.parametrize("status", [302, 400, 401, 403, 503])
def test_what_the_index_says_reaches_the_user(tmp_path: Path, wheel: Path, status: int) -> None:
    def refuse(request: BaseHTTPRequestHandler) -> None:
        answer(request, status, "the reason", Location="http://127.0.0.1:1/")

    with stub_server(refuse) as url:
        failed = twine(tmp_path, **ENVIRON).upload(wheel, url, 60)
    assert failed is not None
    assert failed.status == status
    assert url in failed.said
    assert status in (302, 503) or "the reason" in failed.said


def test_the_password_is_taken_out_of_what_is_said(tmp_path: Path, wheel: Path) -> None:
    def echo(request: BaseHTTPRequestHandler) -> None:
        request.send_response(400, f"got {request.headers['Authorization']} {LOGIN[1]}")
        request.end_headers()

    with stub_server(echo) as url:
        failed = twine(tmp_path, **ENVIRON).upload(wheel, url, 60)
    assert failed is not None
    assert "got Basic *** ***" in failed.said


def test_without_a_login_an_open_index_takes_it(tmp_path: Path, wheel: Path) -> None:
    with stub_server(lambda request: answer(request, 200)) as url:
        assert twine(tmp_path).upload(wheel, url, 60) is None


def test_a_proxy_is_for_other_machines(tmp_path: Path, wheel: Path) -> None:
    asked: list[str] = []

    def proxy(request: BaseHTTPRequestHandler) -> None:
        asked.append(f"{request.command} {request.path}")
        answer(request, 400)

    with stub_server(proxy) as other, stub_server(lambda request: answer(request, 200)) as url:
        names = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
        proxies = {**dict.fromkeys(names, other), "no_proxy": "index.example.org"}
        behind_a_proxy = twine(tmp_path, **ENVIRON, **proxies)
        assert behind_a_proxy.upload(wheel, url, 60) is None
        assert asked == []
        failed = behind_a_proxy.upload(wheel, "http://index.invalid/legacy/", 60)
    assert failed is not None
    assert failed.status == 400
    assert asked == ["POST http://index.invalid/legacy/"]


def test_an_upload_that_got_no_answer_has_no_status(tmp_path: Path, wheel: Path) -> None:
    failed = twine(tmp_path).upload(wheel, "http://127.0.0.1:1/", 60)
    assert failed is not None
    assert failed.status is None
    assert "exit status 1" in failed.said


def test_metadata_that_only_warns_is_refused(tmp_path: Path, wheel: Path) -> None:
    assert twine(tmp_path).check([wheel]) == ""
    bare = WheelBuilder(version="2.0").write(tmp_path)
    assert "long_description" in twine(tmp_path).check([wheel, bare])


def test_of_the_environment_only_what_is_needed_is_kept() -> None:
    given = {
        "TWINE_PASSWORD": " pypi-token\n",
        "TWINE_REPOSITORY_URL": "https://example.org/",
        "TWINE_SKIP_EXISTING": "1",
        "TWINE_CERT": "/ca.pem",
        "HTTPS_PROXY": "http://proxy.example.org:3128",
        "PYTHONPATH": "/x",
        "GITHUB_ACTIONS": "true",
    }
    access = Access.of(given)
    assert access.login == ("__token__", "pypi-token")
    kept = ("TWINE_CERT", "HTTPS_PROXY", "GITHUB_ACTIONS")
    assert access.variables == {name: given[name] for name in kept}
    assert access.ca_file == "/ca.pem"
    assert access.proxies == {"https": "http://proxy.example.org:3128"}
    assert "pypi-token" not in repr(access)


def test_half_a_login_is_refused() -> None:
    with pytest.raises(EnvironmentFailed, match=r"'ada', but TWINE_PASSWORD is not set"):
        Access.of({"TWINE_USERNAME": "ada"})


def test_pypi_needs_a_token_or_a_platform_that_gives_one() -> None:
    for environ in ({"TWINE_PASSWORD": "x"}, {"GITHUB_ACTIONS": "true"}, {"GITLAB_CI": "true"}):
        Access.of(environ).demand_login(TESTPYPI)
    Access.of({}).demand_login("https://index.example.org/")
    with pytest.raises(EnvironmentFailed, match="nothing to log in to") as caught:
        Access.of({}).demand_login(TESTPYPI)
    assert "set TWINE_PASSWORD to an API token" in str(caught.value)
