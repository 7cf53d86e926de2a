"""Runs chosen tests in forked children of a process that has imported what is slow to import.

Usage: zygote.py SLOT MODULE...

SLOT is a copy of the checkout, whose tests run on its own sources. One request a line, as JSON:
``starts``, each with ``world`` (ranks), ``nodes`` (test ids, in the order in which they run, or
folders) and ``limit`` (seconds); ``trace``, a folder for coverage data and durations, or null.
The answer, one line: ``red``, the first test that failed or why there was no result, or null;
``missing``, tests that were not found.

Nothing of the sources under test may be imported here: each child imports them anew.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SLOT = Path(sys.argv[1]) if __name__ == "__main__" else Path()
CHECKOUT = Path(__file__).resolve().parents[2]
DATA_BYTES = 8 * 2**30
FILE_BYTES = 2**28


class Chosen:
    """A pytest plugin: these tests alone, in this order; notes the first that fails."""

    def __init__(self, nodes: Sequence[str], notes: Path, trace: Any) -> None:
        self._order = {node: number for number, node in enumerate(nodes)}
        self._notes, self._trace = notes, trace
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid for item in items}
        chosen = [node for node in self._order if "::" in node]
        write(self._notes / "missing", [node for node in chosen if node not in found])
        if chosen:
            items[:] = [item for item in items if item.nodeid in self._order]
            items.sort(key=lambda item: self._order[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            write(self._notes / "red", f"collection of {report.nodeid}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self._trace:
            self._trace.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spent = self._seconds.get(report.nodeid, 0.0) + report.duration
        self._seconds[report.nodeid] = spent
        if report.failed and not (self._notes / "red").exists():
            write(self._notes / "red", report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if self._trace:
            write(self._notes / "seconds", self._seconds)


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def traced(folder: Path | None) -> Any:
    """Start to trace the sources into ``folder``, or return None."""
    if folder is None:
        return None
    import coverage

    trace = coverage.Coverage(config_file=str(folder / "coveragerc"), data_suffix=True)
    trace.start()
    return trace


def forked_pool(folder: Path | None) -> None:
    """Let tests that fork ranks fork them from a copy of this process, not from a new one."""
    spec = importlib.util.find_spec("pool")
    if spec is None:
        return
    pool: Any = importlib.import_module("pool")
    (requests, to_server), (from_server, answers) = os.pipe(), os.pipe()
    plain_rank, plain_send = pool._rank, pool._send

    def rank(function: Any, request: Any, *rest: Any) -> Any:
        trace = traced(folder)
        if trace:
            trace.switch_context(request.test)
        try:
            return plain_rank(function, request, *rest)
        finally:
            if trace:
                trace.stop()
                trace.save()

    def send(descriptor: int, value: Any) -> None:
        if isinstance(value, pool._Request):
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
            object.__setattr__(value, "test", test)
        plain_send(descriptor, value)

    pool._rank, pool._send = rank, send
    pid = os.fork()
    if not pid:
        os.close(to_server), os.close(from_server)
        os.dup2(2, 1)
        pool._serve(requests, answers)
        os._exit(0)
    os.close(requests), os.close(answers)
    server = SimpleNamespace(
        stdin=os.fdopen(to_server, "wb"),
        stdout=os.fdopen(from_server, "rb"),
        poll=lambda: None,
        terminate=lambda: os.kill(pid, signal.SIGTERM),
        wait=lambda _: os.waitpid(pid, 0),
    )
    plain_init = pool.RankPool.__init__

    def init(self: Any) -> None:
        plain_init(self)
        if server is not None and not server.stdin.closed:
            self._server = server

    pool.RankPool.__init__ = init


def run_tests(nodes: Sequence[str], notes: Path, trace: Path | None, world: int) -> int:
    """Run tests in this process, a child; return pytest's status."""
    os.chdir(SLOT)
    # Everything else would be imported from where the first of these found it.
    sys.path[:0] = [str(SLOT / "src"), str(SLOT)]
    sys.dont_write_bytecode = True
    if world == 1 and any("/worlds/" in node for node in nodes):
        sys.path[:0] = [str(SLOT / "tests/regression/worlds")]
        forked_pool(trace)
    started = traced(trace)
    files = list(dict.fromkeys(node.partition("::")[0] for node in nodes))
    options = ["-p", "no:cacheprovider", "-q", "--tb=short", f"--rootdir={SLOT}"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # imported before: meant so
    if world > 1 or not trace:
        options.append("--exitfirst")
    # They ask whether the kernels are clean, and need terabytes of addresses.
    options.append("--ignore=tests/kernels/test_sanitizers.py")
    status = pytest.main([*options, *files], plugins=[Chosen(nodes, notes, started)])
    if started:
        started.stop()
        started.save()
    return int(status)


def fork(action: Callable[[], int], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setpgid(0, 0)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1), os.dup2(handle, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = action()
        sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def rank_environment(rank: int, world: int, port: int) -> None:
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(request: dict[str, Any], folder: Path, trace: Path | None) -> dict[str, Any]:
    """Run one start; return ``red``, or null, and ``missing``."""
    world, nodes = request["world"], request["nodes"]
    port = free_port()
    children = {}
    for rank in range(world):
        notes = folder / f"rank{rank}"
        notes.mkdir(parents=True)

        def action(rank: int = rank, notes: Path = notes) -> int:
            if world > 1:
                rank_environment(rank, world, port)
            return run_tests(nodes, notes, trace, world)

        children[fork(action, folder / f"log{rank}")] = notes
    status = awaited(children, time.monotonic() + request["limit"])
    missing: list[str] = []
    red = None
    for pid, notes in children.items():
        missing += read(notes / "missing") or []
        found = read(notes / "red")
        if found is None and status[pid] not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            found = "took too long" if status[pid] is None else f"ended with {status[pid]}"
        # The ranks that wait for one that failed say less than that one.
        if red is None or "::" not in red:
            red = found or red
    return {"red": red, "missing": sorted(set(missing))}


def awaited(children: dict[int, Path], deadline: float) -> dict[int, int | None]:
    """Return {pid: status}; the first rank that fails, or the deadline, ends the others."""
    status: dict[int, int | None] = dict.fromkeys(children)
    left = set(children)
    while left:
        for pid in list(left):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                status[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                left.discard(pid)
        failed = any(value for value in status.values() if value is not None)
        if left and (time.monotonic() > deadline or failed):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            for pid in left:
                os.waitpid(pid, 0)
                status[pid] = None if not failed else 0
            left.clear()
        time.sleep(0.01)
    SUPERVISE.kill(SUPERVISE.descendants(os.getpid()))
    SUPERVISE.reap()
    return status


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Answer requests until there are no more."""
    global SUPERVISE
    SUPERVISE = load(CHECKOUT / "gate" / "harness" / "supervise.py")
    SUPERVISE.become_subreaper()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        folder = SLOT.with_name(f"{SLOT.name}.records") / str(number)
        trace = Path(request["trace"]) if request["trace"] else None
        found: dict[str, Any] = {"red": None, "missing": [], "folder": str(folder)}
        for at, each in enumerate(request["starts"]):
            answer = start(each, folder / str(at), trace)
            found["missing"] += answer["missing"]
            found["red"] = found["red"] or answer["red"]
            if found["red"] and not trace:
                break
        print(json.dumps(found), file=answers, flush=True)


SUPERVISE: Any = None
if __name__ == "__main__":
    main()
