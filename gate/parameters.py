"""Values on the command line: paths, and what is refused as one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.errors import UsageFailure


def base_directory() -> Path:
    """Return the directory that relative paths on the command line count from."""
    try:
        return Path(os.environ.get("GATE_INVOKED_FROM") or Path.cwd())
    except FileNotFoundError:
        raise UsageFailure(
            "The current directory does not exist any more.", next_step="cd to another one"
        ) from None


if TYPE_CHECKING:
    _PathType = click.ParamType[Path]
else:  # older versions of click give it no parameter
    _PathType = click.ParamType


class PathOption(_PathType):
    """A path: ``~`` is expanded, and relative ones count from where the user typed."""

    name = "path"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Return the absolute path, or fail as a usage error that names the option."""
        if isinstance(value, Path):
            return value
        name = param.opts[0] if param else "the option"
        # click itself takes the next option for a value that is missing.
        if not value.strip() or value.startswith("-"):
            raise click.UsageError(f"{name} needs a path, not {value!r}; ./-x is one.", ctx)
        try:
            return base_directory() / Path(str(value)).expanduser()
        except RuntimeError as error:
            self.fail(f"{value}: {error}", param, ctx)


def positive(_ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Refuse a time limit that is not a positive number of seconds."""
    if not 0 < value < float("inf"):
        raise click.BadParameter(f"{value} is not a positive number of seconds", param=param)
    return value


def not_an_option(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty value, and one that is the next option."""
    if value is not None and (not value.strip() or value.startswith("-")):
        raise click.UsageError(f"{param.opts[0]} needs a value, not {value!r}.", ctx)
    return value
