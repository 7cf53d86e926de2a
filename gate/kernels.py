"""Compile the project's CUDA kernels for a wheel, in a process of their own, and judge them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from gate.errors import BuildFailed, KernelsSpill
from gate.layer import cache_directory
from gate.runner import Runner
from gate.wheels import sha256_of

ROOT = Path(__file__).parent.parent
PACKAGE = Path("src/gefen/kernels")
IMAGES = PACKAGE / "cubin"
# What to compile for; by default what the project's own script lists.
ARCHS: tuple[str, ...] = ()
COMPILER = "nvidia-cuda-nvrtc-cu12"
# Every driver for CUDA 12 and 13 loads what this one makes, and it knows all architectures.
RELEASE = "12.9."
TIMEOUT = 1800.0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one kernel needs on one architecture; all but registers in bytes."""

    kernel: str
    arch: str
    registers: int
    shared: int
    stack: int
    spills: int


def has_kernels(tree: Path) -> bool:
    """Whether the project in ``tree`` has kernels to compile."""
    return (tree / PACKAGE / "compile.py").is_file()


def compile_sources(root: Path, runner: Runner, scratch: Path) -> list[Usage]:
    """What the kernels of the project in ``root`` need; leaves the project as it is.

    Raises:
        BuildFailed: there is no compiler, or it refuses the sources.
    """
    _provide(root, scratch / "cubin", runner, {}, scratch)
    return usage(scratch / "cubin")


def compile_into(tree: Path, runner: Runner, env: Mapping[str, str], scratch: Path) -> None:
    """Compile the kernels of a source tree; leave images and their manifest in it.

    Raises:
        BuildFailed: there is no compiler, or it refuses the sources.
        KernelsSpill: a kernel needs too many registers.
    """
    folder = tree / IMAGES
    _provide(tree, folder, runner, env, scratch)
    demand_no_spills(usage(folder))


def compile_again(
    sources: Mapping[str, bytes], images: Mapping[str, bytes], runner: Runner, scratch: Path
) -> dict[str, bytes]:
    """What this checkout's script and compiler make of sources, by the names of the files.

    None of the code that the sources came with is run. Where they give just these ``images``,
    that is kept for the next time.

    Raises:
        BuildFailed: there is no compiler, or it refuses the sources.
    """
    tree = scratch / "tree"
    (tree / PACKAGE / "src").mkdir(parents=True)
    shutil.copyfile(ROOT / PACKAGE / "compile.py", tree / PACKAGE / "compile.py")
    for name, data in sources.items():
        if "/" not in name:
            (tree / PACKAGE / "src" / name).write_bytes(data)
    _provide(tree, tree / IMAGES, runner, {}, scratch)
    made = {path.name: path.read_bytes() for path in (tree / IMAGES).iterdir()}
    del made["manifest.json"]
    if made == images:
        remember(tree)
    return made


def remember(tree: Path) -> None:
    """Keep the images in a tree, which were compiled twice with the same bytes.

    Compiling takes minutes, and nothing but the sources and the compiler decides what comes out.
    """
    kept = _kept(tree, _compiler()[1])
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as part:
            shutil.copytree(tree / IMAGES, Path(part) / "images")
            if kept.exists() and not _is_whole(kept):
                shutil.rmtree(kept)
            (Path(part) / "images").rename(kept)


def _kept(tree: Path, release: str) -> Path:
    """Where the images made of these sources by this compiler are kept."""
    script = tree / PACKAGE / "compile.py"
    parts = [release, *ARCHS, sha256_of(script)]
    parts += [f"{path.name} {sha256_of(path)}" for path in sorted(tree.glob(f"{PACKAGE}/src/*"))]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return cache_directory() / "kernels" / key


def _is_whole(folder: Path) -> bool:
    try:
        files = json.loads((folder / "manifest.json").read_bytes())["files"]
        listed = {name: entry["sha256"] for name, entry in files.items()}
        there = {path.name: sha256_of(path) for path in folder.iterdir()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    return there == {**listed, "manifest.json": there["manifest.json"]}


def _provide(tree: Path, out: Path, runner: Runner, env: Mapping[str, str], scratch: Path) -> None:
    library, release = _compiler()
    kept = _kept(tree, release)
    if _is_whole(kept):
        shutil.copytree(kept, out, dirs_exist_ok=True)
        return
    script = tree / PACKAGE / "compile.py"
    archs = ("--arch", *ARCHS) if ARCHS else ()
    outcome = runner.run(
        [sys.executable, "-ISB", script, out, "--nvrtc", library, "--release", release, *archs],
        env=env,
        cwd=scratch,
        log=scratch / "kernels.log",
        timeout=TIMEOUT,
    )
    if not outcome.ok:
        raise BuildFailed(f"The kernels do not compile: {outcome.describe()}.\n{outcome.tail()}")


def _compiler() -> tuple[Path, str]:
    """The NVRTC installed beside the gate, and its version."""
    install = "use `nox -s build`, or `pip install -c ci/constraints.txt " + COMPILER + "`"
    try:
        found = importlib.metadata.distribution(COMPILER)
    except importlib.metadata.PackageNotFoundError:
        raise BuildFailed(f"{COMPILER} is not installed.", next_step=install) from None
    if not found.version.startswith(RELEASE):
        raise BuildFailed(f"{COMPILER} is {found.version}, not {RELEASE}x.", next_step=install)
    files = [found.locate_file(file) for file in found.files or () if "libnvrtc.so" in file.name]
    for file in map(str, files):
        if Path(file).is_file():
            return Path(file), found.version
    raise BuildFailed(f"{COMPILER} {found.version} holds no library.", next_step=install)


def usage(folder: Path) -> list[Usage]:
    """What the kernels compiled into ``folder`` need, from its manifest."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    return sorted(
        (
            Usage(kernel=kernel, arch=entry["arch"], **used)
            for entry in manifest["files"].values()
            for kernel, used in entry["kernels"].items()
        ),
        key=lambda item: item.kernel,
    )


def table(items: Sequence[Usage]) -> Iterator[str]:
    """Lines of a table, one for each kernel and architecture."""
    rows = [[field.name for field in fields(Usage)], *([*map(str, astuple(u))] for u in items)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for kernel, *values in rows:
        cells = (value.rjust(width) for value, width in zip(values, widths[1:], strict=True))
        yield "  ".join([kernel.ljust(widths[0]), *cells])


def demand_no_spills(items: Sequence[Usage]) -> None:
    """Refuse kernels that run out of registers.

    Raises:
        KernelsSpill: naming each kernel and architecture.
    """
    findings = [
        f"{item.kernel} on {item.arch}: {item.spills} bytes" for item in items if item.spills
    ]
    if findings:
        raise KernelsSpill(
            "Kernels keep values in memory that should be in registers",
            findings=findings,
            next_step="hold fewer values at a time, or allow more registers per thread",
        )
