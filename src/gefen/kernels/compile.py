"""Compile the kernels with NVRTC: when a wheel is built, and at first use where it lacks one.

Needs nothing but the standard library and the NVRTC library, so that a build runs this file by
its path, without torch, a CUDA toolkit or a GPU: ``python compile.py OUT --nvrtc LIBRARY``.

All units are compiled as one program, hence one image (cubin or PTX) for each architecture.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
MANIFEST = "manifest.json"

ARCHS = (
    *("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"),
    # The oldest one: a driver compiles it for any GPU without a cubin, between these or later.
    "compute_75",
)

OPTIONS = ("--std=c++20", "--fmad=false", "--ptxas-options=-v")
"""No contraction into fused multiply-adds: results must not depend on the compiler."""

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_\w+'")
_FUNCTION = re.compile(r"Function properties for (\w+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class CompileError(Exception):
    """The sources or the compiler are missing or broken; the message says why.

    Internal: the package raises it as :class:`gefen.errors.CudaUnavailable`.
    """


@dataclass
class Resources:
    """What one kernel, or one function that was not inlined, uses; sizes in bytes."""

    registers: int = 0
    shared: int = 0
    stack: int = 0
    spills: int = 0


@dataclass(frozen=True)
class Image:
    """Code for one architecture, and what its kernels use by name; PTX does not say."""

    arch: str
    data: bytes
    resources: Mapping[str, Resources]


def read_sources(folder: Path = SOURCES) -> dict[str, bytes]:
    """Every ``.cu`` and ``.cuh`` file by name, in order.

    Raises:
        CompileError: there is no unit, or a file cannot be read.
    """
    paths = sorted(path for path in folder.glob("*.cu*") if path.suffix in (".cu", ".cuh"))
    if not any(path.suffix == ".cu" for path in paths):
        raise CompileError(f"there are no kernel sources in {folder}")
    try:
        return {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise CompileError(f"cannot read {error.filename}: {error.strerror}") from error


def recipe(sources: Mapping[str, bytes]) -> dict[str, object]:
    """What images are made of: the compiler's options, and SHA-256 of each source by name."""
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sources.items()}
    return {"options": list(OPTIONS), "sources": hashes}


def digest(sources: Mapping[str, bytes]) -> str:
    """SHA-256, in hexadecimal, of the recipe."""
    return hashlib.sha256(json.dumps(recipe(sources), sort_keys=True).encode()).hexdigest()


def file_name(arch: str) -> str:
    """Name of the file with the image for ``arch``: ``sm_90.cubin`` or ``compute_75.ptx``."""
    return f"{arch}.{'ptx' if arch.startswith('compute_') else 'cubin'}"


class Nvrtc:
    """The compiler library at ``path``, or found by the dynamic linker under that name.

    Attributes:
        path: as given.
        version: of the library, as in (12, 9).

    Raises:
        CompileError: it cannot be loaded.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self._library = ctypes.CDLL(self.path)
            self._error_string = self._library.nvrtcGetErrorString
        except (OSError, AttributeError) as error:
            raise CompileError(f"cannot load NVRTC: {error}") from error
        self._error_string.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = major.value, minor.value

    def supports(self, arch: str) -> bool:
        """Whether it compiles for ``arch``, as in ``sm_90`` or ``compute_75``."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return arch.partition("_")[2] in map(str, numbers)

    def compile(self, sources: Mapping[str, bytes], arch: str) -> Image:
        """Compile all units as one program.

        Raises:
            CompileError: with the compiler's log.
        """
        main = "".join(f'#include "{name}"\n' for name in sources if name.endswith(".cu"))
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            main.encode(),
            b"gefen.cu",
            len(sources),
            _strings(list(sources.values())),
            _strings([name.encode() for name in sources]),
        )
        try:
            return self._compiled(program, arch)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _compiled(self, program: ctypes.c_void_p, arch: str) -> Image:
        options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture={arch}")]
        status = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
        log = self._read(program, "ProgramLog").decode("utf-8", "replace")
        if status:
            raise CompileError(f"{arch}: {self._text(status)}\n{log}")
        if arch.startswith("compute_"):
            return Image(arch, self._read(program, "PTX"), {})
        return Image(arch, self._read(program, "CUBIN", text=False), resources_in(log))

    def _read(self, program: ctypes.c_void_p, what: str, text: bool = True) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.value if text else buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CompileError(f"{name}: {self._text(status)}")

    def _text(self, status: int) -> str:
        return (self._error_string(status) or b"unknown error").decode()


def _strings(values: Sequence[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*values)


def resources_in(log: str) -> dict[str, Resources]:
    """What ptxas said about each function.

    Raises:
        CompileError: the log does not say it for any kernel.
    """
    found: dict[str, Resources] = {}
    entry = function = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = match[1]
        elif match := _FUNCTION.search(line):
            function = match[1]
        elif match := _STACK.search(line):
            stack, stores, loads = map(int, match.groups())
            found[function] = Resources(stack=stack, spills=stores + loads)
        elif match := _USED.search(line):
            shared = _SHARED.search(line)
            own = found.setdefault(entry, Resources())
            own.registers, own.shared = int(match[1]), int(shared[1]) if shared else 0
    if not any(item.registers for item in found.values()):
        raise CompileError(f"the compiler does not say what the kernels use:\n{log}")
    return dict(sorted(found.items()))


def build(
    out: Path, compiler: Nvrtc, release: str, sources: Mapping[str, bytes], archs: Sequence[str]
) -> None:
    """Write an image for each architecture, and a manifest, into the folder ``out``.

    ``release`` is the compiler's full version, for the manifest.

    Raises:
        CompileError: a source does not compile.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        images = list(pool.map(lambda arch: compiler.compile(sources, arch), archs))
    out.mkdir(parents=True, exist_ok=True)
    for image in images:
        (out / file_name(image.arch)).write_bytes(image.data)
    manifest = {
        "compiler": f"NVRTC {release}",
        **recipe(sources),
        "files": {file_name(image.arch): _entry(image) for image in images},
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _entry(image: Image) -> dict[str, object]:
    return {
        "arch": image.arch,
        "sha256": hashlib.sha256(image.data).hexdigest(),
        "kernels": {name: asdict(used) for name, used in image.resources.items()},
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile the kernels for a wheel.")
    parser.add_argument("out", type=Path, help="folder for the images and their manifest")
    parser.add_argument("--nvrtc", type=Path, required=True, help="the compiler's library")
    parser.add_argument("--release", required=True, help="its version, as in 12.9.86")
    parser.add_argument("--sources", type=Path, default=SOURCES)
    parser.add_argument("--arch", nargs="+", default=ARCHS, help="default: all of a wheel's")
    return parser.parse_args()


def main() -> None:
    """Compile for a wheel; end with a message on failure."""
    options = _arguments()
    try:
        compiler = Nvrtc(options.nvrtc)
        if not options.release.startswith("{}.{}.".format(*compiler.version)):
            found = "{}.{}".format(*compiler.version)
            raise CompileError(f"{options.nvrtc} is NVRTC {found}, not {options.release}")
        sources = read_sources(options.sources)
        build(options.out, compiler, options.release, sources, options.arch)
    except (CompileError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
