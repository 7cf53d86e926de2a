"""Run one command and leave no process behind, even if the gate itself is killed.

Usage: supervise.py LIFELINE_FD RESULT WRITABLE COMMAND...

As a child subreaper it inherits every orphaned descendant, whatever session the descendant moved
to. It ends them all when the command is over or when the lifeline, a pipe held by the gate, is
closed. RESULT receives a JSON object: ``returncode`` (as in subprocess), ``survivors``, the
processes that were still running a moment after the command had ended, and ``unconfined``; or
``error``, why the command could not be started.

WRITABLE is the only folder, devices aside, whose files the command may change; "" leaves it free.
Where the kernel cannot see to that (Linux before 5.19, or without Landlock), the command runs all
the same, and ``unconfined`` is true.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

GRACE_SECONDS = 2.0
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
# landlock(7): system calls, the same on every processor, and rights to change files, of which
# older kernels do not know the last one. Version 1 does not even allow a file to be moved from one
# writable folder to another, as caches of compilers do.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
BELOW_PATH = 1
RIGHTS = {2: 0x3FF2, 3: 0x7FF2}
DEVICES = ("/dev", "/proc")


def become_subreaper() -> None:
    """Inherit the orphans among this process's descendants, in place of init."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(pid: int) -> None:
    """Have this process get SIGTERM when its parent ``pid`` is gone, however that ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != pid:  # it was gone before
        os.kill(os.getpid(), signal.SIGTERM)


def descendants(root: int, without: frozenset[int] = frozenset()) -> dict[int, str]:
    """Return {pid: command line} of the living processes below ``root``.

    Args:
        without: processes to leave out, with all that is below them.
    """
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in without:
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    # The command name may hold spaces and parentheses: split after the last one.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state != b"Z":
                parents[int(entry)] = int(parent)
    found: dict[int, str] = {}
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found.update((pid, command_line(pid)) for pid in frontier)
    return found


def command_line(pid: int) -> str:
    """Return how a process was started, as far as it can still be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def kill(pids: dict[int, str]) -> None:
    """Kill processes, all of them stopped first so that none can start another meanwhile."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def reap() -> bool:
    """Collect every finished child, adopted ones too; return whether any child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def wait_for_end(seconds: float) -> list[str]:
    """Return the command lines still running after at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while reap():
        if time.monotonic() >= deadline:
            running = sorted(descendants(os.getpid()).values())
            return running or ["a process that keeps forking"]
        signal.sigtimedwait([signal.SIGCHLD], 0.05)
    return []


def kill_all() -> None:
    """End every descendant.

    A chain of processes that fork and exit moves on between two looks at /proc. But as long as
    one lives, the subreaper has a child: only having none is the end.
    """
    while reap():
        kill(descendants(os.getpid()))
        signal.sigtimedwait([signal.SIGCHLD], 0.01)


def publish(result: str, facts: dict[str, Any]) -> None:
    """Write the result, completely or not at all."""
    with open(result + ".part", "w") as file:
        json.dump(facts, file)
    os.replace(result + ".part", result)


def rights_to_confine() -> int:
    """Return the rights that the kernel can take away, or 0 where it cannot confine a process."""
    version = ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1)
    return RIGHTS.get(min(version, max(RIGHTS)), 0)


def confine(writable: str, rights: int) -> None:
    """Let this process and its children change no file outside of ``writable`` and devices."""
    libc = ctypes.CDLL(None, use_errno=True)
    ruleset = libc.syscall(CREATE_RULESET, ctypes.c_char_p(struct.pack("<Q", rights)), 8, 0)
    for folder in (writable, *DEVICES):
        handle = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("<Qi", rights, handle)
        libc.syscall(ADD_RULE, ruleset, BELOW_PATH, ctypes.c_char_p(rule), 0)
        os.close(handle)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "the command cannot be confined")
    os.close(ruleset)


def default_signals() -> None:
    """Give the command the signal handling that it would have without a supervisor."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def main() -> None:
    """Supervise the command that the arguments name."""
    lifeline, result, writable, command = int(sys.argv[1]), *sys.argv[2:4], sys.argv[4:]
    become_subreaper()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])

    rights = rights_to_confine() if writable else 0

    def prepare() -> None:
        default_signals()
        if rights:
            confine(writable, rights)

    try:
        child = subprocess.Popen(command, preexec_fn=prepare)
    except (OSError, subprocess.SubprocessError) as error:
        publish(result, {"error": str(error)})
        return
    with selectors.DefaultSelector() as selector:
        selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ, "child")
        selector.register(lifeline, selectors.EVENT_READ, "lifeline")
        ended = {key.data for key, _ in selector.select()}
    survivors: list[str] = []
    if "child" in ended:
        child.wait()
        survivors = wait_for_end(GRACE_SECONDS)
    kill_all()
    unconfined = bool(writable) and not rights
    facts = {"returncode": child.returncode, "survivors": survivors, "unconfined": unconfined}
    publish(result, facts)


if __name__ == "__main__":
    main()
