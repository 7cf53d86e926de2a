"""The expensive part of an environment: torch and the test tools, installed once and cached.

A layer is a virtual environment under the cache directory, named by what was asked for. Nothing
is ever installed into it again; before each use its files are compared with the manifest written
when it was made, so that an edited cache is noticed and rebuilt.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gate.errors import EnvironmentFailed
from gate.runner import Runner, checked
from gate.wheels import sha256_of

CREATE_TIMEOUT = 3600.0
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
    """Return the writable directory that layers are kept in (``GATE_CACHE`` overrides it)."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    chosen = Path(os.environ.get("GATE_CACHE") or home / "gefen-gate")
    try:
        chosen.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=chosen).close()
    except OSError as error:
        fallback = Path(tempfile.gettempdir()) / f"gefen-gate-{os.getuid()}"
        print(f"gate: {chosen} is not writable ({error}); using {fallback}", file=sys.stderr)
        fallback.mkdir(mode=0o700, exist_ok=True)
        if fallback.stat().st_uid != os.getuid():
            raise EnvironmentFailed(
                f"{fallback} belongs to somebody else.", next_step="set GATE_CACHE to a directory"
            ) from error
        return fallback
    return chosen


def provide(recipe: Recipe, *, runner: Runner, workdir: Path, fresh: bool) -> Path:
    """Return the site-packages directory of a verified layer, making the layer if needed.

    Args:
        workdir: a neutral directory for logs and working files.
        fresh: rebuild the layer even if a good one is cached.

    Raises:
        EnvironmentFailed: it could not be installed.
    """
    root = cache_directory()
    layer = root / recipe.key(_python_identity(recipe.python, runner, workdir))
    with _locked(layer.with_name(layer.name + ".lock")):
        manifest = layer.with_name(layer.name + ".json")
        reason = "asked for a fresh one" if fresh else _damage(layer, manifest)
        if reason:
            if layer.exists():
                print(f"gate: rebuilding the torch layer: {reason}", file=sys.stderr)
            _remove(layer, manifest)
            _create(layer, recipe, runner, workdir)
            _write_manifest(layer, manifest)
    return site_packages(layer)


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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let only one gate at a time look at or make a layer; a dead one's lock is freed."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
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
    print("gate: installing the torch layer (once; later runs reuse it)", file=sys.stderr)
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
            cause="the package index is unreachable, lacks a version, or the disk is full",
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


def _write_manifest(layer: Path, manifest: Path) -> None:
    for _, path in _files(layer):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    entries = {name: (_digest(path), *_stamp(path)) for name, path in _files(layer)}
    part = manifest.with_suffix(".part")
    part.write_text(json.dumps(entries))
    part.replace(manifest)


def _damage(layer: Path, manifest: Path) -> str:
    """Return what is wrong with a cached layer, or ""; only files touched since are re-read."""
    try:
        entries = json.loads(manifest.read_text())
    except (OSError, ValueError):
        return "it was never finished"
    present = dict(_files(layer))
    if changed := sorted(present.keys() ^ entries.keys()):
        return f"{changed[0]} was added or removed"
    for name, path in present.items():
        digest, *stamp = entries[name]
        if list(_stamp(path)) != stamp and _digest(path) != digest:
            return f"{name} was changed"
    return ""


def _remove(layer: Path, manifest: Path) -> None:
    manifest.unlink(missing_ok=True)
    if layer.exists():
        shutil.rmtree(layer)
