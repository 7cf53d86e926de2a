from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gate.audit import audit
from gate.policy import AuditPolicy
from tests.gate.wheel_builder import (
    POLICY,
    Entry,
    WheelBuilder,
    add_manifest,
    as_wheel,
    cubin,
    findings,
    ptx,
    rejects,
)

INIT = "demo/__init__.py"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("evil.pth", ["startup: evil.pth: runs at every", "top-level: evil.pth: stray"]),
        ("demo/evil.pth", ["startup: demo/evil.pth: runs at every start of Python"]),
        ("sitecustomize.py", ["startup: sitecustomize.py: runs", "top-level: sitecustomize.py"]),
        ("usercustomize/__init__.py", ["startup: usercustomize: runs", "top-level: usercustom"]),
        ("evil.start", ["startup: evil.start: runs", "top-level: evil.start: stray"]),
        ("tests/__init__.py", ["top-level: tests: stray", "tests do not belong"]),
        ("gate/cli.py", ["top-level: gate: stray top-level name; the wheel may install demo"]),
        ("second.py", ["top-level: second.py: stray top-level name"]),
        ("demo/tests/test_a.py", ["demo/tests/test_a.py: tests do not belong into the wheel"]),
        ("demo/conftest.py", ["demo/conftest.py: tests do not belong into the wheel"]),
        ("demo-1.0.data/scripts/run", ["data: demo-1.0.data/scripts/run: would be installed"]),
        ("demo-1.0.data/purelib/evil.pth",
            ["startup: ", "top-level: evil.pth", "data: demo-1.0.data/purelib/evil.pth"]),
        ("demo.egg-info/PKG-INFO", ["dist-info: demo.egg-info: a second", "top-level: demo.egg"]),
        ("demo/__pycache__/a.cpython-311.pyc", ["junk: demo/__pycache__/a.cpython-311.pyc"]),
        ("demo/.git/config", ["junk: demo/.git/config: does not belong into a wheel"]),
        ("demo/.env", ["junk: demo/.env: does not belong into a wheel"]),
        ("demo-1.0.dist-info/INSTALLER",
            ["junk: demo-1.0.dist-info/INSTALLER: is written by installers only"]),
        ("demo-1.0.dist-info/direct_url.json", ["direct_url.json: is written by installers only"]),
    ],
)  # fmt: skip
def test_files_that_do_not_belong(tmp_path: Path, name: str, expected: list[str]) -> None:
    rejects(WheelBuilder().add(name, b"import os\n").write(tmp_path), *expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("evil.pth", "startup: evil.pth"),
        ("demo-1.0.data/data/lib/python3.11/site-packages/a.pth", "startup: demo-1.0.data/data"),
        ("demo-1.0.data/elsewhere/a.py", "data: demo-1.0.data/elsewhere/a.py: unknown install"),
        ("other-1.0.data/scripts/a", "data: other-1.0.data is of other 1.0, the file name says"),
        ("tests/a.py", "top-level: tests: stray top-level name"),
        ("docs.py", "top-level: docs.py: stray top-level name"),
        ("demo/a.pyc", "junk: demo/a.pyc: does not belong into a wheel"),
    ],
)
def test_files_that_belong_into_no_wheel(tmp_path: Path, name: str, expected: str) -> None:
    path = WheelBuilder().add(name, b"import os\n").write(tmp_path)
    rejects(path, expected, policy=None)


def test_a_private_key_by_any_name(tmp_path: Path) -> None:
    key = b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n"
    rejects(WheelBuilder().add("demo/notes.txt", key).write(tmp_path), "is a private key")
    audit(as_wheel(WheelBuilder().add("demo/n.py", b"# " + key).write(tmp_path)), POLICY)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[pytest11]\nx = demo.plugin\n", "pytest11:x: would load itself into every pytest run"),
        ("[console_scripts]\nx = demo:main\n", "console_scripts:x: is not declared"),
        ("no section\n", "entry_points.txt cannot be parsed"),
    ],
)
def test_entry_points(tmp_path: Path, text: str, expected: str) -> None:
    builder = WheelBuilder().add("demo-1.0.dist-info/entry_points.txt", text.encode())
    rejects(builder.write(tmp_path), expected)


def test_declared_entry_points(tmp_path: Path) -> None:
    wanted = frozenset({"console_scripts:x"})
    policy = AuditPolicy(package="demo", max_bytes=100_000, entry_points=wanted)
    rejects(WheelBuilder().write(tmp_path), "x: is declared but missing", policy=policy)
    text = b"[console_scripts]\nx = demo:main\n"
    builder = WheelBuilder().add("demo-1.0.dist-info/entry_points.txt", text)
    audit(as_wheel(builder.write(tmp_path)), policy)


def test_a_missing_package(tmp_path: Path) -> None:
    builder = WheelBuilder(entries=[Entry("other/__init__.py", b"")])
    rejects(
        builder.write(tmp_path),
        "top-level: the package demo is missing",
        "top-level: other: stray top-level name",
        "resources: demo/py.typed: is missing",
        "resources: demo/kernels/*.cu: is missing",
    )


def test_resources(tmp_path: Path) -> None:
    rejects(
        WheelBuilder().drop("demo/py.typed").write(tmp_path),
        "resources: demo/py.typed: is missing",
    )
    rejects(
        WheelBuilder().drop("demo/kernels/step.cu").write(tmp_path),
        "resources: demo/kernels/*.cu: is missing",
    )
    rejects(
        WheelBuilder().add("demo/kernels/more.cu", b"").write(tmp_path),
        "resources: demo/kernels/more.cu: is empty",
    )


def test_the_size_ceiling(tmp_path: Path) -> None:
    policy = AuditPolicy(package="demo", max_bytes=100)
    rejects(WheelBuilder().write(tmp_path), "bytes, more than the 100 allowed", policy=policy)


SM_90, SM_120 = cubin(0x5A055A, 7), cubin(0x6007802, 8)
CUDA = AuditPolicy(
    package="demo", max_bytes=100_000, cuda_archs=frozenset({"sm_90", "sm_120", "compute_120"})
)


def cuda_builder() -> WheelBuilder:
    builder = WheelBuilder()
    for family in ("step", "histogram"):
        builder.add(f"demo/cubin/{family}.sm_90.cubin", SM_90)
        builder.add(f"demo/cubin/{family}.sm_120.cubin", SM_120)
        builder.add(f"demo/cubin/{family}.compute_120.ptx", ptx("sm_120"))
    return builder


def test_the_declared_architectures_pass(tmp_path: Path) -> None:
    result = audit(as_wheel(add_manifest(cuda_builder()).write(tmp_path)), CUDA)
    assert result.archs == ("sm_90", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b.drop("demo/cubin/step.sm_90.cubin"), ["cubin/step.*.cubin: has no sm_90"]),
        (lambda b: b.drop("demo/cubin/step.sm_90.cubin").drop("demo/cubin/histogram.sm_90.cubin"),
            ["sm_90: is declared but not embedded"]),
        (lambda b: b.drop("demo/cubin/step.compute_120.ptx")
            .drop("demo/cubin/histogram.compute_120.ptx"),
            ["compute_120: is declared but not embedded"]),
        (lambda b: b.add("demo/cubin/x", cubin(0x500550, 7)),
            ["sm_80: is embedded but not declared", "demo/cubin/x: has no sm_90", "no sm_120"]),
        (lambda b: b.drop("demo/cubin/step.sm_90.cubin")
            .add("demo/cubin/step.sm_90.cubin", SM_120),
            ["step.sm_90.cubin: was compiled for sm_120", "has no sm_90"]),
        (lambda b: b.add("demo/cubin/bad.sm_90.cubin", b"text"), ["bad.sm_90.cubin: is no cubin"]),
        (lambda b: b.add("demo/cubin/bad.ptx", b"text"), ["bad.ptx: is no ptx"]),
        (lambda b: b.drop("demo/cubin/step.sm_90.cubin")
            .add("demo/cubin/step.sm_90.cubin", SM_90[:58] + b"\x40\0\x02\0" + SM_90[62:]),
            ["step.sm_90.cubin: is cut short"]),
        (lambda b: b.add("demo/all.fatbin", bytes.fromhex("50ed55ba0100")), ["a fat binary"]),
    ],
)  # fmt: skip
def test_wrong_architectures(tmp_path: Path, change, expected: list[str]) -> None:
    found = findings(add_manifest(change(cuda_builder())).write(tmp_path), CUDA)
    assert len(found) == len(expected), found
    assert all(part in one for one, part in zip(found, expected, strict=True)), found


def test_requirements_other_than_declared(tmp_path: Path) -> None:
    policy = replace(POLICY, requires=frozenset({Requirement("numpy>=2")}))
    builder = WheelBuilder()
    less = builder.write(tmp_path / "less")
    rejects(less, "metadata: does not require numpy>=2, as declared", policy=policy)
    builder.metadata += "Requires-Dist: numpy >= 2\n"
    audit(as_wheel(builder.write(tmp_path / "right")), policy)
    builder.metadata += "Requires-Dist: torch\n"
    more = builder.write(tmp_path / "more")
    rejects(more, "metadata: requires torch, which is not declared", policy=policy)


IMPORTS = {
    "import os.path, json\nfrom . import answer\nfrom demo import kernels\nimport numpy\n": "",
    "import numpy, _pytest.runner\n": "demo/a.py: imports _pytest, which is not declared",
    "def f():\n    from yaml import load\n": "demo/a.py: imports yaml, which is not declared",
    "print 'hello'\n": "demo/a.py: is not Python: Missing parentheses",
    "\0": "demo/a.py: is not Python: source code",
}


@pytest.mark.parametrize("code", IMPORTS)
def test_imports_other_than_declared(tmp_path: Path, code: str) -> None:
    policy = replace(POLICY, imports=frozenset({"numpy"}))
    path = WheelBuilder().add("demo/a.py", code.encode()).write(tmp_path)
    audit(as_wheel(path), POLICY)
    if IMPORTS[code]:
        rejects(path, f"imports: {IMPORTS[code]}", policy=policy)
    else:
        assert "imports: numpy" in audit(as_wheel(path), policy).checks


def test_line_endings_of_documents(tmp_path: Path) -> None:
    def record(old: str, new: str, count: int) -> Path:
        return WheelBuilder(edit_record=lambda text: text.replace(old, new, count)).write(tmp_path)

    mixed = record("\n", "\r\n", 1)
    rejects(mixed, "dist-info: RECORD: has mixed line endings")
    assert audit(as_wheel(mixed)).notes == ("dist-info: RECORD: has mixed line endings",)
    of_windows = audit(as_wheel(record("\n", "\r\n", -1)), POLICY)
    assert of_windows.notes == ("dist-info: RECORD: has the line endings of Windows",)


def test_line_endings_of_a_description_are_its_own(tmp_path: Path) -> None:
    text = "Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nOne\r\nTwo\n"
    assert audit(as_wheel(WheelBuilder(metadata=text).write(tmp_path)), POLICY).notes == ()
    text = text.replace("\n", "\r\n", 1)
    rejects(WheelBuilder(metadata=text).write(tmp_path), "METADATA: has mixed line endings")
    text = text.replace("\r\n", "\r")
    rejects(WheelBuilder(metadata=text).write(tmp_path), "METADATA: has mixed line endings")


def test_a_licence_that_is_missing(tmp_path: Path) -> None:
    builder = WheelBuilder()
    builder.metadata += "License-File: LICENSE\n"
    rejects(builder.write(tmp_path), "metadata: License-File LICENSE is missing")
    builder.add(f"{builder.folder}/licenses/LICENSE", b"MIT").write(tmp_path)
    audit(as_wheel(tmp_path / builder.filename), POLICY)
