from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from gate.audit import audit
from gate.errors import WheelRejected
from gate.policy import AuditPolicy
from tests.gate.wheel_builder import (
    POLICY,
    WheelBuilder,
    as_wheel,
    central,
    findings,
    flip,
    local,
    patch,
)


def test_an_honest_wheel_passes_and_is_described(tmp_path: Path) -> None:
    builder = WheelBuilder()
    builder.metadata += "Requires-Python: >=3.10\nRequires-Dist: torch>=2.6\n"
    path = builder.write(tmp_path)
    result = audit(as_wheel(path), POLICY)
    assert result.members == 6
    assert result.requires_dist == ("torch>=2.6",)
    assert result.top_levels == ("demo",)
    assert result.archs == ()
    assert "top-level: installs demo" in result.checks


@pytest.mark.parametrize(
    "builder",
    [
        WheelBuilder(version="1.0+cu130.1"),
        WheelBuilder(version="1.0rc1.post2"),
        WheelBuilder(tag="py2.py3-none-any", wheel="Wheel-Version: 1.9\nRoot-Is-Purelib: true\n"
                     "Tag: py2-none-any\nTag: py3-none-any\n"),
        WheelBuilder(build="7abc", wheel="Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
                     "Build: 7abc\nTag: py3-none-any\n"),
        WheelBuilder(record_mode=0o100664),
        WheelBuilder().add("demo/zeros.bin", bytes(30_000_000)),
        WheelBuilder().add(f"demo/{'n' * 240}.py", b"pass\n"),
        WheelBuilder().add("demo/été.py", b"pass\n"),
    ],
    ids=["local", "rc", "tags", "build", "setuptools", "zeros", "long", "unicode"],
)  # fmt: skip
def test_honest_but_odd_wheels_pass(tmp_path: Path, builder: WheelBuilder) -> None:
    audit(as_wheel(builder.write(tmp_path)), POLICY)


def test_a_wheel_without_policy_meets_the_generic_rules_only(tmp_path: Path) -> None:
    builder = WheelBuilder(name="other")
    builder.add("second/__init__.py", b"", mode=0o100755)
    builder.add("other-1.0.data/scripts/tool", b"#!python\n", mode=0o100755)
    builder.add("other-1.0.dist-info/entry_points.txt", b"[console_scripts]\nx = demo:main\n")
    builder.add("demo/weights.pth", b"tensor")
    result = audit(as_wheel(builder.write(tmp_path)))
    assert result.top_levels == ("demo", "second")
    assert "entry-points: console_scripts:x" in result.checks


def test_no_byte_can_be_flipped_unnoticed(tmp_path: Path) -> None:
    path = WheelBuilder().write(tmp_path)
    data = path.read_bytes()
    assert audit(as_wheel(path), POLICY).notes == ()
    for offset in range(len(data)):
        flip(path, offset, 0xFF if offset % 3 else 1 << offset % 8)
        with suppress(WheelRejected):
            assert audit(as_wheel(path), POLICY).notes, offset
        path.write_bytes(data)


def test_a_damaged_file_is_one_finding(tmp_path: Path) -> None:
    for name in ("demo/py.typed", "demo/__init__.py", "demo-1.0.dist-info/METADATA"):
        path = WheelBuilder().write(tmp_path)
        patch(path, central(path, name) + 16, "<L", 12345)  # the CRC
        patch(path, local(path, name) + 14, "<L", 12345)
        (finding,) = findings(path)
        assert finding.startswith(f"zip: {name}"), finding


def test_all_findings_are_listed_in_a_stable_order(tmp_path: Path) -> None:
    builder = WheelBuilder().add("tests/a.pyc", b"x", mode=0o100600).drop("demo/py.typed")
    path = builder.write(tmp_path)
    found = findings(path)
    rules = [finding.partition(":")[0] for finding in found]
    assert rules == ["permissions", *["top-level"] * 2, "junk", "resources"]
    assert findings(path) == found


def test_contents_are_compared_with_the_source_tree(tmp_path: Path) -> None:
    policy = AuditPolicy(package="demo", max_bytes=100_000, source="src", built=("demo/cubin/*",))
    builder = WheelBuilder().add("demo/cubin/a.bin", b"built")
    for entry in builder.entries[:3]:
        target = tmp_path / "src" / entry.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(entry.data)
    (tmp_path / "src/demo/__pycache__").mkdir()
    (tmp_path / "src/demo/__pycache__/a.pyc").write_bytes(b"")
    path = builder.write(tmp_path)
    audit(as_wheel(path), policy, source=tmp_path)
    (tmp_path / "src/demo/new.py").write_text("")
    (tmp_path / "src/demo/__init__.py").write_text("answer = 43\n")
    (tmp_path / "src/demo/py.typed").unlink()
    assert findings(path, policy, source=tmp_path) == [
        "source: demo/py.typed: is not in the source tree",
        "source: demo/new.py: is in the source tree but not in the wheel",
        "source: demo/__init__.py: differs from the source tree",
    ]
