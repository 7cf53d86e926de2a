from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Barrier, Event, Thread

import pytest

from gate import parallel
from gate.errors import Interrupted
from gate.parallel import Capacity, Need, available_memory, side_by_side, this_machine
from gate.runner import Runner

WAIT = 60.0


@contextmanager
def waiting(
    capacity: Capacity, need: Need, gpus: tuple[str, ...] = ()
) -> Iterator[tuple[Event, list[list[str]]]]:
    """Ask for something in a thread; give an event that is set once it was granted."""
    granted, given, runner_stop = Event(), [], Event()

    def ask() -> None:
        with capacity.take(need, Runner(stops=(runner_stop,)), gpus) as got:
            given.append(got)
            granted.set()

    def ask_until_stopped() -> None:
        try:
            ask()
        except Interrupted:
            given.append(["stopped"])

    queued = len(capacity._waiting)
    thread = Thread(target=ask_until_stopped)
    thread.start()
    while not granted.is_set() and len(capacity._waiting) == queued:
        granted.wait(0.001)
    try:
        yield granted, given
    finally:
        runner_stop.set()
        thread.join()


@pytest.mark.parametrize(
    "need", [Need(cores=1), Need(cores=1, memory=6), Need(cores=0, memory=6), Need(gpus=2)]
)
def test_what_is_in_use_is_waited_for(need: Need) -> None:
    capacity, gpus = Capacity(cores=2, memory=10), ("0", "1", "2")
    with ExitStack() as held:
        held.enter_context(capacity.take(Need(cores=2, memory=5, gpus=2), Runner(), gpus))
        with waiting(capacity, need, gpus) as (granted, _):
            assert not granted.is_set()
            held.close()
            assert granted.wait(WAIT)


def test_what_fits_runs_at_once_and_each_gpu_is_used_by_one() -> None:
    capacity, gpus = Capacity(cores=4, memory=10), ("0", "1", "GPU-2")
    need = Need(cores=1, memory=3, gpus=1)
    with ExitStack() as held:
        given = [held.enter_context(capacity.take(need, Runner(), gpus)) for _ in range(3)]
        assert given == [["0"], ["1"], ["GPU-2"]]


def test_what_needs_more_than_there_is_runs_alone() -> None:
    capacity = Capacity(cores=2, memory=10)
    with (
        capacity.take(Need(cores=3, memory=99, gpus=1), Runner()) as gpus,
        waiting(capacity, Need(cores=1)) as (granted, _),
    ):
        assert gpus == []
        assert not granted.is_set()
    with capacity.take(Need(cores=2, memory=10), Runner()):
        pass


def test_without_any_memory_work_runs_alone() -> None:
    capacity = Capacity(cores=2, memory=0)
    need = Need(cores=1, memory=1)
    with capacity.take(need, Runner()), waiting(capacity, need) as (granted, _):
        assert not granted.is_set()


def test_small_work_does_not_wait_behind_large_work_that_cannot_start() -> None:
    capacity = Capacity(cores=2, memory=10)
    with (
        capacity.take(Need(cores=1), Runner()),
        waiting(capacity, Need(cores=2)) as (large, _),
    ):
        with capacity.take(Need(cores=1), Runner()):
            pass
        assert not large.is_set()


def test_who_came_first_goes_first() -> None:
    capacity = Capacity(cores=2, memory=10)
    with ExitStack() as held:
        held.enter_context(capacity.take(Need(cores=2), Runner()))
        with (
            waiting(capacity, Need(cores=2)) as (first, _),
            waiting(capacity, Need(cores=2)) as (second, _),
        ):
            held.close()
            assert first.wait(WAIT)
            assert second.wait(WAIT)


def test_a_stopped_run_does_not_wait() -> None:
    capacity = Capacity(cores=1, memory=10)
    with capacity.take(Need(), Runner()), waiting(capacity, Need()) as (granted, given):
        pass
    assert not granted.is_set()
    assert given == [["stopped"]]
    with capacity.take(Need(), Runner()):
        pass


def test_this_machine_has_something() -> None:
    assert this_machine().cores >= 1
    assert available_memory() > 2**20


def test_a_control_group_limits_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"memory.max": "1000000", "memory.current": "400000"}
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(parallel, "CONTROL_GROUP", tmp_path)
    assert available_memory() == 600000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 600000


def test_tasks_run_at_once_and_their_results_are_in_order() -> None:
    barrier, order = Barrier(3), []
    first_last = [Event(), Event(), Event()]
    first_last[2].set()

    def task(number: int) -> Callable[[Runner], int]:
        def run(_runner: Runner) -> int:
            barrier.wait(WAIT)
            assert first_last[number].wait(WAIT)
            return number

        return run

    def done(number: int, _future: Future[int]) -> None:
        order.append(number)
        first_last[number - 1].set()

    assert side_by_side([task(number) for number in range(3)], Runner(), done) == [0, 1, 2]
    assert order == [2, 1, 0]


def test_the_first_error_stops_the_others() -> None:
    ended = []

    def fail(_runner: Runner) -> None:
        raise ValueError("first")

    def wait(runner: Runner) -> None:
        try:
            with Capacity(cores=0, memory=0).take(Need(cores=1), runner):
                while True:
                    runner.demand_going()
        finally:
            ended.append(True)

    with pytest.raises(ValueError, match="first"):
        side_by_side([wait, fail], Runner())
    assert ended == [True]
