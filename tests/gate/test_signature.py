"""Signatures with real keys, and what verifying makes of them."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest

from gate import regressions, signature
from gate.errors import EnvironmentFailed, EvidenceRejected, UsageFailure
from gate.evidence import revoke, sign_statements, suite_digest, verify
from gate.runner import Runner
from gate.statement import BadSignature
from gate.wheels import Wheel
from tests.gate.conftest import SITE, Gate, MakeSuite, mini_wheel
from tests.gate.statements import ENVIRONMENT, OTHER_SUITE, SUITE, write_statement
from tests.gate.wheel_builder import WheelBuilder, as_wheel, flip

pytestmark = pytest.mark.processes

MINE = 'namespaces="gefen-gate"'


def make_key(path: Path, passphrase: str = "") -> Path:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "x", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


def public(key: Path) -> str:
    return key.with_suffix(".pub").read_text()


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys of Ada and Bob."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ada", "bob"):
        make_key(folder / name)
    return folder


@pytest.fixture
def allowed(tmp_path: Path, keys: Path) -> Path:
    """A file that allows both to sign."""
    path = tmp_path / "allowed_signers"
    lines = [f"{name}@example.org {MINE} {public(keys / name)}" for name in ("ada", "bob")]
    path.write_text("# Release managers\n" + "".join(lines))
    return path


def sign(message: bytes, keys: Path, allowed: Path, name: str = "ada") -> bytes:
    return signature.sign(message, key=keys / name, allowed=allowed, runner=Runner())


def signers(message: bytes, signed: bytes, allowed: Path) -> tuple[str, ...]:
    return signature.signers(message, signed, allowed, Runner())


def reason(message: bytes, signed: bytes, allowed: Path) -> str:
    with pytest.raises(BadSignature) as caught:
        signers(message, signed, allowed)
    return caught.value.reason


# One signature


def test_a_signature_says_who_made_it(keys: Path, allowed: Path) -> None:
    for name in ("ada", "bob"):
        signed = sign(b"text", keys, allowed, name)
        assert signers(b"text", signed, allowed) == (f"{name}@example.org",)


def test_a_key_with_several_names(keys: Path, allowed: Path) -> None:
    signed = sign(b"text", keys, allowed)
    allowed.write_text(f'not a line\n"ada lovelace,ada@example.org" {MINE} {public(keys / "ada")}')
    assert signers(b"text", signed, allowed) == ("ada lovelace", "ada@example.org")


@pytest.mark.parametrize("data", [b"", b"junk", b"-----BEGIN SSH SIGNATURE-----\n"])
def test_what_is_no_signature(allowed: Path, data: bytes) -> None:
    assert "has a signature that does not fit it (Couldn't" in reason(b"text", data, allowed)


def test_a_signature_of_something_else(keys: Path, allowed: Path) -> None:
    signed = sign(b"text", keys, allowed)
    assert "does not fit it" in reason(b"other text", signed, allowed)
    assert "does not fit it" in reason(b"", signed, allowed)


def test_any_changed_byte_of_a_signature_is_noticed(keys: Path, allowed: Path) -> None:
    signed = sign(b"text", keys, allowed)
    body = signed.index(b"\n") + 1
    for offset in range(body + 20, len(signed) - 40, 61):
        letter = b"A" if signed[offset : offset + 1] != b"A" else b"B"
        reason(b"text", signed[:offset] + letter + signed[offset + 1 :], allowed)


def test_a_signature_made_for_another_purpose(tmp_path: Path, keys: Path, allowed: Path) -> None:
    (tmp_path / "message").write_bytes(b"text")
    command = ["ssh-keygen", "-Y", "sign", "-n", "git", "-f", keys / "ada", tmp_path / "message"]
    subprocess.run(command, check=True, capture_output=True)
    signed = (tmp_path / "message.sig").read_bytes()
    assert "namespace does not match" in reason(b"text", signed, allowed)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "No principal matched"),
        ('ada valid-before="20200101" {key}', "key has expired"),
        ('ada valid-after="29990101" {key}', "key is not yet valid"),
        (
            'ada namespaces="git" {key}',
            "key is not permitted for use in signature namespace",
        ),
        ("ada ssh-ed25519 AAAA", "allowed_signers:1: invalid key"),
    ],
)
def test_a_key_that_is_not_allowed(keys: Path, allowed: Path, line: str, words: str) -> None:
    signed = sign(b"text", keys, allowed)
    allowed.write_text(line.format(key=public(keys / "ada")))
    why = reason(b"text", signed, allowed)
    assert "is signed with ED25519 key SHA256:" in why
    assert "which allowed_signers does not allow" in why
    assert words in why


def test_no_file_of_allowed_signers(tmp_path: Path, keys: Path, allowed: Path) -> None:
    signed = sign(b"text", keys, allowed)
    assert "No such file" in reason(b"text", signed, tmp_path / "absent")


def test_a_signature_that_nobody_would_accept_is_not_made(keys: Path, allowed: Path) -> None:
    allowed.write_text("")
    with pytest.raises(UsageFailure, match=r"(?s)would not be accepted.*add a line to .*allowed"):
        sign(b"text", keys, allowed)


def test_keys_that_cannot_sign(tmp_path: Path, keys: Path, allowed: Path) -> None:
    with pytest.raises(UsageFailure, match="absent does not exist"):
        sign(b"text", keys, allowed, "absent")
    with pytest.raises(EnvironmentFailed, match=r"(?s)Cannot sign with .*passphrase.*ssh-add"):
        sign(b"text", make_key(tmp_path / "secret", "passphrase").parent, allowed, "secret")
    # Only an agent could have its private half.
    (tmp_path / "alone.pub").write_text(public(keys / "ada"))
    with pytest.raises(EnvironmentFailed, match="Cannot sign with"):
        sign(b"text", tmp_path, allowed, "alone.pub")


def test_without_ssh_keygen(
    keys: Path, allowed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    signed = sign(b"text", keys, allowed)
    monkeypatch.setenv("PATH", str(tmp_path))
    for action in (
        lambda: sign(b"text", keys, allowed),
        lambda: signers(b"text", signed, allowed),
    ):
        with pytest.raises(EnvironmentFailed, match=r"(?s)need ssh-keygen.*install OpenSSH"):
            action()


# Signed statements


def signed_statement(evidence: Path, wheel: Wheel, keys: Path, allowed: Path, **more: str) -> Path:
    by = partial(sign, keys=keys, allowed=allowed, name=more.pop("name", "ada"))
    return write_statement(evidence, wheel, sign=by, **more)


def refusal(evidence: Path, wheel: Wheel, allowed: Path, *by: str, **options: str) -> str:
    with pytest.raises(EvidenceRejected) as caught:
        verify([wheel], evidence=evidence, allowed_signers=allowed, signers=by, **options)
    assert caught.value.exit_code == 5
    return str(caught.value)


def signed_by(evidence: Path, wheel: Wheel, allowed: Path, *by: str) -> list[str]:
    (verified,) = verify([wheel], evidence=evidence, allowed_signers=allowed, signers=by)
    return [f"{s.profile} {s.signature()}" for s in verified.statements]


def test_verifying_says_who_signed(
    evidence: Path, wheel: Wheel, keys: Path, allowed: Path
) -> None:
    path = signed_statement(evidence, wheel, keys, allowed)
    assert path.with_name(path.name + ".sig").stat().st_mode & 0o777 == 0o644
    write_statement(evidence, wheel, profile="gpu")
    assert signed_by(evidence, wheel, allowed) == ["cpu signed by ada@example.org", "gpu unsigned"]


def test_only_the_signatures_asked_for_count(
    evidence: Path, wheel: Wheel, keys: Path, allowed: Path
) -> None:
    ada, bob = "ada@example.org", "bob@example.org"
    signed_statement(evidence, wheel, keys, allowed)
    assert signed_by(evidence, wheel, allowed, ada) == ["cpu signed by ada@example.org"]
    assert signed_by(evidence, wheel, allowed, bob, ada) == ["cpu signed by ada@example.org"]
    why = refusal(evidence, wheel, allowed, bob)
    assert "profile cpu is signed by ada@example.org; bob@example.org must sign it" in why
    assert "next:  have its statements signed: python -m gate sign " in why
    write_statement(evidence, wheel, profile="gpu")
    why = refusal(evidence, wheel, allowed, ada, bob, require=["cpu", "gpu"])
    assert "profile gpu is unsigned; ada@example.org or bob@example.org must sign it" in why
    signed_statement(evidence, wheel, keys, allowed, profile="gpu", name="bob")
    verify(
        [wheel],
        evidence=evidence,
        require=["cpu", "gpu"],
        signers=(ada, bob),
        allowed_signers=allowed,
    )


@pytest.mark.parametrize("damage", ["other", "junk", "empty", "folder", "dangling", "huge"])
def test_a_broken_signature_is_refused_where_none_is_needed(
    tmp_path: Path, evidence: Path, wheel: Wheel, keys: Path, allowed: Path, damage: str
) -> None:
    path = write_statement(evidence, wheel)
    beside = path.with_name(path.name + ".sig")
    if damage == "other":
        other = as_wheel(WheelBuilder(version="2.0").write(tmp_path))
        signed = signed_statement(evidence, other, keys, allowed)
        beside.write_bytes(signed.with_name(signed.name + ".sig").read_bytes())
    elif damage == "folder":
        beside.mkdir()
    elif damage == "dangling":
        beside.symlink_to(tmp_path / "absent")
    else:
        beside.write_bytes({"junk": b"junk", "empty": b"", "huge": b"x" * 2**20}[damage])
    assert path.name in refusal(evidence, wheel, allowed)
    beside.rmdir() if damage == "folder" else beside.unlink()
    assert signed_by(evidence, wheel, allowed) == ["cpu unsigned"]


def test_a_resealed_statement_does_not_fit_its_signature(
    evidence: Path, wheel: Wheel, keys: Path, allowed: Path
) -> None:
    """The seal notices accidents; whoever can forge it still has no key."""
    path = signed_statement(evidence, wheel, keys, allowed)
    kept = path.with_name(path.name + ".sig").read_bytes()
    write_statement(evidence, wheel, commit="d" * 40)
    path.with_name(path.name + ".sig").write_bytes(kept)
    assert "has a signature that does not fit it" in refusal(evidence, wheel, allowed)


def test_an_unknown_signature_is_refused(
    evidence: Path, wheel: Wheel, keys: Path, allowed: Path
) -> None:
    signed_statement(evidence, wheel, keys, allowed)
    allowed.write_text(f"bob {public(keys / 'bob')}")
    assert "which allowed_signers does not allow" in refusal(evidence, wheel, allowed)


def test_an_unsigned_statement_takes_the_place_of_a_signed_one(
    evidence: Path, wheel: Wheel, keys: Path, allowed: Path
) -> None:
    path = signed_statement(evidence, wheel, keys, allowed)
    write_statement(evidence, wheel)
    assert list(path.parent.iterdir()) == [path]
    assert signed_by(evidence, wheel, allowed) == ["cpu unsigned"]


def test_revoking_takes_the_signature_along(
    evidence: Path, wheel: Wheel, keys: Path, allowed: Path
) -> None:
    path = signed_statement(evidence, wheel, keys, allowed)
    revoke(evidence, wheel=wheel, profile="cpu", environment=ENVIRONMENT)
    assert list(path.parent.iterdir()) == []


def test_a_signature_that_fails_leaves_the_old_statement(
    evidence: Path, wheel: Wheel, keys: Path, allowed: Path
) -> None:
    path = signed_statement(evidence, wheel, keys, allowed)
    before = path.read_bytes()
    with pytest.raises(UsageFailure):
        signed_statement(evidence, wheel, keys, allowed, name="absent", commit="d" * 40)
    assert path.read_bytes() == before
    assert signed_by(evidence, wheel, allowed) == ["cpu signed by ada@example.org"]


def test_long_names_leave_room_for_the_signature(
    tmp_path: Path, evidence: Path, keys: Path, allowed: Path
) -> None:
    wheel = as_wheel(WheelBuilder(version="1.0+" + "x" * 220).write(tmp_path))
    signed_statement(evidence, wheel, keys, allowed)
    assert signed_by(evidence, wheel, allowed) == ["cpu signed by ada@example.org"]


# Signing later


def sign_all(evidence: Path, wheel: Wheel, keys: Path, allowed: Path, name: str) -> list[Path]:
    by = partial(sign, keys=keys, allowed=allowed, name=name)
    return sign_statements([wheel], evidence=evidence, suite_digest=SUITE, sign=by)


def test_statements_are_signed_later(
    evidence: Path, wheel: Wheel, keys: Path, allowed: Path
) -> None:
    paths = [write_statement(evidence, wheel), write_statement(evidence, wheel, profile="gpu")]
    before = [path.read_bytes() for path in paths]
    assert sign_all(evidence, wheel, keys, allowed, "ada") == paths
    assert sign_all(evidence, wheel, keys, allowed, "bob") == paths
    assert [path.read_bytes() for path in paths] == before
    assert signed_by(evidence, wheel, allowed, "bob@example.org") == [
        "cpu signed by bob@example.org",
        "gpu signed by bob@example.org",
    ]


def test_a_broken_signature_can_be_replaced(
    evidence: Path, wheel: Wheel, keys: Path, allowed: Path
) -> None:
    path = write_statement(evidence, wheel)
    path.with_name(path.name + ".sig").write_text("junk")
    sign_all(evidence, wheel, keys, allowed, "ada")
    assert signed_by(evidence, wheel, allowed) == ["cpu signed by ada@example.org"]


def test_what_does_not_hold_is_not_signed(
    evidence: Path, wheel: Wheel, keys: Path, allowed: Path
) -> None:
    path = write_statement(evidence, wheel, suite_digest=OTHER_SUITE)
    with pytest.raises(EvidenceRejected, match="stale"):
        sign_all(evidence, wheel, keys, allowed, "ada")
    flip(path, 100, 1)
    with pytest.raises(EvidenceRejected):
        sign_all(evidence, wheel, keys, allowed, "ada")
    assert list(path.parent.iterdir()) == [path]


# The command line


def test_a_run_signs_and_a_failing_run_revokes_both(
    gate: Gate, make_suite: MakeSuite, tmp_path: Path, keys: Path, allowed: Path
) -> None:
    wheel, evidence = mini_wheel(tmp_path), tmp_path / "evidence"
    common = ("--wheel", wheel, "--site", SITE, "--profile", "cpu", "--evidence", evidence)
    signing = ("--sign", keys / "ada", "--allowed-signers", allowed)
    done = gate("run", *common, *signing, "--suite", make_suite())
    assert done.returncode == 0, done.stderr
    statements = evidence / "statements"
    assert [path.suffix for path in sorted(statements.iterdir())] == [".json", ".sig"]
    assert signed_by(evidence, wheel, allowed) == ["cpu signed by ada@example.org"]
    broken = make_suite(single__test_one="import absent\n")
    assert gate("run", *common, "--suite", broken).returncode == 1
    assert list(statements.iterdir()) == []


def test_a_run_tries_the_key_first(gate: Gate, tmp_path: Path, keys: Path, allowed: Path) -> None:
    run = ("run", "--wheel", mini_wheel(tmp_path), "--site", SITE, "--allowed-signers", allowed)
    done = gate(*run, GATE_SIGN=str(tmp_path / "absent"))
    assert done.returncode == 2
    assert "absent does not exist" in done.stderr
    done = gate(*run, "--sign", keys / "ada", PATH=str(tmp_path))
    assert done.returncode == 3
    assert "install OpenSSH" in done.stderr
    done = gate(*run, "--sign", "--fresh")
    assert done.returncode == 2
    assert "--sign needs a path" in done.stderr


def test_signing_and_verifying_as_commands(
    gate: Gate, tmp_path: Path, evidence: Path, keys: Path, allowed: Path
) -> None:
    wheel = as_wheel(mini_wheel(tmp_path))
    write_statement(evidence, wheel, suite_digest=suite_digest(regressions.SUITE))
    common = (wheel.path, "--evidence", evidence, "--allowed-signers", allowed)
    done = gate("verify", *common)
    assert "cpu, torch2.13.0: unsigned" in done.stdout
    done = gate("sign", *common, "--key", keys / "ada")
    assert done.returncode == 0, done.stderr
    assert "signed " in done.stdout
    done = gate("verify", *common, "--repository", "testpypi")
    assert done.returncode == 0
    assert "cpu, torch2.13.0: signed by ada@example.org" in done.stdout
    assert "testpypi requires profiles cpu; no signature" in done.stdout
    allowed.write_text("")
    assert gate("verify", *common).returncode == 5
    assert gate("sign", *common, "--key", keys / "ada").returncode == 2
