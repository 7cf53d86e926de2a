"""Build the sdist and the wheel twice, in unlike surroundings, and accept only equal bytes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gate import kernels
from gate.errors import BuildFailed
from gate.repository import Repository
from gate.runner import Outcome, Runner
from gate.scratch import scratch
from gate.wheels import sha256_of

BUILD_TIMEOUT = 900.0
NOTE = "everything twice; CUDA kernels that are new to this machine take minutes"
DIGESTS = "SHA256SUMS"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SURROUNDINGS = (
    {"TZ": "UTC", "PYTHONHASHSEED": "0"},
    {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "1"},
)
# Zip files cannot hold an earlier time.
EARLIEST_EPOCH = 315532800


def build(repository: Repository, out: Path, runner: Runner) -> Path:
    """Build into ``out``, replacing what an earlier build of this project left there.

    Returns:
        The wheel.

    Raises:
        BuildFailed: the build breaks, is not reproducible or has metadata an index would refuse.
    """
    with scratch("build") as folder:
        builder = _Builder(folder, _epoch(repository), runner)
        first, second = folder / "first", folder / "second"
        builder.sdist(repository.root, first, SURROUNDINGS[0])
        one, two = (_unpack(next(first.iterdir()), folder / name) for name in ("one", "two"))
        builder.wheel(one, first, SURROUNDINGS[0])
        builder.wheel(two, second, SURROUNDINGS[1])
        # After its wheel: what that build left in the tree must not get into the sdist.
        builder.sdist(two, second, SURROUNDINGS[1])
        _demand_equal(first, second)
        if kernels.has_kernels(one):
            kernels.remember(one)
        builder.check(first)
        return _publish(first, out)


def _epoch(repository: Repository) -> int:
    """The time stamped into the archives: the user's, else the commit's."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "").strip() or repository.commit_time() or "0"
    try:
        return max(int(given), EARLIEST_EPOCH)
    except ValueError:
        raise BuildFailed(
            f"SOURCE_DATE_EPOCH={given!r} is not a number of seconds.",
            next_step="unset it, or use `git log -1 --format=%ct`",
        ) from None


class _Builder:
    def __init__(self, scratch: Path, epoch: int, runner: Runner) -> None:
        self._scratch, self._epoch, self._runner = scratch, epoch, runner

    def sdist(self, source: Path, out: Path, variables: Mapping[str, str]) -> None:
        self._build("--sdist", source, out, variables)

    def wheel(self, source: Path, out: Path, variables: Mapping[str, str]) -> None:
        """A wheel of an unpacked sdist, whose kernels are compiled in place."""
        if kernels.has_kernels(source):
            kernels.compile_into(source, self._runner, self._environment(variables), self._scratch)
        self._build("--wheel", source, out, variables)

    def _build(self, kind: str, source: Path, out: Path, variables: Mapping[str, str]) -> None:
        command = ["build", "--no-isolation", kind, "--outdir", str(out), str(source)]
        outcome = self._python(f"{out.name}{kind}", command, variables)
        if not outcome.ok:
            raise BuildFailed(f"The build failed: {outcome.describe()}.\n{outcome.tail()}")

    def check(self, built: Path) -> None:
        files = [str(path) for path in sorted(built.iterdir())]
        outcome = self._python("twine-check", ["twine", "check", "--strict", *files], {})
        if not outcome.ok:
            raise BuildFailed(f"An index would refuse the metadata.\n{outcome.tail()}")

    def _python(self, name: str, module: list[str], variables: Mapping[str, str]) -> Outcome:
        return self._runner.run(
            [sys.executable, "-IBm", *module],
            env=self._environment(variables),
            cwd=self._scratch,
            log=self._scratch / f"{name}.log",
            timeout=BUILD_TIMEOUT,
        )

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {
            "PATH": os.defpath,
            "HOME": str(self._scratch),
            "LANG": "C.UTF-8",
            "SOURCE_DATE_EPOCH": str(self._epoch),
            **variables,
        }


def _unpack(sdist: Path, target: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    return next(target.iterdir())


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in sorted(folder.iterdir())}


def _demand_equal(first: Path, second: Path) -> None:
    one, two = _digests(first), _digests(second)
    if different := [name for name in sorted(one.keys() | two) if one.get(name) != two.get(name)]:
        raise BuildFailed(
            f"Two builds of the same source differ: {', '.join(different)}.",
            cause="the build reads the time, a path, the environment or an unlisted file",
        )


def _publish(built: Path, out: Path) -> Path:
    """Move the files to ``out`` beside their digests; what earlier builds left there goes.

    All of it or nothing, also where a signal or a full disk comes in between.
    """
    out.mkdir(parents=True, exist_ok=True)
    wheel = next(built.glob("*.whl")).name
    digests = _digests(built)
    with tempfile.TemporaryDirectory(dir=out, prefix=".new-") as name:
        new = Path(name)
        for each in digests:
            shutil.copyfile(built / each, new / each)
        lines = (f"{sha}  {each}\n" for each, sha in digests.items())
        (new / DIGESTS).write_text("".join(lines))
        with _undisturbed():
            _replace(out, new, wheel.partition("-")[0] + "-")
    return out / wheel


def _replace(out: Path, new: Path, prefix: str) -> None:
    for old in out.iterdir():
        if old.name.startswith(prefix) and old.name.endswith((".whl", ".tar.gz")):
            old.unlink()
    for path in new.iterdir():
        path.replace(out / path.name)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold back the signals that end the gate."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
