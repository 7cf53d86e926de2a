"""What the modules of a wheel import, define and need, found without running them."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

_LENIENT = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")


@dataclass(frozen=True, kw_only=True)
class Import:
    """One import.

    Attributes:
        line: where it is.
        module: what it names, without leading dots.
        level: how many leading dots it has.
        names: what it takes from there, ``*`` too; empty for ``import module``.
        optional: whether the program goes on without it.
    """

    line: int
    module: str
    level: int = 0
    names: tuple[str, ...] = ()
    optional: bool = False


@dataclass(kw_only=True)
class Module:
    """What a module holds.

    Attributes:
        imports: all of them, wherever they are.
        names: what is bound at its top level.
        is_open: whether it can have names besides.
        version: its ``__version__``, where that is written down.
        words: texts in it that look like names.
        launches: the names given to calls of ``launch``.
        aliases: imports at its top level by the name they bind; None for a name that something
            else binds as well, here or in a function.
        uses: line, name and attribute wherever an attribute of such a name is read.
    """

    imports: list[Import] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    is_open: bool = False
    version: str | None = None
    words: set[str] = field(default_factory=set)
    launches: set[str] = field(default_factory=set)
    aliases: dict[str, Import | None] = field(default_factory=dict)
    uses: list[tuple[int, str, str]] = field(default_factory=list)


def parse(source: bytes, minor: int) -> ast.Module:
    """The syntax tree of a module for Python 3.``minor``, as far as this Python can tell.

    Raises:
        SyntaxError: the bytes are no Python source.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source, feature_version=(3, minor))
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error)) from error


@lru_cache(maxsize=4096)
def syntax_error(source: bytes, minor: int) -> str | None:
    """Why a module is no Python 3.``minor``, or None."""
    try:
        parse(source, minor)
    except SyntaxError as error:
        return f"{error.msg} (line {error.lineno})"
    return None


@lru_cache(maxsize=4096)
def read(source: bytes) -> Module:
    """What a module holds; one that is no Python source holds nothing that is known.

    Imports and names that are put together while the program runs are not found.
    """
    try:
        tree = parse(source, sys.version_info[1])
    except SyntaxError:
        return Module(is_open=True)
    module = Module(version=_version(tree))
    _Reader(module).visit(tree)
    module.is_open |= "__getattr__" in module.names
    return module


def constant(source: bytes, name: str) -> tuple[object, ...] | None:
    """A tuple or list that a module writes down under a name, or None."""
    try:
        body = parse(source, sys.version_info[1]).body
        values = [
            node.value
            for node in body
            if isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
        ]
        found = ast.literal_eval(values[-1]) if values else None
    except (SyntaxError, ValueError):
        return None
    return tuple(found) if isinstance(found, (tuple, list)) else None


class _Reader(ast.NodeVisitor):
    def __init__(self, module: Module) -> None:
        self._module = module
        self._optional = False
        self._inner = 0

    def _bind(self, *names: str | None) -> None:
        if not self._inner:
            self._module.names.update(name for name in names if name)

    def _within(self, nodes: list[ast.stmt], *, optional: bool) -> None:
        before, self._optional = self._optional, self._optional or optional
        for node in nodes:
            self.visit(node)
        self._optional = before

    def _alias(self, name: str, found: Import | None) -> None:
        known = name in self._module.aliases or self._inner or self._optional
        self._module.aliases[name] = None if known else found

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._bind(alias.asname or alias.name.partition(".")[0])
            found = Import(line=node.lineno, module=alias.name, optional=self._optional)
            self._module.imports.append(found)
            self._alias(
                alias.asname or alias.name.partition(".")[0], found if alias.asname else None
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        names = tuple(alias.name for alias in node.names)
        self._bind(*(alias.asname or alias.name for alias in node.names))
        found = Import(
            line=node.lineno,
            module=node.module or "",
            level=node.level,
            names=names,
            optional=self._optional,
        )
        self._module.imports.append(found)
        for alias in node.names:
            self._alias(alias.asname or alias.name, replace(found, names=(alias.name,)))

    def visit_arg(self, node: ast.arg) -> None:
        self._alias(node.arg, None)
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        lenient = any(map(_is_lenient, node.handlers))
        self._within(node.body, optional=lenient)
        for handler in node.handlers:
            self._bind(handler.name)
            self._within(handler.body, optional=False)
        self._within([*node.orelse, *node.finalbody], optional=False)

    visit_TryStar = visit_Try  # type: ignore[assignment]

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item)
        suppressed = any("suppress" in ast.dump(item.context_expr) for item in node.items)
        self._within(node.body, optional=suppressed)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._within(node.body, optional=is_for_types(node))
        self._within(node.orelse, optional=False)

    def visit_FunctionDef(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ) -> None:
        self._bind(node.name)
        self._alias(node.name, None)
        self._inner += 1
        self.generic_visit(node)
        self._inner -= 1

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Global(self, node: ast.Global) -> None:
        self._module.names.update(node.names)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._bind(node.id)
            self._alias(node.id, None)
        elif node.id in ("globals", "vars", "locals", "exec"):
            self._module.is_open = True

    def visit_Attribute(self, node: ast.Attribute) -> None:
        # What a module may put itself into, or grow names by.
        if node.attr in ("modules", "__dict__"):
            self._module.is_open = True
        if isinstance(node.value, ast.Name) and not self._optional:
            self._module.uses.append((node.lineno, node.value.id, node.attr))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.isidentifier():
            self._module.words.add(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        first = node.args[0] if node.args else None
        is_launch = isinstance(node.func, ast.Attribute) and node.func.attr == "launch"
        if is_launch and isinstance(first, ast.Constant) and isinstance(first.value, str):
            self._module.launches.add(first.value)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self._bind(node.name)
        self.generic_visit(node)


def _version(tree: ast.Module) -> str | None:
    """What is last written down as ``__version__``, whatever else happens."""
    found = None
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(t, ast.Name) and t.id == "__version__" for t in targets):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            found = value if isinstance(value, str) else None
    return found


def _is_lenient(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    return any(isinstance(n, ast.Name) and n.id in _LENIENT for n in ast.walk(handler.type))


def is_for_types(node: ast.If) -> bool:
    """Whether only type checkers read what follows."""
    return any(
        "TYPE_CHECKING" in (getattr(part, "id", ""), getattr(part, "attr", ""))
        for part in ast.walk(node.test)
    )


def foreign(module: Module) -> Iterator[str]:
    """Top-level modules that it imports, besides the standard library."""
    for found in module.imports:
        top = found.module.partition(".")[0]
        if not found.level and top not in sys.stdlib_module_names:
            yield top
