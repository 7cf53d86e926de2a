"""What git says about the checkout the gate runs from."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from gate.errors import EnvironmentFailed, UsageFailure, WheelRejected
from gate.runner import Runner

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Repository:
    """The checkout at ``root``; without git or a commit its answers are empty."""

    runner: Runner
    root: Path = ROOT

    def commit(self) -> str:
        """Return HEAD's full id, with ``-dirty`` where tracked or new files differ from it."""
        head = self._git("rev-parse", "HEAD")
        return f"{head}-dirty" if head and self._git("status", "--porcelain") else head

    def commit_time(self) -> str:
        """Return HEAD's commit time in seconds since 1970."""
        return self._git("log", "-1", "--format=%ct")

    def demand_tag(self, tag: str, version: Version) -> None:
        """Check that ``tag`` names this version and the clean HEAD.

        Raises:
            UsageFailure: it is no version tag, does not exist, or is not what is checked out.
            WheelRejected: the wheel has another version.
        """
        if tag_version(tag) != version:
            raise WheelRejected(
                f"The wheel's version is {version}, the tag is {tag}.",
                next_step="change `version` in pyproject.toml or gate the right tag",
            )
        tagged = self._git("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
        commit = self.commit()
        if not tagged:
            raise UsageFailure(f"There is no tag {tag}.", next_step=f"git tag {tag}")
        if tagged != commit:
            raise UsageFailure(
                f"Tag {tag} is {tagged[:12]}, but the checkout is {commit[:12] or 'unknown'}"
                f"{' with uncommitted changes' if commit.endswith('-dirty') else ''}.",
                next_step=f"git checkout {tag}, or --no-tag-check",
            )

    def _git(self, *arguments: str) -> str:
        with tempfile.TemporaryDirectory(prefix="gate-git-") as scratch:
            try:
                outcome = self.runner.run(
                    ["git", "-C", self.root, *arguments],
                    env={name: os.environ.get(name, "") for name in ("PATH", "HOME")},
                    cwd=Path(scratch),
                    log=Path(scratch) / "git.log",
                    timeout=60,
                )
            except EnvironmentFailed:
                return ""
            return outcome.output().strip() if outcome.ok else ""


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
