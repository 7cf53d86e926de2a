from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from gate import wheels
from gate.errors import EnvironmentFailed, GateError, UsageFailure, WheelRejected
from gate.wheels import Wheel, locate, resolve
from tests.gate.wheel_builder import WheelBuilder, flip

NAME = "demo-1.0-py3-none-any.whl"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory the user is in, with room for the copies beside it."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def resolved(base: Path, *values: str) -> list[Wheel]:
    return resolve(values, base=base, workdir=base.parent / "copies")


def refused(base: Path, *values: str, error: type[GateError] = UsageFailure) -> str:
    with pytest.raises(error) as caught:
        resolved(base, *values)
    return str(caught.value)


def test_what_a_wheel_is(base: Path) -> None:
    path = WheelBuilder(name="Demo_Pkg", version="1.0+cu.1").write(base)
    (wheel,) = resolved(base, path.name)
    assert wheel.path == path
    assert wheel.filename == path.name == wheel.copy.name
    assert wheel.name == "demo-pkg"
    assert wheel.version == Version("1.0+cu.1")
    assert wheel.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_copy_survives_changes_to_the_original(base: Path) -> None:
    path = WheelBuilder().write(base)
    before = path.read_bytes()
    (wheel,) = resolved(base, str(path))
    path.write_bytes(b"other")
    assert wheel.copy.read_bytes() == before


# What a value may be


@pytest.mark.parametrize(
    "folder", ["plain", "with space", "a b#c", "brackets [1]", "[ab]", "été", "q?", "s*r", "%20"]
)
def test_folders_with_odd_names(base: Path, folder: str) -> None:
    path = WheelBuilder().write(base / folder)
    for value in (f"{folder}/{NAME}", folder, f"{folder}/*.whl", f"./{folder}/", str(path)):
        (wheel,) = resolved(base, value)
        assert wheel.path == path


def test_a_pattern_is_not_taken_for_a_pattern_where_it_exists(base: Path) -> None:
    literal = WheelBuilder().write(base / "[ab]")
    WheelBuilder(version="2.0").write(base / "a")
    assert [wheel.path for wheel in resolved(base, "[ab]/*.whl")] == [literal]
    assert [str(wheel.version) for wheel in resolved(base, "?/*.whl")] == ["2.0"]


def test_relative_values_count_from_the_base(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = WheelBuilder().write(base / "dist")
    elsewhere = base / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (wheel,) = resolved(base, "dist/*.whl")
    assert wheel.path == path
    (wheel,) = resolved(elsewhere, "../dist")
    assert wheel.path.samefile(path)


def test_home(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = base / "home [x]"
    path = WheelBuilder().write(home / "dist")
    monkeypatch.setenv("HOME", str(home))
    for value in (f"~/dist/{NAME}", "~/dist", "~/dist/*.whl"):
        (wheel,) = resolved(base, value)
        assert wheel.path == path
    assert "there is no user 'nobody-of-that-name'" in refused(base, "~nobody-of-that-name/a.whl")


def test_a_directory_means_all_its_wheels_in_order(base: Path) -> None:
    for version in ("2.0", "10.0", "1.0"):
        WheelBuilder(version=version).write(base / "dist")
    (base / "dist/demo-1.0.tar.gz").write_bytes(b"")
    (base / "dist/SHA256SUMS").write_bytes(b"")
    (base / "dist/.hidden-1.0-py3-none-any.whl").write_bytes(b"")
    WheelBuilder(version="9.0").write(base / "dist/old")
    assert [str(w.version) for w in resolved(base, "dist")] == ["1.0", "10.0", "2.0"]
    assert [str(w.version) for w in resolved(base, "dist/*")] == ["1.0", "10.0", "2.0"]
    everywhere = [str(w.version) for w in resolved(base, "dist/**/*.whl")]
    assert everywhere == ["1.0", "10.0", "2.0", "9.0"]


def test_the_order_given_is_kept_and_bytes_come_once(base: Path) -> None:
    second = WheelBuilder(version="2.0").write(base / "b")
    first = WheelBuilder().write(base / "a")
    copy = base / "c" / first.name
    copy.parent.mkdir()
    copy.write_bytes(first.read_bytes())
    found = resolved(base, "b", "a", "c", str(first), "*/*.whl")
    assert [wheel.path for wheel in found] == [second, first]


def test_two_wheels_of_one_name(base: Path) -> None:
    first = WheelBuilder().write(base / "a")
    second = WheelBuilder().add("demo/more.py", b"").write(base / "b")
    found = resolved(base, "a", "b")
    assert [wheel.copy.read_bytes() for wheel in found] == [
        first.read_bytes(),
        second.read_bytes(),
    ]
    assert found[0].filename == found[1].filename


def test_links(base: Path) -> None:
    path = WheelBuilder().write(base / "store")
    (base / "latest.whl").symlink_to(path)
    blob = base / "0f3c"
    path.rename(blob)
    path.symlink_to(blob)
    (base / "dist").symlink_to(base / "store")
    (wheel,) = resolved(base, f"store/{NAME}")
    assert (wheel.path, wheel.filename) == (path, NAME)
    (wheel,) = resolved(base, "dist")
    assert wheel.path == base / "dist" / NAME
    (base / "latest.whl").unlink()
    (base / "latest.whl").symlink_to(WheelBuilder().write(base / "real"))
    (wheel,) = resolved(base, "latest.whl")
    assert (wheel.path, wheel.filename) == (base / "latest.whl", NAME)


def test_a_wheel_whose_name_starts_with_a_dash(base: Path) -> None:
    path = WheelBuilder().write(base, filename="-odd.whl")
    assert locate(["./-odd.whl"], base=base) == [path]


# Usage


@pytest.mark.parametrize("value", ["", " ", "--help", "-x", "--", "-", "-odd.whl", "--wheel=a"])
def test_values_that_are_missing_or_look_like_options(base: Path, value: str) -> None:
    WheelBuilder().write(base, filename="-odd.whl")
    message = refused(base, value)
    assert "--wheel" in message
    if value.strip():
        assert repr(value) in message
        assert "./-odd.whl" in message


def test_no_value_at_all(base: Path) -> None:
    assert "--wheel needs a wheel" in refused(base)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("missing.whl", "No such file or directory"),
        ("missing/", "No such file or directory"),
        ("*.whl", "the pattern matches nothing"),
        ("[z].whl", "the pattern matches nothing"),
        ("empty", "no *.whl among the 0 entries"),
        ("full", "no *.whl among the 2 entries"),
        ("full/*", "the pattern matches 2 other entries"),
        ("file/x.whl", "Not a directory"),
        ("file/*.whl", "the pattern matches nothing"),
        ("links/dangling.whl", "a link to nowhere.whl, which does not exist"),
        ("links/loop.whl", "Too many levels of symbolic links"),
        ("x" * 300 + ".whl", "File name too long"),
        ("https://example.org/demo.whl", "download it first"),
        ("nul\0.whl", "NUL"),
    ],
)
def test_values_that_find_nothing(base: Path, value: str, expected: str) -> None:
    (base / "empty").mkdir()
    (base / "full").mkdir()
    (base / "full/a.txt").write_text("")
    (base / "full/b.tar.gz").write_text("")
    (base / "file").write_text("")
    (base / "links").mkdir()
    (base / "links/dangling.whl").symlink_to("nowhere.whl")
    (base / "links/loop.whl").symlink_to("loop.whl")
    message = refused(base, value)
    assert "--wheel" in message
    assert repr(value) in message
    assert expected in message
    assert "there is no user" not in message


def test_the_argument_of_another_command_is_named(base: Path) -> None:
    with pytest.raises(UsageFailure, match=r"WHEEL 'a\.whl': No such file"):
        locate(["a.whl"], base=base, option="WHEEL")


def test_a_file_that_may_not_be_read() -> None:
    """As root, permissions do not bind, so a child gives them up first."""
    code = """
import os, sys
from pathlib import Path
from gate.errors import UsageFailure
from gate.wheels import resolve
base = Path(sys.argv[1])
path = base / "demo-1.0-py3-none-any.whl"
path.write_bytes(b"x")
path.chmod(0)
hidden = base / "hidden"
hidden.mkdir()
(hidden / "a.whl").write_bytes(b"x")
copies = base / "copies"
copies.mkdir()
copies.chmod(0o777)
base.chmod(0o755)
hidden.chmod(0)
if os.getuid() == 0:
    os.setuid(65534)
for value in (path.name, "hidden/a.whl", "hidden"):
    try:
        resolve([value], base=base, workdir=copies)
    except UsageFailure as error:
        print("Permission denied" in str(error))
"""
    root = Path(__file__).parents[2]
    # pytest's own temporary folders are closed to whoever gave up root.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code, folder],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.split() == ["True", "True", "True"], done.stdout


# Not a wheel


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("demo-1.0.tar.gz", "is a source distribution, not a wheel"),
        ("demo-1.0.zip", "is a source distribution, not a wheel"),
        ("demo-1.0.txt", "is not called *.whl"),
        ("demo-1.0-py3-none-any.WHL", "is not called *.whl"),
        ("demo.whl", "Invalid wheel filename"),
        ("demo-1.0-py3-none.whl", "Invalid wheel filename"),
        ("demo-one-py3-none-any.whl", "Invalid wheel filename"),
        ("de mo-1.0-py3-none-any.whl", "Invalid project name"),
    ],
)
def test_other_files(base: Path, name: str, expected: str) -> None:
    WheelBuilder().write(base, filename=name)
    message = refused(base, name, error=WheelRejected)
    assert name in message
    assert expected in message


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "broken archive: the file is empty"),
        (b"<html>404</html>", "broken archive: this is no zip archive"),
        (b"PK\3\4" + bytes(100), "broken archive: the archive is cut off"),
    ],
)
def test_contents_that_are_no_archive(base: Path, data: bytes, expected: str) -> None:
    (base / NAME).write_bytes(data)
    assert expected in refused(base, NAME, error=WheelRejected)


def test_a_truncated_wheel(base: Path) -> None:
    path = WheelBuilder().write(base)
    path.write_bytes(path.read_bytes()[:-100])
    assert "cut off" in refused(base, NAME, error=WheelRejected)


def test_damaged_metadata(base: Path) -> None:
    path = WheelBuilder().write(base)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("demo-1.0.dist-info/METADATA")
    flip(path, info.header_offset + 30 + len(info.filename) + 5)
    assert "METADATA" in refused(base, NAME, error=WheelRejected)


def test_an_archive_that_is_no_wheel(base: Path) -> None:
    with zipfile.ZipFile(base / NAME, "w") as archive:
        archive.writestr("demo.py", "")
    assert "has no *.dist-info/METADATA" in refused(base, NAME, error=WheelRejected)


@pytest.mark.parametrize(
    "filename",
    ["demo-1.1-py3-none-any.whl", "demo-1.0+cu-py3-none-any.whl", "other-1.0-py3-none-any.whl"],
)
def test_a_name_that_disagrees_with_the_metadata(base: Path, filename: str) -> None:
    WheelBuilder().write(base, filename=filename)
    message = refused(base, filename, error=WheelRejected)
    assert "its METADATA is of demo 1.0, the file name says" in message


def test_a_name_that_agrees_once_normalised(base: Path) -> None:
    builder = WheelBuilder(name="demo_pkg", version="1.0+a.1")
    builder.metadata = "Metadata-Version: 2.1\nName: Demo.Pkg\nVersion: v1.0+A-1\n"
    assert resolved(base, builder.write(base).name)[0].name == "demo-pkg"


def test_a_directory_called_like_a_wheel(base: Path) -> None:
    (base / NAME).mkdir()
    for value in (NAME, "*.whl", "."):
        assert "is a directory, not a wheel" in refused(base, value, error=WheelRejected)


def test_pipes_and_devices_are_refused_without_waiting(base: Path) -> None:
    os.mkfifo(base / NAME)
    assert "is a pipe, a device" in refused(base, NAME, error=WheelRejected)
    (base / NAME).unlink()
    (base / NAME).symlink_to("/dev/zero")
    assert "is a pipe, a device" in refused(base, NAME, error=WheelRejected)


def test_all_that_is_wrong_is_listed(base: Path) -> None:
    (base / "a-1.0-py3-none-any.whl").write_bytes(b"")
    WheelBuilder().write(base)
    (base / "z-1.0-py3-none-any.whl").write_bytes(b"no")
    with pytest.raises(WheelRejected) as caught:
        resolved(base, ".")
    assert [finding[0] for finding in caught.value.findings] == ["a", "z"]


def test_a_disk_without_room(base: Path) -> None:
    WheelBuilder().write(base)
    with pytest.raises(EnvironmentFailed, match="cannot copy"):
        resolve([NAME], base=base, workdir=Path("/proc/nowhere"))


def test_a_name_that_would_confuse_the_terminal(base: Path) -> None:
    (base / "evil\x1b[2J.whl").write_bytes(b"")
    message = refused(base, "*.whl", error=WheelRejected)
    assert "\x1b" not in message
    assert "evil\\x1b[2J.whl" in message


def test_a_file_too_large(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "MAX_WHEEL_BYTES", 100)
    WheelBuilder().write(base)
    assert "is larger than 100 bytes" in refused(base, NAME, error=WheelRejected)


def test_an_absolute_pattern(base: Path) -> None:
    path = WheelBuilder().write(base / "dist")
    WheelBuilder().add("demo/more.py", b"").write(base)
    (wheel,) = resolved(base, f"{base}/d*/*.whl")
    assert wheel.path == path
