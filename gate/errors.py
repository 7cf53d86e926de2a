"""The catalogue of everything that can stop the gate: one class per failure.

A message has three parts: what happened, the likely cause, and the command to try next.
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_CODES = {
    0: "passed",
    1: "a regression failed, hung or was incomplete",
    2: "usage: the command line is wrong",
    3: "this machine or environment cannot run the gate",
    4: "the wheel was rejected by the audit",
    5: "evidence is missing, stale or altered",
    6: "the package index refused, or holds other bytes",
    130: "interrupted by Ctrl-C; 128 + n by signal n",
}


class GateError(Exception):
    """A failure the user can act on.

    Args:
        what: one sentence saying what happened.
        cause: the likely cause, or "" where ``what`` already says it.
        next_step: a command or action to try, or "".

    Attributes:
        state: what is done and what is not, where that is not plain; else "".
    """

    exit_code = 1
    state = ""

    def __init__(self, what: str, *, cause: str = "", next_step: str = "") -> None:
        self.what, self.cause, self.next_step = what, cause, next_step
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.cause:
            lines.append(f"  cause: {self.cause}")
        if self.state:
            lines.append(f"  state: {self.state}")
        if self.next_step:
            lines.append(f"  next:  {self.next_step}")
        return "\n".join(lines)


class RegressionFailed(GateError):
    """A test failed, was skipped, went missing, hung or crashed."""

    exit_code = 1


class IdentityMismatch(GateError):
    """A test process imported other files than those of the wheel under test."""

    exit_code = 1


class UsageFailure(GateError):
    """The command line asks for something that makes no sense."""

    exit_code = 2


class MachineUnfit(GateError):
    """The machine lacks what the profile needs."""

    exit_code = 3


class EnvironmentFailed(GateError):
    """The clean environment could not be made or is not clean."""

    exit_code = 3


class _Listing(GateError):
    """A failure with several findings, of which the message shows the first hundred.

    Args:
        what: one sentence saying what happened.
        findings: every single thing that is wrong, one line each.
        next_step: a command or action to try, or "".
    """

    shown = 100

    def __init__(self, what: str, *, findings: Sequence[str] = (), next_step: str = "") -> None:
        self.findings = tuple(findings)
        lines = [what, *(f"  - {finding}" for finding in self.findings[: self.shown])]
        if len(self.findings) > self.shown:
            lines.append(f"  - and {len(self.findings) - self.shown} more")
        super().__init__("\n".join(lines), next_step=next_step)


class WheelRejected(_Listing):
    """The static audit found something wrong with the wheel."""

    exit_code = 4


class KernelsSpill(_Listing):
    """A kernel needs more registers than there are."""

    exit_code = 1


class EvidenceRejected(_Listing):
    """Evidence is missing, stale or does not match the bytes."""

    exit_code = 5


class IndexRefused(_Listing):
    """A package index refused an upload or a question, or holds other bytes."""

    exit_code = 6


class IndexFailing(IndexRefused):
    """A package index answered with an error of its own; it may work later."""

    exit_code = 6


class Interrupted(GateError):
    """A signal asked the gate to stop."""

    exit_code = 130


class BuildFailed(GateError):
    """The wheel could not be built, or not twice with the same bytes."""

    exit_code = 3
