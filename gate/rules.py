"""The audit's rules: each looks at the facts of one wheel and yields what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

from packaging.requirements import Requirement

from gate import distinfo, elf
from gate.code import check_code
from gate.manifests import check_manifests
from gate.members import check_headers, check_names, check_permissions
from gate.own_imports import check_imports, check_own_imports, check_python, imported
from gate.project import check_project, undeclared
from gate.pythons import oldest
from gate.scan import SCHEMES, Content, Facts, arch_key, data_scheme, info_identity

STARTUP = ("sitecustomize", "usercustomize")
STRAY = ("tests", "test", "gate", "ci", "benchmarks", "docs", "examples")
_JUNK_PARTS = ("__pycache__", ".git", ".hg", ".svn", ".env", ".DS_Store", ".pypirc", ".netrc")
_OF_INSTALLERS = (
    "INSTALLER",
    "REQUESTED",
    "direct_url.json",
    "provenance_url.json",
    "uv_cache.json",
)
_JUNK_SUFFIXES = (".pyc", ".pyo", ".swp", "~")
_PRIVATE_KEY = re.compile(rb"\s*-----BEGIN [A-Z ]*PRIVATE KEY( BLOCK)?-----")
_FATBIN_MAGIC = bytes.fromhex("50ed55ba")
_LINUX = "x86_64|i686|aarch64|armv7l|ppc64le|ppc64|s390x|riscv64|loongarch64"
# What warehouse, PyPI's own program, lets through.
_PYPI_PLATFORM = re.compile(
    rf"any|win32|win_(amd64|arm64|ia64)|manylinux(1|2010)_(x86_64|i686)|linux_armv[67]l"
    rf"|(manylinux2014|manylinux_\d+_\d+|musllinux_\d+_\d+)_({_LINUX})"
    r"|macosx_\d+_\d+_(\w+)|(ios|android|pyodide|pyemscripten)_\w+"
)
_ARCH_IN_NAME = re.compile(r"(sm|compute)_?(\d+[af]?)(?![0-9a-z])")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A check, and the line that says what a wheel that passes it is like."""

    name: str
    check: Callable[[Facts], Iterator[str]]
    passed: Callable[[Facts], str]


def check_dist_info(facts: Facts) -> Iterator[str]:
    """There must be exactly one dist-info, of the same name and version as the file."""
    if len(facts.infos) != 1:
        yield f"{len(facts.infos)} dist-info folders, not 1: {', '.join(facts.infos) or 'none'}"
    for info in facts.infos:
        problem = distinfo.disagreement(facts.wheel.filename, *info_identity(info), info)
        if problem or not info.endswith(".dist-info"):
            yield problem or f"{info}: is not spelled .dist-info"
    for document in ("METADATA", "WHEEL", "RECORD"):
        if f"{facts.info}/{document}" not in facts.contents:
            yield f"{document} is missing"
    for document, text in facts.documents.items():
        yield from _line_endings(facts, document, text)
    for top in facts.top_levels:
        if top.lower().endswith((".egg-info", ".egg")) or top == "EGG-INFO":
            yield f"{top}: a second record of what is installed"


def _line_endings(facts: Facts, document: str, text: bytes) -> Iterator[str]:
    """Where they are mixed, parsers split differently; a description may have any."""
    if document == "METADATA":
        text = re.split(rb"\r?\n\r?\n", text, maxsplit=1)[0]
    if b"\r" not in text:
        return
    if text.rstrip(b"\r\n").count(b"\r\n") == max(map(text.rstrip(b"\r\n").count, (b"\r", b"\n"))):
        facts.note("dist-info", f"{document}: has the line endings of Windows")
    elif facts.policy:
        yield f"{document}: has mixed line endings"
    else:
        facts.note("dist-info", f"{document}: has mixed line endings")


def check_metadata(facts: Facts) -> Iterator[str]:
    """METADATA must be valid and of the same name and version as the file."""
    if "METADATA" not in facts.documents:
        return
    name, version = distinfo.identity_of(facts.documents["METADATA"])
    problem = distinfo.disagreement(facts.wheel.filename, name, version, "METADATA")
    if problem:
        yield problem
    if facts.policy:
        for requirement in _requirements(facts):
            if requirement.url:
                yield f"Requires-Dist has a URL, which indexes refuse: {requirement}"
        if facts.policy.requires is not None:
            yield from undeclared(facts.policy.requires, set(_requirements(facts)))
    yield from _missing_licences(facts)
    for classifier in (facts.metadata.classifiers if facts.metadata else None) or ():
        if classifier.startswith("Private ::"):
            yield from facts.judged("metadata", f"Classifier {classifier}: indexes refuse it")


def _missing_licences(facts: Facts) -> Iterator[str]:
    """Before Metadata-Version 2.4 no place was laid down for them."""
    for file in (facts.metadata.license_files if facts.metadata else None) or ():
        folder, name = f"{facts.info}/licenses", file.rpartition("/")[2]
        if f"{folder}/{file}" in facts.contents:
            continue
        if {f"{facts.info}/{file}", f"{facts.info}/{name}"} & facts.contents.keys():
            facts.note("metadata", f"License-File {file} is not in {folder}")
        elif facts.policy:
            yield f"License-File {file} is missing from {folder}"
        else:
            facts.note("metadata", f"License-File {file} is missing from {folder}")


def _requirements(facts: Facts) -> list[Requirement]:
    return list(facts.metadata.requires_dist or []) if facts.metadata else []


def check_wheel_file(facts: Facts) -> Iterator[str]:
    """WHEEL must agree with the tags and build number of the file name."""
    if "WHEEL" in facts.documents:
        yield from distinfo.wheel_findings(facts.documents["WHEEL"], facts.build, facts.tags)
    yield from _tag_problems(facts)
    if facts.policy and all(tag.platform == "any" for tag in facts.tags):
        for content in facts.contents.values():
            processor = elf.host_machine(content.head)
            if processor:
                yield f"{content.name}: machine code for {processor} in a wheel for any platform"


def _tag_problems(facts: Facts) -> Iterator[str]:
    declared = (facts.policy.tags if facts.policy else None) or facts.tags
    yield from (
        f"tag {tag} is declared but missing" for tag in sorted(map(str, declared - facts.tags))
    )
    pythons = facts.metadata.requires_python if facts.metadata else None
    for tag in sorted(facts.tags - declared, key=str):
        if tag.interpreter == "py2" and pythons and not pythons.contains("2.7"):
            facts.note("wheel", f"tag {tag} is of no use with Requires-Python {pythons}")
        else:
            yield f"tag {tag} is not declared"
    for platform in sorted({tag.platform for tag in facts.tags}):
        if not _PYPI_PLATFORM.fullmatch(platform):
            what = f"PyPI takes no files for the platform {platform}"
            yield from facts.judged("wheel", what)


def check_record(facts: Facts) -> Iterator[str]:
    """RECORD must list every file once, with its hash and size, and nothing else."""
    if "RECORD" in facts.documents:
        found = {name: (c.digest, c.size) for name, c in facts.contents.items()}
        yield from distinfo.record_findings(facts.rows, found, f"{facts.info}/RECORD")


def check_startup(facts: Facts) -> Iterator[str]:
    """Nothing may run whenever Python starts."""
    for name in facts.contents:
        place = facts.installed.get(name, name)
        base = place.rpartition("/")[2]
        at_root = "/" not in place or "site-packages" in place or "dist-packages" in place
        if base.endswith((".pth", ".start")) and (at_root or facts.policy):
            yield f"{name}: runs at every start of Python"
    for top in facts.top_levels:
        if top.partition(".")[0] in STARTUP:
            yield f"{top}: runs at every start of Python"


def check_top_level(facts: Facts) -> Iterator[str]:
    """Only the declared package, and nothing of the repository's own tooling."""
    package = facts.policy.package if facts.policy else None
    if package and package not in facts.top_levels:
        yield f"the package {package} is missing"
    for top in facts.top_levels:
        stem = top.partition(".")[0]
        if package and top != package:
            yield f"{top}: stray top-level name; the wheel may install {package} only"
        elif not package and stem in STRAY and stem != facts.wheel.name:
            yield f"{top}: stray top-level name"
    if package:
        for name in facts.contents:
            *folders, base = name.split("/")
            if set(folders) & {"tests", "test"} or base == "conftest.py":
                yield f"{name}: tests do not belong into the wheel"


def check_entry_points(facts: Facts) -> Iterator[str]:
    """No pytest plugin; for a declared distribution, only the entry points declared."""
    allowed = facts.policy.entry_points if facts.policy else facts.entry_points
    for point in sorted(facts.entry_points):
        if point.startswith("pytest11:"):
            yield f"{point}: would load itself into every pytest run"
        elif point not in allowed:
            yield f"{point}: is not declared"
    for point in sorted(allowed - facts.entry_points):
        yield f"{point}: is declared but missing"


def check_data(facts: Facts) -> Iterator[str]:
    """``.data`` folders install outside the package: known schemes only."""
    for name in facts.contents:
        split = data_scheme(name)
        if split is None:
            continue
        folder, scheme, _ = split
        problem = distinfo.disagreement(facts.wheel.filename, *info_identity(folder), folder)
        if facts.policy:
            yield f"{name}: would be installed outside the package"
        elif problem or scheme not in SCHEMES:
            yield problem or f"{name}: unknown installation scheme {scheme!r}"


def check_junk(facts: Facts) -> Iterator[str]:
    """No caches, repository folders, secrets, editors' leftovers or notes of installers."""
    for name, content in facts.contents.items():
        if name.rpartition("/")[::2] in product(facts.infos, _OF_INSTALLERS):
            yield f"{name}: is written by installers only"
        parts = name.split("/")
        if set(parts) & set(_JUNK_PARTS) or name.endswith(_JUNK_SUFFIXES):
            yield f"{name}: does not belong into a wheel"
        if _PRIVATE_KEY.match(content.head):
            yield f"{name}: is a private key"


def check_resources(facts: Facts) -> Iterator[str]:
    """Declared resources must be present and have content."""
    for pattern in facts.policy.resources if facts.policy else ():
        matches = [c for name, c in facts.contents.items() if _fits(name, pattern)]
        if not matches:
            yield f"{pattern}: is missing"
        for content in matches:
            if not content.size and not content.name.endswith("/py.typed"):
                yield f"{content.name}: is empty"


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def check_cuda(facts: Facts) -> Iterator[str]:
    """The GPU architectures embedded must be exactly those declared."""
    families: dict[str, set[str]] = {}
    for content in facts.contents.values():
        yield from _cubin_problems(content)
        if content.arch:
            family = _ARCH_IN_NAME.sub("*", content.name)
            families.setdefault(family, set()).add(content.arch)
        if facts.policy and content.head.startswith(_FATBIN_MAGIC):
            yield f"{content.name}: a fat binary, whose architectures the audit cannot read"
    if facts.policy:
        declared, embedded = facts.policy.cuda_archs, set(facts.archs)
        for arch in sorted(declared - embedded, key=arch_key):
            yield f"{arch}: is declared but not embedded"
        for arch in sorted(embedded - declared, key=arch_key):
            yield f"{arch}: is embedded but not declared"
        for family, archs in families.items():
            kinds = {arch.partition("_")[0] for arch in archs}
            for arch in sorted((declared & embedded) - archs, key=arch_key):
                if arch.partition("_")[0] in kinds:
                    yield f"{family}: has no {arch}"


def _cubin_problems(content: Content) -> Iterator[str]:
    if content.name.endswith((".cubin", ".ptx")) and not content.arch:
        yield f"{content.name}: is no {content.name.rpartition('.')[2]}"
    named = _ARCH_IN_NAME.search(content.name)
    if content.arch and named and named[2].rstrip("af") != _digits(content.arch):
        yield f"{content.name}: was compiled for {content.arch}"
    if elf.cubin_arch(content.head) and content.size < elf.extent(content.head):
        yield f"{content.name}: is cut short"


def _digits(arch: str) -> str:
    return arch.partition("_")[2].rstrip("af")


def check_source(facts: Facts) -> Iterator[str]:
    """The package must hold what the source tree holds: nothing stale, nothing left out."""
    policy = facts.policy
    if policy is None or policy.source is None or facts.source is None:
        return
    root = facts.source / policy.source
    there = set(_source_files(root, policy.package))
    here = {name for name in facts.contents if name.startswith(f"{policy.package}/")}
    built = {name for name in here | there if any(_fits(name, p) for p in policy.built)}
    for name in sorted(here - there - built):
        yield f"{name}: is not in the source tree"
    for name in sorted(there - here - built):
        yield f"{name}: is in the source tree but not in the wheel"
    for name in sorted((here & there) - built):
        algorithm = facts.contents[name].digest.partition("=")[0]
        if distinfo.digest_of(root / name, algorithm) != facts.contents[name].digest:
            yield f"{name}: differs from the source tree"


def _source_files(root: Path, package: str) -> Iterator[str]:
    for path in (root / package).rglob("*"):
        name = path.relative_to(root).as_posix()
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
            yield name


def check_size(facts: Facts) -> Iterator[str]:
    """The file must stay below the ceiling declared."""
    if facts.policy and facts.file_size > facts.policy.max_bytes:
        yield f"{facts.file_size} bytes, more than the {facts.policy.max_bytes} allowed"


def _has_project(facts: Facts) -> bool:
    return facts.policy is not None and facts.policy.project is not None


def _python_passed(facts: Facts) -> str:
    minor = oldest(facts.metadata.requires_python) if facts.metadata else None
    if minor is None or "python" in facts.notes:
        return "not compared" if minor is None else "see the notes"
    return f"nothing that Python 3.{minor} lacks"


def _nothing(facts: Facts) -> Iterator[str]:
    return iter(())


RULES = (
    Rule(
        name="zip",
        check=_nothing,
        passed=lambda f: f"{len(f.members)} members, {f.unpacked} bytes, every CRC right",
    ),
    Rule(name="names", check=check_names, passed=lambda f: "plain relative paths, none twice"),
    Rule(
        name="permissions",
        check=check_permissions,
        passed=lambda f: "regular files, readable by everyone",
    ),
    Rule(
        name="headers",
        check=check_headers,
        passed=lambda f: "unusual, but harmless" if "headers" in f.notes else "nothing unusual",
    ),
    Rule(name="dist-info", check=check_dist_info, passed=lambda f: f"{f.info}"),
    Rule(
        name="metadata",
        check=check_metadata,
        passed=lambda f: f"valid, requires {', '.join(map(str, _requirements(f))) or 'nothing'}",
    ),
    Rule(
        name="project",
        check=check_project,
        passed=lambda f: "as in pyproject.toml" if _has_project(f) else "not compared",
    ),
    Rule(
        name="wheel",
        check=check_wheel_file,
        passed=lambda f: f"tags {', '.join(sorted(map(str, f.tags)))}",
    ),
    Rule(
        name="record",
        check=check_record,
        passed=lambda f: f"lists all {len(f.contents)} files, hashes and sizes right",
    ),
    Rule(name="startup", check=check_startup, passed=lambda f: "nothing runs at Python's start"),
    Rule(
        name="top-level",
        check=check_top_level,
        passed=lambda f: f"installs {', '.join(f.top_levels) or 'nothing'}",
    ),
    Rule(
        name="entry-points",
        check=check_entry_points,
        passed=lambda f: ", ".join(sorted(f.entry_points)) or "none",
    ),
    Rule(
        name="imports",
        check=check_imports,
        passed=lambda f: ", ".join(imported(f)) or "none of others",
    ),
    Rule(
        name="own-imports",
        check=check_own_imports,
        passed=lambda f: (
            "not all found: see the notes"
            if "own-imports" in f.notes
            else f"{len(f.sources)} modules find what they import of each other"
        ),
    ),
    Rule(
        name="python",
        check=check_python,
        passed=_python_passed,
    ),
    Rule(
        name="data",
        check=check_data,
        passed=lambda f: f"{sum(data_scheme(n) is not None for n in f.contents)} files in .data",
    ),
    Rule(name="junk", check=check_junk, passed=lambda f: "no caches, no secrets"),
    Rule(
        name="resources",
        check=check_resources,
        passed=lambda f: ", ".join(f.policy.resources if f.policy else ()) or "none declared",
    ),
    Rule(
        name="cuda",
        check=check_cuda,
        passed=lambda f: f"embeds {', '.join(f.archs) or 'no GPU code'}",
    ),
    Rule(
        name="code",
        check=check_code,
        passed=lambda f: "every kernel in every image" if f.archs else "no GPU code",
    ),
    Rule(
        name="manifest",
        check=check_manifests,
        passed=lambda f: "as listed" if f.archs else "no GPU code",
    ),
    Rule(
        name="source",
        check=check_source,
        passed=lambda f: "as in the source tree" if f.source else "not compared",
    ),
    Rule(name="size", check=check_size, passed=lambda f: f"{f.file_size} bytes"),
)
