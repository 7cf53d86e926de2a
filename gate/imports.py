"""What the modules of a wheel import, found without running them."""

from __future__ import annotations

import ast
import sys
import warnings
from functools import lru_cache

SOURCE_BYTES = 4 * 1024**2


@lru_cache(maxsize=512)
def foreign(source: bytes, package: str) -> frozenset[str]:
    """Top-level modules that a module imports, besides the standard library and ``package``.

    Imports that are put together while the program runs are not found.

    Raises:
        SyntaxError: the bytes are no Python source.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error)) from error
    found = {name.partition(".")[0] for node in ast.walk(tree) for name in _names(node)}
    return frozenset(found - sys.stdlib_module_names - {package})


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module or ""]
    return []
