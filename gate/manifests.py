"""The audit's rule about the list of GPU code that a build leaves beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gate import distinfo, elf, modules
from gate.scan import MANIFEST, Content, Facts

Values = Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one lists: hashes as RECORD writes them, all by the names of files in the archive.

    Attributes:
        images: hash of each image.
        archs: its architecture.
        sources: hash of each source.
        kernels: names of an image's kernels; None where they are not listed.
        compiler: what is said to have compiled them.
        options: with which options.
    """

    images: Values
    archs: Values
    sources: Values
    kernels: Mapping[str, list[str] | None]
    compiler: object
    options: object


def check_manifests(facts: Facts) -> Iterator[str]:
    """GPU code must be what the manifest beside it lists, made of the sources in the wheel.

    Others need not keep such a list, but theirs must be right as well.
    """
    folders = {c.name.rpartition("/")[0] for c in facts.contents.values() if c.arch}
    for folder in sorted(folders):
        name = folder + MANIFEST
        sources = folder.rpartition("/")[0] + "/src"
        if name not in facts.kept:
            if facts.policy:
                yield f"{name}: is missing"
        elif listed := _read(facts.kept[name], folder, sources):
            code = {c.name: c for c in _below(facts, folder) if c.arch}
            yield from _differences({n: c.digest for n, c in code.items()}, listed.images)
            yield from _differences({n: c.arch for n, c in code.items()}, listed.archs)
            there = {c.name: c.digest for c in _below(facts, sources)}
            yield from _differences(there, listed.sources)
            yield from (f"{name}: {what}" for what in _unread(facts, folder, listed))
        elif facts.policy:
            yield f"{name}: is no manifest"


def _unread(facts: Facts, folder: str, listed: Manifest) -> Iterator[str]:
    """What the package, which compares options, would not take, and kernels that are not there."""
    for name, kernels in listed.kernels.items():
        there = elf.kernels(facts.kept.get(name, b"")) if name.endswith(".cubin") else kernels
        if kernels is not None and sorted(there or ()) != sorted(kernels):
            yield f"lists other kernels of {name} than it has"
    script = facts.kept.get(folder.rpartition("/")[0] + "/compile.py")
    options = modules.constant(script, "OPTIONS") if script else None
    if options is None:
        return
    if not isinstance(listed.compiler, str):
        yield "does not name the compiler"
    if listed.options != list(options):
        yield f"has options {listed.options}, the package asks for {list(options)}"


def listed_kernels(text: bytes) -> set[str]:
    """The kernels that a manifest lists; none where it is no manifest."""
    listed = _read(text, "", "")
    return {n for names in listed.kernels.values() for n in names or ()} if listed else set()


def _kernels(entry: Mapping[str, Any]) -> list[str] | None:
    """Functions that are called, which are listed too, have no registers of their own."""
    if "kernels" not in entry:
        return None
    return [name for name, used in entry["kernels"].items() if used["registers"]]


def _below(facts: Facts, folder: str) -> Iterator[Content]:
    return (c for name, c in facts.contents.items() if name.startswith(folder + "/"))


def _read(text: bytes, folder: str, sources: str) -> Manifest | None:
    try:
        listed = json.loads(text)
        files = {f"{folder}/{name}": entry for name, entry in listed["files"].items()}
        return Manifest(
            images={name: _recorded(entry["sha256"]) for name, entry in files.items()},
            archs={name: entry["arch"] for name, entry in files.items()},
            sources={f"{sources}/{n}": _recorded(v) for n, v in listed["sources"].items()},
            kernels={name: _kernels(entry) for name, entry in files.items()},
            compiler=listed.get("compiler"),
            options=listed.get("options"),
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _recorded(sha256: str) -> str:
    return distinfo.encoded("sha256", bytes.fromhex(sha256))


def _differences(present: Values, listed: Values) -> Iterator[str]:
    for name in sorted(present.keys() | listed):
        if name not in present:
            yield f"{name}: is listed but missing"
        elif name not in listed:
            yield f"{name}: is not listed"
        elif present[name] != listed[name]:
            yield f"{name}: is not what the manifest lists"
