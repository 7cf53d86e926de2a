from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gate import elf, kernels
from gate.audit import audit
from gate.policy import AuditPolicy
from gate.runner import Runner
from tests.gate.wheel_builder import (
    WheelBuilder,
    add_manifest,
    as_wheel,
    cubin,
    findings,
    ptx,
)

POLICY = AuditPolicy(
    package="demo", max_bytes=2_000_000, cuda_archs=frozenset({"sm_90", "compute_75"})
)
SOURCE = b"""\
// extern "C" __global__ void gone() {}
extern "C" __launch_bounds__(256, 2) __global__ void step(const void* table,
                                                          long long items) {}
extern "C" __global__ void __launch_bounds__(128)
peaks(float* x) {}
__device__ void helper() {}
"""
LAUNCHES = b'def run(driver):\n    driver.launch("step", 1)\n    driver.launch("peaks", 1)\n'
SECTIONS = {".text.step": b"\1", ".text.peaks": b"\1", ".nv.constant0.step": b"\0"}
PTX = ptx("sm_75").decode() + ".visible .entry step(\n) {}\n.entry peaks() { ret; }\n"


def image(sections: Mapping[str, bytes]) -> bytes:
    """A cubin for sm_90 with these sections."""
    everything = {"": b"", **sections, ".shstrtab": b""}
    names = b"\0".join(name.encode() for name in everything) + b"\0"
    everything[".shstrtab"] = names
    table, body = b"", b""
    for name, content in everything.items():
        place = names.index(name.encode() + b"\0") if name else 0
        offset = 64 + len(body)
        table += struct.pack("<IIQQQQIIQQ", place, 1, 0, 0, offset, len(content), 0, 0, 1, 0)
        body += content
    head = bytearray(cubin(0x5A055A, 7))
    struct.pack_into("<Q", head, 40, 64 + len(body))
    struct.pack_into("<3H", head, 58, 64, len(everything), len(everything) - 1)
    return bytes(head) + body + table


def builder(
    sections: Mapping[str, bytes] = SECTIONS,
    text: str = PTX,
    source: bytes = SOURCE,
    module: bytes = LAUNCHES,
) -> WheelBuilder:
    made = WheelBuilder().add("demo/src/step.cu", source).add("demo/launch.py", module)
    made.add("demo/cubin/sm_90.cubin", image(sections))
    return made.add("demo/cubin/compute_75.ptx", text.encode())


def said(made: WheelBuilder, folder: Path) -> list[str]:
    found = findings(add_manifest(made).write(folder), POLICY)
    assert all(finding.startswith("code: demo/cubin") for finding in found)
    return [finding.removeprefix("code: demo/cubin") for finding in found]


def test_whole_images_of_all_kernels(tmp_path: Path) -> None:
    result = audit(as_wheel(add_manifest(builder()).write(tmp_path)), POLICY)
    assert "code: every kernel in every image" in result.checks


def test_sections_are_read() -> None:
    found = dict(elf.sections(image(SECTIONS)))
    assert {name: found[name] for name in SECTIONS} == SECTIONS
    assert elf.kernels(image(SECTIONS)) == ["step", "peaks"]
    assert elf.kernels(image(SECTIONS)[:-40]) == []


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({".text.step": b"\1"}, "/sm_90.cubin: has no kernel peaks"),
        ({**SECTIONS, ".text.more": b"\1"}, "/compute_75.ptx: has no kernel more"),
        ({**SECTIONS, ".text.peaks": bytes(8)}, ": .text.peaks holds nothing but zeros"),
        ({**SECTIONS, ".nv.constant2.step": bytes(8)}, "constant2.step holds nothing but zeros"),
        ({**SECTIONS, ".nv.constant3": bytes(8)}, ": .nv.constant3 holds nothing but zeros"),
        ({**SECTIONS, ".nv.global.init": bytes(8)}, ": .nv.global.init holds nothing but zeros"),
    ],
)
def test_what_a_cubin_lacks(tmp_path: Path, sections: dict[str, bytes], expected: str) -> None:
    (finding,) = said(builder(sections), tmp_path)
    assert finding.endswith(expected)


def test_a_program_may_fill_its_own_tables_once_it_runs(tmp_path: Path) -> None:
    path = add_manifest(builder({**SECTIONS, ".nv.constant3": bytes(8)})).write(tmp_path)
    (note,) = audit(as_wheel(path)).notes
    assert note == "code: demo/cubin/sm_90.cubin: .nv.constant3 holds nothing but zeros"


VERSION = ".version 8.8\n"
RELEASE = "// Cuda compilation tools, release 12.9, V12.9.86\n"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("entry peaks", "func peaks", "has no kernel peaks"),
        (".entry peaks", "// .entry peaks", "has no kernel peaks"),
        (VERSION, "", "has no one version of PTX, but none"),
        (VERSION, VERSION * 2, "has no one version of PTX, but 8.8, 8.8"),
        (VERSION, ".version latest\n", "has no one version of PTX, but latest"),
        (VERSION, f"{RELEASE}.version 8.7\n", "has version 8.7; CUDA 12.9 writes 8.8"),
        ("ret; }\n", "ret;", "does not end where its code does"),
        ("ret; }\n", "ret; }\nmore", "does not end where its code does"),
        ("ret; }\n", "ret; } // }\n.entry x() {\n", "does not end where its code does"),
    ],
)
def test_what_is_wrong_with_ptx(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in PTX
    found = said(builder(text=PTX.replace(old, new)), tmp_path)
    assert f"/compute_75.ptx: {expected}" in found


@pytest.mark.parametrize(
    "text", [PTX.replace(VERSION, RELEASE + VERSION), PTX + "\0", PTX + "//{"]
)
def test_honest_ptx(tmp_path: Path, text: str) -> None:
    audit(as_wheel(add_manifest(builder(text=text)).write(tmp_path)), POLICY)


def test_names_that_modules_use(tmp_path: Path) -> None:
    module = LAUNCHES.replace(b"peaks", b"peeks")
    assert said(builder(module=module), tmp_path) == [
        ": no module names the kernel peaks",
        ": has no kernel peeks, which is launched",
    ]


def test_without_sources_the_manifest_says_which_kernels_there_are(tmp_path: Path) -> None:
    made = WheelBuilder().add("demo/cubin/sm_90.cubin", image({".text.step": b"\1"}))
    entry: dict[str, Any] = {"arch": "sm_90", "sha256": "", "kernels": {"a": {"registers": 4}}}
    entry["kernels"]["b"] = {"registers": 0}
    listed = json.dumps({"files": {"sm_90.cubin": entry}, "sources": {}}).encode()
    made.add("demo/cubin/manifest.json", listed)
    assert "code: demo/cubin/sm_90.cubin: has no kernel a" in findings(made.write(tmp_path), None)


def test_images_of_several_programs_need_not_be_alike(tmp_path: Path) -> None:
    made = WheelBuilder().add("demo/a.sm_90.cubin", image({".text.a": b"\1"}))
    audit(as_wheel(made.add("demo/b.sm_90.cubin", image({".text.b": b"\1"})).write(tmp_path)))


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelBuilder:
    """A wheel with GPU code that is what its sources give."""
    monkeypatch.setenv("GATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "ARCHS", ("sm_90", "compute_75"))
    tree = tmp_path / "tree"
    made = kernels.compile_again({"step.cu": SOURCE}, {}, Runner(), tree)
    builder = WheelBuilder().add("demo/src/step.cu", SOURCE).add("demo/launch.py", LAUNCHES)
    for name, data in made.items():
        builder.add(f"demo/cubin/{name}", data)
    return builder


def changed(made: WheelBuilder, name: str, old: bytes, new: bytes) -> WheelBuilder:
    entry = next(entry for entry in made.entries if entry.name == name)
    assert old in entry.data
    entry.data = entry.data.replace(old, new, 1)
    return made


def test_what_the_sources_give_passes_and_is_kept(compiled: WheelBuilder, tmp_path: Path) -> None:
    path = add_manifest(compiled).write(tmp_path)
    assert not any("compiled" in check for check in audit(as_wheel(path), POLICY).checks)
    runner = Runner()
    result = audit(as_wheel(path), POLICY, runner=runner)
    assert "compiled: GPU code is what its sources give" in result.checks
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("cubin/compute_75.ptx", b"ret;", b"exit;", ["compute_75.ptx"]),
        (
            "src/step.cu",
            b"float* x) {}",
            b"float* x) { *x = 1; }",
            ["compute_75.ptx", "sm_90.cubin"],
        ),
    ],
)
def test_what_the_sources_do_not_give(
    compiled: WheelBuilder, tmp_path: Path, name: str, old: bytes, new: bytes, expected: list[str]
) -> None:
    path = add_manifest(changed(compiled, f"demo/{name}", old, new)).write(tmp_path)
    audit(as_wheel(path), POLICY)
    assert findings(path, POLICY, runner=Runner()) == [
        f"compiled: demo/cubin/{name}: is not what the sources in the wheel give"
        for name in expected
    ]
    assert not (tmp_path / "cache").exists()


def test_without_the_compiler_a_note_says_so(
    compiled: WheelBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_manifest(compiled).write(tmp_path)
    monkeypatch.setattr(kernels, "COMPILER", "no-such-compiler")
    result = audit(as_wheel(path), POLICY, runner=Runner())
    (note,) = result.notes
    assert note == "compiled: demo/cubin: not compiled again: no-such-compiler is not installed."
    assert not any(check.startswith("compiled") for check in result.checks)
