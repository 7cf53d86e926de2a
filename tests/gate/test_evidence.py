from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gate.errors import EnvironmentFailed, EvidenceRejected, Interrupted, UsageFailure
from gate.evidence import environment_id, revoke, statement_path, suite_digest, verify
from gate.statement import PREDICATE_TYPE, STATEMENT_TYPE, seal
from gate.wheels import Wheel, sha256_of
from tests.gate.statements import COMMIT, ENVIRONMENT, OTHER_SUITE, SUITE, write_statement
from tests.gate.wheel_builder import WheelBuilder, as_wheel, flip


def reason(evidence: Path, *wheels: Wheel | Path, **options: Any) -> str:
    """Why the evidence is refused; one line where there is one wheel."""
    with pytest.raises(EvidenceRejected) as caught:
        verify(wheels, evidence=evidence, **options)
    assert caught.value.exit_code == 5
    assert all(finding in str(caught.value) for finding in caught.value.findings)
    assert len(caught.value.findings) <= len(wheels)
    return "\n".join(caught.value.findings)


# Writing


def test_a_statement_is_an_in_toto_test_result(evidence: Path, wheel: Wheel) -> None:
    path = write_statement(evidence, wheel)
    value = json.loads(path.read_text())
    assert value["_type"] == STATEMENT_TYPE
    assert value["predicateType"] == PREDICATE_TYPE
    assert value["subject"] == [{"name": wheel.filename, "digest": {"sha256": wheel.sha256}}]
    predicate = value["predicate"]
    assert predicate["result"] == "PASSED"
    assert len(predicate["passedTests"]) == 2
    assert predicate["warnedTests"] == predicate["failedTests"] == []
    for descriptor in predicate["configuration"]:
        # What the specification of resource descriptors allows.
        assert set(descriptor) <= {"name", "uri", "digest", "content", "downloadLocation",
                                   "mediaType", "annotations"}  # fmt: skip
        assert all(isinstance(hex_, str) and hex_ for hex_ in descriptor["digest"].values())
    names = [descriptor["name"] for descriptor in predicate["configuration"]]
    assert names[:3] == ["gate run", "tests/regression", "source"]
    assert names[3:] == ["runs/junit.xml", "runs/report.json"]


def test_what_was_written_is_verified(evidence: Path, wheel: Wheel) -> None:
    path = write_statement(evidence, wheel)
    (verified,) = verify([wheel], evidence=evidence, require=["cpu"], suite_digest=SUITE)
    assert (verified.filename, verified.sha256) == (wheel.filename, wheel.sha256)
    assert verified.profiles == {"cpu"}
    (statement,) = verified.statements
    assert statement.path == path
    assert statement.environment == ENVIRONMENT
    assert statement.embedded_archs == ("sm_90",)
    assert statement.commit == COMMIT
    assert statement.started < statement.finished


def test_the_name_and_mode_of_the_file(evidence: Path, wheel: Wheel) -> None:
    old = os.umask(0o077)
    try:
        path = write_statement(evidence, wheel)
    finally:
        os.umask(old)
    assert path.parent == evidence / "statements"
    assert path.name == f"{wheel.filename}.{wheel.sha256[:12]}.cpu.torch2.13.0.intoto.json"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]


def test_long_and_odd_names_still_make_a_file(tmp_path: Path, evidence: Path) -> None:
    version = "1.0+" + "x" * 220
    wheel = as_wheel(WheelBuilder(version=version).write(tmp_path))
    environment = {"id": "../torch 2.13/" + "y" * 300}
    path = write_statement(evidence, wheel, environment=environment)
    assert path.parent == evidence / "statements"
    assert len(path.name) <= 255
    assert verify([wheel], evidence=evidence)


def test_environments_have_different_names() -> None:
    facts = [{"id": "a b"}, {"id": "a_b"}, {"id": "a/b"}, {"torch": "2.13"}, {"torch": "2.6"}]
    assert len({environment_id(one) for one in facts}) == len(facts)
    assert environment_id({"torch": "2.13.0", "python": "3.11"}) == "torch2.13.0-py3.11"


def test_nothing_passed_makes_no_statement(evidence: Path, wheel: Wheel) -> None:
    for tests in ([], ["a", "a"]):
        with pytest.raises(ValueError, match="each once"):
            write_statement(evidence, wheel, passed_tests=tests)
    assert not (evidence / "statements").exists()


def test_a_file_outside_the_folder_is_not_bound(evidence: Path, wheel: Wheel) -> None:
    with pytest.raises(ValueError, match="is not in the subpath"):
        write_statement(evidence, wheel, files=[wheel.path])


def test_a_folder_that_cannot_be_written(evidence: Path, wheel: Wheel) -> None:
    (evidence / "statements").write_text("a file is in the way")
    with pytest.raises(EnvironmentFailed, match="cannot write"):
        write_statement(evidence, wheel)


def test_a_failed_write_leaves_nothing(evidence: Path, wheel: Wheel) -> None:
    path = statement_path(evidence, wheel, "cpu", ENVIRONMENT)
    path.mkdir(parents=True)
    (path / "in the way").write_text("")
    with pytest.raises(EnvironmentFailed, match="cannot remove"):
        write_statement(evidence, wheel)
    assert list(path.parent.iterdir()) == [path]


def test_revoking_removes_only_the_statement_meant(
    tmp_path: Path, evidence: Path, wheel: Wheel
) -> None:
    other = as_wheel(WheelBuilder().add("demo/more.py", b"").write(tmp_path / "other"))
    kept = [
        write_statement(evidence, wheel, profile="gpu"),
        write_statement(evidence, wheel, environment={"id": "torch2.6.0"}),
        write_statement(evidence, other),
    ]
    write_statement(evidence, wheel)
    revoke(evidence, wheel=wheel, profile="cpu", environment={"id": ENVIRONMENT["id"]})
    assert set((evidence / "statements").iterdir()) == set(kept)
    revoke(evidence, wheel=wheel, profile="cpu", environment=ENVIRONMENT)


# The digest of the suite


def test_the_suite_digest_depends_on_names_and_contents(tmp_path: Path) -> None:
    folder = tmp_path / "suite"
    (folder / "single").mkdir(parents=True)
    (folder / "single/test_a.py").write_text("a")
    (folder / "test_b.py").write_text("b")
    seen = {suite_digest(folder)}
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__/test_b.pyc").write_bytes(b"")
    (folder / "single/__pycache__").mkdir()
    (folder / "single/__pycache__/x.txt").write_bytes(b"")
    assert suite_digest(folder) in seen
    for change in (
        lambda: (folder / "test_b.py").write_text("c"),
        lambda: (folder / "test_b.py").rename(folder / "test_c.py"),
        lambda: (folder / "conftest.py").write_text(""),
        lambda: (folder / "single/test_a.py").unlink(),
    ):
        change()
        digest = suite_digest(folder)
        assert digest not in seen
        seen.add(digest)


def test_the_suite_digest_does_not_depend_on_where_it_is(tmp_path: Path) -> None:
    digests = set()
    for parent in ("a", "__pycache__"):
        (tmp_path / parent / "suite").mkdir(parents=True)
        (tmp_path / parent / "suite/test_a.py").write_text("a")
        digests.add(suite_digest(tmp_path / parent / "suite"))
    assert len(digests) == 1


def test_a_suite_without_files(tmp_path: Path) -> None:
    with pytest.raises(UsageFailure, match="no regression suite"):
        suite_digest(tmp_path)


# Missing and stale evidence


def test_no_evidence(tmp_path: Path, evidence: Path, wheel: Wheel) -> None:
    assert "no evidence for sha256" in reason(evidence, wheel)
    assert "does not exist" in reason(tmp_path / "nowhere", wheel)
    with pytest.raises(UsageFailure):
        verify([], evidence=evidence)


def test_evidence_for_other_bytes_of_the_same_name(
    tmp_path: Path, evidence: Path, wheel: Wheel
) -> None:
    write_statement(evidence, wheel)
    other = as_wheel(WheelBuilder().add("demo/more.py", b"").write(tmp_path / "other"))
    message = reason(evidence, other)
    assert wheel.sha256 in message
    assert other.sha256 in message
    assert "evidence is for other bytes" in message


def test_any_flipped_byte_is_refused(evidence: Path, wheel: Wheel) -> None:
    """Also where what is left is no wheel, or no zip archive."""
    write_statement(evidence, wheel)
    size = wheel.path.stat().st_size
    for offset in (0, 5, 30, size // 2, size - 22, size - 1):
        flip(wheel.path, offset)
        assert "evidence is for other bytes" in reason(evidence, wheel.path)
        flip(wheel.path, offset)
    assert verify([wheel.path], evidence=evidence)


def test_required_profiles(evidence: Path, wheel: Wheel) -> None:
    write_statement(evidence, wheel)
    message = reason(evidence, wheel, require=["cpu", "gpu", "multi-gpu"])
    assert "lacks profile gpu, multi-gpu (there is cpu)" in message
    write_statement(evidence, wheel, profile="gpu")
    (verified,) = verify([wheel], evidence=evidence, require=["cpu", "gpu"])
    assert verified.profiles == {"cpu", "gpu"}


def test_a_signal_while_files_are_read_is_not_taken_for_a_missing_one(
    evidence: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_statement(evidence, wheel)

    def interrupted(path: Path) -> str:
        if path.is_relative_to(evidence):
            raise Interrupted("by a signal")
        return sha256_of(path)

    monkeypatch.setattr("gate.evidence.sha256_of", interrupted)
    with pytest.raises(Interrupted):
        verify([wheel], evidence=evidence)


def test_what_to_run_next_names_the_profile(evidence: Path, wheel: Wheel) -> None:
    write_statement(evidence, wheel)
    for options, profile in (
        ({"require": ["cpu", "gpu"]}, "gpu"),
        ({"suite_digest": OTHER_SUITE}, "cpu"),
        ({"require": ["gpu", "cpu"], "suite_digest": OTHER_SUITE}, "gpu"),
    ):
        with pytest.raises(EvidenceRejected) as caught:
            verify([wheel], evidence=evidence, **options)
        again = f"next:  gate these bytes: python -m gate run --wheel {wheel.path}"
        assert str(caught.value).endswith(f"{again} --profile {profile}")


def test_stale_evidence(evidence: Path, wheel: Wheel) -> None:
    write_statement(evidence, wheel)
    assert verify([wheel], evidence=evidence, suite_digest=None)
    message = reason(evidence, wheel, suite_digest=OTHER_SUITE)
    assert "stale for profile cpu: the tests changed since" in message
    write_statement(evidence, wheel, profile="gpu", suite_digest=OTHER_SUITE)
    assert verify([wheel], evidence=evidence, require=["gpu"], suite_digest=OTHER_SUITE)
    message = reason(evidence, wheel, require=["cpu", "gpu"], suite_digest=OTHER_SUITE)
    assert "stale for profile cpu" in message
    fresh = {"suite_digest": OTHER_SUITE, "environment": {"id": "newer"}}
    write_statement(evidence, wheel, **fresh)
    assert verify([wheel], evidence=evidence, require=["cpu"], suite_digest=OTHER_SUITE)


def test_a_renamed_wheel(tmp_path: Path, evidence: Path, wheel: Wheel) -> None:
    write_statement(evidence, wheel)
    renamed = tmp_path / "demo-1.0-5-py3-none-any.whl"
    renamed.write_bytes(wheel.path.read_bytes())
    assert f"is for a file called {wheel.filename}" in reason(evidence, renamed)
    link = tmp_path / "latest.whl"
    link.symlink_to(wheel.path)
    assert verify([link], evidence=evidence)


def test_every_wheel_is_checked_before_any_is_refused(
    tmp_path: Path, evidence: Path, wheel: Wheel
) -> None:
    write_statement(evidence, wheel)
    first = WheelBuilder(version="2.0").write(tmp_path)
    second = WheelBuilder(version="3.0").write(tmp_path)
    message = reason(evidence, first, wheel, second)
    assert [line.partition(":")[0] for line in message.splitlines()] == [first.name, second.name]


def test_evidence_can_be_moved(tmp_path: Path, evidence: Path, wheel: Wheel) -> None:
    write_statement(evidence, wheel)
    evidence.rename(tmp_path / "elsewhere")
    assert verify([wheel], evidence=tmp_path / "elsewhere", require=["cpu"])


# Altered evidence


Change = Callable[[dict[str, Any]], object]


def run_of(value: dict[str, Any]) -> dict[str, Any]:
    return value["predicate"]["configuration"][0]


ALTERED: dict[str, tuple[Change, str]] = {
    "type": (lambda v: v.update(_type="https://in-toto.io/Statement/v0.1"), "not an in-toto"),
    "predicate type": (lambda v: v.update(predicateType="x"), "is not an in-toto test result"),
    "no predicate": (lambda v: v.pop("predicate"), "predicate is not an object"),
    "failed": (lambda v: v["predicate"].update(result="FAILED"), "its result is 'FAILED'"),
    "warned": (lambda v: v["predicate"].update(warnedTests=["a"]), "not that all tests passed"),
    "failures": (lambda v: v["predicate"].update(failedTests=["a"]), "not that all tests passed"),
    "no tests": (lambda v: v["predicate"].update(passedTests=[]), "lists no test, or one twice"),
    "twice": (lambda v: v["predicate"].update(passedTests=["a", "a"]), "lists no test, or one"),
    "test types": (lambda v: v["predicate"].update(passedTests=[1]), "not a list of texts"),
    "tests null": (lambda v: v["predicate"].update(passedTests=None), "not a list of texts"),
    "one test less": (lambda v: v["predicate"]["passedTests"].pop(), "was altered after"),
    "no configuration": (lambda v: v["predicate"].pop("configuration"), "is not a list"),
    "no descriptors": (lambda v: v["predicate"].update(configuration=[]), "one run descriptor"),
    "odd descriptor": (lambda v: v["predicate"]["configuration"].append(3), "not an object"),
    "unknown kind": (
        lambda v: v["predicate"]["configuration"].append({"digest": {}, "annotations": {}}),
        "has a descriptor of unknown kind None",
    ),
    "file unbound": (lambda v: v["predicate"]["configuration"].pop(), "was altered after"),
    "profile": (lambda v: run_of(v)["annotations"].update(profile="gpu"), "was altered after"),
    "seal": (lambda v: run_of(v).update(digest={"sha256": "0" * 64}), "was altered after"),
    "no seal": (lambda v: run_of(v).update(digest={}), "run descriptor has no sha256 digest"),
    "two subjects": (lambda v: v["subject"].append(v["subject"][0]), "exactly one subject"),
    "subject object": (lambda v: v.update(subject=v["subject"][0]), "exactly one subject"),
}


@pytest.mark.parametrize("kind", ALTERED)
def test_altered_statements(evidence: Path, wheel: Wheel, kind: str) -> None:
    change, expected = ALTERED[kind]
    path = write_statement(evidence, wheel)
    write_statement(evidence, wheel, profile="gpu")
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    assert expected in reason(evidence, wheel)


RESEALED: dict[str, tuple[Change, str]] = {
    "profile type": (lambda v: run_of(v)["annotations"].update(profile=3), "profile is not a"),
    "environment": (lambda v: run_of(v)["annotations"].pop("environment"), "environment is not"),
    "archs": (lambda v: run_of(v)["annotations"].update(executedArchs="sm"), "executedArchs is"),
    "subject name": (lambda v: v["subject"][0].update(name=""), "name of the subject is not"),
    "other name": (lambda v: v["subject"][0].update(name="x.whl"), "is for a file called x.whl"),
    "no suite": (lambda v: v["predicate"]["configuration"].pop(1), "exactly one suite"),
    "same file": (
        lambda v: v["predicate"]["configuration"].append(v["predicate"]["configuration"][-1]),
        "binds a file twice",
    ),
}


@pytest.mark.parametrize("kind", RESEALED)
def test_statements_that_say_nonsense_consistently(
    evidence: Path, wheel: Wheel, kind: str
) -> None:
    change, expected = RESEALED[kind]
    path = write_statement(evidence, wheel)
    value = json.loads(path.read_text())
    change(value)
    run_of(value)["digest"] = {"sha256": seal(value)}
    path.write_text(json.dumps(value))
    assert expected in reason(evidence, wheel)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "runs/../../secret", "link/secret", "a\\b", "nul\0"]
)
def test_bound_files_outside_the_folder(
    tmp_path: Path, evidence: Path, wheel: Wheel, name: str
) -> None:
    (tmp_path / "secret").write_text("{}")
    (evidence / "link").symlink_to(tmp_path)
    path = write_statement(evidence, wheel)
    value = json.loads(path.read_text())
    value["predicate"]["configuration"][-1]["name"] = name
    run_of(value)["digest"] = {"sha256": seal(value)}
    path.write_text(json.dumps(value))
    assert "lies outside the evidence folder" in reason(evidence, wheel)


def test_bound_files_must_be_as_they_were(evidence: Path, wheel: Wheel) -> None:
    write_statement(evidence, wheel)
    report = evidence / "runs/report.json"
    report.write_text("{ }")
    assert "binds runs/report.json, which was altered" in reason(evidence, wheel)
    report.unlink()
    assert "binds runs/report.json, which is missing" in reason(evidence, wheel)
    os.mkfifo(report)
    assert "binds runs/report.json, which is missing or cannot be" in reason(evidence, wheel)
    report.unlink()
    report.write_text("{}")
    assert verify([wheel], evidence=evidence)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": NaN}',
        b'{"_type": 1, "_type": 2}',
        b'{"subject": [[]]}',
    ],
)
def test_files_that_are_no_statements(evidence: Path, wheel: Wheel, data: bytes) -> None:
    path = write_statement(evidence, wheel)
    path.write_bytes(data)
    assert path.name in reason(evidence, wheel)


def test_a_statement_cut_short_anywhere(evidence: Path, wheel: Wheel) -> None:
    path = write_statement(evidence, wheel)
    data = path.read_bytes()
    for length in range(0, len(data) - 1, 41):
        path.write_bytes(data[:length])
        assert path.name in reason(evidence, wheel)


def test_any_changed_letter_of_a_statement_is_noticed(evidence: Path, wheel: Wheel) -> None:
    path = write_statement(evidence, wheel)
    data = path.read_bytes()
    for offset in range(0, len(data), 5):
        if not data[offset : offset + 1].isspace():
            flip(path, offset, 1)
            reason(evidence, wheel)
            path.write_bytes(data)
    assert verify([wheel], evidence=evidence)


def test_a_statement_relabelled_for_another_wheel(
    tmp_path: Path, evidence: Path, wheel: Wheel
) -> None:
    path = write_statement(evidence, wheel)
    other = as_wheel(WheelBuilder(version="2.0").write(tmp_path))
    value = path.read_text().replace(wheel.sha256, other.sha256)
    path.with_name(f"x{path.name}").write_text(value.replace(wheel.filename, other.filename))
    assert "was altered after it was written" in reason(evidence, other)


def test_broken_evidence_of_another_wheel_is_no_obstacle(
    tmp_path: Path, evidence: Path, wheel: Wheel
) -> None:
    other = as_wheel(WheelBuilder(version="2.0").write(tmp_path))
    write_statement(evidence, other).write_text("{")
    write_statement(evidence, wheel)
    (evidence / "statements/folder.intoto.json").mkdir()
    assert verify([wheel], evidence=evidence)
    assert "x.intoto.json" not in reason(evidence, other)


def test_a_key_given_twice(evidence: Path, wheel: Wheel) -> None:
    path = write_statement(evidence, wheel)
    text = path.read_text()
    path.write_text(text.replace('"result"', '"result": "FAILED", "result"'))
    assert "has the same key twice" in reason(evidence, wheel)


def test_outside_a_checkout_there_is_no_commit(evidence: Path, wheel: Wheel) -> None:
    write_statement(evidence, wheel, commit=None)
    (verified,) = verify([wheel], evidence=evidence)
    assert verified.statements[0].commit is None
