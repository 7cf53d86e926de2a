"""The environments to gate wheels in: one unless more are asked for."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from gate.errors import UsageFailure

CONSTRAINTS = Path(__file__).parent.parent / "ci" / "constraints.txt"
ALL = "all"
_NAME = re.compile(r"(?!torch\d|site$|all$)[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A Python and a torch.

    Attributes:
        name: what tells its evidence from that of other environments.
        python: interpreter of the environment.
        torch: a requirement on torch, or None for the pinned one.
        site: an existing site-packages directory to use in place of a layer, or None.
    """

    name: str = ""
    python: Path = Path(sys.executable)
    torch: str | None = None
    site: Path | None = None

    @property
    def identity(self) -> str:
        """The name, or what stands for it: the torch and the Python asked for."""
        if self.name:
            return self.name
        torch = (self.torch or pinned("torch")).replace("torch==", "torch")
        parts = ["site" if self.site else torch]
        if self.python != Path(sys.executable):
            parts.append(str(self.python).strip("/"))
        return "-".join(parts)

    def describe(self) -> str:
        """Return one line for a person."""
        layer = f"the packages in {self.site}" if self.site else self.torch or pinned("torch")
        return f"{layer}, {self.python}"


def pins() -> list[str]:
    """Return the requirements in ci/constraints.txt."""
    lines = (line.partition("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines())
    return [line for line in lines if line]


def pinned(name: str) -> str:
    """Return the pinned requirement of ``name``, as in ``torch==2.13.0``."""
    return next(pin for pin in pins() if Requirement(pin).name == name)


def torch_requirement(spec: str, source: str = "--torch") -> str:
    """Return ``spec`` (``2.13.0``, ``torch==2.13.0``, ``>=2.12``) as a requirement on torch.

    Args:
        source: where ``spec`` was given, for the message.

    Raises:
        UsageFailure: it is not a requirement on torch.
    """
    text = f"torch=={spec}" if re.match(r"\d", spec) else spec
    text = f"torch{text}" if text.startswith(tuple("<>=!~")) else text
    try:
        if Requirement(text).name == "torch":
            return text
    except InvalidRequirement:
        pass
    raise UsageFailure(
        f"{source} {spec!r} is not a requirement on torch.",
        next_step="use a version or a specifier: --torch 2.13.0, --torch 'torch>=2.12'",
    )


def choose(
    *,
    torch: Sequence[str],
    names: Sequence[str],
    site: Path | None,
    python: Path | None,
    known: Mapping[str, Target],
) -> tuple[Target, ...]:
    """Return what the options ask for, in their order; by default one environment.

    Args:
        torch: each ``--torch``, as a requirement.
        names: each ``--environment``; ``all`` stands for every known one.
        site: ``--site``.
        python: ``--python``, for every environment that names none itself.
        known: the named environments.

    Raises:
        UsageFailure: a name is unknown, or the options contradict each other.
    """
    interpreter = python or Path(sys.executable)
    if site and (torch or names):
        other = "--torch" if torch else "--environment"
        raise UsageFailure(f"--site brings its own torch; it does not go with {other}.")
    targets = [Target(python=interpreter, torch=each) for each in torch]
    for name in names:
        found = list(known) if name == ALL else [name]
        if not found or not known.keys() >= set(found):
            raise UsageFailure(
                f"--environment {name!r} has no entry in [tool.gate.environments].",
                next_step=f"known are {', '.join([*known, ALL])}",
            )
        targets += [known[each] for each in found]
    if python:
        targets = [replace(each, python=python) if _default(each) else each for each in targets]
    return tuple(dict.fromkeys(targets)) or (Target(python=interpreter, site=site),)


def _default(target: Target) -> bool:
    return target.python == Path(sys.executable)


def parse(tables: Mapping[str, Any], root: Path) -> dict[str, Target]:
    """Read ``[tool.gate.environments]``: a name, and a torch or a table of python, torch, site.

    Raises:
        UsageFailure: it says something the gate does not know.
    """
    targets = {name: _target(name, value, root) for name, value in tables.items()}
    folded = {name.lower() for name in targets}
    if len(folded) < len(targets):
        raise UsageFailure("pyproject.toml, tool.gate.environments: two names differ only in case")
    return targets


def _target(name: str, value: Any, root: Path) -> Target:
    where = f"pyproject.toml, tool.gate.environments.{name}"
    if not _NAME.fullmatch(name):
        raise UsageFailure(f"{where}: is not a name such as floor or newest")
    table = {"torch": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not table.keys() <= {"torch", "python", "site"}:
        raise UsageFailure(f"{where}: must be a torch or a table of torch, python and site")
    for key, text in table.items():
        if not isinstance(text, str) or not text.strip():
            raise UsageFailure(f"{where}.{key}: must be a text, not {text!r}")
    if len(table.keys() & {"torch", "site"}) != 1:
        raise UsageFailure(f"{where}: needs either torch or site")
    paths = {key: root / Path(table[key]).expanduser() for key in table.keys() - {"torch"}}
    torch = torch_requirement(table["torch"], f"{where}:") if "torch" in table else None
    return Target(name=name, torch=torch, **paths)
