"""What may be published: everything here is refused before the index hears of it."""

from __future__ import annotations

import gzip
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gate.errors import EvidenceRejected, UsageFailure, WheelRejected
from tests.gate.index_server import PypiServer, pypi_server
from tests.gate.release import Checkout

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PypiServer]:
    with pypi_server(tmp_path_factory.mktemp("index")) as running:
        yield running


@pytest.fixture
def checkout(tmp_path: Path, server: PypiServer) -> Iterator[Checkout]:
    """A release that nobody may have published when the test is over."""
    yield Checkout.make(tmp_path / "checkout")
    assert server.requests == []


@pytest.fixture
def wheel(checkout: Checkout) -> Path:
    made = checkout.wheel()
    checkout.attest(made)
    return made


def refused(checkout: Checkout, server: PypiServer, *files: Path, **options: object) -> str:
    message = checkout.refusal(EvidenceRejected, server.url, *files, **options)
    assert "nothing was published" in message
    assert "next:" in message
    return message


def test_without_evidence(checkout: Checkout, server: PypiServer, tmp_path: Path) -> None:
    wheel = checkout.wheel()
    assert "does not exist" in refused(checkout, server)
    checkout.attest(wheel)
    assert "does not exist" in refused(checkout, server, evidence=tmp_path / "elsewhere")


def test_one_wheel_without_evidence_stops_the_others(
    checkout: Checkout, server: PypiServer, wheel: Path
) -> None:
    other = checkout.wheel("1")
    message = refused(checkout, server)
    assert "does not cover 1 of 2 wheels" in message
    assert other.name in message


def test_with_evidence_of_other_bytes(checkout: Checkout, server: PypiServer, wheel: Path) -> None:
    with wheel.open("ab") as file:
        file.write(b"x")
    assert "evidence is for other bytes" in refused(checkout, server)


def test_when_the_tests_changed_since(checkout: Checkout, server: PypiServer, wheel: Path) -> None:
    (checkout.root / "tests/regression/single/test_two.py").write_text("def test_two(): pass\n")
    checkout.release()
    assert "stale for profile cpu: the tests changed since" in refused(checkout, server)


def policy(checkout: Checkout, server: PypiServer, profiles: str, signers: str = "") -> None:
    table = f"[tool.gate.publish.own]\nprofiles = [{profiles}]\nsigners = [{signers}]\n"
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write(f'{table}url = "{server.url}"\nindex = "{server.url}simple/"\n')
    checkout.release()


def test_without_a_profile_that_the_index_requires(checkout: Checkout, server: PypiServer) -> None:
    policy(checkout, server, '"cpu", "gpu"')
    checkout.attest(checkout.wheel())
    assert "lacks profile gpu (there is cpu)" in refused(checkout, server, repository="own")
    # Its URL is no way around it.
    assert "lacks profile gpu (there is cpu)" in refused(checkout, server)


def test_without_the_signature_that_the_index_requires(
    checkout: Checkout, server: PypiServer
) -> None:
    policy(checkout, server, '"cpu"', '"ada@example.org"')
    checkout.attest(checkout.wheel())
    assert "ada@example.org" in refused(checkout, server, repository="own")


@pytest.mark.parametrize(
    ("path", "text"),
    [("notes.txt", "x"), ("README.md", "changed"), ("src/mini/__init__.py", "answer = 41\n")],
)
def test_from_a_dirty_checkout(
    path: str, text: str, checkout: Checkout, server: PypiServer, wheel: Path
) -> None:
    # What the user's git is told not to show is there all the same.
    checkout.git("config", "status.showUntrackedFiles", "no")
    (checkout.root / path).write_text(text)
    message = refused(checkout, server)
    assert "differs from the commit" in message
    assert path in message


def test_from_a_checkout_without_the_tag(
    checkout: Checkout, server: PypiServer, wheel: Path
) -> None:
    checkout.git("tag", "--delete", "v1.0")
    checkout.git("tag", "v2.0")
    message = refused(checkout, server)
    assert "There is no tag for version 1.0" in message
    assert "git tag v1.0" in message


def test_from_another_commit_than_the_tag(checkout: Checkout, server: PypiServer) -> None:
    checkout.git("commit", "--quiet", "--allow-empty", "--message", "later")
    checkout.attest(checkout.wheel())
    message = refused(checkout, server)
    assert "Tag v1.0 is" in message
    assert "is checked out" in message
    assert "git checkout v1.0" in message


def test_from_outside_a_checkout(checkout: Checkout, server: PypiServer, wheel: Path) -> None:
    shutil.rmtree(checkout.root / ".git")
    assert "is no git checkout" in refused(checkout, server)


@pytest.mark.parametrize(
    "changes",
    [
        {"commit": "c" * 40},
        {"commit": None},
        {"environment": {"torch": "2.13.0", "python": "3.11.7", "dirty": True}},
        {"environment": {"torch": "2.13.0", "python": "3.11.7"}},
    ],
)
def test_with_evidence_from_another_or_a_dirty_checkout(
    changes: dict[str, object], checkout: Checkout, server: PypiServer
) -> None:
    wheel = checkout.wheel()
    checkout.attest(wheel, **changes)
    message = refused(checkout, server)
    assert "Evidence was not made in a clean checkout of" in message
    assert f"{wheel.name}: profile cpu" in message
    # A second, good statement on another profile does not stand in for it.
    policy(checkout, server, '"cpu", "gpu"')
    checkout.attest(wheel, **changes)
    checkout.attest(wheel, profile="gpu")
    assert f"{wheel.name}: profile cpu" in refused(checkout, server, repository="own")


def test_a_wheel_that_is_not_made_of_the_source(checkout: Checkout, server: PypiServer) -> None:
    wheel = checkout.wheel(code=b"answer = 43\n")
    checkout.attest(wheel)
    message = checkout.refusal(WheelRejected, server.url)
    assert "mini/__init__.py: differs from the source tree" in message


def test_metadata_that_an_index_would_refuse(checkout: Checkout, server: PypiServer) -> None:
    wheel = checkout.wheel(metadata="Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    checkout.attest(wheel)
    message = checkout.refusal(WheelRejected, server.url)
    assert "An index would refuse the metadata" in message
    assert "long_description" in message


def test_two_files_of_one_name(checkout: Checkout, server: PypiServer, wheel: Path) -> None:
    other = checkout.wheel(folder="dist/other", method=zipfile.ZIP_STORED)
    checkout.attest(other)
    message = checkout.refusal(UsageFailure, server.url, wheel, other)
    assert f"Two files are called {wheel.name}" in message


def test_an_sdist_without_its_wheel(checkout: Checkout, server: PypiServer, wheel: Path) -> None:
    sdist = checkout.root / "dist" / "mini-1.0.tar.gz"
    sdist.write_bytes(gzip.compress(b""))
    assert "an sdist is published together with its wheel" in refused(checkout, server, sdist)
    other = sdist.rename(sdist.with_name("mini-1.1.tar.gz"))
    assert "its wheel is not among the files" in refused(checkout, server, wheel, other)


def test_an_sdist_that_the_checkout_does_not_build(
    checkout: Checkout, server: PypiServer, wheel: Path
) -> None:
    sdist = checkout.root / "dist" / "mini-1.0.tar.gz"
    sdist.write_bytes(gzip.compress(b""))
    message = refused(checkout, server, wheel, sdist)
    assert f"{sdist.name}: this checkout builds another {sdist.name}" in message
    # Nor is an sdist published with a wheel that is not built from it.
    assert f"{sdist.name}: this checkout builds another {wheel.name}" in message


def test_a_file_that_is_no_sdist(checkout: Checkout, server: PypiServer, wheel: Path) -> None:
    odd = checkout.root / "dist" / "odd.tar.gz"
    odd.write_bytes(b"")
    assert "not an sdist" in checkout.refusal(WheelRejected, server.url, wheel, odd)
