from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from gate.audit import audit
from tests.gate.wheel_builder import (
    POLICY,
    REGULAR,
    WheelBuilder,
    as_wheel,
    central,
    findings,
    patch,
    rejects,
)

INIT = "demo/__init__.py"


def notes(path: Path) -> list[str]:
    """What the audit finds unusual, and the same whether or not it has a policy."""
    found = audit(as_wheel(path), POLICY).notes
    assert found == audit(as_wheel(path)).notes
    return list(found)


BAD_NAMES = {
    "../demo/evil.py": "leads out of the installation directory",
    "demo/../../evil.py": "leads out of the installation directory",
    "/etc/evil.py": "leads out of the installation directory",
    "C:/evil.py": "a backslash or a colon",
    "demo/a:stream": "a backslash or a colon",
    "demo/./evil.py": "is not a normalised path",
    "demo//evil.py": "is not a normalised path",
    "demo/evil\n.py": "has control characters",
    "demo/evil\x1b[2J.py": "has control characters",
    "demo/\u202eyp.live": "has control characters",
    "demo/evil.py ": "ends in a space or a dot",
    "demo./evil.py": "ends in a space or a dot",
    f"demo/{'x' * 256}": "longer than 255 bytes",
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    path = WheelBuilder().add(name, b"x = 1\n").write(tmp_path)
    found = findings(path, None)
    assert any(BAD_NAMES[name] in finding for finding in found), found
    assert all(finding.isprintable() for finding in found)


def test_a_backslash_in_a_name(tmp_path: Path) -> None:
    path = WheelBuilder().add("demo/Xevil.py", b"").write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"demo/Xevil.py", b"demo\\Xevil.py"))
    assert any("a backslash" in finding for finding in findings(path))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_the_same_member_twice(tmp_path: Path) -> None:
    builder = WheelBuilder().add(INIT, b"answer = 42\n", listed=False)
    rejects(builder.write(tmp_path), f"names: {INIT}: is in the archive more than once")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("demo/ab.py", "demo/AB.py"),
        ("demo/Sub/a.py", "demo/sub/b.py"),
        ("demo/\u00e9.py", "demo/e\u0301.py"),
        ("demo/stra\u00dfe.py", "demo/strasse.py"),
    ],
)
def test_members_that_are_one_file_elsewhere(tmp_path: Path, first: str, second: str) -> None:
    builder = WheelBuilder().add(first, b"").add(second, b"")
    rejects(builder.write(tmp_path), "is the same path as")


def test_a_file_that_is_also_a_directory(tmp_path: Path) -> None:
    builder = WheelBuilder().add("demo/a", b"").add("demo/a/b.py", b"")
    rejects(builder.write(tmp_path), "names: demo/a: is a file and a directory at once")


def test_a_name_in_no_known_encoding(tmp_path: Path) -> None:
    path = WheelBuilder().add("demo/XX.py", b"").write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"demo/XX.py", b"demo/\xff\xfe.py"))
    rejects(path, "the name is not UTF-8 or does not say that it is")


MODES = {
    stat.S_IFLNK | 0o777: "is a symbolic link",
    stat.S_IFIFO | 0o644: "is a special file",
    stat.S_IFCHR | 0o644: "is a special file",
    stat.S_IFDIR | 0o755: "is a special file",
    REGULAR | 0o4755: "is setuid or writable by everyone",
    REGULAR | 0o2755: "is setuid or writable by everyone",
    REGULAR | 0o022: "is setuid or writable by everyone",
    0o100600: "is not readable by everyone (mode 0o600)",
    0o100640: "is not readable by everyone (mode 0o640)",
    0o600: "is not readable by everyone",
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(tmp_path: Path, mode: int) -> None:
    builder = WheelBuilder().add("demo/odd.py", b"../../etc/passwd", mode=mode)
    rejects(builder.write(tmp_path), MODES[mode], policy=None)


def test_modes_that_installers_do_not_look_at(tmp_path: Path) -> None:
    builder = WheelBuilder().add("demo/run.py", b"#!python\n", mode=0o100755)
    builder.record_mode = 0o600
    assert notes(builder.write(tmp_path)) == [
        "headers: demo/run.py: has mode 0o755, not 0644",
        "headers: demo/run.py (and 1 more): has another mode than most",
        "headers: demo-1.0.dist-info/RECORD: has mode 0o600, not 0644",
    ]


def test_modes_that_windows_makes_up(tmp_path: Path) -> None:
    builder = WheelBuilder()
    builder.entries = [replace(e, system=0, mode=0o100666) for e in builder.entries]
    rejects(WheelBuilder().add("demo/a.py", b"", mode=0o100666).write(tmp_path), "by everyone")
    assert "headers: demo/__init__.py (and 2 more): has mode 0o666, not 0644" in notes(
        builder.write(tmp_path)
    )


def test_a_header_unlike_the_others(tmp_path: Path) -> None:
    path = WheelBuilder().add("demo/odd.py", b"", system=0).write(tmp_path)
    assert notes(path) == [
        "headers: demo/odd.py: was packed by another tool than the other members"
    ]


def test_folders(tmp_path: Path) -> None:
    builder = WheelBuilder().add("demo/sub/", b"text", mode=stat.S_IFDIR | 0o755, listed=False)
    rejects(builder.write(tmp_path), "demo/sub/: is a directory with content", policy=None)
    builder = WheelBuilder().add("demo/sub/", b"", mode=stat.S_IFDIR | 0o2775, listed=False)
    assert notes(builder.write(tmp_path)) == ["headers: demo/sub/: is an entry of a directory"]
    path = patch(WheelBuilder().write(tmp_path), 0, "<B", ord("P"))
    rejects(patch(path, central(path, INIT) + 38, "<B", 16), "says that it is a directory")


@pytest.mark.parametrize(
    ("offset", "value", "expected"),
    [
        (4, 99, "made by an unusual system, 3/99"),
        (5, 19, "made by an unusual system, 19/20"),
        (36, 1, "has attributes of other systems"),
        (36, 2, "has attributes of other systems"),
        (38, 4, "has attributes of other systems"),
    ],
)
def test_header_fields_that_few_builders_write(
    tmp_path: Path, offset: int, value: int, expected: str
) -> None:
    path = WheelBuilder().write(tmp_path)
    assert f"headers: {INIT}: {expected}" in notes(
        patch(path, central(path, INIT) + offset, "<B", value)
    )


RESERVED = ("demo/con", "demo/Aux.py", "demo/nul.tar.gz", "demo/com1/x.py", "demo/LPT\u00b9.txt")


@pytest.mark.parametrize("name", [*RESERVED, "demo/what?.py", 'demo/"x".py', "demo/a|b"])
def test_names_that_no_file_can_have_on_windows(tmp_path: Path, name: str) -> None:
    problem = "names: demo/", "on Windows" if name not in RESERVED else "Windows reserves the name"
    (finding,) = findings(WheelBuilder().add(name, b"").write(tmp_path), None)
    assert all(part in finding for part in problem)
    elsewhere = WheelBuilder(tag="py3-none-manylinux_2_28_x86_64").add(name, b"")
    elsewhere.wheel = elsewhere.wheel.replace("Purelib: true", "Purelib: false")
    (note,) = notes(elsewhere.write(tmp_path))
    assert all(part in note for part in problem)


@pytest.mark.parametrize("name", ["demo/console.py", "demo/com10.py", "demo/auxiliary/nul_.py"])
def test_names_that_are_like_reserved_ones(tmp_path: Path, name: str) -> None:
    assert notes(WheelBuilder().add(name, b"").write(tmp_path)) == []
