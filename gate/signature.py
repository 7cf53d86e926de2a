"""Signatures of statements, made and checked with ``ssh-keygen -Y``: offline, by an SSH key.

The format is OpenSSH's PROTOCOL.sshsig. Whose keys count is in a file of allowed signers, in the
form that ssh-keygen(1) describes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gate.errors import EnvironmentFailed, UsageFailure
from gate.repository import ROOT
from gate.runner import Outcome, Runner
from gate.scratch import scratch
from gate.statement import BadSignature

SUFFIX = ".sig"
ALLOWED = ROOT / "ci" / "allowed_signers"
# A signature made for another purpose, such as one of a git commit, is none of a statement.
NAMESPACE = "gefen-gate"
# Long enough for somebody to touch a security key.
TIMEOUT = 60.0


def sign(message: bytes, *, key: Path, allowed: Path, runner: Runner) -> bytes:
    """Sign ``message``; return the signature, in armour.

    Args:
        message: what to sign.
        key: a private key, or a public one whose private half an SSH agent holds.
        allowed: the file of allowed signers; a signature that it does not cover is not made.
        runner: starts ssh-keygen.

    Raises:
        UsageFailure: there is no such key, or it is not an allowed one.
        EnvironmentFailed: ssh-keygen is missing, or cannot sign with it.
    """
    if not key.is_file():
        raise UsageFailure(f"The signing key {key} does not exist.")
    with _scratch(message=message) as folder:
        file = folder / "message"
        outcome = _keygen(runner, folder, "sign", "-f", key, "-n", NAMESPACE, file)
        if not outcome.ok:
            raise EnvironmentFailed(
                f"Cannot sign with {key}: {_first_line(outcome)}",
                next_step="where it has a passphrase, ssh-add it and name its .pub file instead",
            )
        signature = file.with_name(file.name + SUFFIX).read_bytes()
    try:
        signers(message, signature, allowed, runner)
    except BadSignature as error:
        raise UsageFailure(
            f"What {key} signs would not be accepted: it {error.reason}.",
            next_step=f'add a line to {allowed}: NAME namespaces="{NAMESPACE}" PUBLIC-KEY',
        ) from error
    return signature


def signers(message: bytes, signature: bytes, allowed: Path, runner: Runner) -> tuple[str, ...]:
    """The names, in the file of allowed signers, of whoever signed exactly this message.

    Raises:
        BadSignature: the signature is broken, of something else, or by nobody allowed today.
        EnvironmentFailed: ssh-keygen is missing.
    """
    with _scratch(message=message, signature=signature) as folder:
        files = ("-s", folder / "signature", "-f", allowed)
        found = _keygen(runner, folder, "find-principals", *files)
        # Warnings stand between the names, and do not verify.
        names = dict.fromkeys(found.output().splitlines()) if found.ok else {}
        purpose = ("-n", NAMESPACE)
        tried = {name: _verify(runner, folder, *files, *purpose, "-I", name) for name in names}
        if verified := tuple(name for name, outcome in tried.items() if outcome.ok):
            return verified
        valid = _keygen(
            runner, folder, "check-novalidate", *files[:2], *purpose, stdin=folder / "message"
        )
        if not valid.ok:
            raise BadSignature(f"has a signature that does not fit it ({_first_line(valid)})")
        said = [_first_line(outcome) for outcome in (*tried.values(), found)]
        who = _first_line(valid).partition(" with ")[2]
        raise BadSignature(
            f"is signed with {who}, which {allowed.name} does not allow ({said[0]})"
        )


@contextmanager
def _scratch(**contents: bytes) -> Iterator[Path]:
    with scratch("signature") as folder:
        for name, data in contents.items():
            (folder / name).write_bytes(data)
        yield folder


def _verify(runner: Runner, folder: Path, *arguments: str | Path) -> Outcome:
    return _keygen(runner, folder, "verify", *arguments, stdin=folder / "message")


def _keygen(
    runner: Runner, folder: Path, action: str, *arguments: str | Path, stdin: Path | None = None
) -> Outcome:
    passed = {"PATH", "HOME", "SSH_AUTH_SOCK"} & os.environ.keys()
    try:
        return runner.run(
            ["ssh-keygen", "-Y", action, *arguments],
            env={"LC_ALL": "C", **{name: os.environ[name] for name in passed}},
            cwd=folder,
            log=folder / f"{action}.log",
            timeout=TIMEOUT,
            stdin=stdin,
        )
    except EnvironmentFailed as error:
        raise EnvironmentFailed(
            "Signatures need ssh-keygen, which could not be started.",
            cause=str(error),
            next_step="install OpenSSH 8.2 or newer (Debian: apt-get install openssh-client)",
        ) from error


def _first_line(outcome: Outcome) -> str:
    return next(iter(outcome.output().splitlines()), outcome.describe())
