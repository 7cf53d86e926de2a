"""The audit's rule about the list of GPU code that a build leaves beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gate import distinfo
from gate.scan import MANIFEST, Content, Facts

Values = Mapping[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one lists: hashes of images and sources, as RECORD writes them, and architectures."""

    images: Values
    archs: Values
    sources: Values


def check_manifests(facts: Facts) -> Iterator[str]:
    """GPU code must be what the manifest beside it lists, made of the sources in the wheel."""
    folders = {c.name.rpartition("/")[0] for c in facts.contents.values() if c.arch}
    for folder in sorted(folders) if facts.policy else ():
        name = folder + MANIFEST
        sources = folder.rpartition("/")[0] + "/src"
        if name not in facts.kept:
            yield f"{name}: is missing"
        elif listed := _read(facts.kept[name], folder, sources):
            code = {c.name: c for c in _below(facts, folder) if c.arch}
            yield from _differences({n: c.digest for n, c in code.items()}, listed.images)
            yield from _differences({n: c.arch for n, c in code.items()}, listed.archs)
            there = {c.name: c.digest for c in _below(facts, sources)}
            yield from _differences(there, listed.sources)
        else:
            yield f"{name}: is no manifest"


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
