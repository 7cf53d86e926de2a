"""What git says about the checkout the gate runs from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from gate.errors import EnvironmentFailed, EvidenceRejected, UsageFailure, WheelRejected
from gate.runner import Runner
from gate.scratch import scratch

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Repository:
    """The checkout at ``root``; without git or a commit its answers are empty."""

    runner: Runner
    root: Path = ROOT

    def commit(self) -> str:
        """Return HEAD's full id, with ``-dirty`` unless git says that nothing differs from it."""
        head = self._git("rev-parse", "HEAD") or ""
        return f"{head}-dirty" if head and self._git("status", "--porcelain") != "" else head

    def commit_time(self) -> str:
        """Return HEAD's commit time in seconds since 1970."""
        return self._git("log", "-1", "--format=%ct") or ""

    def demand_tag(self, tag: str) -> None:
        """Check that ``tag`` names the clean HEAD.

        Raises:
            UsageFailure: it is no version tag, does not exist, or is not what is checked out.
        """
        tag_version(tag)
        tagged = self._git("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
        if not tagged:
            known = self._git("tag", "--points-at", "HEAD") or "none"
            raise UsageFailure(
                f"There is no tag {tag}.",
                cause=f"tags of the commit that is checked out: {known}",
                next_step=f"git tag {tag}, or --no-tag-check",
            )
        head = self._git("rev-parse", "HEAD") or "unknown"
        if tagged != head:
            raise UsageFailure(
                f"Tag {tag} is {tagged[:12]}, but {head[:12]} is checked out.",
                next_step=f"git checkout {tag}, or --no-tag-check",
            )
        if changes := self._git("status", "--porcelain"):
            raise UsageFailure(
                f"The checkout differs from tag {tag}:\n{changes}",
                next_step="commit, stash or remove these, or --no-tag-check",
            )

    def demand_release(self, version: Version) -> str:
        """Check that the clean HEAD carries the tag of ``version``; return HEAD's full id.

        Raises:
            EvidenceRejected: it does not, or there is no telling.
        """
        head = self._git("rev-parse", "HEAD")
        if not head:
            raise EvidenceRejected(
                f"{self.root} is no git checkout, so nothing shows what is released.",
                next_step=f"publish from a clone of the repository, at tag v{version}",
            )
        # Not as the user's configuration likes to see it.
        options = ("--porcelain", "--untracked-files=normal", "--ignore-submodules=none")
        changes = self._git("status", *options)
        if changes != "":
            raise EvidenceRejected(
                f"The checkout differs from the commit {head[:12]}.",
                findings=(changes or "git cannot tell how").splitlines(),
                next_step="commit, stash or remove these, then build and gate again",
            )
        if version not in map(_version_or_none, self._words("tag", "--points-at", "HEAD")):
            raise self._untagged(version, head)
        return head

    def _untagged(self, version: Version, head: str) -> EvidenceRejected:
        elsewhere = [tag for tag in self._words("tag") if _version_or_none(tag) == version]
        if not elsewhere:
            return EvidenceRejected(
                f"There is no tag for version {version}.",
                next_step=f"git tag v{version} && git push origin v{version}, if {head[:12]} "
                "is the commit to release",
            )
        tag = elsewhere[0]
        tagged = self._git("rev-parse", f"refs/tags/{tag}^{{commit}}") or "unknown"
        return EvidenceRejected(
            f"Tag {tag} is {tagged[:12]}, but {head[:12]} is checked out.",
            next_step=f"git checkout {tag}, then publish what was built and gated there",
        )

    def _words(self, *arguments: str) -> list[str]:
        return (self._git(*arguments) or "").split()

    def _git(self, *arguments: str) -> str | None:
        """Return what git prints, or None where it fails."""
        with scratch("git") as folder:
            try:
                outcome = self.runner.run(
                    ["git", "-C", self.root, *arguments],
                    env={name: os.environ.get(name, "") for name in ("PATH", "HOME")},
                    cwd=folder,
                    log=folder / "git.log",
                    timeout=60,
                )
            except EnvironmentFailed:
                return None
            # A status begins with a space where the index has no change.
            return outcome.output().strip("\n") if outcome.ok else None


def tag_version(tag: str) -> Version:
    """Return the version that a tag such as ``v1.2.0`` stands for.

    Raises:
        UsageFailure: it stands for none.
    """
    try:
        return Version(re.sub(r"^v", "", tag))
    except InvalidVersion:
        raise UsageFailure(
            f"TAG {tag!r} is not a version tag such as v1.2.0.",
            next_step="a wheel is given with --wheel",
        ) from None


def _version_or_none(tag: str) -> Version | None:
    try:
        return tag_version(tag)
    except UsageFailure:
        return None


def demand_version(tag: str, version: Version) -> None:
    """Check that a wheel's version is the one that ``tag`` stands for.

    Raises:
        WheelRejected: it is another.
    """
    if tag_version(tag) != version:
        raise WheelRejected(
            f"The wheel's version is {version}, the tag is {tag}.",
            next_step="change `version` in pyproject.toml or gate the right tag",
        )
