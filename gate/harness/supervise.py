"""Run one command and leave no process behind, even if the gate itself is killed.

Usage: supervise.py LIFELINE_FD RESULT COMMAND...

As a child subreaper it inherits every orphaned descendant, whatever session the descendant moved
to. It ends them all when the command is over or when the lifeline, a pipe held by the gate, is
closed. RESULT receives a JSON object: ``returncode`` (as in subprocess) and ``survivors``, the
processes that were still running a moment after the command had ended; or ``error``, why the
command could not be started.
"""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress

GRACE_SECONDS = 2.0
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36


def descendants():
    """Return {pid: command line} of all living processes below this one."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    # The command name may hold spaces and parentheses: split after the last one.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state != b"Z":
                parents[int(entry)] = int(parent)
    found, frontier = {}, {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found.update((pid, command_line(pid)) for pid in frontier)
    return found


def command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def reap():
    """Collect every finished child, adopted ones too."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def wait_for_end(seconds):
    """Return the descendants still running after at most ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        reap()
        running = descendants()
        if not running or time.monotonic() >= deadline:
            return running
        signal.sigtimedwait([signal.SIGCHLD], 0.05)


def kill_all():
    while running := descendants():
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for_end(0.2)


def publish(result, facts):
    with open(result + ".part", "w") as file:
        json.dump(facts, file)
    os.replace(result + ".part", result)


def default_signals():
    for number in IGNORED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def main():
    lifeline, result, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        child = subprocess.Popen(command, preexec_fn=default_signals)
    except OSError as error:
        publish(result, {"error": str(error)})
        return
    with selectors.DefaultSelector() as selector:
        selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ, "child")
        selector.register(lifeline, selectors.EVENT_READ, "lifeline")
        ended = {key.data for key, _ in selector.select()}
    survivors = {}
    if "child" in ended:
        child.wait()
        survivors = wait_for_end(GRACE_SECONDS)
    kill_all()
    reap()
    publish(result, {"returncode": child.returncode, "survivors": sorted(survivors.values())})


if __name__ == "__main__":
    main()
