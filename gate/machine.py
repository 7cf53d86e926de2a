"""What each profile needs of the machine, and whether this machine has it.

Facts come from a child process inside the environment under test, which tries things rather than
reading version numbers; the decision is made here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gate.environment import Environment
from gate.errors import MachineUnfit
from gate.runner import Runner

PROBE_TIMEOUT = 240.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One level of coverage: which device tests use and how many ranks run at once."""

    name: str
    device: str
    min_gpus: int
    worlds: tuple[int, ...]
    covers: str


# From the weakest to the strongest.
PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="cpu",
            device="cpu",
            min_gpus=0,
            worlds=(2, 3),
            covers="one process, and 2 and 3 ranks over gloo, on the CPU",
        ),
        Profile(
            name="gpu",
            device="cuda",
            min_gpus=1,
            worlds=(),
            covers="one process on one GPU",
        ),
        Profile(
            name="multi-gpu",
            device="cuda",
            min_gpus=2,
            worlds=(2, 3),
            covers="one process, and 2 and 3 ranks over NCCL, one GPU each",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the probe found; ``facts`` is its whole answer."""

    facts: dict[str, Any]

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The visible GPUs: name, arch, memory in bytes, uuid."""
        return list(self.facts["gpus"])

    def summary(self) -> str:
        """Return torch's version and the GPUs, in a few words."""
        names = [f"{gpu['name']} ({gpu['arch']})" for gpu in self.gpus]
        return f"torch {self.facts['torch']}, {', '.join(names) or 'no GPU'}"

    def executed_archs(self, profile: Profile) -> set[str]:
        """Return the GPU architectures whose code ``profile`` runs here."""
        return {gpu["arch"] for gpu in self.gpus if profile.min_gpus}

    def obstacle(self, profile: Profile) -> str:
        """Return why this machine cannot run ``profile``, or ""."""
        if profile.min_gpus == 0:
            problem = self.facts["gloo_problem"]
            return f"gloo does not work here: {problem}" if problem else ""
        if not self.gpus:
            return f"no GPU: {self.facts['no_gpu_reason']}"
        if self.facts["gpu_problems"]:
            return str(self.facts["gpu_problems"][0])
        if len(self.gpus) < profile.min_gpus:
            return f"{profile.min_gpus} GPUs are needed, {len(self.gpus)} visible"
        if profile.min_gpus > 1 and self.facts["nccl_problem"]:
            return f"NCCL does not work here: {self.facts['nccl_problem']}"
        return ""

    def tokens(self, variable: str | None) -> list[str]:
        """Return an entry of CUDA_VISIBLE_DEVICES for each GPU; none where that is unclear.

        Args:
            variable: what CUDA_VISIBLE_DEVICES is now, or None where it is not set.
        """
        count = len(self.gpus)
        if variable is None:
            return [str(index) for index in range(count)]
        entries = [entry.strip() for entry in variable.split(",")][:count]
        return entries if len(set(entries)) == count and all(entries) else []

    def worlds(self, profile: Profile) -> tuple[int, ...]:
        """Return the world sizes of ``profile`` that the GPUs suffice for: one GPU a rank."""
        if profile.min_gpus == 0:
            return profile.worlds
        return tuple(world for world in profile.worlds if world <= len(self.gpus))


def examine(
    environment: Environment, runner: Runner, probe: Sequence[str | Path] | None = None
) -> Machine:
    """Ask a child process what the machine can do.

    Args:
        probe: the command that writes the facts, for tests; its last argument is the file.

    Raises:
        MachineUnfit: the probe crashed, hung or gave no answer.
    """
    facts = environment.root / "tmp" / "machine.json"
    facts.unlink(missing_ok=True)
    script = environment.root / "harness" / "gate_machine.py"
    outcome = runner.run(
        [*(probe or [environment.python, "-IB", script]), facts],
        env=environment.variables,
        cwd=environment.cwd,
        log=environment.root / "logs" / "machine.log",
        timeout=PROBE_TIMEOUT,
    )
    if not outcome.ok or not facts.exists():
        raise MachineUnfit(
            f"The machine check did not finish: {outcome.describe()}.\n{outcome.tail()}",
            cause="torch cannot be imported, or the driver hangs",
            next_step="try `python -c 'import torch; print(torch.cuda.is_available())'`",
        )
    return Machine(facts=json.loads(facts.read_text()))


def choose(machine: Machine, wanted: str) -> tuple[Profile, list[str]]:
    """Return the profile to run and a line for each that stays uncovered.

    Args:
        wanted: a profile's name, or ``auto`` for the strongest one that the machine can do.

    Raises:
        MachineUnfit: the wanted profile cannot run here.
    """
    obstacles = {name: machine.obstacle(profile) for name, profile in PROFILES.items()}
    able = [name for name, obstacle in obstacles.items() if not obstacle]
    if wanted == "auto":
        if not able:
            raise MachineUnfit(f"No profile can run here. {obstacles['cpu']}.")
        wanted = able[-1]
    if obstacles[wanted]:
        raise MachineUnfit(
            f"Profile {wanted} cannot run here: {obstacles[wanted]}.",
            next_step=f"use --profile {able[-1]}, which can run here" if able else "",
        )
    uncovered = [
        f"{name}: {obstacles[name] or 'not asked for in this run'}"
        for name in PROFILES
        if name != wanted
    ]
    return PROFILES[wanted], uncovered
