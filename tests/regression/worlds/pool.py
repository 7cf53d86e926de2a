"""Run a function on W gloo ranks under a hard time limit.

A fork server imports torch once; each case forks W fresh ranks from it, so that nothing leaks
from case to case and a case costs milliseconds. A rank that does not come back shows its Python
stack and is killed: a hang is a failure.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 20.0
"""How long one case may take before its ranks are shown and killed."""

_STARTUP_S = 60.0
_STACKS_S = 10.0


class RankError(AssertionError):
    """A rank raised, died or hung; the message holds every rank's traceback or stack."""


@dataclass(frozen=True)
class _Request:
    file: str
    function: str
    world: int
    args: tuple[Any, ...]
    limit_s: float


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: ``value`` when it returned, else ``error`` (traceback, stack)."""

    ok: bool
    value: Any
    error: str


class RankPool:
    """A fork server; ``run`` gives each rank's return value, in rank order."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    def run(
        self, function: Callable[..., Any], world: int, *args: Any, limit_s: float = LIMIT_S
    ) -> list[Any]:
        """Call ``function(rank, world, *args)`` on each rank of a fresh gloo world."""
        outcomes = self.outcomes(function, world, *args, limit_s=limit_s)
        if all(outcome.ok for outcome in outcomes):
            return [outcome.value for outcome in outcomes]
        raise RankError(
            "\n".join(
                f"--- rank {rank}: {outcome.error or 'returned'}"
                for rank, outcome in enumerate(outcomes)
            )
        )

    def outcomes(
        self, function: Callable[..., Any], world: int, *args: Any, limit_s: float = LIMIT_S
    ) -> list[Outcome]:
        file = sys.modules[function.__module__].__file__
        assert file is not None
        request = _Request(file, function.__qualname__, world, args, limit_s)
        server = self._started()
        assert server.stdin is not None
        _send(server.stdin.fileno(), request)
        return self._receive(server, limit_s + 2 * _STARTUP_S + _STACKS_S)

    def close(self) -> None:
        if self._server is not None:
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.close()
            self._server.stdout.close()
            self._server.terminate()
            self._server.wait(10)
            self._server = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._server is not None and self._server.poll() is not None:
            # Tests of the gate end every process that they find below their own.
            self.close()
        if self._server is None:
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }
            self._server = subprocess.Popen(
                [sys.executable, "-B", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
        return self._server

    def _receive(self, server: subprocess.Popen[bytes], limit_s: float) -> list[Outcome]:
        assert server.stdout is not None
        ready, _, _ = select.select([server.stdout], [], [], limit_s)
        if not ready:
            self.close()
            raise RankError("the fork server did not answer")
        outcomes: list[Outcome] = _receive(server.stdout.fileno())
        return outcomes


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Forks ranks for a test; they have torch and gloo, on the CPU."""
    pool = RankPool()
    yield pool
    pool.close()


def _send(descriptor: int, value: Any) -> None:
    data = pickle.dumps(value)
    view = memoryview(struct.pack("<Q", len(data)) + data)
    while view:
        view = view[os.write(descriptor, view) :]


def _receive(descriptor: int) -> Any:
    (size,) = struct.unpack("<Q", _read(descriptor, 8))
    return pickle.loads(_read(descriptor, size))


def _read(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(descriptor, size - len(data))
        if not piece:
            raise EOFError("the other end closed")
        data += piece
    return bytes(data)


def _serve(requests: int, replies: int) -> None:
    import torch
    import torch._dynamo  # DTensor imports it on first use, which takes seconds
    import torch.distributed.fsdp
    import torch.distributed.tensor

    torch.set_num_threads(1)
    modules: dict[str, Any] = {}
    while True:
        try:
            request = _receive(requests)
        except EOFError:
            return
        if request.file not in modules:
            modules[request.file] = _load(request.file)
        function = modules[request.file]
        for part in request.function.split("."):
            function = getattr(function, part)
        _send(replies, _run_case(function, request))


def _load(file: str) -> Any:
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"ranks_case_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _run_case(function: Callable[..., Any], request: _Request) -> list[Outcome]:
    scratch = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        pids = [_fork(function, request, rank, scratch) for rank in range(request.world)]
        _await_start(set(pids), [scratch / f"started{rank}" for rank in range(request.world)])
        stacks = {pid: scratch / f"stack{rank}" for rank, pid in enumerate(pids)}
        hung = _wait(stacks, time.monotonic() + request.limit_s)
        return [
            _outcome(scratch, rank, pid in hung, request.limit_s) for rank, pid in enumerate(pids)
        ]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fork(function: Callable[..., Any], request: _Request, rank: int, scratch: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        outcome = _rank(function, request, rank, scratch)
        (scratch / f"outcome{rank}").write_bytes(pickle.dumps(outcome))
        code = 0
    finally:
        os._exit(code)


def _rank(function: Callable[..., Any], request: _Request, rank: int, scratch: Path) -> Outcome:
    import faulthandler

    import torch.distributed as dist

    stacks = (scratch / f"stack{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    try:
        store = dist.FileStore(str(scratch / "store"), request.world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=request.world)
        (scratch / f"started{rank}").touch()
        return Outcome(True, function(rank, request.world, *request.args), "")
    except BaseException:
        return Outcome(False, None, traceback.format_exc())


def _await_start(pids: set[int], started: list[Path]) -> None:
    """Wait until every rank is in its function, so that a case's limit is its own."""
    deadline = time.monotonic() + _STARTUP_S
    while time.monotonic() < deadline and not all(file.exists() for file in started):
        if any(_has_ended(pid) for pid in pids):
            return
        time.sleep(0.005)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait(pids: dict[int, Path], deadline: float) -> set[int]:
    """Wait for every process; those alive at the deadline show their stacks and are killed.

    pids: with the file that each writes its stack to.
    """
    left = _reap(set(pids), deadline)
    if left:
        for pid in left:
            os.kill(pid, signal.SIGUSR1)
        _await_stacks([pids[pid] for pid in left])
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in left:
            os.waitpid(pid, 0)
    return left


def _await_stacks(files: list[Path]) -> None:
    """Wait until the signal handlers have written all stacks: no file is empty or grows."""
    deadline = time.monotonic() + _STACKS_S
    sizes: list[int] = [0]
    while time.monotonic() < deadline:
        last, sizes = sizes, [file.stat().st_size for file in files]
        if all(sizes) and sizes == last:
            return
        time.sleep(0.1)


def _reap(pids: set[int], deadline: float) -> set[int]:
    left = set(pids)
    while left and time.monotonic() < deadline:
        for pid in list(left):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    left.discard(pid)
        time.sleep(0.005)
    return left


def _outcome(scratch: Path, rank: int, hung: bool, limit_s: float) -> Outcome:
    file = scratch / f"outcome{rank}"
    if file.exists() and file.stat().st_size:
        outcome: Outcome = pickle.loads(file.read_bytes())
        return outcome
    stack = scratch / f"stack{rank}"
    shown = stack.read_text() if stack.exists() else "(no stack)"
    what = f"hung for {limit_s:g} s" if hung else "died"
    return Outcome(False, None, f"{what}\n{shown}")


if __name__ == "__main__":
    # Pickles name classes by module, so the server must be the module that tests import.
    import pool

    answers = os.dup(1)
    os.dup2(2, 1)
    pool._serve(0, answers)
