from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from gate.errors import EvidenceRejected, UsageFailure, WheelRejected
from gate.repository import Repository, demand_version
from gate.runner import Runner


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.invalid")
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True)

    git("init", "--quiet")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "--message", "one")
    git("tag", "v1.0")
    git("commit", "--quiet", "--allow-empty", "--message", "two")
    git("tag", "v1.1")
    return Repository(runner=Runner(), root=tmp_path)


def test_the_tag_of_a_clean_head_is_accepted(repository: Repository) -> None:
    repository.demand_tag("v1.1")
    demand_version("v1.1", Version("1.1"))
    assert len(repository.commit()) == 40
    assert int(repository.commit_time()) > 0


def test_another_commits_tag_is_refused(repository: Repository) -> None:
    with pytest.raises(UsageFailure, match="is checked out") as caught:
        repository.demand_tag("v1.0")
    assert "git checkout v1.0" in str(caught.value)


def test_a_missing_tag_shows_those_of_the_checkout(repository: Repository) -> None:
    with pytest.raises(UsageFailure, match=r"There is no tag 1\.1") as caught:
        repository.demand_tag("1.1")
    assert "v1.1" in str(caught.value)


def test_uncommitted_changes_are_listed(repository: Repository) -> None:
    (repository.root / "junk").write_text("")
    (repository.root / "file").write_text("2")
    with pytest.raises(UsageFailure, match=r"\n M file\n\?\? junk"):
        repository.demand_tag("v1.1")
    assert repository.commit().endswith("-dirty")


def test_what_git_cannot_tell_is_not_clean(repository: Repository) -> None:
    (repository.root / ".git" / "index").write_text("broken")
    assert repository.commit().endswith("-dirty")


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path) -> None:
    assert Repository(runner=Runner(), root=tmp_path).commit() == ""


def test_a_wheel_of_another_version_is_rejected() -> None:
    with pytest.raises(WheelRejected, match=r"version is 1\.0, the tag is v2\.0"):
        demand_version("v2.0", Version("1.0"))


def test_a_release_is_the_clean_head_at_the_tag_of_its_version(repository: Repository) -> None:
    # However the version is written.
    for version in ("1.1", "1.1.0"):
        assert repository.demand_release(Version(version)) == repository.commit()
    for version, words in (("1.0", "Tag v1.0 is"), ("1.2", "no tag for version 1.2")):
        with pytest.raises(EvidenceRejected, match=words):
            repository.demand_release(Version(version))


def test_an_annotated_tag_counts(repository: Repository) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.invalid")
    tag = ("tag", "--annotate", "--message", "release", "v1.2")
    subprocess.run(["git", "-C", repository.root, *identity, *tag], check=True)
    assert repository.demand_release(Version("1.2")) == repository.commit()


@pytest.mark.parametrize("broken", [".git/index", ".git/HEAD"])
def test_a_release_from_what_git_cannot_read_is_refused(
    repository: Repository, broken: str
) -> None:
    (repository.root / broken).write_text("broken")
    with pytest.raises(EvidenceRejected, match=r"cannot tell|is no git checkout"):
        repository.demand_release(Version("1.1"))
