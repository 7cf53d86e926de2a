"""Compile the project's CUDA kernels for a wheel, in a process of their own, and judge them."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from gate.errors import BuildFailed, KernelsSpill
from gate.runner import Runner

PACKAGE = Path("src/gefen/kernels")
COMPILER = "nvidia-cuda-nvrtc-cu12"
# Every driver for CUDA 12 and 13 loads what this one makes, and it knows all architectures.
RELEASE = "12.9."
TIMEOUT = 900.0


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
    _compile(root / PACKAGE / "compile.py", scratch / "cubin", runner, {}, scratch)
    return usage(scratch / "cubin")


def compile_into(tree: Path, runner: Runner, env: Mapping[str, str], scratch: Path) -> None:
    """Compile the kernels of a source tree; leave images and their manifest in it.

    Raises:
        BuildFailed: there is no compiler, or it refuses the sources.
        KernelsSpill: a kernel needs too many registers.
    """
    folder = tree / PACKAGE / "cubin"
    _compile(tree / PACKAGE / "compile.py", folder, runner, env, scratch)
    demand_no_spills(usage(folder))


def _compile(
    script: Path, out: Path, runner: Runner, env: Mapping[str, str], scratch: Path
) -> None:
    library, release = _compiler()
    outcome = runner.run(
        [sys.executable, "-ISB", script, out, "--nvrtc", library, "--release", release],
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
