"""Code for a GPU: what the wheel embeds, else compiled here once and kept in a cache."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from gefen.kernels.compile import (
    MANIFEST,
    SOURCES,
    CompileError,
    Nvrtc,
    digest,
    read_sources,
    recipe,
)

EMBEDDED = Path(__file__).parent / "cubin"


@dataclass(frozen=True)
class Code:
    """An image that the driver can load, for ``arch``; ``origin`` says where it is from."""

    arch: str
    origin: str
    data: bytes


@dataclass(frozen=True)
class Manifest:
    """What the package embeds: SHA-256 of each file by name, and what compiled them."""

    compiler: str
    files: Mapping[str, str]

    @property
    def archs(self) -> list[str]:
        """Architectures, as in ``sm_90`` and ``compute_75``."""
        return [name.partition(".")[0] for name in self.files]


@cache
def manifest() -> Manifest | None:
    """What is embedded; None without images, or if they are not of the sources beside them."""
    try:
        read = json.loads((EMBEDDED / MANIFEST).read_bytes())
        if not recipe(read_sources(SOURCES)).items() <= read.items():
            return None
        files = {name: entry["sha256"] for name, entry in read["files"].items()}
        return Manifest(compiler=read["compiler"], files=files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, CompileError):
        return None


def embedded(name: str) -> bytes | None:
    """An embedded file, if it is there and as it was built."""
    found = manifest()
    if found is None or name not in found.files:
        return None
    try:
        data = (EMBEDDED / name).read_bytes()
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest() == found.files[name] else None


def candidates(major: int, minor: int, problems: list[str]) -> Iterator[Code]:
    """Code that may run on a GPU of compute capability ``major.minor``, the best first.

    Why one could not be had is added to ``problems``.
    """
    arch = f"sm_{major}{minor}"
    if data := embedded(f"{arch}.cubin"):
        yield Code(arch, "embedded", data)
    else:
        problems.append(f"no usable code for {arch} is embedded")
    try:
        yield Code(arch, "compiled at first use", compiled(arch, torch.version.cuda or ""))
    except CompileError as error:
        problems.append(str(error))
    found = manifest()
    for name in found.files if found else ():
        older = name.endswith(".ptx") and _number(name) <= 10 * major + minor
        if older and (data := embedded(name)):
            # The driver reads text up to a zero.
            yield Code(name.removesuffix(".ptx"), "embedded", data + b"\0")


def _number(name: str) -> int:
    return int(name.partition("_")[2].partition(".")[0])


def compiled(arch: str, cuda: str) -> bytes:
    """A cubin for ``arch``, from the cache or from the NVRTC of CUDA version ``cuda``.

    Raises:
        CompileError: there is no compiler, it does not know ``arch``, or it refuses the sources.
    """
    sources = read_sources(SOURCES)
    folder = cache_folder()
    path = folder / digest(sources) / f"{arch}-cuda{cuda}.cubin" if folder else None
    if path and (data := _read(path)):
        return data
    data = nvrtc(arch, cuda).compile(sources, arch).data
    if path:
        _write(path, data)
    return data


def nvrtc(arch: str, cuda: str) -> Nvrtc:
    """The first compiler found that knows ``arch``.

    Raises:
        CompileError: none does.
    """
    problems = []
    for path in _libraries(cuda.partition(".")[0]):
        try:
            compiler = Nvrtc(path)
            if compiler.supports(arch):
                return compiler
            problems.append("{} {}.{} does not know {}".format(path, *compiler.version, arch))
        except CompileError as error:
            problems.append(str(error))
    raise CompileError(f"no NVRTC compiles for {arch}: {'; '.join(problems)}")


def _libraries(major: str) -> Iterator[str]:
    """Where torch, or its requirements, install NVRTC."""
    site = Path(torch.__file__).parent.parent
    for folder in dict.fromkeys([site, *map(Path, sys.path)]):
        for package in (f"cu{major}", "cuda_nvrtc"):
            path = folder / "nvidia" / package / "lib" / f"libnvrtc.so.{major}"
            if path.is_file():
                yield str(path)
    yield f"libnvrtc.so.{major}"


def cache_folder() -> Path | None:
    """Where compiled code is kept; None for a user without a home."""
    try:
        given = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = given if given.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "gefen" / "kernels"


def _read(path: Path) -> bytes | None:
    """What :func:`_write` wrote; None if it is not there or was damaged since."""
    try:
        checksum, _, data = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return data if data and checksum == hashlib.sha256(data).hexdigest().encode() else None


def _write(path: Path, data: bytes) -> None:
    """Keep ``data``, whole or not at all; a cache that cannot be written is no error."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
            Path(part).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(part).unlink()
            raise
