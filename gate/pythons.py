"""What the oldest Python that a wheel is for lacks of what its modules use."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import lru_cache

from packaging.specifiers import SpecifierSet

from gate import modules

try:
    import vermin
except ImportError:  # machines that only run what others have audited may lack it
    vermin = None

_NEEDED = re.compile(r"L(\d+)[^:]*: (.+) requires? [^ ]+, 3\.(\d+)")
_MINORS = range(7, 40)


def oldest(pythons: SpecifierSet | None) -> int | None:
    """The minor version of the oldest Python 3 that a Requires-Python takes, from 3.7 on."""
    if pythons is None:
        return None
    return next((minor for minor in _MINORS if pythons.contains(f"3.{minor}.99")), None)


def has_vermin() -> bool:
    """Whether more than the syntax can be compared."""
    return vermin is not None


@lru_cache(maxsize=4096)
def lacking(source: bytes, minor: int) -> tuple[str, ...]:
    """What of a module's syntax and standard library Python 3.``minor`` lacks, a line each."""
    if minor > sys.version_info[1]:
        return ()
    if error := modules.syntax_error(source, minor):
        return (f"is not Python 3.{minor}: {error}",)
    return tuple(_lacking(source, minor)) if vermin else ()


def _lacking(source: bytes, minor: int) -> Iterator[str]:
    config = vermin.Config()
    config.set_verbose(3)
    config.set_ignore_incomp(True)
    config.set_eval_annotations(not _defers_annotations(source))
    tree, _, unmarked, _ = vermin.Parser(source).detect(config)
    visitor = vermin.SourceVisitor(config=config, source=source)
    visitor.set_no_lines(unmarked)
    visitor.tour(_Unguarded().visit(tree))
    visitor.minimum_versions()
    # Built-in names that a module makes for itself where Python lacks them.
    given = tuple(f"'{name}' member" for name in modules.read(source).names)
    for line in visitor.output_text().splitlines():
        match = _NEEDED.fullmatch(line)
        if match and int(match[3]) > minor and not match[2].startswith(given):
            yield f"line {match[1]}: {match[2]} needs Python 3.{match[3]}"


def _defers_annotations(source: bytes) -> bool:
    found = modules.read(source).imports
    return any(f.module == "__future__" and "annotations" in f.names for f in found)


class _Unguarded(ast.NodeTransformer):
    """Leaves out what a module runs only where it has asked for the version, or can do without."""

    def visit_If(self, node: ast.If) -> ast.AST:
        asks = "version_info" in ast.dump(node.test) or modules.is_for_types(node)
        return _nothing(node) if asks else self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        asks = "version_info" in ast.dump(node.test)
        return ast.copy_location(ast.Constant(None), node) if asks else self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        catches = " ".join(map(ast.dump, node.handlers))
        tries = any(
            name in catches for name in ("ImportError", "ModuleNotFound", "AttributeError")
        )
        return _nothing(node) if tries else self.generic_visit(node)


def _nothing(node: ast.stmt) -> ast.stmt:
    return ast.copy_location(ast.Pass(), node)
