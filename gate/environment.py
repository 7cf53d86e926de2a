"""The clean environment: a cached torch layer, the wheel on top of it, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from gate import layer
from gate.errors import EnvironmentFailed, WheelRejected
from gate.layer import Layers
from gate.runner import Runner, checked
from gate.scratch import low_on_disk, scratch
from gate.targets import Target, pins

HARNESS = Path(__file__).parent / "harness"
TEST_LAYER = ("torch", "numpy", "pytest", "hypothesis", "packaging")
GRAFT_FILE = "_gate_layer.pth"
# What a GPU run needs to see of the machine; everything else stays outside.
PASSED_ON = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH")
PASSED_ON_PREFIXES = ("NVIDIA_", "NCCL_")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment that only this gate run uses.

    ``root`` holds the environment itself and ``home``, ``tmp`` and ``cwd`` folders for the
    processes that run in it. ``layers`` are the read-only directories below the wheel's own.
    """

    root: Path
    layers: tuple[Path, ...]
    variables: Mapping[str, str] = field(repr=False)

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.root / "venv" / "bin" / "python"

    @property
    def site(self) -> Path:
        """Where the wheel is installed."""
        return layer.site_packages(self.root / "venv")

    @property
    def cwd(self) -> Path:
        """An empty, neutral working directory."""
        return self.root / "cwd"


def recipe(python: Path, torch: str | None, requires_dist: tuple[str, ...]) -> layer.Recipe:
    """Return the layer that a wheel with these ``Requires-Dist`` lines needs.

    All that is asked for comes at the pinned version where there is one, so that one layer serves
    all wheels that need no more. Whether the versions suffice shows once the wheel is installed.
    """
    wanted = {name: name for name in TEST_LAYER}
    if torch:
        wanted["torch"] = torch
    for text in requires_dist:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise WheelRejected(f"Requires-Dist: {text}: {error}") from None
        marker, name = requirement.marker, canonicalize_name(requirement.name)
        if name not in wanted and (not marker or marker.evaluate({"extra": ""})):
            wanted[name] = text
    # Pins of what only builds the wheel may contradict what torch itself requires.
    pinned = wanted.keys() - ({"torch"} if torch else set())
    return layer.Recipe(
        python=python,
        requirements=tuple(wanted.values()),
        constraints=tuple(pin for pin in pins() if Requirement(pin).name in pinned),
    )


@contextmanager
def clean_environment(
    target: Target, *, requires_dist: tuple[str, ...], runner: Runner, layers: Layers
) -> Iterator[Environment]:
    """Make an environment, and remove it afterwards.

    Args:
        target: its Python, and its torch or an existing site-packages directory with torch, numpy,
            pytest and hypothesis, used in place of a cached layer (nothing is downloaded then).
        requires_dist: what the wheel requires.

    Raises:
        EnvironmentFailed: it could not be made.
    """
    with ExitStack() as stack:
        root = stack.enter_context(scratch("environment"))
        for name in ("home", "tmp", "cwd", "logs"):
            (root / name).mkdir()
        if target.site:
            below = _grafted(target.site)
        else:
            wanted = recipe(target.python, target.torch, requires_dist)
            below = stack.enter_context(
                layers.provide(wanted, runner=runner, workdir=root / "logs")
            )
        environment = Environment(
            root=root, layers=(below, root / "harness"), variables=_variables(root)
        )
        _create(environment, target.python, runner)
        yield environment


def install(environment: Environment, wheel: Path, runner: Runner) -> None:
    """Install exactly this wheel file: no index, no dependencies, nothing replaced.

    Raises:
        WheelRejected: pip refuses the wheel.
        EnvironmentFailed: pip was stopped, or had no space.
    """
    outcome = runner.run(
        [
            *(sys.executable, "-sBm", "pip", "--python", environment.python),
            *("install", "--quiet", "--no-index", "--no-deps", "--no-cache-dir"),
            # A grafted site may hold another version, which is not ours to remove.
            *("--ignore-installed", wheel),
        ],
        env={**environment.variables, "PIP_CONFIG_FILE": os.devnull},
        cwd=environment.cwd,
        log=environment.root / "logs" / "install.log",
        timeout=300,
    )
    if not outcome.ok:
        # What the wheel cannot help is not held against it.
        full = any(os.strerror(number) in outcome.tail() for number in DISK_ERRORS)
        if full or outcome.returncode is None or outcome.returncode < 0:
            cause = low_on_disk(environment.root.parent)
            checked(outcome, f"pip could not install {wheel.name}", cause=cause)
        raise WheelRejected(
            f"pip could not install {wheel.name}: {outcome.describe()}.\n{outcome.tail()}",
            next_step=f"try: {environment.python.name} -m pip install --no-deps {wheel.name}",
        )


def _grafted(site: Path) -> Path:
    if missing := [name for name in TEST_LAYER if not (site / name).is_dir()]:
        raise EnvironmentFailed(
            f"--site {site} lacks {', '.join(missing)}.",
            cause="--site needs a site-packages directory that holds the whole test layer",
            next_step="install the missing packages there, or leave --site out",
        )
    return site.resolve()


def _variables(root: Path) -> dict[str, str]:
    seen = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)
    }
    return {
        **seen,
        "PATH": os.defpath,
        "HOME": str(root / "home"),
        "TMPDIR": str(root / "tmp"),
        "LANG": "C.UTF-8",
        # Ranks talk over loopback, whatever the host name resolves to.
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def _create(environment: Environment, python: Path, runner: Runner) -> None:
    outcome = runner.run(
        [python, "-Im", "venv", "--without-pip", environment.root / "venv"],
        env={"PATH": os.defpath},
        cwd=environment.cwd,
        log=environment.root / "logs" / "venv.log",
        timeout=120,
    )
    checked(outcome, f"Could not make a virtual environment with {python}")
    # A copy, since the gate's own folder would make the checkout importable.
    shutil.copytree(HARNESS, environment.root / "harness", ignore=lambda *_: {"__pycache__"})
    lines = "".join(f"{path}\n" for path in environment.layers)
    (environment.site / GRAFT_FILE).write_text(lines)
