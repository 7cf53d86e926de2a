"""The gate's commands as functions: every wheel in every environment, and their verdicts."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packaging.utils import canonicalize_name

from gate import audit as auditing
from gate import page, policy, regressions, signature
from gate.build import NOTE, build
from gate.environment import clean_environment
from gate.errors import (
    EnvironmentFailed,
    GateError,
    Interrupted,
    RegressionFailed,
    UsageFailure,
    WheelRejected,
)
from gate.fetch import fetch
from gate.layer import Layers
from gate.machine import Profile, choose, examine
from gate.parallel import side_by_side, this_machine
from gate.report import Display, Report
from gate.repository import ROOT, Repository, demand_version, tag_version
from gate.runner import Runner
from gate.scratch import scratch, sweep, unwritable
from gate.session import Candidate, Session, Settings
from gate.targets import Target
from gate.wheels import Wheel, resolve


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one run was asked to do."""

    wheels: tuple[str, ...]
    base: Path
    tag: str | None = None
    source: str | None = None
    profile: str = "auto"
    targets: tuple[Target, ...] = (Target(),)
    fresh: bool = False
    evidence: Path = ROOT / "gate-evidence"
    suite: Path = regressions.SUITE
    timeout: float = 600.0
    fail_fast: bool = False
    only: tuple[str, ...] = ()
    tag_check: bool = True
    sign: Path | None = None
    summary: Path | None = None
    allowed_signers: Path = signature.ALLOWED
    verbose: bool = False
    program: str = "python -m gate"

    def again(self, candidate: Candidate, target: Target, profile: str) -> str:
        """Return the command that repeats this on one wheel in one environment."""
        words = ["run", *(("--wheel", candidate.wheel.path) if self.source is None else ())]
        if self.source is not None:
            words += [str(self.tag), "--from", self.source]
        words += ["--profile", profile]
        if target.name:
            words += ["--environment", target.name]
        else:
            words += ["--torch", target.torch] if target.torch else []
            words += ["--site", target.site] if target.site else []
            words += ["--python", target.python] if target.python != Target().python else []
        for name in ("suite", "evidence", "timeout"):
            value = getattr(self, name)
            words += [f"--{name}", value] if value != getattr(Options, name) else []
        return f"{self.program} {shlex.join(map(str, words))}"

    def check(self) -> None:
        """Find mistyped paths before anything takes time.

        Raises:
            UsageFailure: naming the option.
        """
        if self.source is not None and (self.wheels or self.tag is None):
            raise UsageFailure(
                "--from needs the TAG of what is to be downloaded, and no --wheel.",
                next_step=f"python -m gate run v0.1.0 --from {self.source}",
            )
        for target in self.targets:
            where = f"environment {target.name}:" if target.name else "--python"
            if shutil.which(target.python) is None:
                raise UsageFailure(f"{where} {target.python} is not an executable file.")
            where = f"environment {target.name}:" if target.name else "--site"
            if target.site is not None and not target.site.is_dir():
                raise UsageFailure(f"{where} {target.site} is not a directory.")
        if self.only and self.sign is not None:
            raise UsageFailure("--only states nothing that --sign could sign.")
        if not next(self.suite.rglob("test_*.py"), None):
            raise UsageFailure(f"--suite {self.suite} holds no test_*.py file.")

    def signing(self, runner: Runner) -> Callable[[bytes], bytes] | None:
        """Return what signs statements, after trying it; None where they stay unsigned.

        Raises:
            GateError: the key cannot be used, or its signatures would not be accepted.
        """
        if self.sign is None:
            return None
        sign = partial(signature.sign, key=self.sign, allowed=self.allowed_signers, runner=runner)
        sign(b"Can this key be used?")
        return sign


def run(options: Options, display: Display) -> list[Report]:
    """Gate every wheel in every environment; return their reports in order.

    Raises:
        GateError: a wheel failed. Reports and logs of what ran lie in the evidence folder, and a
            statement for each wheel and environment that passed.
    """
    runner = _runner(options, display)
    repository = Repository(runner=runner)
    options.check()
    sweep()
    sign = options.signing(runner)
    if options.tag and options.tag_check:
        repository.demand_tag(options.tag)
    with scratch("wheels") as folder:
        candidates = _candidates(options, repository, runner, display, folder)
        # Better now than after the tests.
        if why := unwritable(options.evidence):
            raise EnvironmentFailed(
                f"The evidence folder {options.evidence} cannot be written: {why}.",
                next_step="choose another one with --evidence DIR",
            )
        sessions = _sessions(options, candidates, repository, display, sign)
        try:
            _run_all(sessions, runner)
            _tell(sessions, display)
        finally:
            _show(options, display)
    return _verdict(sessions, display)


def _verdict(sessions: Sequence[Session], display: Display) -> list[Report]:
    """Say what came of each session, in order; raise the failure that tells most."""
    errors: list[tuple[str, GateError]] = []
    for session in sessions:
        if session.error:
            errors.append((_title(session, sessions), session.error))
            if len(sessions) > 1:
                display.say(f"gate: {errors[-1][0]} FAILED: {session.error}")
        else:
            display.say(f"gate: {_title(session, sessions)} {session.report.verdict()}")
            for line in session.report.uncovered:
                display.say(f"gate: not covered: {line}")
    if not errors:
        return [session.report for session in sessions]
    # A verdict on the wheel tells more than a machine that could not give one.
    error = min((error for _, error in errors), key=lambda each: each.exit_code not in (1, 4))
    if len(sessions) == 1:
        raise error
    titles = ", ".join(title for title, _ in errors)
    raise type(error)(f"{len(errors)} of {len(sessions)} failed: {titles}.")


def _tell(sessions: Sequence[Session], display: Display) -> None:
    """Say which tests failed, before all verdicts."""
    for session in sessions:
        if isinstance(session.error, RegressionFailed) and session.report.tests:
            if len(sessions) > 1:
                display.say(f"{_title(session, sessions)}:")
            for line in session.report.told():
                display.say(line)


def _show(options: Options, display: Display) -> None:
    """Write the page for a person; a verdict does not depend on it."""
    signers = partial(
        signature.signers, allowed=options.allowed_signers, runner=Runner(verbose=options.verbose)
    )
    try:
        html, markdown = page.write(options.evidence, signers)
        display.say(f"gate: {html} shows all runs")
        if options.summary is not None:
            with options.summary.open("a") as file:
                file.write(markdown.read_text())
    except (GateError, OSError) as error:
        display.say(f"gate: There is no page to look at: {error}")


def _runner(options: Options, display: Display) -> Runner:
    return Runner(verbose=options.verbose, on_tick=display.tick, say=display.say)


def _sessions(
    options: Options,
    candidates: Sequence[Candidate],
    repository: Repository,
    display: Display,
    sign: Callable[[bytes], bytes] | None,
) -> list[Session]:
    count = len(candidates) * len(options.targets)
    capacity = this_machine()
    settings = Settings(
        profile=options.profile,
        evidence=options.evidence,
        suite=options.suite,
        timeout=options.timeout,
        fail_fast=options.fail_fast,
        only=options.only,
        again=options.again,
        # What several sessions gain by running at once, one gains by sharing out its tests.
        processes=max(1, capacity.cores // count),
        layers=Layers(fresh=options.fresh),
        capacity=capacity,
        repository=repository,
        sign=sign,
    )
    labels = _labels(options, candidates, display)
    return [
        Session(
            settings,
            candidate,
            target,
            candidate.report_in(target),
            display.lane(labels.pop(0)),
        )
        for candidate in candidates
        for target in options.targets
    ]


def _labels(options: Options, candidates: Sequence[Candidate], display: Display) -> list[str]:
    """What tells the sessions' lines apart, of one width; and a line on what each part means."""
    numbers = [str(number) for number in range(1, len(candidates) + 1)]
    if len(candidates) == 1:
        numbers = [""]
        display.say(f"gate: {candidates[0].wheel.filename}")
    else:
        for number, candidate in zip(numbers, candidates, strict=True):
            display.say(f"gate: wheel {number} is {candidate.wheel.filename}")
    names = [target.identity for target in options.targets]
    if len(names) == 1:
        names = [""]
    else:
        for target in options.targets:
            display.say(f"gate: environment {target.identity} is {target.describe()}")
    labels = [f"{number} {name}".strip() for number in numbers for name in names]
    width = max(map(len, labels))
    return [f"{label:<{width}}" for label in labels]


def _title(session: Session, sessions: Sequence[Session]) -> str:
    """How a verdict names its session, where there are several."""
    several = len({each.target.identity for each in sessions}) > 1
    name = session.candidate.wheel.filename
    return f"{name} in {session.target.identity}" if several else name


def _run_all(sessions: Sequence[Session], runner: Runner) -> None:
    """Test side by side; write each session's evidence as soon as its tests are over."""
    concluded: set[int] = set()

    def conclude(number: int, _future: Future[None]) -> None:
        concluded.add(number)
        sessions[number].conclude()

    try:
        side_by_side([session.test for session in sessions], runner, on_done=conclude)
    finally:
        for number, session in enumerate(sessions):
            if number not in concluded:
                # Even if all its tests passed at last: whoever interrupts a run wants no evidence.
                session.error = session.error or Interrupted("The run was interrupted.")
                session.conclude()


def inspect(wheels: Sequence[str], base: Path) -> list[tuple[Wheel, auditing.Audit]]:
    """Audit wheels without installing them.

    Raises:
        GateError: one was rejected or does not exist.
    """
    rules = policy.load(ROOT)
    with scratch("wheels") as folder:
        found = resolve(wheels, base=base, workdir=folder, option="WHEEL")
        runner = Runner()
        return [
            (wheel, auditing.audit(wheel, rules.audit_of(wheel.name), runner=runner))
            for wheel in found
        ]


def machine(options: Options, display: Display) -> list[tuple[Target, Profile, list[str]]]:
    """Examine the machine from every environment.

    Returns:
        For each environment the profile that it would run, and a line for each that it would not.

    Raises:
        GateError: it cannot run the profile.
    """
    options.check()
    sweep()
    runner, layers = _runner(options, display), Layers(fresh=options.fresh)
    found = []
    for target in options.targets:
        report = Report(wheel="")
        with (
            display.phase(report, "environment"),
            clean_environment(target, requires_dist=(), runner=runner, layers=layers) as made,
        ):
            with display.phase(report, "machine") as phase:
                machine = examine(made, runner)
                profile, uncovered = choose(machine, options.profile)
                phase.detail = machine.summary()
            found.append((target, profile, uncovered))
    return found


def _candidates(
    options: Options, repository: Repository, runner: Runner, display: Display, folder: Path
) -> list[Candidate]:
    """Resolve and audit all wheels before anything is installed."""
    values = options.wheels
    common = Report(wheel="")
    rules = policy.load(ROOT)
    if options.source is not None:
        values = (str(_download(options, rules, runner, display, common, folder)),)
    elif not values:
        values = (str(_build(repository, runner, display, common)),)
    with display.phase(common, "resolve") as phase:
        wheels = resolve(values, base=options.base, workdir=folder)
        phase.detail = ", ".join(wheel.filename for wheel in wheels)
        for wheel in wheels:
            if options.tag and options.tag_check:
                demand_version(options.tag, wheel.version)
    candidates = []
    for wheel in wheels:
        report = Report(
            wheel=wheel.filename,
            sha256=wheel.sha256,
            profile=options.profile,
            phases=list(common.phases),
        )
        with display.phase(report, "audit") as phase:
            own = rules.audit_of(wheel.name)
            # Only these claim to come from the source that is checked out.
            claimed = not options.wheels or (options.tag and options.tag_check)
            audit = auditing.audit(wheel, own, source=ROOT if claimed else None, runner=runner)
            package = own.package if own else _only_package(wheel, audit)
            notes = f", {len(audit.notes)} notes: see `inspect`" if audit.notes else ""
            phase.detail = f"{audit.members} files, sha256 {wheel.sha256[:16]}{notes}"
        foreign = wheel.name != canonicalize_name(str(rules.distribution))
        candidates.append(
            Candidate(wheel=wheel, audit=audit, package=package, report=report, foreign=foreign)
        )
    return candidates


def _download(
    options: Options,
    rules: policy.Policy,
    runner: Runner,
    display: Display,
    report: Report,
    workdir: Path,
) -> Path:
    index = rules.index_of(str(options.source))
    folder = workdir / "download"
    folder.mkdir()
    with display.phase(report, "download", f"from {index}") as phase:
        wheel = fetch(
            str(rules.distribution),
            tag_version(str(options.tag)),
            index=index,
            folder=folder,
            runner=runner,
        )
        phase.detail = f"{wheel.name} from {index}"
    return wheel


def _build(repository: Repository, runner: Runner, display: Display, report: Report) -> Path:
    with display.phase(report, "build", NOTE) as phase:
        wheel = build(repository, ROOT / "dist", runner)
        phase.detail = f"dist/{wheel.name}, built twice with the same bytes"
    return wheel


def _only_package(wheel: Wheel, audit: auditing.Audit) -> str:
    if len(audit.top_levels) != 1:
        raise WheelRejected(
            f"{wheel.filename} installs {len(audit.top_levels)} packages; the gate tests one",
            findings=audit.top_levels,
        )
    return audit.top_levels[0].removesuffix(".py")
