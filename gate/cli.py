"""The command line: parse, call one typed function, turn its errors into exit codes."""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from gate import kernels as compiling
from gate import pipeline, policy, regressions, signature
from gate.build import NOTE as BUILD_NOTE
from gate.build import build as build_wheel
from gate.errors import EXIT_CODES, EnvironmentFailed, GateError, Interrupted, UsageFailure
from gate.evidence import sign_statements, suite_digest
from gate.evidence import verify as verify_evidence
from gate.harness.supervise import end_with_parent
from gate.layer import KEPT_LAYERS
from gate.machine import PROFILES
from gate.parameters import PathOption, base_directory, not_an_option, positive
from gate.pipeline import Options
from gate.publish import Options as PublishOptions
from gate.publish import publish as publish_files
from gate.report import Display, Report
from gate.repository import ROOT, Repository, tag_version
from gate.runner import Runner
from gate.scratch import scratch
from gate.targets import choose, torch_requirement
from gate.wheels import locate

MODULE = "python -m gate"
# What the user types instead, where a session of nox calls the gate.
PROGRAM = os.environ.get("GATE_PROGRAM") or MODULE
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

EPILOG = "\n\n".join(
    [
        "\b\nExit status:\n"
        + "\n".join(f"  {code:<4} {text}" for code, text in EXIT_CODES.items()),
        "\b\nEnvironment:\n"
        "  GATE_CACHE         where torch layers are cached (default ~/.cache/gefen-gate); the\n"
        f"                     {KEPT_LAYERS} used last are kept; also compiled kernels\n"
        "  TMPDIR             where environments are made, and removed again (default /tmp)\n"
        "  GATE_INVOKED_FROM  directory that relative paths count from (default: this one)\n"
        "  GATE_PROGRAM       what is typed to call the gate, for its advice to name\n"
        "  GATE_PARENT        process id of the parent, with which the gate is to end\n"
        "  GITHUB_STEP_SUMMARY  file that `run` appends its report to, in Markdown\n"
        "  GATE_SIGN          key that `run` signs statements with, as --sign does\n"
        "  TWINE_USERNAME, TWINE_PASSWORD\n"
        "                     what `publish` logs in with; an API token needs no user name. In\n"
        "                     GitHub and GitLab pipelines PyPI needs neither. Besides these,\n"
        "                     proxies and CA files count; other TWINE_*, .pypirc, .netrc do not\n"
        "  CUDA_VISIBLE_DEVICES, NCCL_*, NVIDIA_*, LD_LIBRARY_PATH reach the tests;\n"
        "  PYTHON*, PIP_*, VIRTUAL_ENV, CONDA_*, RANK and the like do not. Packages are taken\n"
        "  from the indexes that pip's configuration names; its other settings are ignored.",
        "\b\nExamples:\n"
        "  python -m gate run                            build this checkout's wheel and gate it\n"
        "  python -m gate run --wheel dist --profile cpu\n"
        "  python -m gate run v0.1.0 --wheel 'dist/*.whl'\n"
        "  python -m gate run v0.1.0 --from testpypi\n"
        "  python -m gate run --wheel dist --only single/test_groups.py\n"
        "  python -m gate verify dist --evidence gate-evidence --require cpu\n"
        "  python -m gate run --environment floor --environment newest\n"
        "  python -m gate run --torch 2.12.0 --torch 2.13.0\n"
        "  python -m gate sign dist --key ~/.ssh/id_ed25519\n"
        "  python -m gate publish dist --repository testpypi\n"
        "  nox -s gate -- --wheel ../some.whl            the same, in an environment of its own",
    ]
).replace(MODULE, PROGRAM)


settings = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
profile_option = click.option(
    "--profile",
    type=click.Choice(["auto", *PROFILES]),
    default="auto",
    show_default=True,
    help="What to cover: "
    + "; ".join(f"{profile.name}: {profile.covers}" for profile in PROFILES.values())
    + "; auto: the strongest of these that the machine can run.",
)
environment_options = [
    click.option(
        "--python",
        type=PathOption(),
        help="Interpreter of the clean environment.  [default: the gate's own]",
    ),
    click.option(
        "--torch",
        multiple=True,
        metavar="SPEC",
        callback=lambda _ctx, _param, specs: tuple(map(torch_requirement, specs)),
        help="Other torch than the pinned one, as in 2.12.0 or >=2.12; repeatable, for an "
        "environment each.",
    ),
    click.option(
        "--environment",
        "names",
        multiple=True,
        metavar="NAME",
        help="Environment that [tool.gate.environments] in pyproject.toml names, or `all` of "
        "them; repeatable.",
    ),
    click.option(
        "--site",
        type=PathOption(),
        metavar="DIR",
        help="Use this site-packages directory; download nothing. It has torch, numpy, pytest and "
        "hypothesis.",
    ),
    click.option("--fresh", is_flag=True, help="Rebuild the cached torch layer."),
    click.option("-v", "--verbose", is_flag=True, help="Show every command and its output."),
]
evidence_option = click.option(
    "--evidence",
    type=PathOption(),
    default=Options.evidence,
    metavar="DIR",
    help="Evidence folder.  [default: gate-evidence in the checkout]",
)

allowed_option = click.option(
    "--allowed-signers",
    type=PathOption(),
    default=Options.allowed_signers,
    metavar="FILE",
    help="Whose signatures count (see ssh-keygen(1)).  [default: ci/allowed_signers]",
)


def with_environment_options(command: Any) -> Any:
    """Add the options that describe the clean environments; the command gets ``targets``."""

    @wraps(command)
    def call(python: Any, torch: Any, names: Any, site: Any, **given: Any) -> None:
        known = policy.load(ROOT).environments if names else {}
        given["targets"] = choose(torch=torch, names=names, site=site, python=python, known=known)
        command(**given)

    for option in reversed(environment_options):
        call = option(call)
    return call


def show_version(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    """Print the commit: the gate has no version but the checkout's."""
    if asked:
        commit = Repository(runner=Runner()).commit() or "no commit"
        click.echo(f"gate of {commit}, on Python {platform.python_version()}")
        ctx.exit()


@click.group(context_settings=settings, epilog=EPILOG)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=show_version,
    help="Show the commit of this checkout and exit.",
)
def gate() -> None:
    """Audit a wheel, install it into a clean environment, try to break it, and keep evidence."""


@gate.command(epilog=EPILOG)
@click.argument("tag", required=False)
@click.option(
    "--wheel",
    "wheels",
    multiple=True,
    metavar="PATH",
    help="Wheel file, directory or glob; repeatable.  [default: build this checkout's wheel]",
)
@click.option(
    "--from",
    "source",
    metavar="NAME|URL",
    callback=not_an_option,
    help="Download the wheel of TAG from this index (testpypi, pypi or a simple index) instead.",
)
@profile_option
@with_environment_options
@evidence_option
@click.option(
    "--timeout",
    type=float,
    default=Options.timeout,
    show_default=True,
    metavar="SECONDS",
    callback=positive,
    help="Time limit of each start of the regression tests.",
)
@click.option(
    "-x",
    "--fail-fast",
    is_flag=True,
    help="Let the first regression test that fails end them all; quick ones are first then.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="NODE",
    callback=lambda ctx, param, values: tuple(not_an_option(ctx, param, v) for v in values),
    help="Run just this test of the suite, as in single/test_groups.py::test_rate, or all of a "
    "file; repeatable. Leaves reports and logs, and no evidence.",
)
@click.option(
    "--suite",
    type=PathOption(),
    default=Options.suite,
    metavar="DIR",
    help="Other regression tests, to try them out: `verify` accepts only this checkout's own.",
)
@click.option(
    "--sign",
    type=PathOption(),
    metavar="KEY",
    envvar="GATE_SIGN",
    help="Sign statements with this SSH key (or, by its .pub file, one of an SSH agent).",
)
@allowed_option
@click.option("--no-tag-check", is_flag=True, help="Do not compare TAG with HEAD and the wheel.")
def run(tag: str | None, no_tag_check: bool, **given: Any) -> None:
    """Gate wheels through all phases, and write evidence for those that pass.

    TAG, as in v0.1.0, must be the wheel's version and the commit that is checked out.
    """
    if tag is not None:
        tag_version(tag)
    options = Options(
        tag=tag,
        tag_check=not no_tag_check,
        base=base_directory(),
        program=PROGRAM,
        summary=Path(summary) if (summary := os.environ.get("GITHUB_STEP_SUMMARY")) else None,
        **given,
    )
    pipeline.run(options, Display())


@gate.command(epilog=EPILOG)
@click.argument("wheels", nargs=-1, required=True, metavar="WHEEL...")
def inspect(wheels: tuple[str, ...]) -> None:
    """Audit wheels without installing them or running any of their code.

    A line "note" is about something unusual that is harmless.
    """
    for wheel, audit in pipeline.inspect(wheels, base_directory()):
        click.echo(f"{wheel.filename}  sha256 {wheel.sha256}")
        for check in audit.checks:
            click.echo(f"  ok  {check}")
        for note in audit.notes:
            click.echo(f"  note  {note}")


@gate.command(epilog=EPILOG)
@profile_option
@with_environment_options
def machine(profile: str, **given: Any) -> None:
    """Say what this machine can gate, by trying it."""
    options = Options(
        wheels=(),
        base=base_directory(),
        profile=profile,
        **given,
    )
    for target, chosen, uncovered in pipeline.machine(options, Display()):
        name = f"{target.identity}: " if len(options.targets) > 1 else ""
        click.echo(f"{name}Can run profile {chosen.name}: {chosen.covers}.")
        for line in uncovered:
            click.echo(f"{name}Not covered: {line}")


@gate.command(epilog=EPILOG)
@click.argument("wheels", nargs=-1, required=True, metavar="WHEEL...")
@evidence_option
@click.option(
    "--require",
    multiple=True,
    type=click.Choice(list(PROFILES)),
    help="Profile that must have passed; repeatable.  [default: any one]",
)
@click.option(
    "--repository",
    metavar="NAME",
    help="Also require what [tool.gate.publish] in pyproject.toml names for this repository.",
)
@allowed_option
def verify(
    wheels: tuple[str, ...],
    evidence: Path,
    require: tuple[str, ...],
    repository: str | None,
    allowed_signers: Path,
) -> None:
    """Check that evidence exists for these bytes and this test suite, and say who signed it."""
    target = policy.load(ROOT).publishing_to(repository) if repository is not None else None
    required = {*require, *(target.profiles if target else ())}
    for verified in verify_evidence(
        locate(wheels, base=base_directory(), option="WHEEL"),
        evidence=evidence,
        require=sorted(required),
        suite_digest=suite_digest(regressions.SUITE),
        signers=target.signers if target else (),
        allowed_signers=allowed_signers,
    ):
        profiles = ", ".join(sorted(verified.profiles))
        click.echo(f"{verified.filename}  sha256 {verified.sha256}  passed: {profiles}")
        for statement in verified.statements:
            click.echo(f"  {statement.about()}")
    if target is not None:
        click.echo(f"{repository} requires {target.describe()}")


@gate.command(epilog=EPILOG)
@click.argument("wheels", nargs=-1, required=True, metavar="WHEEL...")
@click.option(
    "--key",
    type=PathOption(),
    required=True,
    help="SSH key to sign with, or the .pub file of one that an SSH agent holds.",
)
@evidence_option
@allowed_option
def sign(wheels: tuple[str, ...], key: Path, evidence: Path, allowed_signers: Path) -> None:
    """Sign the statements on these wheels, once they are found to hold."""
    signed = sign_statements(
        locate(wheels, base=base_directory(), option="WHEEL"),
        evidence=evidence,
        suite_digest=suite_digest(regressions.SUITE),
        sign=partial(signature.sign, key=key, allowed=allowed_signers, runner=Runner()),
    )
    for path in signed:
        click.echo(f"signed {path}")


@gate.command(epilog=EPILOG)
@click.option("--out", type=PathOption(), default=ROOT / "dist", help="Where to.  [default: dist]")
@click.option("-v", "--verbose", is_flag=True, help="Show every command and its output.")
def build(out: Path, verbose: bool) -> None:
    """Build sdist and wheel twice, compare them byte for byte, and check their metadata."""
    display = Display()
    runner = Runner(verbose=verbose, on_tick=display.tick)
    with display.phase(Report(wheel=""), "build", BUILD_NOTE) as phase:
        wheel = build_wheel(Repository(runner=runner), out, runner)
        phase.detail = "twice, with the same bytes"
    click.echo(wheel)


@gate.command(epilog=EPILOG)
@click.argument("files", nargs=-1, required=True, metavar="WHEEL...")
@click.option(
    "--repository",
    required=True,
    metavar="testpypi|pypi|URL",
    callback=not_an_option,
    help="Where to: an index that [tool.gate.publish] in pyproject.toml names, or an upload URL.",
)
@evidence_option
@click.option(
    "--index",
    metavar="URL",
    callback=not_an_option,
    help="Simple index of an upload URL.  [default: simple/ or +simple/ below it]",
)
@click.option(
    "--timeout",
    type=float,
    default=PublishOptions.timeout,
    show_default=True,
    metavar="SECONDS",
    callback=positive,
    help="Time limit of each upload, and of waiting for the index to show what was sent.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show every command and its output.")
def publish(**given: Any) -> None:
    """Upload gated wheels, and see that the index holds exactly these bytes.

    Needs the evidence that the index requires, made in a clean checkout of the tag of the wheels'
    version, and that checkout. An sdist (.tar.gz) may come with its wheel where this checkout
    builds both. Nothing is sent before all is checked. The same command finishes an upload that
    broke off: what the index already holds is compared, never sent or skipped blindly.
    """
    display = Display()
    for file in publish_files(PublishOptions(base=base_directory(), **given), display):
        click.echo(f"{file.name}  sha256 {file.sha256}  {file.how}")


@gate.command(epilog=EPILOG)
@click.option("-v", "--verbose", is_flag=True, help="Show every command and its output.")
def kernels(verbose: bool) -> None:
    """Compile the CUDA kernels and say what each needs; one that spills registers fails."""
    display = Display()
    runner = Runner(verbose=verbose, on_tick=display.tick)
    with (
        scratch("kernels") as folder,
        display.phase(Report(wheel=""), "kernels", "compiling them, which takes minutes"),
    ):
        found = compiling.compile_sources(ROOT, runner, folder)
    for line in compiling.table(found):
        click.echo(line)
    compiling.demand_no_spills(found)


def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """Turn a signal into an error, once: the clean-up that follows must not be disturbed."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    error = Interrupted(
        f"Interrupted by {signal.Signals(number).name}; what was running has no result.",
        next_step="run the same command again",
    )
    error.exit_code = 128 + number
    raise error


def call(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    try:
        if (parent := os.environ.get("GATE_PARENT", "")).isdecimal():
            end_with_parent(int(parent))
        gate.main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return UsageFailure.exit_code
    except GateError as error:
        click.echo(f"gate: {error}".replace(MODULE, PROGRAM), err=True)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has had enough; nothing can be told to them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        click.echo(f"gate: The machine refused: {error.strerror or error}{where}.", err=True)
        return EnvironmentFailed.exit_code
    return 0


def reopen_streams() -> None:
    """Give a process that was started without standard streams some that lead nowhere."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r+"))  # noqa: SIM115 - stays open
            with suppress(OSError):
                os.dup2(getattr(sys, name).fileno(), number)


def main() -> NoReturn:
    """Run the command line and exit."""
    reopen_streams()
    for number in SIGNALS:
        signal.signal(number, interrupt)
    sys.exit(call())
