"""The phases of a gate run, in order; each can fail the run."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from gate import audit as auditing
from gate import environment as environments
from gate import evidence, policy, records, regressions, signature
from gate.build import build
from gate.environment import Environment
from gate.errors import (
    EnvironmentFailed,
    GateError,
    IdentityMismatch,
    Interrupted,
    RegressionFailed,
    UsageFailure,
    WheelRejected,
)
from gate.fetch import fetch
from gate.machine import Machine, Profile, choose, examine
from gate.regressions import Run, Subject
from gate.report import Display, Failure, Report
from gate.repository import ROOT, Repository, demand_version, tag_version
from gate.runner import Runner, in_background
from gate.wheels import Wheel, resolve

SHOWN_FAILURES = 20
SHOWN_LINES = 60


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one run was asked to do."""

    wheels: tuple[str, ...]
    base: Path
    tag: str | None = None
    source: str | None = None
    profile: str = "auto"
    python: Path = Path(sys.executable)
    torch: str | None = None
    site: Path | None = None
    fresh: bool = False
    evidence: Path = ROOT / "gate-evidence"
    suite: Path = regressions.SUITE
    timeout: float = 600.0
    tag_check: bool = True
    sign: Path | None = None
    allowed_signers: Path = signature.ALLOWED
    verbose: bool = False

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
        if shutil.which(self.python) is None:
            raise UsageFailure(f"--python {self.python} is not an executable file.")
        if self.site is not None and not self.site.is_dir():
            raise UsageFailure(f"--site {self.site} is not a directory.")
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

    def environment_id(self) -> str:
        """Name of the environment asked for, part of the evidence's identity."""
        torch = str(self.torch or environments.pinned("torch"))
        parts = ["site" if self.site else torch.replace("torch==", "torch")]
        if self.python != Path(sys.executable):
            parts.append(str(self.python).strip("/"))
        return "-".join(parts)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A wheel that the audit accepted."""

    wheel: Wheel
    audit: auditing.Audit
    package: str
    report: Report


def run(options: Options, display: Display) -> list[Report]:
    """Gate every wheel; return their reports in order.

    Raises:
        GateError: a wheel failed. Reports and logs of what ran lie in the evidence folder; a
            statement exists for each wheel that passed before.
    """
    runner = Runner(verbose=options.verbose, on_tick=display.tick)
    repository = Repository(runner=runner)
    options.check()
    sign = options.signing(runner)
    if options.tag and options.tag_check:
        repository.demand_tag(options.tag)
    with tempfile.TemporaryDirectory(prefix="gate-wheels-") as scratch:
        candidates = _candidates(options, repository, runner, display, Path(scratch))
        _demand_writable(options.evidence)
        errors: list[GateError] = []
        for candidate in candidates:
            display.say(f"gate: {candidate.wheel.filename}")
            try:
                _Session(options, candidate, repository, runner, display, sign).run()
            except (RegressionFailed, IdentityMismatch, WheelRejected) as error:
                # The other wheels deserve their verdict too.
                errors.append(error)
                if len(candidates) > 1:
                    display.say(f"gate: {candidate.wheel.filename} FAILED: {error}")
        if errors:
            raise errors[0]
        return [candidate.report for candidate in candidates]


def _demand_writable(folder: Path) -> None:
    """Find out now, rather than after the tests, whether evidence can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise EnvironmentFailed(
            f"The evidence folder {folder} cannot be written: {error.strerror}.",
            next_step="choose another one with --evidence DIR",
        ) from error


def inspect(wheels: Sequence[str], base: Path) -> list[tuple[Wheel, auditing.Audit]]:
    """Audit wheels without installing them.

    Raises:
        GateError: one was rejected or does not exist.
    """
    rules = policy.load(ROOT)
    with tempfile.TemporaryDirectory(prefix="gate-wheels-") as scratch:
        found = resolve(wheels, base=base, workdir=Path(scratch), option="WHEEL")
        return [(wheel, auditing.audit(wheel, rules.audit_of(wheel.name))) for wheel in found]


def machine(options: Options, display: Display) -> tuple[Profile, list[str]]:
    """Examine the machine; return the profile it would run, and what stays uncovered.

    Raises:
        GateError: it cannot run the profile.
    """
    options.check()
    runner = Runner(verbose=options.verbose, on_tick=display.tick)
    report = Report(wheel="")
    with ExitStack() as stack:
        with display.phase(report, "environment"):
            environment = stack.enter_context(_environment(options, (), runner))
        with display.phase(report, "machine") as phase:
            found = examine(environment, runner)
            profile, uncovered = choose(found, options.profile)
            phase.detail = _summary(found)
        return profile, uncovered


def _candidates(
    options: Options, repository: Repository, runner: Runner, display: Display, scratch: Path
) -> list[Candidate]:
    """Resolve and audit all wheels before anything is installed."""
    values = options.wheels
    common = Report(wheel="")
    rules = policy.load(ROOT)
    if options.source is not None:
        values = (str(_download(options, rules, runner, display, common, scratch)),)
    elif not values:
        values = (str(_build(repository, runner, display, common)),)
    with display.phase(common, "resolve") as phase:
        wheels = resolve(values, base=options.base, workdir=scratch)
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
            audit = auditing.audit(wheel, own, source=ROOT if claimed else None)
            package = own.package if own else _only_package(wheel, audit)
            phase.detail = f"{audit.members} files, sha256 {wheel.sha256[:16]}"
        candidates.append(Candidate(wheel=wheel, audit=audit, package=package, report=report))
    return candidates


def _download(
    options: Options,
    rules: policy.Policy,
    runner: Runner,
    display: Display,
    report: Report,
    scratch: Path,
) -> Path:
    index = rules.index_of(str(options.source))
    folder = scratch / "download"
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
    with display.phase(report, "build") as phase:
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


def _environment(options: Options, requires_dist: tuple[str, ...], runner: Runner) -> Any:
    return environments.clean_environment(
        python=options.python,
        torch=options.torch,
        site=options.site,
        requires_dist=requires_dist,
        runner=runner,
        fresh=options.fresh,
    )


def _summary(machine: Machine) -> str:
    names = [f"{gpu['name']} ({gpu['arch']})" for gpu in machine.gpus]
    return f"torch {machine.facts['torch']}, {', '.join(names) or 'no GPU'}"


class _Session:
    """The phases of one accepted wheel, from the environment to the evidence."""

    def __init__(
        self,
        options: Options,
        candidate: Candidate,
        repository: Repository,
        runner: Runner,
        display: Display,
        sign: Callable[[bytes], bytes] | None,
    ) -> None:
        self._sign = sign
        self._options, self._candidate, self._repository = options, candidate, repository
        self._runner, self._display = runner, display
        self._report = candidate.report
        self._started = _now()
        self._wanted = {"id": options.environment_id()}

    def run(self) -> None:
        options, report = self._options, self._report
        if options.profile != "auto":
            self._revoke(options.profile)
        try:
            with ExitStack() as stack:
                with self._phase("environment") as phase:
                    requires = self._candidate.audit.requires_dist
                    environment = stack.enter_context(
                        _environment(options, requires, self._runner)
                    )
                    phase.detail = "clean, on a verified torch layer"
                # Does not depend on the wheel, and mostly waits for an import.
                probe = stack.enter_context(
                    in_background(self._runner, partial(examine, environment))
                )
                try:
                    self._test(environment, probe)
                except BaseException:
                    self._keep(environment)
                    raise
        except BaseException as error:
            failed = isinstance(error, GateError) and not isinstance(error, Interrupted)
            report.result = "failed" if failed else "interrupted"
            failure = Failure(where=report.phases[-1].name, reason=str(error))
            report.failures = report.failures or [failure]
            with suppress(OSError):  # what failed first is worth more
                self._folder.mkdir(parents=True, exist_ok=True)
                report.write(self._folder / "report.json")
            raise

    def _test(self, environment: Environment, probe: Callable[[], Machine]) -> None:
        with self._phase("install"):
            environments.install(environment, self._candidate.wheel.copy, self._runner)
        subject = Subject(
            environment=environment,
            distribution=self._candidate.wheel.name,
            package=self._candidate.package,
        )
        folder = environment.root / "records"
        suite = regressions.prepare(subject, self._options.suite)
        self._suite_digest = evidence.suite_digest(suite)
        with self._phase("identity") as phase:
            inventory = regressions.collect(subject, suite, folder / "collect", self._runner)
            phase.detail = f"the wheel's own files are imported; {len(inventory)} tests collected"
        with self._phase("machine") as phase:
            machine = probe()
            profile, self._report.uncovered = choose(machine, self._options.profile)
            phase.detail = f"{_summary(machine)}: profile {profile.name}"
        self._report.profile, self._report.facts = profile.name, machine.facts
        self._revoke(profile.name)
        for part in regressions.plan(profile, machine):
            self._regress(part, subject, suite, inventory, folder, profile)
        if self._report.failures:
            raise self._verdict()
        self._keep(environment)
        self._attest(profile, machine)

    def _regress(
        self,
        part: Run,
        subject: Subject,
        suite: Path,
        inventory: Sequence[str],
        folder: Path,
        profile: Profile,
    ) -> None:
        count = sum(node.startswith(part.folder + "/") for node in inventory)
        ranks = f" on each of {part.world} ranks" if part.world > 1 else ""
        note = f"{part.label}: {count} tests{ranks}, at most {self._options.timeout:g} s"
        with self._phase("regressions", note) as phase:
            passed, failures = regressions.run(
                subject,
                suite,
                part,
                inventory,
                folder=folder / part.label,
                runner=self._runner,
                profile=profile,
                timeout=self._options.timeout,
            )
            self._report.passed_tests += passed
            self._report.failures += failures
            phase.detail = f"{part.label}: {_tally(passed, failures)}"
            phase.status = "failed" if failures else "passed"

    def _verdict(self) -> RegressionFailed:
        """Failed tests before those that did not run, and the most telling log below them."""
        failures = sorted(self._report.failures, key=lambda item: item.reason == "did not run")
        lines = [f"{failure.where}: {failure.reason}" for failure in failures]
        more = [f"and {len(lines) - SHOWN_FAILURES} more"] if len(lines) > SHOWN_FAILURES else []
        detail = next((failure.detail for failure in failures if failure.detail), "").splitlines()
        return RegressionFailed(
            "\n".join([*lines[:SHOWN_FAILURES], *more, *detail[:SHOWN_LINES]]),
            next_step=f"read {self._folder}/report.json and the logs beside it",
        )

    def _attest(self, profile: Profile, machine: Machine) -> None:
        with self._phase("evidence") as phase:
            folder, wheel = self._folder, self._candidate.wheel
            self._report.result = "passed"
            self._report.write(folder / "report.json")
            commit = self._repository.commit()
            path = evidence.write_statement(
                self._options.evidence,
                wheel=wheel,
                profile=profile.name,
                environment={
                    **machine.facts,
                    **self._wanted,
                    "dirty": commit.endswith("-dirty"),
                    "site": str(self._options.site or ""),
                },
                suite_digest=self._suite_digest,
                commit=commit.removesuffix("-dirty") or None,
                executed_archs={gpu["arch"] for gpu in machine.gpus if profile.min_gpus},
                embedded_archs=self._candidate.audit.archs,
                passed_tests=self._report.passed_tests,
                files=sorted(file for file in folder.rglob("*") if file.is_file()),
                started=self._started,
                finished=_now(),
                sign=self._sign,
            )
            phase.detail = f"{path}{', signed' if self._sign else ''}"

    @property
    def _folder(self) -> Path:
        """Where this wheel's reports and logs go."""
        wheel = self._candidate.wheel
        name = f"{wheel.filename}.{wheel.sha256[:12]}"
        run = f"{self._report.profile}.{evidence.environment_id(self._wanted)}"
        return self._options.evidence / "runs" / name / run

    def _keep(self, environment: Environment) -> None:
        """Copy records and logs out of the environment, in place of those of an earlier run."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for name in ("records", "logs"):
            records.keep(environment.root / name, self._folder / name)

    def _revoke(self, profile: str) -> None:
        evidence.revoke(
            self._options.evidence,
            wheel=self._candidate.wheel,
            profile=profile,
            environment=self._wanted,
        )

    def _phase(self, name: str, note: str = "") -> Any:
        return self._display.phase(self._report, name, note)


def _tally(passed: Sequence[str], failures: Sequence[Failure]) -> str:
    return f"{len(failures)} failed" if failures else f"{len(passed)} passed"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
