"""Mutants: where code can be changed, what is drawn of it, and which changes mean nothing.

The operators are cosmic-ray's, and two more that it lacks: a statement that is gone, and two
arguments that have changed places. What Python never evaluates, or what nothing can depend on, is
not changed: annotations, branches for type checkers, options of dataclasses.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

Node = Any
Place = tuple[int, int]
LEFT_OUT = ("VariableReplacer", "VariableInserter")  # they draw at random, by themselves
STATEMENTS = ("expr_stmt", "atom_expr", "raise_stmt", "return_stmt", "del_stmt", "await")
GROUPS = {
    "arguments": ("ArgumentSwapper",),
    "conditions": ("ReplaceComparison", "AddNot", "ReplaceAnd", "ReplaceOr", "ReplaceUnary"),
    "constants": ("NumberReplacer", "ReplaceTrue", "ReplaceFalse"),
    "operators": ("ReplaceBinary",),
}


class StatementRemover(Operator):
    """Put ``pass`` in the place of a simple statement."""

    def mutation_positions(self, node: Node) -> Iterator[tuple[Place, Place]]:
        """Yield where ``node`` is a statement that does something."""
        if _is_statement(node):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Node, index: int) -> Node:
        """Return ``pass``."""
        return parso.python.tree.Keyword("pass", node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        """None are needed: they are for cosmic-ray's own tests."""
        return ()


class ArgumentSwapper(Operator):
    """Let two positional arguments of a call, side by side, change places."""

    def mutation_positions(self, node: Node) -> Iterator[tuple[Place, Place]]:
        """Yield each pair of arguments of a call."""
        for first, second in _pairs(node):
            yield first.start_pos, second.end_pos

    def mutate(self, node: Node, index: int) -> Node:
        """Return the arguments with one pair of them swapped."""
        first, second = list(_pairs(node))[index]
        here, there = node.children.index(first), node.children.index(second)
        before, after = first.get_first_leaf().prefix, second.get_first_leaf().prefix
        first.get_first_leaf().prefix, second.get_first_leaf().prefix = after, before
        node.children[here], node.children[there] = second, first
        return node

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        """None are needed: they are for cosmic-ray's own tests."""
        return ()


def _is_statement(node: Node) -> bool:
    if node.type not in STATEMENTS or node.parent is None or node.parent.type != "simple_stmt":
        return False
    # "x: int" does nothing.
    return not (
        node.type == "expr_stmt" and len(node.children) == 2 and "=" not in node.get_code()
    )


def _pairs(node: Node) -> Iterator[tuple[Node, Node]]:
    if node.type != "arglist" or node.parent.type != "trailer":
        return
    plain = [child for child in node.children if child.type not in ("operator", "argument")]
    for first, second in pairwise(plain):
        if first.get_code().strip() != second.get_code().strip():
            yield first, second


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: relative to the checkout.
        function: the qualified name of the function or class that is changed, or "<module>".
        operator: the name of cosmic-ray's operator, or of one of ours.
        lines: the changed lines of the file, counted from 1.
        before, after: what these lines said and say, without the space around them.
        text: the whole mutated file.
    """

    file: str
    function: str
    operator: str
    lines: tuple[int, ...]
    before: str
    after: str
    text: str

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What stays the same when other lines of the file change."""
        return self.file, self.function, self.before, self.after


def operators() -> dict[str, Operator]:
    """Return all operators, by name."""
    provider = OperatorProvider()
    found = {name: provider[name]() for name in provider if name not in LEFT_OUT}
    return found | {"StatementRemover": StatementRemover(), "ArgumentSwapper": ArgumentSwapper()}


def draw(root: Path, files: Sequence[str], count: int, seed: str, least: int = 4) -> list[Mutant]:
    """Return ``count`` mutants of ``files``, or a few more, spread over them by their size.

    The draw depends on the changed function alone: a change elsewhere leaves it as it is.

    Args:
        least: how many at least of each file, where it has as many.
    """
    places = {file: list(_places(root / file)) for file in files}
    total = sum(len(found) for found in places.values())
    drawn = []
    for file, found in places.items():
        share = max(least, round(count * len(found) / max(total, 1)))
        text = (root / file).read_text()
        mutants = _made(file, text, _in_turn(found, seed, file), seed)
        drawn += [mutant for mutant, _ in zip(mutants, range(share), strict=False)]
    return drawn


@dataclass(frozen=True)
class _Site:
    """A node that operators of one kind can change: ``choices`` are operators and occurrences."""

    function: str
    line: str
    number: int
    choices: tuple[tuple[str, int], ...]


def _rank(seed: str, *parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, (seed, *parts))).encode()).hexdigest()


def _in_turn(sites: Iterable[_Site], seed: str, file: str) -> list[_Site]:
    """In an order that chance decides, with one of each group of operators after the other."""
    groups: dict[str, list[_Site]] = defaultdict(list)
    for site in sorted(sites, key=lambda site: _rank(seed, file, site)):
        groups[_group(site.choices[0][0])].append(site)
    turns = [(turn, name, site) for name in groups for turn, site in enumerate(groups[name])]
    return [site for _, _, site in sorted(turns, key=lambda item: item[:2])]


def _group(operator: str) -> str:
    for group, names in GROUPS.items():
        if operator.startswith(names):
            return group
    return "statements"


def _places(path: Path) -> Iterator[_Site]:
    text = path.read_text()
    lines, scopes, silent = text.splitlines(), _scopes(text), _silent(text)
    tree = parso.parse(text)
    sites: dict[tuple[str, Place, Place], list[tuple[str, int]]] = defaultdict(list)
    for name, operator in operators().items():
        occurrence = 0
        for node in _nodes(tree):
            for start, stop in operator.mutation_positions(node):
                if not any(first <= start and stop <= last for first, last in silent):
                    sites[_kind(name), start, stop].append((name, occurrence))
                occurrence += 1
    seen: dict[tuple[str, ...], int] = defaultdict(int)
    for (kind, start, _), choices in sorted(sites.items(), key=lambda item: (item[0][1], item[0])):
        function = scopes.get(start[0], "<module>")
        key = function, lines[start[0] - 1].strip(), kind
        seen[key] += 1
        yield _Site(function, "\0".join(key[1:]), seen[key], tuple(choices))


def _kind(operator: str) -> str:
    for kind in ("ReplaceComparisonOperator", "ReplaceBinaryOperator", "ReplaceUnaryOperator"):
        if operator.startswith(kind):
            return kind
    return operator


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def _made(file: str, text: str, sites: Iterable[_Site], seed: str) -> Iterator[Mutant]:
    known = operators()
    for site in sites:
        choices = sorted(site.choices, key=lambda choice: _rank(seed, file, site, *choice))
        for name, occurrence in choices:
            mutated = mutate_code(text, known[name], occurrence)
            if mutated is None or not _differs(text, mutated):
                continue
            removed, added, lines = _difference(text, mutated)
            yield Mutant(
                file=file,
                function=site.function,
                operator=name,
                lines=lines,
                before=removed,
                after=added,
                text=mutated,
            )
            break


def _differs(text: str, mutated: str) -> bool:
    """Whether Python would run something else; a mutant that does not compile says nothing."""
    try:
        return ast.dump(ast.parse(text)) != ast.dump(ast.parse(mutated))
    except SyntaxError:
        return False


def _difference(text: str, mutated: str) -> tuple[str, str, tuple[int, ...]]:
    old, new = text.splitlines(), mutated.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    changed = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    first, last = changed[0], changed[-1]
    removed = " ".join(line.strip() for line in old[first[1] : last[2]])
    added = " ".join(line.strip() for line in new[first[3] : last[4]])
    return removed, added, tuple(range(first[1] + 1, max(last[2], first[1] + 1) + 1))


def _scopes(text: str) -> dict[int, str]:
    """{line: qualified name of the innermost function or class around it}."""
    found: dict[int, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                name = f"{prefix}.{child.name}" if prefix else child.name
                assert child.end_lineno is not None
                for line in range(child.lineno, child.end_lineno + 1):
                    found[line] = name
            visit(child, name)

    visit(ast.parse(text), "")
    return found


def _silent(text: str) -> list[tuple[Place, Place]]:
    """What is not changed, since nothing that runs can depend on it."""
    parts: list[ast.AST | None] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts.append(node.returns)
        elif isinstance(node, ast.ClassDef):
            parts += [one for one in node.decorator_list if "dataclass" in ast.unparse(one)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("cast", "TypeVar"):
            parts += node.args[:1]
        elif _is_silent(node):
            parts.append(node)
    return [_extent(part) for part in parts if part is not None]


def _is_silent(node: ast.AST) -> bool:
    """Whether it is a docstring, for type checkers alone, or a list of names."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _extent(node: Any) -> tuple[Place, Place]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
