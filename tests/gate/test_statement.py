"""Statements against the published schema: the protobuf definitions that in-toto releases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from in_toto_attestation.predicates.test_result.v0.test_result_pb2 import TestResult as Result
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as Message

from gate.statement import PREDICATE_TYPE
from gate.wheels import Wheel
from tests.gate.statements import write_statement

# What the specification says of test results beyond their fields.
RESULTS = ("PASSED", "WARNED", "FAILED")
DIGESTS = {"sha256": 64, "gitCommit": 40}


def validate(value: dict[str, Any]) -> None:
    """Accept what a reader of in-toto statements with test results must be able to read."""
    message = ParseDict(value, Message())
    Statement.copy_from_pb(message).validate()
    assert message.predicate_type == PREDICATE_TYPE
    result = ParseDict(value["predicate"], Result())
    assert result.result in RESULTS
    assert result.configuration
    for descriptor in [*message.subject, *result.configuration]:
        ResourceDescriptor.copy_from_pb(descriptor).validate()
        for algorithm, digest in descriptor.digest.items():
            assert len(bytes.fromhex(digest)) * 2 == DIGESTS[algorithm]
    # Field names are in the form that the specification gives them, and nothing gets lost.
    again = MessageToDict(message, always_print_fields_with_no_presence=True)
    assert {key: value[key] for key in again if key != "subject"} == {
        key: again[key] for key in value if key != "subject"
    }
    written = MessageToDict(result)
    kept = {key: item for key, item in value["predicate"].items() if item}
    assert written == kept


def written(evidence: Path, wheel: Wheel, **changes: Any) -> dict[str, Any]:
    value = json.loads(write_statement(evidence, wheel, **changes).read_text())
    assert isinstance(value, dict)
    return value


def test_a_statement_fits_the_published_schema(evidence: Path, wheel: Wheel) -> None:
    gpus = [{"name": "GPU", "arch": "sm_90", "memory": 2**40, "uuid": None}]
    environment = {"id": "site", "dirty": False, "gpus": gpus, "driver": 1.5, "nested": {"a": []}}
    validate(written(evidence, wheel))
    validate(written(evidence, wheel, environment=environment, executed_archs=["sm_90"]))
    validate(written(evidence, wheel, commit=None, files=[]))


BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "a field more": lambda v: v.update(signature=""),
    "another type": lambda v: v.update(_type="https://in-toto.io/Statement/v0.1"),
    "no predicate": lambda v: v.pop("predicate"),
    "no subject": lambda v: v.update(subject=[]),
    "a subject without a digest": lambda v: v["subject"][0].pop("digest"),
    "a digest that is a list": lambda v: v["subject"][0].update(digest=["sha256"]),
    "a field more in a subject": lambda v: v["subject"][0].update(sha256=""),
    "a field more in a result": lambda v: v["predicate"].update(skippedTests=[]),
    "another spelling": lambda v: v["predicate"].update(passed_tests=["a"]),
    "an unknown result": lambda v: v["predicate"].update(result="OK"),
    "tests that are numbers": lambda v: v["predicate"].update(passedTests=[1]),
    "no configuration": lambda v: v["predicate"].pop("configuration"),
    "an empty descriptor": lambda v: v["predicate"]["configuration"].append({}),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_the_schema_refuses(
    evidence: Path, wheel: Wheel, change: Callable[[dict[str, Any]], object]
) -> None:
    value = written(evidence, wheel)
    change(value)
    with pytest.raises((ParseError, ValueError, AssertionError)):
        validate(value)
