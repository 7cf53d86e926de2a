"""The audit's rules about modules: what they import, of others and of the wheel's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import PurePosixPath
from types import ModuleType

from packaging.version import InvalidVersion, Version

from gate import modules, pythons
from gate.modules import Import, Module
from gate.scan import Facts

# Of more, it would take minutes to find what an old Python lacks.
_MOST_BYTES = 8 << 20
_MACHINE_CODE = (".so", ".pyd")
_MODULE = ModuleType("any")


def check_imports(facts: Facts) -> Iterator[str]:
    """Modules import the standard library, the package itself and what is declared."""
    package = facts.policy.package if facts.policy else ""
    allowed = facts.policy.imports if facts.policy else None
    for name, source in facts.sources.items() if allowed is not None else ():
        if error := modules.syntax_error(source, sys.version_info[1]):
            yield f"{name}: is not Python: {error}"
        found = set(modules.foreign(modules.read(source))) - {package}
        for module in sorted(found - (allowed or frozenset())):
            yield f"{name}: imports {module}, which is not declared"


def imported(facts: Facts) -> list[str]:
    """What modules import of others, where that is looked at."""
    if not facts.policy or facts.policy.imports is None:
        return []
    found = {top for s in facts.sources.values() for top in modules.foreign(modules.read(s))}
    return sorted(found - {facts.policy.package})


def check_own_imports(facts: Facts) -> Iterator[str]:
    """What the package imports of itself is in the wheel, and has the names."""
    tree = _Tree(facts)
    for name, source in facts.sources.items():
        place = facts.installed.get(name)
        for found in modules.read(source).imports if place else ():
            if not found.optional:
                problems = tree.problems(str(place), found)
                yield from facts.judged(
                    "own-imports", *(f"{name}, line {found.line}: {p}" for p in problems)
                )
        for line, problem in tree.unknown(str(place), modules.read(source)) if place else ():
            yield from facts.judged("own-imports", f"{name}, line {line}: {problem}")
    yield from _other_versions(facts, tree)


def check_python(facts: Facts) -> Iterator[str]:
    """Syntax and standard library are those of the oldest Python that the wheel is for."""
    minor = pythons.oldest(facts.metadata.requires_python) if facts.metadata else None
    if minor is not None and sum(map(len, facts.sources.values())) > _MOST_BYTES:
        yield from facts.judged(
            "python", f"more than {_MOST_BYTES} bytes of modules: not compared"
        )
        return
    if minor is not None and not pythons.has_vermin():
        facts.note("python", "vermin is not installed: only the syntax was compared")
    for name, source in facts.sources.items() if minor is not None else ():
        if name in facts.installed:
            lacking = pythons.lacking(source, minor or 0)
            yield from facts.judged("python", *(f"{name}, {problem}" for problem in lacking))


def _other_versions(facts: Facts, tree: _Tree) -> Iterator[str]:
    for top in facts.top_levels:
        module = tree.modules.get(top)
        if module and module.version is not None and not _is_version(facts, module.version):
            what = f"{top}: __version__ is {module.version}, the wheel's is {facts.wheel.version}"
            yield from facts.judged("own-imports", what)


def _is_version(facts: Facts, text: str) -> bool:
    """A local part (``+cu130``) may be left out."""
    try:
        version = Version(text)
    except InvalidVersion:
        return False
    return version in (facts.wheel.version, Version(facts.wheel.version.public))


class _Tree:
    """The modules of a wheel by their dotted names."""

    def __init__(self, facts: Facts) -> None:
        self.modules: dict[str, Module] = {}
        self._folders: set[str] = set()
        self._compiled: set[str] = set()
        self._tops = {top.partition(".")[0] for top in facts.top_levels}
        for name, place in facts.installed.items():
            path = PurePosixPath(place)
            self._folders.update(".".join(parent.parts) for parent in path.parents)
            if path.suffix == ".py" and name in facts.sources:
                self.modules[_dotted(path)] = modules.read(facts.sources[name])
            elif path.suffix in _MACHINE_CODE:
                dotted = ".".join([*path.parent.parts, path.name.partition(".")[0]])
                self.modules.setdefault(dotted, Module(is_open=True))
                self._compiled.add(dotted)

    def problems(self, place: str, found: Import) -> Iterator[str]:
        """What an import in the module at ``place`` does not find."""
        base = _base(PurePosixPath(place), found)
        if base is None:
            yield "imports from outside of all packages"
        elif base.partition(".")[0] in self._tops:
            if not self._exists(base):
                yield f"imports {base}, which is not in the wheel"
                return
            for name in found.names:
                if not self._has(base, name, set()):
                    yield f"imports {name} from {base}, which has none"

    def unknown(self, place: str, module: Module) -> Iterator[tuple[int, str]]:
        """Attributes of other modules that a module at ``place`` reads and they lack."""
        for line, alias, name in module.uses:
            found = module.aliases.get(alias)
            base = _base(PurePosixPath(place), found) if found else None
            target = ".".join([base or "", *(found.names if found else ())])
            # Of what is no module, the attributes are not known.
            if not base or target not in self.modules or self._is_hidden(target):
                continue
            if not self._has(target, name, set()):
                yield line, f"uses {alias}.{name}, but {target} has no {name}"

    def _is_hidden(self, dotted: str) -> bool:
        """Whether its package gives the name of a module to something else."""
        package, _, name = dotted.rpartition(".")
        module = self.modules.get(package)
        if module is None or name not in module.names:
            return False
        found = module.aliases.get(name)
        base = _base(_place(package, is_package=True), found) if found else None
        return ".".join([base or "", *(found.names if found else ())]) != dotted

    def _exists(self, dotted: str) -> bool:
        """Machine code can hold modules that no file is called after."""
        if dotted in self.modules or dotted in self._folders:
            return True
        parents = PurePosixPath(*dotted.split(".")).parents
        return any(".".join(parent.parts) in self._compiled for parent in parents)

    def _has(self, dotted: str, name: str, seen: set[str]) -> bool:
        module = self.modules.get(dotted, Module())
        if name == "*" or module.is_open or name in module.names or _is_given(name):
            return True
        if self._exists(f"{dotted}.{name}"):
            return True
        seen.add(dotted)
        return any(self._star(dotted, f, name, seen) for f in module.imports if "*" in f.names)

    def _star(self, dotted: str, found: Import, name: str, seen: set[str]) -> bool:
        base = _base(_place(dotted, is_package=dotted in self._folders), found)
        if base is None or base.partition(".")[0] not in self._tops:
            return True
        return base not in seen and self._has(base, name, seen)


def _is_given(name: str) -> bool:
    """Python itself gives every module some."""
    return hasattr(_MODULE, name) or name in ("__file__", "__path__", "__cached__")


def _place(dotted: str, *, is_package: bool) -> PurePosixPath:
    return PurePosixPath(*dotted.split("."), *(["__init__.py"] if is_package else []))


def _dotted(path: PurePosixPath) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _base(place: PurePosixPath, found: Import) -> str | None:
    """The absolute name of the module that an import names."""
    if not found.level:
        return found.module
    parts = place.parent.parts
    if found.level > len(parts):
        return None
    kept = parts[: len(parts) - found.level + 1]
    return ".".join([*kept, *([found.module] if found.module else [])])
