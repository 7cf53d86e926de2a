"""Which starts of tests a profile comes to."""

from __future__ import annotations

import pytest

from gate.machine import PROFILES, Machine
from gate.parts import plan

INVENTORY = [
    *(f"single/test_a.py::test_{number}" for number in range(5)),
    "single/test_b.py::test_0",
    "single/test_c.py::test_0",
    "single/test_c.py::test_1",
    "ranks/test_d.py::test_0",
]


@pytest.mark.parametrize("processes", [1, 2, 3, 9])
def test_every_test_is_in_exactly_one_share(processes: int) -> None:
    machine = Machine(facts={"gpus": []})
    parts = plan(PROFILES["cpu"], machine, INVENTORY, processes)
    single = [part for part in parts if part.folder == "single"]
    assert len(single) == min(processes, 3)
    ran = [node for part in single for node in part.expected(INVENTORY)]
    assert sorted(ran) == sorted(INVENTORY[:-1])
    assert len({part.name for part in parts}) == len(parts)
    assert {part.label for part in single} == {"single"}
    assert max(len(part.expected(INVENTORY)) for part in single) == (8 if processes == 1 else 5)
    assert [part.world for part in parts if part.folder == "ranks"] == [3, 2]
    quick = plan(PROFILES["cpu"], machine, INVENTORY, processes, quick_first=True)
    assert quick == parts[::-1]
    assert (parts[0].folder, quick[0].folder) == ("ranks", "single")


def test_processes_on_gpus_are_no_more_than_gpus() -> None:
    machine = Machine(facts={"gpus": [{"arch": "sm_90"}] * 2})
    parts = plan(PROFILES["multi-gpu"], machine, INVENTORY, 16)
    assert [(part.name, part.need(PROFILES["multi-gpu"]).gpus) for part in parts] == [
        ("ranks-2", 2),
        ("single.1", 1),
        ("single.2", 1),
    ]
