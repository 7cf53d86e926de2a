"""Runs suites through the gate, and keeps what it makes of them."""

from __future__ import annotations

from pathlib import Path

from gate import regressions as module
from gate.judge import Judgement
from gate.machine import PROFILES
from gate.parts import Run
from gate.regressions import Subject, collect, prepare
from gate.report import Failure
from gate.runner import Runner

SINGLE = Run(folder="single", world=1)
RANKS = Run(folder="ranks", world=2)
HEAD = "import os, sys, pytest, mini\n"


def judge(
    subject: Subject, suite: Path, run: Run = SINGLE, timeout: float = 240.0
) -> tuple[list[str], list[Failure]]:
    judgement = judgement_of(subject, suite, run, timeout)
    return judgement.passed, judgement.failures


def judgement_of(
    subject: Subject,
    suite: Path,
    run: Run = SINGLE,
    timeout: float = 240.0,
    exit_first: bool = False,
) -> Judgement:
    records = subject.environment.root / "records"
    copy = prepare(subject, suite)
    inventory = collect(subject, copy, records / "collect", Runner())
    return module.run(
        subject,
        copy,
        run,
        inventory,
        folder=records / run.label,
        runner=Runner(),
        profile=PROFILES["cpu"],
        timeout=timeout,
        exit_first=exit_first,
    )
