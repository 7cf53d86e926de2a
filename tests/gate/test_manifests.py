from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gate.audit import audit
from gate.policy import AuditPolicy
from tests.gate.wheel_builder import (
    WheelBuilder,
    add_manifest,
    as_wheel,
    cubin,
    findings,
    manifest,
    ptx,
)

POLICY = AuditPolicy(
    package="demo", max_bytes=100_000, cuda_archs=frozenset({"sm_90", "compute_75"})
)
SM_90 = cubin(0x5A055A, 7)


def builder() -> WheelBuilder:
    made = WheelBuilder().add("demo/src/step.cu", b"step").add("demo/src/flat.cuh", b"flat")
    made.add("demo/cubin/sm_90.cubin", SM_90)
    return made.add("demo/cubin/compute_75.ptx", ptx("sm_75"))


def test_what_it_lists_is_there(tmp_path: Path) -> None:
    audit(as_wheel(add_manifest(builder()).write(tmp_path)), POLICY)


def test_a_long_one_is_read_whole(tmp_path: Path) -> None:
    text = json.dumps({"about": "x" * 100_000, **manifest(builder())})
    made = builder().add("demo/cubin/manifest.json", text.encode())
    audit(as_wheel(made.write(tmp_path)), POLICY)


def test_it_must_be_there(tmp_path: Path) -> None:
    found = findings(builder().write(tmp_path), POLICY)
    assert found == ["manifest: demo/cubin/manifest.json: is missing"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b.add("demo/src/new.cu", b"new"), ["src/new.cu: is not listed"]),
        (lambda b: b.drop("demo/src/flat.cuh"), ["src/flat.cuh: is listed but missing"]),
        (lambda b: b.drop("demo/src/step.cu").add("demo/src/step.cu", b"Step"),
            ["src/step.cu: is not what the manifest lists"]),
        (lambda b: b.add("demo/cubin/other.cubin", SM_90), ["cubin/other.cubin: is not listed"]),
        (lambda b: b.drop("demo/cubin/sm_90.cubin").add("demo/cubin/sm_90.cubin", SM_90 + b"x"),
            ["cubin/sm_90.cubin: is not what the manifest lists"]),
    ],
)  # fmt: skip
def test_files_that_differ(
    tmp_path: Path, change: Callable[[WheelBuilder], WheelBuilder], expected: list[str]
) -> None:
    found = findings(change(add_manifest(builder())).write(tmp_path), POLICY)
    found = [finding for finding in found if finding.startswith("manifest: ")]
    assert len(found) == len(expected), found
    assert all(part in one for one, part in zip(found, expected, strict=True)), found


def test_an_architecture_that_differs(tmp_path: Path) -> None:
    listed: Any = manifest(builder())
    listed["files"]["sm_90.cubin"]["arch"] = "sm_80"
    made = builder().add("demo/cubin/manifest.json", json.dumps(listed).encode())
    assert findings(made.write(tmp_path), POLICY) == [
        "manifest: demo/cubin/sm_90.cubin: is not what the manifest lists"
    ]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"files": []}', '{"files": {"a": {}}}', '{"files": {}}', '"x"']
)
def test_what_is_none(tmp_path: Path, text: str) -> None:
    made = builder().add("demo/cubin/manifest.json", text.encode())
    assert "manifest: demo/cubin/manifest.json: is no manifest" in findings(
        made.write(tmp_path), POLICY
    )


def test_a_hash_that_is_none(tmp_path: Path) -> None:
    listed: Any = manifest(builder())
    listed["sources"]["step.cu"] = "no hash"
    made = builder().add("demo/cubin/manifest.json", json.dumps(listed).encode())
    found = findings(made.write(tmp_path), POLICY)
    assert found == ["manifest: demo/cubin/manifest.json: is no manifest"]


COMPILE = b'OPTIONS = ("--std=c++20", "--fmad=false")\n'


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ({"compiler": "NVRTC", "options": ["--std=c++20", "--fmad=false"]}, []),
        ({"options": ["--std=c++20", "--fmad=false"]}, ["does not name the compiler"]),
        ({"compiler": "NVRTC", "options": ["--std=c++20"]}, ["has options ['--std=c++20'], the"]),
        ({"compiler": "NVRTC"}, ["has options None, the package asks for ['--std=c++20', '--fm"]),
        ({}, ["does not name the compiler", "has options None"]),
    ],
)
def test_what_the_package_reads(
    tmp_path: Path, listed: dict[str, object], expected: list[str]
) -> None:
    made = builder().add("demo/compile.py", COMPILE)
    text = json.dumps({**manifest(made), **listed})
    path = made.add("demo/cubin/manifest.json", text.encode()).write(tmp_path)
    if not expected:
        audit(as_wheel(path), POLICY)
        return
    found = findings(path, POLICY)
    assert len(found) == len(expected)
    for one, part in zip(found, expected, strict=True):
        assert one.startswith(f"manifest: demo/cubin/manifest.json: {part}")


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ({"called": {"registers": 0}}, ""),
        ({"step": {"registers": 8}}, "lists other kernels of demo/cubin/sm_90.cubin than it has"),
        ({"step": 8}, "is no manifest"),
        (["step"], "is no manifest"),
    ],
)
def test_the_kernels_that_it_lists(tmp_path: Path, kernels: object, expected: str) -> None:
    listed: Any = manifest(builder())
    listed["files"]["sm_90.cubin"]["kernels"] = kernels
    made = builder().add("demo/cubin/manifest.json", json.dumps(listed).encode())
    path = made.write(tmp_path)
    if expected:
        assert f"manifest: demo/cubin/manifest.json: {expected}" in findings(path, POLICY)
    else:
        audit(as_wheel(path), POLICY)


def test_of_other_wheels_only_what_is_wrong_is_said(tmp_path: Path) -> None:
    audit(as_wheel(builder().write(tmp_path)))
    audit(as_wheel(builder().add("demo/cubin/manifest.json", b'{"name": "app"}').write(tmp_path)))
    made = add_manifest(builder()).drop("demo/src/flat.cuh")
    found = findings(made.write(tmp_path), None)
    assert found == ["manifest: demo/src/flat.cuh: is listed but missing"]
