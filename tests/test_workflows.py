"""The workflows: what the linters must find in broken copies, and what linters do not know."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").iterdir())
RELEASE = (ROOT / ".github/workflows/release.yml").read_text()
CHECKOUT = "actions/checkout@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1"


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "ci/check_workflows.py", folder]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_linters_find_nothing() -> None:
    done = check(ROOT / ".github")
    assert done.returncode == 0, done.stdout + done.stderr


BROKEN = {
    "an action that is not pinned": (CHECKOUT, "actions/checkout@v7", "unpinned-uses"),
    "no permissions": ("permissions: {}\n", "", "excessive-permissions"),
    "too many permissions": ("permissions: {}\n", "permissions: write-all\n", "excessive-perm"),
    "input in a command": ('"$TAG" --wheel', "${{ github.ref_name }} --wheel", "template-inj"),
    "credentials on disk": ("persist-credentials: false", "fetch-depth: 1", "artipacked"),
    "runs that overlap": ("concurrency:\n  group: release\n", "env:\n", "concurrency"),
    "an unknown runner": ("[self-hosted, gpu]", "[self-hosted, gpus]", 'label "gpus" is unknown'),
    "an unknown job": ("needs: attest\n", "needs: attested\n", "attested"),
    "a typing error": ("timeout-minutes", "timeout-minute", "timeout-minute"),
    "a broken expression": ("!contains(github.ref_name, 'pre')", "!contains(x", "unexpected"),
    "an undefined value": ("profile }}\n      TAG", "profil }}\n      TAG", '"profil" is not'),
    "YAML that is none": ("jobs:\n", "jobs: [\n", "could not parse as YAML"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_the_linters_find_what_is_broken(tmp_path: Path, kind: str) -> None:
    before, after, words = BROKEN[kind]
    assert before in RELEASE
    shutil.copytree(ROOT / ".github", tmp_path / "github")
    changed = RELEASE.replace(before, after, 1)
    (tmp_path / "github/workflows/release.yml").write_text(changed)
    done = check(tmp_path / "github")
    assert done.returncode == 1
    assert words in done.stdout + done.stderr


def test_a_folder_without_workflows_is_an_error(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 1
    assert "there are no workflows" in done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_only_call_nox(path: Path) -> None:
    text = path.read_text()
    commands = re.findall(r"\brun:(.*)", text)
    assert commands
    for command in commands:
        assert re.fullmatch(r" \./ci/nox -s [a-z_ ]+( -- [-\w.*/\"$ ]+)?", command), command
    for action in re.findall(r"\buses:(.*)", text):
        assert re.fullmatch(r" actions/[-a-z]+@[0-9a-f]{40} # v[0-9.]+", action), action
    assert "secrets." not in text


def sessions() -> set[str]:
    return set(re.findall(r"@nox\.session\S*\ndef (\w+)", (ROOT / "noxfile.py").read_text()))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_the_sessions_that_workflows_call_exist(path: Path) -> None:
    called = re.findall(r"/ci/nox -s ([a-z ]+)", path.read_text())
    assert {name for names in called for name in names.split()} <= sessions()


def test_one_action_has_one_version() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    pins = set(re.findall(r"uses: (actions/[-a-z]+)(@.*)", text))
    assert len(pins) == len(dict(pins))


def job(name: str) -> str:
    """The text of one job of the release."""
    return re.split(rf"\n  {name}:\n", RELEASE)[1].partition("\n\n")[0]


def test_nothing_is_published_before_it_is_gated_and_attested() -> None:
    order = ["build", "cpu", "gpu", "verify", "attest", "testpypi", "testpypi-gate", "pypi"]
    assert re.findall(r"^  ([\w-]+):$", RELEASE.partition("jobs:")[2], re.M) == order
    needs = {name: re.findall(r"needs: \[?([\w, -]+)", job(name)) for name in order}
    assert needs == {
        "build": [],
        "cpu": ["build"],
        "gpu": ["build"],
        "verify": ["cpu, gpu"],
        "attest": ["verify"],
        "testpypi": ["attest"],
        "testpypi-gate": ["testpypi"],
        "pypi": ["testpypi-gate"],
    }
    assert [name for name in order if " -s build" in job(name)] == ["build"]
    assert "continue-on-error" not in RELEASE


def test_only_jobs_that_log_in_get_an_identity() -> None:
    jobs = re.findall(r"^  ([\w-]+):$", RELEASE.partition("jobs:")[2], re.M)
    trusted = [name for name in jobs if "id-token: write" in job(name)]
    assert trusted == ["attest", "testpypi", "pypi"]
    # Where its rules decide who may.
    assert "name: testpypi" in job("testpypi")
    assert "name: pypi" in job("pypi")


@pytest.mark.parametrize(
    "tag",
    [
        *("v1.0", "v0.1.0", "v1.0.post1", "v1.0-1", "v2026.11", "v1.0rc1", "v1.0a1", "v1.0b2"),
        *("v1.0.dev3", "v1.0.post1.dev2", "v1.0-preview1", "v1.0alpha", "v1.0C1", "v1.0RC1"),
    ],
)
def test_only_final_versions_reach_pypi(tag: str) -> None:
    letters = re.findall(r"!contains\(github\.ref_name, '(\w+)'\)", job("pypi"))
    # The function ignores case.
    published = not any(part in tag.lower() for part in letters)
    assert published == (not Version(tag).is_prerelease)
