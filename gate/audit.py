"""Look at a wheel without running any of it, and accept or reject it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from gate.archive import BadArchive, open_archive, printable
from gate.code import compiled_again
from gate.errors import WheelRejected
from gate.policy import AuditPolicy
from gate.rules import RULES
from gate.runner import Runner
from gate.scan import Facts, scan
from gate.wheels import Wheel


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an accepted wheel holds.

    Attributes:
        members: how many files it holds.
        requires_dist: the requirements it declares, in its order.
        top_levels: what it puts directly into site-packages, sorted.
        archs: GPU architectures embedded, such as ``sm_90`` and ``compute_121``, sorted.
        checks: one line for each rule passed, ``rule: what was found``.
        notes: what is unusual and harmless, each ``rule: what``.
    """

    members: int
    requires_dist: tuple[str, ...]
    top_levels: tuple[str, ...]
    archs: tuple[str, ...]
    checks: tuple[str, ...]
    notes: tuple[str, ...]


def audit(
    wheel: Wheel,
    policy: AuditPolicy | None = None,
    *,
    source: Path | None = None,
    runner: Runner | None = None,
) -> Audit:
    """Check a wheel against every rule.

    Args:
        wheel: the wheel; only its private copy is read.
        policy: what its distribution must carry, or None for the generic rules only.
        source: the repository it was built from, to compare contents with; compared only where
            the policy names a source folder.
        runner: what runs the compiler, where GPU code is to be compiled again.

    Raises:
        WheelRejected: with all findings, each ``rule: what``, in the order of the rules.
    """
    try:
        with open_archive(wheel.copy) as archive:
            facts = scan(wheel, archive, policy, source)
    except BadArchive as error:
        raise _rejected(wheel, [f"zip: {error}"]) from error
    findings, checks = _judge(facts)
    if runner and policy and facts.archs and not findings:
        findings = [f"compiled: {printable(what)}" for what in compiled_again(facts, runner)]
        if "compiled" not in facts.notes:
            checks.append("compiled: GPU code is what its sources give")
    if findings:
        raise _rejected(wheel, findings)
    metadata = facts.metadata
    return Audit(
        members=len(facts.contents),
        requires_dist=tuple(map(str, metadata.requires_dist or ())) if metadata else (),
        top_levels=facts.top_levels,
        archs=facts.archs,
        checks=tuple(checks),
        notes=tuple(
            f"{rule}: {printable(what)}"
            for rule, found in facts.notes.items()
            for what in dict.fromkeys(found)
        ),
    )


def _judge(facts: Facts) -> tuple[list[str], list[str]]:
    findings: list[str] = []
    checks: list[str] = []
    # Of a file that cannot be read, other rules would say that it is missing.
    rules = [rule for rule in RULES if rule.name == "zip"] if facts.damaged else RULES
    for rule in rules:
        found = [*facts.problems.get(rule.name, []), *rule.check(facts)]
        # The same fact can be seen twice, as by METADATA's own checks and ours.
        findings.extend(f"{rule.name}: {printable(what)}" for what in dict.fromkeys(found))
        if not found:
            checks.append(f"{rule.name}: {printable(rule.passed(facts))}")
    return findings, checks


def _rejected(wheel: Wheel, findings: list[str]) -> WheelRejected:
    again = f"python -m gate inspect {shlex.quote(str(wheel.path))}"
    count = "1 finding" if len(findings) == 1 else f"{len(findings)} findings"
    return WheelRejected(
        f"{printable(wheel.filename)} was rejected by the audit: {count}",
        findings=findings,
        next_step=f"fix the build and repeat: {again}",
    )
