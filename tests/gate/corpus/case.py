"""What a sabotaged wheel must come to: one entry for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.gate.corpus.package import Package

Sabotage = Callable[[Package], None]

STATIC_SECONDS = 15.0
"""Bound of a case that nothing is installed for; it takes less than two."""

EXIT_CODES = {"resolve": 4, "audit": 4, "install": 4, "identity": 1, "regressions": 1}
"""By the phase that catches it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to break a wheel, and how the gate must refuse it.

    Attributes:
        name: unique, of words joined by dashes.
        sabotage: breaks a package.
        phase: the phase that must fail.
        words: what the gate's message must say.
        exit_code: the gate's exit status.
        seconds: within which the gate must end.
        tests: the regression tests it must get past or fail at; none where it gets nowhere near.
        timeout: the gate's time limit for them, in seconds.
    """

    name: str
    sabotage: Sabotage
    phase: str
    words: tuple[str, ...]
    exit_code: int
    seconds: float
    tests: tuple[str, ...] = ()
    timeout: float = 120.0

    @property
    def is_static(self) -> bool:
        """Whether the wheel is refused before anything is installed."""
        return self.phase in ("resolve", "audit")


@dataclass
class Table:
    """Cases in the order in which they are written down."""

    cases: list[Case]

    def add(self, phase: str, *words: str, **options: object) -> Callable[[Sabotage], Sabotage]:
        """Decorate a sabotage, which then is a case with the function's name."""
        defaults = {"exit_code": EXIT_CODES[phase], "seconds": STATIC_SECONDS, **options}

        def enter(sabotage: Sabotage) -> Sabotage:
            name = sabotage.__name__.replace("_", "-")
            case = Case(name=name, sabotage=sabotage, phase=phase, words=words, **defaults)
            self.cases.append(case)
            return sabotage

        return enter
