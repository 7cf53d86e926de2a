"""What ``[tool.gate]`` in pyproject.toml asks of wheels and of releases."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, parse_tag
from packaging.utils import canonicalize_name

from gate import project, targets
from gate.errors import UsageFailure
from gate.machine import PROFILES
from gate.project import Project
from gate.targets import Target

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_ARCH = re.compile(r"(sm|compute)_\d+[af]?")


@dataclass(frozen=True, kw_only=True)
class AuditPolicy:
    """What a wheel of one distribution must carry, beyond what every wheel must.

    Attributes:
        package: the only top-level package the wheel may install.
        resources: member names or patterns (``*`` matches any characters, ``/`` too); each must
            match at least one file, and all matches but ``py.typed`` must have content.
        cuda_archs: exactly the architectures embedded as cubins (``sm_90``) and PTX
            (``compute_121``).
        max_bytes: ceiling for the size of the wheel file.
        entry_points: the entry points it may declare, each as ``group:name``.
        requires: exactly the requirements it declares; None where they are those of
            ``project``, or, without one, any.
        imports: the top-level modules its code may import besides the standard library and the
            package itself; None where that is not looked at.
        source: folder, relative to the repository, that mirrors the package; None where the
            wheel's files are not compared with a source tree.
        built: patterns of files that a build makes and the source tree may lack.
        tags: the tags it must have; empty where any will do.
        project: what ``[project]`` says, where it is about this distribution.
    """

    package: str
    resources: tuple[str, ...] = ()
    cuda_archs: frozenset[str] = frozenset()
    max_bytes: int
    entry_points: frozenset[str] = frozenset()
    requires: frozenset[Requirement] | None = None
    imports: frozenset[str] | None = None
    source: str | None = None
    built: tuple[str, ...] = ()
    tags: frozenset[Tag] = frozenset()
    project: Project | None = None


@dataclass(frozen=True, kw_only=True)
class PublishPolicy:
    """What a package index requires of the evidence on a wheel.

    Attributes:
        profiles: each of them must have passed; with none, any one is enough.
        signers: if there are any, only statements that one of them signed count.
        url: where uploads go.
        index: the simple index (PEP 503, PEP 691) that shows what was uploaded, or None.
    """

    profiles: tuple[str, ...] = ()
    signers: tuple[str, ...] = ()
    url: str
    index: str | None = None

    def describe(self) -> str:
        """Say which evidence is required, and whose signature."""
        profiles = f"profiles {', '.join(self.profiles)}" if self.profiles else "any profile"
        if self.signers:
            return f"{profiles}, signed by {' or '.join(self.signers)}"
        return f"{profiles}; no signature, as no signers are named"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The whole of ``[tool.gate]``.

    Attributes:
        environments: what ``--environment`` can name.
        audits: what the audit asks, by normalised name of the distribution.
        publish: what package indexes require, by the name that ``--repository`` gives them.
        distribution: name of the project that the repository releases, or None.
    """

    environments: Mapping[str, Target] = field(default_factory=dict)
    audits: Mapping[str, AuditPolicy] = field(default_factory=dict)
    publish: Mapping[str, PublishPolicy] = field(default_factory=dict)
    distribution: str | None = None

    def audit_of(self, distribution: str) -> AuditPolicy | None:
        """The policy of a distribution; None where only the generic checks apply."""
        return self.audits.get(canonicalize_name(distribution))

    def publishing_to(self, repository: str) -> PublishPolicy:
        """What ``repository`` requires: the name of an index, or the URL that uploads go to.

        A URL on the host of a named index gets that index's requirements, however it is spelt.
        Any other URL requires evidence, of whatever profile.

        Raises:
            UsageFailure: it is neither a known name nor a URL.
        """
        if repository in self.publish:
            return self.publish[repository]
        if (host := _host(repository)) is None:
            raise UsageFailure(
                f"--repository {repository!r} has no entry in [tool.gate.publish].",
                next_step=f"known are {', '.join(self.publish) or 'none'}; a URL works as well",
            )
        named = [p for p in self.publish.values() if host in (_host(p.url), _host(p.index or ""))]
        # dict.fromkeys: each once, in order.
        return PublishPolicy(
            profiles=tuple(dict.fromkeys(name for p in named for name in p.profiles)),
            signers=tuple(dict.fromkeys(name for p in named for name in p.signers)),
            url=repository,
            index=next((p.index for p in named if p.index), None),
        )

    def index_of(self, source: str) -> str:
        """The simple index to download from: the one of a named index, or the URL of one.

        Raises:
            UsageFailure: it is neither.
        """
        if source in self.publish and (index := self.publish[source].index):
            return index
        if _host(source) is None:
            known = ", ".join(name for name, target in self.publish.items() if target.index)
            raise UsageFailure(
                f"--from {source!r} is no index that [tool.gate.publish] names.",
                next_step=f"known are {known or 'none'}; the URL of a simple index works as well",
            )
        return source


def load(root: Path) -> Policy:
    """Read ``[tool.gate]`` from ``root / "pyproject.toml"``.

    Raises:
        UsageFailure: the file is missing or malformed, or says something the gate does not know.
    """
    path = root / "pyproject.toml"
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise UsageFailure(
            f"cannot read the gate's policy, {path}: {error.strerror}",
            next_step="run the gate from a checkout of the repository",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageFailure(f"{path} is not valid TOML: {error}") from error
    gate = _table(document.get("tool", {}), "gate", "tool")
    audits = _table(gate, "audit", "tool.gate")
    publish = _table(gate, "publish", "tool.gate")
    own = _table(document, "project", "pyproject")
    return Policy(
        environments=targets.parse(_table(gate, "environments", "tool.gate"), root),
        audits={canonicalize_name(n): _audit(audits, n, _project(own, n, root)) for n in audits},
        publish={name: _publish(publish, name) for name in publish},
        distribution=own.get("name"),
    )


def _project(own: dict[str, Any], name: str, root: Path) -> Project | None:
    if canonicalize_name(str(own.get("name"))) != canonicalize_name(name):
        return None
    try:
        return project.parse(own, root)
    except ValueError as error:
        raise _bad("project", str(error)) from error


def _audit(audits: dict[str, Any], name: str, own: Project | None) -> AuditPolicy:
    where = f"tool.gate.audit.{name}"
    table = _table(audits, name, "tool.gate.audit")
    known = {"package", "resources", "cuda-archs", "max-bytes", "entry-points", "source", "built"}
    known |= {"requires", "imports", "tags"}
    _known(table, known, where)
    package, source = table.get("package"), table.get("source")
    max_bytes = table.get("max-bytes")
    archs = _strings(table, "cuda-archs", where)
    if not isinstance(package, str) or not package.isidentifier():
        raise _bad(f"{where}.package", f"must be the name of a package, not {package!r}")
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes <= 0:
        raise _bad(f"{where}.max-bytes", f"must be a positive number of bytes, not {max_bytes!r}")
    if source is not None and not isinstance(source, str):
        raise _bad(f"{where}.source", f"must be a folder, not {source!r}")
    for arch in archs:
        if not _ARCH.fullmatch(arch):
            raise _bad(f"{where}.cuda-archs", f"{arch!r} is not like 'sm_90' or 'compute_121'")
    return AuditPolicy(
        package=package,
        resources=_strings(table, "resources", where),
        cuda_archs=frozenset(archs),
        max_bytes=max_bytes,
        entry_points=frozenset(_strings(table, "entry-points", where)),
        requires=_requirements(table, where),
        imports=frozenset(_strings(table, "imports", where)) if "imports" in table else None,
        source=source,
        built=_strings(table, "built", where),
        tags=_tags(table, where),
        project=own,
    )


def _tags(table: dict[str, Any], where: str) -> frozenset[Tag]:
    try:
        return frozenset(tag for text in _strings(table, "tags", where) for tag in parse_tag(text))
    except ValueError as error:
        raise _bad(f"{where}.tags", f"are not like 'py3-none-any': {error}") from error


def _requirements(table: dict[str, Any], where: str) -> frozenset[Requirement] | None:
    if "requires" not in table:
        return None
    try:
        return frozenset(map(Requirement, _strings(table, "requires", where)))
    except InvalidRequirement as error:
        raise _bad(f"{where}.requires", str(error)) from error


def _publish(publish: dict[str, Any], name: str) -> PublishPolicy:
    where = f"tool.gate.publish.{name}"
    table = _table(publish, name, "tool.gate.publish")
    _known(table, {"profiles", "signers", "url", "index"}, where)
    profiles = _strings(table, "profiles", where)
    if not profiles:
        raise _bad(f"{where}.profiles", "names no profile; publishing needs evidence")
    for profile in profiles:
        if profile not in PROFILES:
            known = ", ".join(PROFILES)
            raise _bad(f"{where}.profiles", f"unknown profile {profile!r}; known are {known}")
    url, index = table.get("url"), table.get("index")
    for key, value in (("url", url), ("index", index)):
        if (key == "url" or value is not None) and _host(value) is None:
            raise _bad(f"{where}.{key}", f"must be an https:// URL, not {value!r}")
    return PublishPolicy(
        profiles=profiles,
        signers=_strings(table, "signers", where),
        url=str(url),
        index=index,
    )


def _host(url: Any) -> str | None:
    """The host of a URL that is safe to upload to: encrypted, or on this machine."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
    except (ValueError, AttributeError, TypeError):
        return None
    local = host in ("localhost", "127.0.0.1", "::1")
    fits = parts.scheme == "https" or (parts.scheme == "http" and local)
    # Others write the same host in letters that only a name server understands.
    return host if isinstance(url, str) and host and host.isascii() and fits else None


def _known(table: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(table) - known):
        raise _bad(f"{where}.{unknown[0]}", f"unknown key; known are {', '.join(sorted(known))}")


def _table(parent: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    table = parent.get(key, {}) if isinstance(parent, dict) else None
    if not isinstance(table, dict):
        raise _bad(f"{where}.{key}", "must be a table")
    return table


def _strings(table: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    values = table.get(key, [])
    if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
        raise _bad(f"{where}.{key}", f"must be a list of strings, not {values!r}")
    if len(set(values)) != len(values):
        raise _bad(f"{where}.{key}", "names something twice")
    return tuple(values)


def _bad(where: str, why: str) -> UsageFailure:
    return UsageFailure(f"pyproject.toml, {where}: {why}")
