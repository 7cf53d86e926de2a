"""The audit's rules about what is in GPU code, as far as that shows without a GPU."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping

from gate import elf, kernels, modules
from gate.errors import BuildFailed
from gate.manifests import listed_kernels
from gate.runner import Runner
from gate.scan import MANIFEST, Facts
from gate.scratch import scratch

# Made by the compiler, or given by the program: such a section has content.
_FULL = re.compile(r"\.text\.|\.nv\.global\.init|\.nv\.constant2")
# What the program may fill in once it runs.
_TABLE = re.compile(r"\.nv\.constant3")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(r'extern\s+"C"[^;{}]*?__global__[^;{}(]*?\bvoid\s+(\w+)\s*\(')
_BOUNDS = re.compile(r"__launch_bounds__\s*\([^)]*\)")
_ENTRY = re.compile(r"^\s*(?:\.\w+\s+)*\.entry\s+([\w$%]+)", re.MULTILINE)
_PTX_VERSION = re.compile(r"^\.version\s+(\S+)\s*$", re.MULTILINE)
_RELEASE = re.compile(r"^// Cuda compilation tools, release (\d+\.\d+)", re.MULTILINE)
_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
# PTX ISA 9.1, "Release Notes": what the compilers of each CUDA release write.
_VERSIONS = {
    **{f"11.{minor}": f"7.{minor}" for minor in range(9)},
    **{f"12.{minor}": f"8.{minor}" for minor in range(6)},
    **{"12.6": "8.5", "12.7": "8.6", "12.8": "8.7", "12.9": "8.8"},
    **{f"13.{minor}": f"9.{minor}" for minor in range(2)},
}


def check_code(facts: Facts) -> Iterator[str]:
    """Images are whole, hold something, and have every kernel that the package launches."""
    images: dict[str, set[str]] = {}
    for name, data in facts.kept.items():
        arch = facts.contents[name].arch
        if arch and name.endswith(".ptx"):
            images[name] = set(_ENTRY.findall(_plain(data)))
            yield from (f"{name}: {problem}" for problem in _ptx_problems(data))
        # One that is cut short is another rule's.
        elif arch and name.endswith(".cubin") and len(data) >= elf.extent(data):
            try:
                sections = list(elf.sections(data))
            except (struct.error, ValueError):
                yield f"{name}: its table of sections is damaged"
                continue
            images[name] = set(elf.kernels(data))
            yield from _empty_sections(facts, name, sections)
    yield from _missing_kernels(facts, images)


def _empty_sections(facts: Facts, name: str, sections: list[tuple[str, bytes]]) -> Iterator[str]:
    for section, content in sections:
        if content and not any(content):
            what = f"{name}: {section} holds nothing but zeros"
            if _FULL.match(section):
                yield what
            elif _TABLE.match(section):
                yield from facts.judged("code", what)


def _plain(data: bytes) -> str:
    """The text of a PTX file without comments."""
    return _COMMENT.sub("", data.decode("utf-8", "replace"))


def _ptx_problems(data: bytes) -> Iterator[str]:
    text = data.decode("utf-8", "replace")
    versions, release = _PTX_VERSION.findall(text), _RELEASE.search(text)
    if len(versions) != 1 or not re.fullmatch(r"\d+\.\d", versions[0]):
        yield f"has no one version of PTX, but {', '.join(versions) or 'none'}"
    elif release and versions[0] != _VERSIONS.get(release[1], versions[0]):
        yield f"has version {versions[0]}; CUDA {release[1]} writes {_VERSIONS[release[1]]}"
    code = _STRING.sub("", _COMMENT.sub("", text)).rstrip("\0").rstrip()
    whole = code.count("{") == code.count("}") and code.endswith(("}", ";"))
    # A head alone, without any code, ends in its last directive.
    if not whole and ("{" in code or _ENTRY.search(code)):
        yield "does not end where its code does"


def _missing_kernels(facts: Facts, images: Mapping[str, set[str]]) -> Iterator[str]:
    """Every image must have what the sources beside it define, and what any like it has."""
    for folder in sorted({name.rpartition("/")[0] for name in images}):
        here = {n: k for n, k in images.items() if n.rpartition("/")[0] == folder}
        defined = _defined(facts, folder) | listed_kernels(facts.kept.get(folder + MANIFEST, b""))
        # Files of several programs are named for them; only those of one are alike.
        alike = set().union(*here.values()) if defined else set()
        for name, found in here.items():
            for kernel in sorted((defined | alike) - found):
                yield f"{name}: has no kernel {kernel}"
        named = {text for source in facts.sources.values() for text in modules.read(source).words}
        for kernel in sorted(defined - named):
            yield from facts.judged("code", f"{folder}: no module names the kernel {kernel}")
        for kernel in sorted(_launched(facts) - defined if defined else ()):
            yield from facts.judged("code", f"{folder}: has no kernel {kernel}, which is launched")


def _launched(facts: Facts) -> set[str]:
    return {name for source in facts.sources.values() for name in modules.read(source).launches}


def _defined(facts: Facts, folder: str) -> set[str]:
    """The kernels in the sources that the images in a folder are made of."""
    below = folder.rpartition("/")[0] + "/src/"
    found: set[str] = set()
    for name, data in facts.kept.items():
        if name.startswith(below) and name.endswith((".cu", ".cuh")):
            found.update(_KERNEL.findall(_BOUNDS.sub("", _plain(data))))
    return found


def compiled_again(facts: Facts, runner: Runner) -> Iterator[str]:
    """Images must be what this checkout's compiler makes of the sources beside them."""
    for manifest in [name for name in facts.kept if name.endswith(MANIFEST)]:
        folder = manifest.removesuffix(MANIFEST)
        below = folder.rpartition("/")[0] + "/src/"
        sources = {n.removeprefix(below): d for n, d in facts.kept.items() if n.startswith(below)}
        images = {
            name.rpartition("/")[2]: data
            for name, data in facts.kept.items()
            if name.rpartition("/")[0] == folder and name != manifest
        }
        if sources and images:
            yield from _differences(facts, folder, sources, images, runner)


def _differences(
    facts: Facts,
    folder: str,
    sources: Mapping[str, bytes],
    images: Mapping[str, bytes],
    runner: Runner,
) -> Iterator[str]:
    try:
        with scratch("compiled") as place:
            made = kernels.compile_again(sources, images, runner, place)
    except BuildFailed as error:
        facts.note("compiled", f"{folder}: not compiled again: {error.what.splitlines()[0]}")
        return
    for name in sorted(images.keys() | made):
        if name not in images:
            yield f"{folder}/{name}: is missing; the sources give it"
        elif images[name] != made.get(name):
            yield f"{folder}/{name}: is not what the sources in the wheel give"
