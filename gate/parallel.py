"""Do work side by side, as far as cores, GPUs and memory allow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Event
from typing import TypeVar

from gate.runner import Runner

Result = TypeVar("Result")

WAKE_SECONDS = 0.2
CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a piece of work takes while it runs; ``memory`` is in bytes of the host's."""

    cores: int = 1
    gpus: int = 0
    memory: int = 0


@dataclass(kw_only=True, eq=False)
class _Request:
    need: Need
    gpus: Sequence[str]
    given: list[str] | None = None


class Capacity:
    """What may be in use at once. Work that needs more than there is gets all of it, alone."""

    def __init__(self, *, cores: int, memory: int) -> None:
        self.cores, self._memory = max(1, cores), max(1, memory)
        self._free_cores, self._free_memory = self.cores, self._memory
        self._busy_gpus: set[str] = set()
        self._waiting: list[_Request] = []
        self._changed = Condition()

    @contextmanager
    def take(self, need: Need, runner: Runner, gpus: Sequence[str] = ()) -> Iterator[list[str]]:
        """Wait until ``need`` is free, and hold it; yield the GPUs, out of ``gpus``.

        Who came first goes first, but what fits does not wait for what does not: work comes to
        an end, so that nothing waits for ever.

        Raises:
            Interrupted: the runner was stopped meanwhile.
        """
        need = Need(
            cores=min(need.cores, self.cores),
            gpus=min(need.gpus, len(gpus)),
            memory=min(need.memory, self._memory),
        )
        request = _Request(need=need, gpus=gpus)
        with self._changed:
            self._waiting.append(request)
            self._grant()
            try:
                while request.given is None:
                    runner.demand_going()
                    self._changed.wait(WAKE_SECONDS)
            except BaseException:
                self._return(request)
                raise
        try:
            yield list(request.given)
        finally:
            with self._changed:
                self._return(request)

    def _grant(self) -> None:
        for request in list(self._waiting):
            need = request.need
            free = [gpu for gpu in request.gpus if gpu not in self._busy_gpus][: need.gpus]
            if need.cores > self._free_cores or need.memory > self._free_memory:
                continue
            if len(free) == need.gpus:
                self._waiting.remove(request)
                self._free_cores -= need.cores
                self._free_memory -= need.memory
                self._busy_gpus.update(free)
                request.given = free
        self._changed.notify_all()

    def _return(self, request: _Request) -> None:
        if request.given is None:
            self._waiting.remove(request)
        else:
            self._free_cores += request.need.cores
            self._free_memory += request.need.memory
            self._busy_gpus.difference_update(request.given)
        self._grant()


def this_machine() -> Capacity:
    """Return what this process may use of the machine."""
    return Capacity(cores=len(os.sched_getaffinity(0)), memory=available_memory())


def available_memory() -> int:
    """Return the bytes of memory that are free, within the limit of the control group."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        found = min(found, max(0, limit - used))
    return found


def side_by_side(
    tasks: Sequence[Callable[[Runner], Result]],
    runner: Runner,
    on_done: Callable[[int, Future[Result]], None] = lambda _number, _future: None,
) -> list[Result]:
    """Run each task in a thread of its own, with a runner; return their results in order.

    Args:
        on_done: called in this thread for each task as it ends, with its number.

    Raises:
        BaseException: the first that a task or ``on_done`` raised, or that a signal's handler
            raised here; the other tasks are stopped and waited for before.
    """
    stop = Event()
    own = runner.stoppable(stop)
    with ThreadPoolExecutor(max_workers=max(1, len(tasks))) as pool:
        try:
            futures = [pool.submit(task, own) for task in tasks]
            numbers = {future: number for number, future in enumerate(futures)}
            for future in as_completed(futures):
                on_done(numbers[future], future)
                future.result()
            return [future.result() for future in futures]
        finally:
            stop.set()
