"""One wheel in one environment: from making the environment to the evidence."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gate import audit as auditing
from gate import environment as environments
from gate import evidence, parts, records, regressions
from gate.environment import Environment
from gate.errors import EnvironmentFailed, GateError, Interrupted, RegressionFailed
from gate.harness.supervise import rights_to_confine
from gate.judge import Judgement
from gate.layer import Layers
from gate.machine import Machine, Profile, choose, examine
from gate.parallel import Capacity, Need, side_by_side
from gate.parts import Run
from gate.regressions import Inventory, Subject
from gate.report import Failure, Lane, Phase, Report
from gate.repository import Repository
from gate.runner import Runner, in_background
from gate.scratch import low_on_disk
from gate.targets import Target
from gate.wheels import Wheel

# Making an environment and importing torch in it keeps one core busy.
PREPARING = Need(cores=1, memory=parts.CPU_PROCESS_BYTES)


class _Enough(Exception):
    """Enough is known."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A wheel that the audit accepted; ``report`` is what its phases so far came to.

    It is foreign unless it is of the project that this checkout releases.
    """

    wheel: Wheel
    audit: auditing.Audit
    package: str
    report: Report
    foreign: bool = False

    def report_in(self, target: Target) -> Report:
        """Return a report of its own for one environment."""
        return Report(
            wheel=self.wheel.filename,
            sha256=self.wheel.sha256,
            environment=target.identity,
            profile=self.report.profile,
            foreign=self.foreign,
            phases=[replace(phase) for phase in self.report.phases],
            embedded_archs=sorted(self.audit.archs),
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all sessions of a run have in common.

    Attributes:
        profile: the profile asked for, or ``auto``.
        evidence: the evidence folder.
        suite: the folder of regressions.
        timeout: seconds that one start of tests may take.
        fail_fast: whether the first part of the regressions that fails ends the others.
        only: names of tests, of which alone the regressions consist; all where there are none.
        processes: how many processes may share the tests that need only one.
        again: the command that repeats a run on a wheel in an environment with a profile.
        sign: signs statements; None where they stay unsigned.
    """

    profile: str
    evidence: Path
    suite: Path
    timeout: float
    fail_fast: bool
    only: tuple[str, ...]
    processes: int
    again: Callable[[Candidate, Target, str], str]
    layers: Layers
    capacity: Capacity
    repository: Repository
    sign: Callable[[bytes], bytes] | None


class Session:
    """Tests a wheel in an environment, then leaves reports and, if all passed, a statement.

    :meth:`test` may run in any thread; what it finds is written by :meth:`conclude`.
    """

    def __init__(
        self, settings: Settings, candidate: Candidate, target: Target, report: Report, lane: Lane
    ) -> None:
        self.report, self.candidate, self.target = report, candidate, target
        self.error: GateError | None = Interrupted("The run ended before this was tested.")
        self._settings, self._lane = settings, lane
        self._wanted = {"id": target.identity}
        self._stack = ExitStack()
        self._environment: Environment | None = None
        report.only = list(settings.only)

    def test(self, runner: Runner) -> None:
        """Run all phases up to the regressions; keep in ``error`` why the wheel did not pass."""
        try:
            self._test(runner)
            self.error = None
        except GateError as error:
            self.error = error
        except OSError as error:
            self.error = _refused(error, Path(tempfile.gettempdir()))

    def _test(self, runner: Runner) -> None:
        settings = self._settings
        # A part of the tests, if they pass, takes nothing back and states nothing.
        if settings.profile != "auto" and not settings.only:
            self._revoke(settings.profile)
        with settings.capacity.take(PREPARING, runner):
            subject, suite, inventory, machine, profile = self._prepare(runner)
        self._profile, self._machine = profile, machine
        self.report.profile, self.report.facts = profile.name, machine.facts
        self.report.executed_archs = sorted(machine.executed_archs(profile))
        if not settings.only:
            self._revoke(profile.name)
        runs = self._parts(profile, machine, inventory)
        phases = [Phase(name="regressions", detail=part.name) for part in runs]
        self.report.phases += phases
        regress = partial(self._regress, subject, suite, inventory, profile, machine)
        tasks = [partial(regress, part, phase) for part, phase in zip(runs, phases, strict=True)]
        unended = [Judgement(missed=part.ids(inventory.tests)) for part in runs]
        self.report.own_tests = [
            name
            for part in runs
            for name in part.ids([node for node in inventory.tests if node in inventory.own])
        ]
        self.report.tests = sum(len(each.missed) for each in unended)
        for judgement in self._judgements(tasks, runner, unended):
            self.report.passed_tests += judgement.passed
            self.report.missed_tests += judgement.missed
            self.report.failures += map(self._told, judgement.failures)
        if self.report.failures:
            raise self._verdict(subject.environment)

    def _told(self, failure: Failure) -> Failure:
        """A failure, with what only the run knows of it."""
        again = self._settings.again(self.candidate, self.target, self.report.profile)
        files = tuple(f"records/{name}" for name in failure.files)
        only = f" --only {shlex.quote(failure.where)}" if failure.tests else ""
        return replace(failure, files=files, again=f"{again}{only}")

    def _parts(self, profile: Profile, machine: Machine, inventory: Inventory) -> list[Run]:
        settings = self._settings
        if settings.only:
            all_runs = parts.plan(profile, machine, inventory.tests, 1)
            return parts.only(all_runs, settings.only, inventory.tests)
        return parts.plan(
            *(profile, machine, inventory.tests, settings.processes),
            quick_first=settings.fail_fast,
        )

    def _judgements(
        self,
        tasks: Sequence[Callable[[Runner], Judgement]],
        runner: Runner,
        unended: Sequence[Judgement],
    ) -> list[Judgement]:
        """What the parts came to, in order; ``unended`` of those that a failure kept from it."""
        ended = dict(enumerate(unended))

        def note(number: int, future: Future[Judgement]) -> None:
            ended[number] = future.result()
            if self._settings.fail_fast and ended[number].failures:
                raise _Enough

        with suppress(_Enough):
            side_by_side(tasks, runner, on_done=note)
        return list(ended.values())

    def _prepare(self, runner: Runner) -> tuple[Subject, Path, Inventory, Machine, Profile]:
        with self._phase("environment") as phase:
            self._environment = environment = self._stack.enter_context(
                environments.clean_environment(
                    self.target,
                    requires_dist=self.candidate.audit.requires_dist,
                    runner=runner,
                    layers=self._settings.layers,
                )
            )
            phase.detail = "clean, on a verified torch layer"
        # Does not depend on the wheel, and mostly waits for an import.
        with in_background(runner, partial(examine, environment)) as probe:
            with self._phase("install"):
                environments.install(environment, self.candidate.wheel.copy, runner)
            subject = Subject(
                environment=environment,
                distribution=self.candidate.wheel.name,
                package=self.candidate.package,
            )
            suite = regressions.prepare(subject, self._settings.suite)
            self._suite_digest = evidence.suite_digest(suite)
            with self._phase("identity") as phase:
                folder = environment.root / "records" / "collect"
                inventory = regressions.collect(
                    subject, suite, folder, runner, self._settings.timeout
                )
                count = f"{len(inventory.tests)} tests collected"
                if inventory.broken:
                    count += f", {len(inventory.broken)} files cannot be"
                phase.detail = f"the wheel's own files are imported; {count}"
            with self._phase("machine") as phase:
                machine = probe()
                profile, self.report.uncovered = choose(machine, self._settings.profile)
                phase.detail = f"{machine.summary()}: profile {profile.name}"
        return subject, suite, inventory, machine, profile

    def _regress(
        self,
        subject: Subject,
        suite: Path,
        inventory: Inventory,
        profile: Profile,
        machine: Machine,
        part: Run,
        phase: Phase,
        runner: Runner,
    ) -> Judgement:
        timeout = self._settings.timeout
        tokens = machine.tokens(os.environ.get("CUDA_VISIBLE_DEVICES"))
        ranks = f" on each of {part.world} ranks" if part.world > 1 else ""
        count = len(part.expected(inventory.tests))
        note = f"{part.name}: {count} tests{ranks}, at most {timeout:g} s"
        need = part.need(profile)
        with (
            # Where GPUs cannot be told apart, whoever uses any has them all.
            self._settings.capacity.take(need, runner, tokens or ["all"]) as gpus,
            self._lane.phase(self.report, "regressions", note, phase),
        ):
            judgement = regressions.run(
                subject,
                suite,
                part,
                inventory,
                folder=subject.environment.root / "records" / part.name,
                runner=runner,
                profile=profile,
                timeout=timeout,
                exit_first=self._settings.fail_fast,
                gpus=gpus if tokens else (),
            )
            phase.detail = f"{part.name}: {_tally(judgement)}"
            phase.status = "failed" if judgement.failures else "passed"
        return judgement

    def _verdict(self, environment: Environment) -> GateError:
        if full := low_on_disk(environment.root.parent):
            return EnvironmentFailed(
                "The disk was full while the tests ran, which says nothing of the wheel.",
                cause=full,
                next_step="free some space or set TMPDIR to a larger disk",
            )
        text = f"{self.candidate.wheel.filename} {self.report.verdict()}"
        return RegressionFailed(text, next_step=f"read {self._folder} for reports and logs")

    def conclude(self) -> None:
        """Write what :meth:`test` found, and remove the environment.

        A statement that could not be completed, for whatever reason, is not there afterwards.
        """
        with self._stack:
            self.report.stamp(self._lane.display.seconds())
            try:
                if self.error is None and self._settings.only:
                    self._record(replace(self.report, result="partial"))
                    self.report.result = "partial"
                elif self.error is None:
                    with self._phase("evidence") as phase:
                        signed = ", signed" if self._settings.sign else ""
                        phase.detail = f"{self._attest()}{signed}"
                        self.report.result = "passed"
            except GateError as error:
                self.error = error
            except OSError as error:
                self.error = _refused(error, self._settings.evidence)
            finally:
                if self.report.result not in ("passed", "partial"):
                    self._record_failure()

    def _attest(self) -> Path:
        self.report.commit = commit = self._settings.repository.commit()
        with evidence.locked(self._settings.evidence):
            self._keep()
            folder = self._folder
            done = [phase for phase in self.report.phases if phase.status == "passed"]
            replace(self.report, result="passed", phases=done).write(folder / "report.json")
            return evidence.write_statement(
                self._settings.evidence,
                wheel=self.candidate.wheel,
                profile=self._profile.name,
                environment={
                    **self._machine.facts,
                    **self._wanted,
                    "dirty": commit.endswith("-dirty"),
                    "site": str(self.target.site or ""),
                    "confined": bool(rights_to_confine()),
                },
                suite_digest=self._suite_digest,
                commit=commit.removesuffix("-dirty") or None,
                executed_archs=self.report.executed_archs,
                embedded_archs=self.candidate.audit.archs,
                passed_tests=self.report.passed_tests,
                files=sorted(file for file in folder.rglob("*") if file.is_file()),
                started=self.report.started,
                finished=self.report.finished,
                sign=self._settings.sign,
            )

    def _record_failure(self) -> None:
        """Leave a report and logs, but no statement: neither this run's nor an earlier one's."""
        interrupted = isinstance(self.error, Interrupted) or self.error is None
        self.report.result = "interrupted" if interrupted else "failed"
        where = self.report.phases[-1].name
        reason = str(self.error or "The run was interrupted.")
        self.report.failures = self.report.failures or [Failure(where=where, reason=reason)]
        # What failed first is worth more than a problem here.
        with suppress(OSError, GateError):
            told = isinstance(self.error, RegressionFailed) or not self._settings.only
            if self.report.profile != "auto" and told:
                self._revoke(self.report.profile)
            self._record(self.report)

    def _record(self, report: Report) -> None:
        """Leave a report and logs."""
        report.commit = self._settings.repository.commit()
        with evidence.locked(self._settings.evidence):
            self._keep()
            report.write(self._folder / "report.json")

    @property
    def _folder(self) -> Path:
        """Where the reports and logs go."""
        wheel = self.candidate.wheel
        name = f"{wheel.filename}.{wheel.sha256[:12]}"
        run = f"{self.report.profile}.{evidence.environment_id(self._wanted)}"
        # Beside what a statement of an earlier run binds.
        run += ".only" if self._settings.only else ""
        return self._settings.evidence / "runs" / name / run

    def _keep(self) -> None:
        """Copy records and logs out of the environment, in place of those of an earlier run."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        if self._environment:
            for name in ("records", "logs"):
                records.keep(self._environment.root / name, self._folder / name)

    def _revoke(self, profile: str) -> None:
        evidence.revoke(
            self._settings.evidence,
            wheel=self.candidate.wheel,
            profile=profile,
            environment=self._wanted,
        )

    @property
    def _phase(self) -> Callable[..., AbstractContextManager[Phase]]:
        return partial(self._lane.phase, self.report)


def _refused(error: OSError, folder: Path) -> EnvironmentFailed:
    """What an operation of the gate's own that failed below ``folder`` means to a person."""
    where = f" ({error.filename})" if error.filename else ""
    return EnvironmentFailed(
        f"The machine refused: {error.strerror or error}{where}.",
        cause=low_on_disk(folder),
        next_step=f"see whether {folder} has space and can be written",
    )


def _tally(judgement: Judgement) -> str:
    counts = {
        "failed": len(judgement.failures),
        "passed": len(judgement.passed),
        "without a result": len(judgement.missed),
    }
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)
