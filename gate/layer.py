"""The expensive part of an environment: torch and the test tools, installed once and cached.

A layer is a virtual environment under the cache directory, named by what was asked for. Nothing
is ever installed into it again; before each use its files are compared with the manifest written
when it was made, so that an edited cache is noticed and rebuilt. Gates that run at once share a
layer: whoever uses it holds a shared lock, whoever makes or removes it an exclusive one.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from gate.errors import EnvironmentFailed
from gate.runner import Runner, checked
from gate.scratch import demand_plain, unwritable
from gate.wheels import sha256_of

CREATE_TIMEOUT = 3600.0
KEPT_LAYERS = 4
LOCK_POLL_SECONDS = 0.1
# Where packages come from is the user's business; how they are installed is the gate's.
SOURCE_OPTIONS = (
    "index-url",
    "extra-index-url",
    "find-links",
    "trusted-host",
    "cert",
    "client-cert",
    "proxy",
    "timeout",
    "retries",
)
NETWORK_VARIABLES = (
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)

Stamp = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a layer holds: requirements, and the versions that constrain them."""

    python: Path
    requirements: tuple[str, ...]
    constraints: tuple[str, ...]

    def key(self, python_identity: str) -> str:
        """Return a name that changes with anything that could change the layer's contents."""
        parts = [python_identity, *sorted(self.requirements), "--", *sorted(self.constraints)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def cache_directory() -> Path:
    """Return the directory that layers are kept in: ``GATE_CACHE``, or one in the user's cache.

    Raises:
        EnvironmentFailed: no environment could lie in it.
    """
    if chosen := os.environ.get("GATE_CACHE"):
        demand_plain(Path(chosen), "GATE_CACHE")
        return Path(chosen).absolute()
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
    except RuntimeError:
        return _substitute("there is no home directory")
    demand_plain(home, "XDG_CACHE_HOME")
    return home / "gefen-gate"


def _substitute(why: str) -> Path:
    """A directory for layers where the one meant for them cannot be written."""
    fallback = Path(tempfile.gettempdir()) / f"gefen-gate-{os.getuid()}"
    print(f"gate: {why}; keeping torch layers in {fallback}", file=sys.stderr)
    fallback.mkdir(mode=0o700, exist_ok=True)
    status = fallback.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise EnvironmentFailed(
            f"{fallback} belongs to somebody else.", next_step="set GATE_CACHE to a directory"
        )
    return fallback


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers that one gate run uses.

    Args:
        fresh: rebuild each layer once, even if a good one is cached.
    """

    fresh: bool = False
    made: set[Path] = field(default_factory=set, repr=False)
    used: Counter[Path] = field(default_factory=Counter, repr=False)

    @contextmanager
    def provide(self, recipe: Recipe, *, runner: Runner, workdir: Path) -> Iterator[Path]:
        """Yield the site-packages directory of a verified layer, making the layer if needed.

        Nobody changes the layer until the body ends.

        Args:
            workdir: a neutral directory for logs and working files.

        Raises:
            EnvironmentFailed: it could not be installed.
        """
        root = cache_directory()
        key = recipe.key(_python_identity(recipe.python, runner, workdir))
        if why := unwritable(root):
            if not self.fresh and not _damage(root / key):
                yield site_packages(root / key)
                return
            root = _substitute(f"{root} cannot be written ({why})")
        with ExitStack() as held:
            yield self._held(root / key, recipe, runner, workdir, held)

    def _held(
        self, layer: Path, recipe: Recipe, runner: Runner, workdir: Path, held: ExitStack
    ) -> Path:
        """Enter, into ``held``, the shared lock of a layer found to be good."""
        for _ in range(10):
            with ExitStack() as attempt:
                attempt.enter_context(_locked(layer, fcntl.LOCK_SH, runner))
                reason = self._stale(layer)
                if not reason:
                    os.utime(_lock(layer))  # shows when it was used last
                    held.enter_context(attempt.pop_all())
                    self.used[layer] += 1
                    held.callback(self.used.subtract, [layer])
                    return site_packages(layer)
            if self.used[layer]:
                raise EnvironmentFailed(f"{layer} was changed while it was in use: {reason}.")
            with _locked(layer, fcntl.LOCK_EX, runner):
                if reason := self._stale(layer):
                    self._make(layer, reason, recipe, runner, workdir)
        raise EnvironmentFailed(f"{layer} keeps being changed by others.")

    def _stale(self, layer: Path) -> str:
        if self.fresh and layer not in self.made:
            return "asked for a fresh one"
        return _damage(layer)

    def _make(
        self, layer: Path, reason: str, recipe: Recipe, runner: Runner, workdir: Path
    ) -> None:
        if layer.exists():
            runner.say(f"gate: rebuilding the torch layer: {reason}")
        _remove(layer)
        _discard_unused(layer.parent, spared=layer)
        try:
            _create(layer, recipe, runner, workdir)
            _write_manifest(layer)
        except BaseException as error:
            # Half a layer is of no use to anyone, and may be what fills the disk.
            _remove(layer)
            if isinstance(error, OSError):
                raise EnvironmentFailed(
                    f"Could not write {layer}: {error.strerror}.",
                    next_step="free some space or set GATE_CACHE to a larger disk",
                ) from error
            raise
        self.made.add(layer)


def _discard_unused(root: Path, spared: Path) -> None:
    """Remove the layers used longest ago, and unfinished ones, unless someone uses them.

    With the one to be made, ``KEPT_LAYERS`` remain.
    """
    locks = sorted(root.glob("*.lock"), key=lambda lock: lock.stat().st_mtime, reverse=True)
    others = [lock.with_suffix("") for lock in locks if lock.with_suffix("") != spared]
    finished = [layer for layer in others if _manifest(layer).exists()]
    for layer in others:
        if layer.exists() and layer not in finished[: KEPT_LAYERS - 1]:
            with suppress(BlockingIOError), _lock(layer).open("r") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(layer)


def site_packages(environment: Path) -> Path:
    """Return the site-packages directory of a virtual environment."""
    return next(environment.glob("lib/python3*/site-packages"))


def pip_sources(runner: Runner, workdir: Path) -> list[str]:
    """Return pip options for the package sources that the user's pip configuration names."""
    log = workdir / "pip-config.log"
    outcome = runner.run(
        [sys.executable, "-Im", "pip", "config", "list"],
        env=os.environ,
        cwd=workdir,
        log=log,
        timeout=60,
    )
    checked(outcome, "Could not read pip's configuration")
    found: dict[str, str] = {}
    for line in outcome.output().splitlines():
        name, _, value = line.partition("=")
        option = name.rpartition(".")[2]
        if option in SOURCE_OPTIONS:
            # Listed from the weakest to the strongest source: the environment comes last.
            found[option] = ast.literal_eval(value)
    many = ("extra-index-url", "find-links", "trusted-host")
    return [
        word
        for option, value in found.items()
        for item in (value.split() if option in many else [value])
        for word in (f"--{option}", item)
    ]


def _python_identity(python: Path, runner: Runner, workdir: Path) -> str:
    code = "import sys,sysconfig;print(sys.version,sysconfig.get_platform(),sys.base_prefix)"
    outcome = runner.run(
        [python, "-Ic", code], env={}, cwd=workdir, log=workdir / "python.log", timeout=60
    )
    return checked(outcome, f"{python} is not a working Python").output()


def _lock(layer: Path) -> Path:
    return layer.with_name(layer.name + ".lock")


def _manifest(layer: Path) -> Path:
    return layer.with_name(layer.name + ".json")


@contextmanager
def _locked(layer: Path, kind: int, runner: Runner) -> Iterator[None]:
    """Share a layer or have it alone; the lock of a dead gate is free."""
    with _lock(layer).open("a+") as file:
        for attempt in range(sys.maxsize):
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == 1:
                    runner.say("gate: waiting for a gate that uses the same layer")
                runner.demand_going()
                runner.on_tick()
                time.sleep(LOCK_POLL_SECONDS)
        yield


def _create(layer: Path, recipe: Recipe, runner: Runner, workdir: Path) -> None:
    constraints = workdir / "constraints.txt"
    constraints.write_text("\n".join(recipe.constraints))
    environment = {
        "PATH": os.defpath,
        "HOME": str(workdir),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        **{name: os.environ[name] for name in NETWORK_VARIABLES if name in os.environ},
    }
    sources = pip_sources(runner, workdir)
    make: list[str | Path] = [recipe.python, "-Im", "venv", "--without-pip", layer]
    install: list[str | Path] = [
        *(sys.executable, "-sBm", "pip", "--python", str(layer / "bin" / "python")),
        *("install", "--quiet", "--no-cache-dir", "--only-binary", ":all:", *sources),
        *("--constraint", str(constraints), *recipe.requirements),
    ]
    runner.say("gate: installing the torch layer (once; later runs reuse it)")
    commands = {"venv": make, "layer": install}
    for name, command in commands.items():
        outcome = runner.run(
            command,
            env=environment,
            cwd=workdir,
            log=workdir / f"{name}.log",
            timeout=CREATE_TIMEOUT,
        )
        checked(
            outcome,
            f"Could not install {', '.join(recipe.requirements)}",
            cause="the package index is unreachable or lacks a version, versions contradict each "
            "other, or the disk is full",
            next_step="check `pip config list`, or use an existing torch with --site DIR",
        )


def _files(layer: Path) -> Iterator[tuple[str, Path]]:
    for directory, _, names in os.walk(layer):
        for name in names:
            path = Path(directory, name)
            yield str(path.relative_to(layer)), path


def _stamp(path: Path) -> Stamp:
    """Return what changes with any write: no user can set a ctime back."""
    status = path.lstat()
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _digest(path: Path) -> str:
    if path.is_symlink():
        return f"-> {path.readlink()}"
    return sha256_of(path)


def _write_manifest(layer: Path) -> None:
    for _, path in _files(layer):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    entries = {name: (_digest(path), *_stamp(path)) for name, path in _files(layer)}
    manifest = _manifest(layer)
    part = manifest.with_suffix(".part")
    part.write_text(json.dumps(entries))
    part.replace(manifest)


def _manifest_time(manifest: Path) -> int:
    return manifest.stat().st_ctime_ns


def _damage(layer: Path) -> str:
    """Return what is wrong with a cached layer, or ""; only files touched since are re-read.

    A file counts as touched unless its stamp is both the one noted and older than the manifest:
    clocks are coarse and can be set back, so that a later write may get an earlier time.
    """
    manifest = _manifest(layer)
    try:
        entries = json.loads(manifest.read_text())
        noted = _manifest_time(manifest)
    except (OSError, ValueError):
        return "it was never finished"
    present = dict(_files(layer))
    if changed := sorted(present.keys() ^ entries.keys()):
        return f"{changed[0]} was added or removed"
    for name, path in present.items():
        digest, *stamp = entries[name]
        now = _stamp(path)
        untouched = list(now) == stamp and now[2] < noted
        if not untouched and _digest(path) != digest:
            return f"{name} was changed"
    return ""


def _remove(layer: Path) -> None:
    """Remove a layer, its manifest first: what is left of it must not pass for a layer."""
    _manifest(layer).unlink(missing_ok=True)
    _manifest(layer).with_suffix(".part").unlink(missing_ok=True)
    if layer.exists():
        shutil.rmtree(layer)
