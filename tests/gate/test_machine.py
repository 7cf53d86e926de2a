"""The decision, with a child process that answers what it is told; and the real probe."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from gate.environment import Environment
from gate.errors import MachineUnfit
from gate.machine import PROFILES, Machine, choose, examine
from gate.runner import Runner

pytestmark = pytest.mark.processes

CPU: dict[str, Any] = {
    "torch": "2.13.0",
    "gpus": [],
    "no_gpu_reason": "CUDA reports no visible device",
    "gpu_problems": [],
    "gloo_problem": "",
    "nccl_problem": "",
}


def gpus(count: int, **facts: Any) -> dict[str, Any]:
    found = [{"name": "H200", "arch": "sm_90", "uuid": str(index)} for index in range(count)]
    return {**CPU, "gpus": found, **facts}


def told(environment: Environment, facts: dict[str, Any]) -> Machine:
    code = f"import sys; open(sys.argv[-1], 'w').write({json.dumps(facts)!r})"
    return examine(environment, Runner(), probe=[sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("facts", "wanted", "chosen"),
    [
        (CPU, "auto", "cpu"),
        (gpus(1), "auto", "gpu"),
        (gpus(2), "auto", "multi-gpu"),
        (gpus(2), "cpu", "cpu"),
        (gpus(2), "gpu", "gpu"),
        (gpus(2, nccl_problem="no route"), "auto", "gpu"),
        (gpus(2, gpu_problems=["GPU 1: launch failed"]), "auto", "cpu"),
    ],
)
def test_choice(environment: Environment, facts: dict[str, Any], wanted: str, chosen: str) -> None:
    profile, uncovered = choose(told(environment, facts), wanted)
    assert profile.name == chosen
    assert [line.split(":")[0] for line in uncovered] == [p for p in PROFILES if p != chosen]


@pytest.mark.parametrize(
    ("facts", "wanted", "words"),
    [
        (CPU, "gpu", "no GPU: CUDA reports no visible device"),
        (CPU, "multi-gpu", "no GPU"),
        (gpus(1), "multi-gpu", "2 GPUs are needed, 1 visible"),
        (gpus(2, nccl_problem="no route"), "multi-gpu", "NCCL does not work here: no route"),
        (gpus(2, gpu_problems=["GPU 1: launch failed"]), "gpu", "GPU 1: launch failed"),
        ({**CPU, "gloo_problem": "refused"}, "auto", "gloo does not work here: refused"),
    ],
)
def test_refusal(environment: Environment, facts: dict[str, Any], wanted: str, words: str) -> None:
    with pytest.raises(MachineUnfit, match=words):
        choose(told(environment, facts), wanted)


def test_each_rank_has_a_gpu_of_its_own(environment: Environment) -> None:
    multi = PROFILES["multi-gpu"]
    assert told(environment, gpus(2)).worlds(multi) == (2,)
    assert told(environment, gpus(8)).worlds(multi) == (2, 3)
    assert told(environment, CPU).worlds(PROFILES["cpu"]) == (2, 3)


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "pass"])
def test_a_probe_without_an_answer_is_an_error(environment: Environment, code: str) -> None:
    with pytest.raises(MachineUnfit, match="did not finish"):
        examine(environment, Runner(), probe=[sys.executable, "-c", code])


def test_the_real_probe_tries_gloo(environment: Environment) -> None:
    machine = examine(environment, Runner())
    assert machine.facts["gloo_problem"] == ""
    assert machine.obstacle(PROFILES["cpu"]) == ""


def test_the_real_probe_reports_a_broken_gloo(environment: Environment) -> None:
    # An interface that does not exist: what a misconfigured machine looks like to gloo.
    broken = {**environment.variables, "GLOO_SOCKET_IFNAME": "absent0"}
    object.__setattr__(environment, "variables", broken)
    problem = examine(environment, Runner()).obstacle(PROFILES["cpu"])
    assert "gloo does not work here" in problem


@pytest.mark.parametrize(
    ("variable", "tokens"),
    [
        (None, ["0", "1"]),
        ("0, 1", ["0", "1"]),
        ("3,1,2", ["3", "1"]),
        ("GPU-a,MIG-b", ["GPU-a", "MIG-b"]),
        ("0,0", []),
        ("1", []),
        ("", []),
        ("1, ", []),
    ],
)
def test_gpus_are_told_apart_as_cuda_does(variable: str | None, tokens: list[str]) -> None:
    assert Machine(facts=gpus(2)).tokens(variable) == tokens


def test_what_was_executed_and_what_it_is_called() -> None:
    machine = Machine(facts=gpus(1))
    assert machine.executed_archs(PROFILES["gpu"]) == {"sm_90"}
    assert machine.executed_archs(PROFILES["cpu"]) == set()
    assert machine.summary() == "torch 2.13.0, H200 (sm_90)"
    assert Machine(facts=CPU).summary() == "torch 2.13.0, no GPU"
