"""What ``[project]`` in pyproject.toml says, and the audit's rule that a wheel says the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from gate.scan import Facts


@dataclass(frozen=True, kw_only=True)
class Project:
    """What the wheels of a project must say; None for what is left to the build.

    Attributes:
        version: its version.
        requires: its requirements, those of extras with a marker.
        requires_python: which versions of Python it is for; empty where it does not say.
        licence: its licence expression (SPDX), in canonical form.
        licences: the texts of its licence files, by their paths in the repository.
    """

    version: Version | None = None
    requires: frozenset[Requirement] | None = None
    requires_python: SpecifierSet | None = None
    licence: str | None = None
    licences: Mapping[str, bytes] = field(default_factory=dict)


def parse(table: Mapping[str, Any], root: Path) -> Project:
    """Read ``[project]`` of the repository in ``root``.

    Raises:
        ValueError: it says what no build tool takes.
    """
    built = table.get("dynamic", [])
    licence = table.get("license")
    try:
        return Project(
            version=Version(table["version"]) if "version" in table else None,
            requires=None if "dependencies" in built else frozenset(_requirements(table)),
            requires_python=SpecifierSet(table.get("requires-python", "")),
            licence=canonicalize_license_expression(licence) if isinstance(licence, str) else None,
            licences=dict(_licences(table.get("license-files", []), root)),
        )
    except (
        InvalidVersion,
        InvalidRequirement,
        InvalidSpecifier,
        InvalidLicenseExpression,
    ) as error:
        raise ValueError(str(error)) from error
    except (TypeError, AttributeError, NotImplementedError) as error:
        raise ValueError(f"has a value of the wrong kind: {error}") from error


def _requirements(table: Mapping[str, Any]) -> Iterator[Requirement]:
    yield from map(Requirement, table.get("dependencies", []))
    for extra, texts in table.get("optional-dependencies", {}).items():
        for text in texts:
            plain, _, marker = text.partition(";")
            both = f'({marker}) and extra == "{extra}"' if marker else f'extra == "{extra}"'
            yield Requirement(f"{plain} ; {both}")


def _licences(patterns: list[str], root: Path) -> Iterator[tuple[str, bytes]]:
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            if path.is_file():
                yield path.relative_to(root).as_posix(), path.read_bytes()


def check_project(facts: Facts) -> Iterator[str]:
    """METADATA and the licences must be what pyproject.toml says."""
    project = facts.policy.project if facts.policy else None
    if project is None or facts.metadata is None:
        return
    found, policy = facts.metadata, facts.policy
    if policy and policy.requires is None and project.requires is not None:
        yield from undeclared(project.requires, set(found.requires_dist or ()))
    pythons = found.requires_python or SpecifierSet()
    if project.requires_python is not None and pythons != project.requires_python:
        declared = str(project.requires_python) or "nothing"
        yield f"Requires-Python is {str(pythons) or 'missing'}, pyproject.toml says {declared}"
    if facts.source and project.version and facts.wheel.version != project.version:
        yield f"is version {facts.wheel.version}, pyproject.toml says {project.version}"
    yield from _licence_problems(facts, project)


def undeclared(declared: frozenset[Requirement], found: set[Requirement]) -> Iterator[str]:
    """Differences between requirements; order, case and spaces are none."""
    extra, missing = sorted(map(str, found - declared)), sorted(map(str, declared - found))
    yield from (f"requires {one}, which is not declared" for one in extra)
    yield from (f"does not require {one}, as declared" for one in missing)


def _licence_problems(facts: Facts, project: Project) -> Iterator[str]:
    metadata = facts.metadata
    assert metadata is not None
    expression = metadata.license_expression
    if project.licence is not None and expression != project.licence:
        if expression is None and metadata.license == project.licence:
            facts.note("project", f"the licence {project.licence} is no License-Expression")
        else:
            given = expression or metadata.license or "missing"
            yield f"License-Expression is {given}, pyproject.toml says {project.licence}"
    listed = set(metadata.license_files or ())
    for name, text in project.licences.items():
        places = f"{facts.info}/licenses/{name}", f"{facts.info}/{name.rpartition('/')[2]}"
        packed = next((facts.kept[p] for p in places if p in facts.kept), None)
        if name not in listed:
            yield f"License-File {name} is missing from METADATA"
        elif packed is not None and _lines(packed) != _lines(text):
            yield f"{name}: is another text than the project's"


def _lines(text: bytes) -> bytes:
    return re.sub(rb"\r\n?", b"\n", text)
