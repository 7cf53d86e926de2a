from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest

from gate.audit import audit
from tests.gate.wheel_builder import POLICY, Entry, WheelBuilder, as_wheel, findings, rejects, row

INIT = "demo/__init__.py"


def test_two_dist_infos(tmp_path: Path) -> None:
    builder = WheelBuilder().add("other-2.0.dist-info/METADATA", b"Name: other\n")
    found = findings(builder.write(tmp_path))
    assert found[0].startswith("dist-info: 2 dist-info folders, not 1: demo-1.0.dist-info, other")
    assert "other-2.0.dist-info is of other 2.0, the file name says demo 1.0" in found[1]


def test_no_dist_info(tmp_path: Path) -> None:
    builder = WheelBuilder()
    path = tmp_path / builder.filename
    with zipfile.ZipFile(path, "w") as archive_:
        for entry in builder.entries:
            entry.write(archive_)
    found = findings(path, None)
    assert found[0] == "dist-info: 0 dist-info folders, not 1: none"
    assert "dist-info: RECORD is missing" in found


@pytest.mark.parametrize(
    ("builder", "filename", "expected"),
    [
        (WheelBuilder(), "demo-1.1-py3-none-any.whl", "the file name says demo 1.1"),
        (WheelBuilder(), "demo-1.0+local-py3-none-any.whl", "the file name says demo 1.0+local"),
        (WheelBuilder(version="1.0+a"), "demo-1.0-py3-none-any.whl", "says demo 1.0"),
        (WheelBuilder(), "other-1.0-py3-none-any.whl", "the file name says other 1.0"),
    ],
)
def test_a_file_name_that_disagrees(
    tmp_path: Path, builder: WheelBuilder, filename: str, expected: str
) -> None:
    found = findings(builder.write(tmp_path, filename), None)
    assert [finding.partition(":")[0] for finding in found] == ["dist-info", "metadata"]
    assert all(expected in finding for finding in found)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n", "METADATA is of other 1.0"),
        ("Metadata-Version: 2.1\nName: demo\nVersion: 2.0\n", "METADATA is of demo 2.0"),
        ("Metadata-Version: 9.9\nName: demo\nVersion: 1.0\n", "metadata version"),
        ("Metadata-Version: 2.1\nName: demo\nVersion: 1.0\nRequires-Python: >>3\n", "invalid"),
        ("Metadata-Version: 2.1\nName: demo\nVersion: 1.0\nRequires-Dist: a b c\n", "invalid"),
        (
            "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n"
            "Requires-Dist: evil @ https://example.org/evil.whl\n",
            "Requires-Dist has a URL, which indexes refuse",
        ),
    ],
)
def test_metadata(tmp_path: Path, metadata: str, expected: str) -> None:
    rejects(WheelBuilder(metadata=metadata).write(tmp_path), expected)


@pytest.mark.parametrize("document", ["METADATA", "WHEEL", "RECORD"])
def test_a_missing_document(tmp_path: Path, document: str) -> None:
    path = WheelBuilder().write(tmp_path)
    copy = tmp_path / "copy" / path.name
    copy.parent.mkdir()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy, "w") as target:
        for info in source.infolist():
            if not info.filename.endswith(document):
                target.writestr(info, source.read(info))
    assert f"dist-info: {document} is missing" in findings(copy)


HEAD = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
LINUX = "cp311-cp311-linux_x86_64"


@pytest.mark.parametrize(
    ("wheel", "options", "expected"),
    [
        (f"{HEAD}Tag: {LINUX}\n", {"tag": "cp311-cp311-manylinux_2_17_x86_64"}, [
            "Root-Is-Purelib is true, but the tags name an ABI",
            f"WHEEL has Tag {LINUX}, the file name does not",
            "the file name has tag cp311-cp311-manylinux_2_17_x86_64, WHEEL does not",
        ]),
        (f"{HEAD}Tag: py3-none-any\n", {"tag": "py2.py3-none-any"}, ["has tag py2-none-any"]),
        (f"{HEAD}Tag: py3-none-any\nTag: py3-none-any\n", {}, ["Tag py3-none-any 2 times"]),
        (HEAD, {}, ["the file name has tag py3-none-any, WHEEL does not"]),
        (f"{HEAD}Tag: py3-none-any\n", {"build": "5"}, ["WHEEL has Build none"]),
        (f"{HEAD}Tag: py3-none-any\nBuild: 6\n", {"build": "5"}, ["WHEEL has Build ['6']"]),
        (f"{HEAD}Tag: py3-none-any\nBuild: 6\n", {}, ["the file name none"]),
        ("Wheel-Version: 2.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n", {},
            ["Wheel-Version is '2.0', installers know 1.x"]),
        ("Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n", {},
            ["Root-Is-Purelib is false, but the tags fit any platform"]),
        ("Wheel-Version: 1.0\nTag: py3-none-any\n", {}, ["one Root-Is-Purelib", "'?'"]),
        (f"{HEAD}Tag: py3-none-any\nGenerator:\n", {}, ["WHEEL is malformed"]),
        (f"Wheel-Version: 1.0\n{HEAD}Tag: py3-none-any\n", {}, ["must have one Wheel-Version"]),
    ],
)  # fmt: skip
def test_the_wheel_file(
    tmp_path: Path, wheel: str, options: dict[str, str], expected: list[str]
) -> None:
    found = findings(WheelBuilder(wheel=wheel, **options).write(tmp_path))
    assert all(finding.startswith("wheel: ") for finding in found)
    assert len(found) == len(expected), found
    for part in expected:
        assert any(part in finding for finding in found), (part, found)


def test_machine_code_in_a_wheel_for_any_platform(tmp_path: Path) -> None:
    elf64 = b"\x7fELF" + bytes([2, 1, 1, 0]) + bytes(8) + struct.pack("<HH", 3, 62) + bytes(44)
    builder = WheelBuilder().add("demo/fast.so", elf64)
    rejects(builder.write(tmp_path), "demo/fast.so: machine code for x86-64 in a wheel for any")


LINE = row(Entry(INIT, b"answer = 42\n"))


RECORD_EDITS = {
    "wrong hash": (lambda t: t.replace(LINE, LINE.replace("=", "=A", 1)), [
        f"{INIT}: its hash is not the one in RECORD"]),
    "other bytes": (lambda t: t.replace(LINE, row(Entry(INIT, b"answer = 43\n"))), [
        f"{INIT}: its hash is not the one in RECORD"]),
    "wrong size": (lambda t: t.replace(LINE, LINE.replace(",12", ",13")), [
        f"{INIT}: is 12 bytes, RECORD says 13"]),
    "no size": (lambda t: t.replace(LINE, LINE.replace(",12", ",")), [
        f"{INIT}: has size ''", f"{INIT}: is 12 bytes, RECORD says nothing"]),
    "extra": (lambda t: t + row(Entry("demo/gone.py", b"")), [
        "demo/gone.py: is listed in RECORD but missing from the wheel"]),
    "unlisted": (lambda t: t.replace(LINE, ""), [f"{INIT}: is not listed in RECORD"]),
    "twice": (lambda t: t + LINE, [f"{INIT}: is listed twice"]),
    "md5": (lambda t: t.replace(LINE, f"{INIT},md5=AAAA,12\n"), [
        f"{INIT}: has hash 'md5=AAAA'; RECORD takes", f"{INIT}: its hash is not the one"]),
    "no hash": (lambda t: t.replace(LINE, f"{INIT},,12\n"), [
        f"{INIT}: has hash ''; RECORD takes", f"{INIT}: its hash is not the one"]),
    "itself hashed": (lambda t: t.replace("RECORD,,", "RECORD,sha256=AAAA,5"), [
        "RECORD: lists a hash or size of itself"]),
    "not itself": (lambda t: t.replace("demo-1.0.dist-info/RECORD,,\n", ""), [
        "demo-1.0.dist-info/RECORD does not list itself"]),
    "directory": (lambda t: t + "demo/,,\n", ["demo/: is a directory; RECORD lists files"]),
    "columns": (lambda t: t + "demo/x.py\n", ["RECORD, line 7: 1 fields, not 3"]),
    "quotes": (lambda t: t + '"demo', ["cannot be parsed"]),
    "escape": (lambda t: t + "../x.py,sha256=AAAA,1\n", [
        "../x.py: is not a normalised relative path", "../x.py: is listed in RECORD but missing"]),
    "absolute": (lambda t: t.replace(INIT, f"/{INIT}"), [
        f"/{INIT}: is not a normalised relative path",
        f"{INIT}: is not listed in RECORD", f"/{INIT}: is listed in RECORD but missing"]),
}  # fmt: skip


@pytest.mark.parametrize("edit", RECORD_EDITS)
def test_record(tmp_path: Path, edit: str) -> None:
    change, expected = RECORD_EDITS[edit]
    found = findings(WheelBuilder(edit_record=change).write(tmp_path))
    if edit == "quotes":
        found = [finding for finding in found if "is not listed" not in finding]
    assert len(found) == len(expected), found
    for one, part in zip(found, expected, strict=True):
        assert one.startswith("record: ")
        assert part in one


def test_record_in_another_hash_and_signatures_beside_it(tmp_path: Path) -> None:
    digest = "sha512=8PLOtMUN7Yq4WYY75JMs4hLqDwQWmBVTBgRs_2oJ0GJLzvKWKV8NAb8Yrnp8oSLaPAoD_XXdFBxi"
    builder = WheelBuilder(edit_record=lambda t: t.replace(LINE, f"{INIT},{digest},12\n"))
    rejects(builder.write(tmp_path), f"record: {INIT}: its hash is not the one in RECORD")
    signed = WheelBuilder().add("demo-1.0.dist-info/RECORD.jws", b"{}", listed=False)
    audit(as_wheel(signed.write(tmp_path)), POLICY)


def test_a_signature_listed_in_record(tmp_path: Path) -> None:
    name = "demo-1.0.dist-info/RECORD.jws"
    path = WheelBuilder().add(name, b"{}").write(tmp_path)
    rejects(path, f"{name}: must not be listed with a hash")
    path = WheelBuilder(edit_record=lambda t: t + f"{name},,\n").write(tmp_path)
    audit(as_wheel(path), POLICY)


def test_fields_newer_than_the_metadata_version(tmp_path: Path) -> None:
    builder = WheelBuilder()
    builder.metadata = builder.metadata.replace("2.4", "2.1") + "License-File: LICENSE\n"
    builder.add(f"{builder.folder}/LICENSE", b"MIT")
    result = audit(as_wheel(builder.write(tmp_path)), POLICY)
    assert result.notes == (
        "metadata: license-file introduced in metadata version 2.4, not 2.1",
        "metadata: License-File LICENSE is not in demo-1.0.dist-info/licenses",
    )


def test_machine_code_for_the_platform_of_the_tags(tmp_path: Path) -> None:
    elf64 = b"\x7fELF" + bytes([2, 1, 1, 0]) + bytes(8) + struct.pack("<HH", 3, 62) + bytes(44)
    path = WheelBuilder().add("demo/fast.so", elf64).write(tmp_path)
    audit(as_wheel(path))
