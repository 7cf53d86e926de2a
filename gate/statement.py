"""The form of a statement: an in-toto Statement with a test-result predicate, made and parsed.

A statement (https://in-toto.io/Statement/v1) has one wheel as its subject. Its predicate
(https://in-toto.io/attestation/test-result/v0.1) has a ``configuration`` that lists, as resource
descriptors told apart by their annotation ``kind``:

- ``run``: profile, environment, architectures, times; its digest covers the whole statement;
- ``suite``: the folder of regressions that was run, with its digest;
- ``source``: the git commit of the checkout, where there is one;
- ``file``: every report and log that the run left, by its path in the evidence folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KINDS = ("run", "suite", "source", "file")


class BadStatement(Exception):
    """A statement is malformed, altered, or says something other than that all tests passed.

    Args:
        reason: what is wrong.
        claimed: the digest of the wheel it claims to be about, as far as it can be read.
        profiles: those that have to be run again.
    """

    def __init__(
        self, reason: str, claimed: str | None = None, profiles: Sequence[str] = ()
    ) -> None:
        self.reason, self.claimed, self.profiles = reason, claimed, tuple(profiles)
        super().__init__(reason)


class BadSignature(BadStatement):
    """A signature is missing, or does not count."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """All tests of a suite passed against a wheel.

    Attributes:
        path: the file it was read from.
        data: the bytes of that file.
        signed_by: names of whoever signed these bytes, as far as that was looked at.
        filename: name of the wheel.
        sha256: digest of the wheel, in hexadecimal.
        profile: cpu, gpu or multi-gpu.
        environment: the facts recorded about the environment.
        suite_digest: digest of the tests that were run.
        commit: git commit of the checkout, or None.
        executed_archs: GPU architectures whose code ran.
        embedded_archs: GPU architectures that the wheel carries.
        passed_tests: the ids of all tests.
        files: path in the evidence folder and digest of every report and log.
        started: when the run began, in RFC 3339.
        finished: when it ended, in RFC 3339.
    """

    path: Path
    data: bytes = field(repr=False)
    signed_by: tuple[str, ...] = ()
    filename: str
    sha256: str
    profile: str
    environment_id: str
    environment: Mapping[str, Any]
    suite_digest: str
    commit: str | None
    executed_archs: tuple[str, ...]
    embedded_archs: tuple[str, ...]
    passed_tests: tuple[str, ...]
    files: Mapping[str, str]
    started: str
    finished: str

    def signature(self) -> str:
        """Say who signed it."""
        return f"signed by {', '.join(self.signed_by)}" if self.signed_by else "unsigned"

    def about(self) -> str:
        """Say what passed, where, and who signed that."""
        return f"{self.profile}, {self.environment_id}: {self.signature()}"


def descriptor(
    name: str, digest: Mapping[str, str], kind: str, **annotations: Any
) -> dict[str, Any]:
    """A resource descriptor of ``configuration``."""
    return {"name": name, "digest": dict(digest), "annotations": {"kind": kind, **annotations}}


def document(
    *,
    filename: str,
    sha256: str,
    run: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    passed_tests: Sequence[str],
) -> str:
    """The JSON text of a statement, sealed.

    Args:
        filename: name of the wheel.
        sha256: digest of the wheel, in hexadecimal.
        run: annotations of the ``run`` descriptor.
        others: the other descriptors.
        passed_tests: ids of all tests.
    """
    first = descriptor("gate run", {"sha256": ""}, "run", **run)
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": filename, "digest": {"sha256": sha256}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "result": "PASSED",
            "configuration": [first, *others],
            "passedTests": list(passed_tests),
            "warnedTests": [],
            "failedTests": [],
        },
    }
    first["digest"] = {"sha256": seal(statement)}
    return json.dumps(statement, indent=2) + "\n"


def seal(statement: Mapping[str, Any]) -> str:
    """Digest of a statement in canonical JSON, its ``run`` digest left empty.

    It notices accidents and careless edits. Only a signature notices a forger.
    """
    copy = json.loads(json.dumps(statement))
    for item in copy["predicate"]["configuration"]:
        if item["annotations"]["kind"] == "run":
            item["digest"] = {"sha256": ""}
    canonical = json.dumps(copy, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def parse(path: Path, data: bytes) -> Statement:
    """Read a statement and check everything in it that needs no other file.

    Raises:
        BadStatement: it is malformed or altered, or is not about tests that all passed.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise BadStatement(f"is not valid JSON: {error}") from error
    claimed = _claimed(value)
    try:
        return _statement(path, data, value)
    except BadStatement as error:
        raise BadStatement(error.reason, claimed) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers may take different values of a key given twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _claimed(value: Any) -> str | None:
    try:
        claimed = value["subject"][0]["digest"]["sha256"]
    except (LookupError, TypeError):
        return None
    return claimed if isinstance(claimed, str) else None


def _statement(path: Path, data: bytes, value: Any) -> Statement:
    top = _dict(value, "the statement")
    if top.get("_type") != STATEMENT_TYPE or top.get("predicateType") != PREDICATE_TYPE:
        raise BadStatement("is not an in-toto test result")
    subject = _only(top.get("subject"), "subject")
    predicate = _dict(top.get("predicate"), "predicate")
    items = _configuration(predicate.get("configuration"))
    result = predicate.get("result")
    if result != "PASSED" or predicate.get("warnedTests") or predicate.get("failedTests"):
        raise BadStatement(f"its result is {result!r}, not that all tests passed")
    tests = _strings(predicate.get("passedTests"), "passedTests")
    if not tests or len(set(tests)) != len(tests):
        raise BadStatement("lists no test, or one twice")
    run = _only(items["run"], "run descriptor")
    suite = _only(items["suite"], "suite descriptor")
    source = _only(items["source"], "source descriptor") if items["source"] else None
    if _sha256(run, "run descriptor") != seal(top):
        raise BadStatement("was altered after it was written")
    facts = run["annotations"]
    return Statement(
        path=path,
        data=data,
        filename=_text(subject.get("name"), "name of the subject"),
        sha256=_sha256(subject, "subject"),
        profile=_text(facts.get("profile"), "profile"),
        environment_id=_text(facts.get("environmentId"), "environmentId"),
        environment=_dict(facts.get("environment"), "environment"),
        suite_digest=_sha256(suite, "suite descriptor"),
        commit=_text(source["digest"].get("gitCommit"), "gitCommit") if source else None,
        executed_archs=_strings(facts.get("executedArchs"), "executedArchs"),
        embedded_archs=_strings(facts.get("embeddedArchs"), "embeddedArchs"),
        passed_tests=tests,
        files=_files(items["file"]),
        started=_text(facts.get("started"), "started"),
        finished=_text(facts.get("finished"), "finished"),
    )


def _configuration(value: Any) -> dict[str, list[dict[str, Any]]]:
    if not isinstance(value, list):
        raise BadStatement("configuration is not a list")
    items: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _KINDS}
    for item in value:
        one = _dict(item, "a descriptor")
        _dict(one.get("digest"), "digest of a descriptor")
        kind = _dict(one.get("annotations"), "annotations of a descriptor").get("kind")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise BadStatement(f"has a descriptor of unknown kind {kind!r}")
        items[kind].append(one)
    return items


def _files(items: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    files = {_text(item.get("name"), "name of a file"): _sha256(item, "file") for item in items}
    if len(files) != len(items):
        raise BadStatement("binds a file twice")
    return files


def _dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadStatement(f"{what} is not an object")
    return value


def _only(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, list) or len(value) != 1:
        raise BadStatement(f"must have exactly one {what}")
    return _dict(value[0], what)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadStatement(f"{what} is not a text")
    return value


def _strings(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise BadStatement(f"{what} is not a list of texts")
    return tuple(value)


def _sha256(item: Mapping[str, Any], what: str) -> str:
    digest = _dict(item.get("digest"), f"digest of the {what}").get("sha256")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise BadStatement(f"the {what} has no sha256 digest")
    return digest
