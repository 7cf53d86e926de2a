from __future__ import annotations

from pathlib import Path

import pytest

from gate.audit import audit
from gate.errors import UsageFailure
from gate.policy import AuditPolicy, load
from tests.gate.wheel_builder import WheelBuilder, as_wheel, findings, rejects

PYPROJECT = """\
[project]
name = "demo"
version = "1.0"
license = "MIT"
license-files = ["LICENSE"]
requires-python = ">=3.10"
dependencies = ["torch>=2.6", "numpy; python_version < '4'"]
[project.optional-dependencies]
fast = ["numba>=0.60", "ninja; sys_platform == 'linux'"]
[tool.gate.audit.Demo]
package = "demo"
max-bytes = 100_000
tags = ["py3-none-any"]
"""
FIELDS = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
License-Expression: MIT
License-File: LICENSE
Requires-Python: >=3.10
Requires-Dist: torch>=2.6
Requires-Dist: numpy; python_version < '4'
Provides-Extra: fast
Requires-Dist: numba>=0.60; extra == "fast"
Requires-Dist: ninja; sys_platform == "linux" and extra == "fast"
"""
LICENCE = "demo-1.0.dist-info/licenses/LICENSE"


def policy(folder: Path, text: str = PYPROJECT) -> AuditPolicy:
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(text)
    (folder / "LICENSE").write_text("MIT\n")
    found = load(folder).audit_of("demo")
    assert found is not None
    return found


def wheel(folder: Path, *changes: tuple[str, str], licence: bytes = b"MIT\n") -> Path:
    fields = FIELDS
    for old, new in changes:
        assert old in fields
        fields = fields.replace(old, new)
    return WheelBuilder(metadata=fields).add(LICENCE, licence).write(folder)


def test_a_wheel_that_says_the_same(tmp_path: Path) -> None:
    result = audit(as_wheel(wheel(tmp_path)), policy(tmp_path), source=tmp_path)
    assert "project: as in pyproject.toml" in result.checks
    assert result.notes == ()


def test_what_makes_no_difference(tmp_path: Path) -> None:
    path = wheel(
        tmp_path,
        ("Requires-Dist: torch>=2.6\n", ""),
        ("Requires-Python: >=3.10\n", "Requires-Dist: Torch >= 2.6.0\nRequires-Python: >= 3.10\n"),
        ('numba>=0.60; extra == "fast"', "numba (>=0.60) ; extra == 'fast'"),
        licence=b"MIT\r\n",
    )
    assert audit(as_wheel(path), policy(tmp_path)).notes == ()


DIFFERENCES = {
    ("Requires-Python: >=3.10\n", ""): "Requires-Python is missing, pyproject.toml says >=3.10",
    (">=3.10", ">=3.8"): "Requires-Python is >=3.8, pyproject.toml says >=3.10",
    (": MIT", ": GPL-3.0-only"): "License-Expression is GPL-3.0-only, pyproject.toml says MIT",
    ("License-Expression: MIT\n", ""): "License-Expression is missing, pyproject.toml says MIT",
    ("License-File: LICENSE\n", ""): "License-File LICENSE is missing from METADATA",
    ("torch>=2.6", "torch>=2.5"): "requires torch>=2.5, which is not declared",
    ("Requires-Dist: torch", "Requires-Dist: evil\nRequires-Dist: torch"): "requires evil, which",
    ("Requires-Dist: ninja", "Requires-Dist: evil"): 'requires evil; sys_platform == "linux" and',
}


@pytest.mark.parametrize("change", DIFFERENCES)
def test_what_differs(tmp_path: Path, change: tuple[str, str]) -> None:
    found = findings(wheel(tmp_path, change), policy(tmp_path))
    assert f"project: {DIFFERENCES[change]}" in "\n".join(found)
    assert all(finding.startswith("project: ") for finding in found)


def test_another_licence_text(tmp_path: Path) -> None:
    path = wheel(tmp_path, licence=b"All rights reserved\n")
    rejects(path, "project: LICENSE: is another text than the project's", policy=policy(tmp_path))


def test_a_licence_of_before_there_were_expressions(tmp_path: Path) -> None:
    path = wheel(tmp_path, ("License-Expression: MIT", "License: MIT"))
    (note,) = audit(as_wheel(path), policy(tmp_path)).notes
    assert note == "project: the licence MIT is no License-Expression"


def test_the_version_counts_where_the_wheel_is_of_this_checkout(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    other = policy(tmp_path, PYPROJECT.replace('"1.0"', '"2.0"'))
    audit(as_wheel(path), other)
    found = findings(path, other, source=tmp_path)
    assert found == ["project: is version 1.0, pyproject.toml says 2.0"]


def test_what_the_build_decides_is_not_compared(tmp_path: Path) -> None:
    text = PYPROJECT.replace('version = "1.0"', 'dynamic = ["version", "dependencies"]')
    text = "\n".join(line for line in text.splitlines() if not line.startswith("dependencies"))
    path = wheel(tmp_path, ("torch>=2.6", "anything"))
    audit(as_wheel(path), policy(tmp_path, text), source=tmp_path)


def test_another_distribution_than_the_project_is_not_compared(tmp_path: Path) -> None:
    found = policy(tmp_path, PYPROJECT.replace('name = "demo"', 'name = "other"'))
    assert found.project is None
    audit(as_wheel(wheel(tmp_path, (">=3.10", ">=3.8"))), found)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('">=3.10"', '"later"', "Invalid specifier"),
        ('"torch>=2.6"', '"torch=>2.6"', "torch=>2.6"),
        ('"MIT"', '"My licence"', "My licence"),
        ('"1.0"', '"one"', "one"),
        ('">=3.10"', "3.10", "wrong kind"),
    ],
)
def test_a_project_that_no_build_tool_takes(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(UsageFailure, match=r"pyproject.toml, project: ") as caught:
        policy(tmp_path, PYPROJECT.replace(old, new))
    assert said in str(caught.value)


def test_tags_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageFailure, match=r"audit\.Demo\.tags: are not like 'py3-none-any'"):
        policy(tmp_path, PYPROJECT.replace('"py3-none-any"', '"any"'))


def tagged(folder: Path, tag: str, listed: str = "") -> Path:
    text = "Wheel-Version: 1.0\nRoot-Is-Purelib: {pure}\n{tags}"
    tags = "".join(f"Tag: {one}\n" for one in (listed or tag).split())
    pure = str("linux" not in tag).lower()
    made = WheelBuilder(tag=tag, metadata=FIELDS, wheel=text.format(pure=pure, tags=tags))
    return made.add(LICENCE, b"MIT\n").write(folder)


def test_tags_other_than_declared(tmp_path: Path) -> None:
    other = tagged(tmp_path, "py3-none-manylinux_2_28_x86_64")
    assert findings(other, policy(tmp_path)) == [
        "wheel: tag py3-none-any is declared but missing",
        "wheel: tag py3-none-manylinux_2_28_x86_64 is not declared",
    ]
    old = tagged(tmp_path, "py2.py3-none-any", "py2-none-any py3-none-any")
    (note,) = audit(as_wheel(old), policy(tmp_path)).notes
    assert note == "wheel: tag py2-none-any is of no use with Requires-Python >=3.10"


REFUSED = ("linux_x86_64", "linux_aarch64", "manylinux_2_28_sparc", "macosx_10_9", "win128")
TAKEN = ("linux_armv7l", "manylinux1_i686", "manylinux2014_aarch64", "musllinux_1_2_x86_64")
TAKEN += ("macosx_11_0_arm64", "macosx_10_9_universal2", "win_amd64", "win32")


@pytest.mark.parametrize("platform", [*REFUSED, *TAKEN])
def test_platforms_that_an_index_refuses(tmp_path: Path, platform: str) -> None:
    made = WheelBuilder(tag=f"py3-none-{platform}")
    made.wheel = made.wheel.replace("Purelib: true", "Purelib: false")
    path, own = made.write(tmp_path), AuditPolicy(package="demo", max_bytes=100_000)
    said = f"wheel: PyPI takes no files for the platform {platform}"
    if platform in REFUSED:
        assert findings(path, own) == [said]
        assert audit(as_wheel(path)).notes == (said,)
    else:
        assert audit(as_wheel(path), own).notes == ()


def test_a_classifier_that_keeps_it_from_an_index(tmp_path: Path) -> None:
    path = WheelBuilder()
    path.metadata += "Classifier: Private :: Do Not Upload\n"
    said = "metadata: Classifier Private :: Do Not Upload: indexes refuse it"
    made = path.write(tmp_path)
    assert findings(made, AuditPolicy(package="demo", max_bytes=100_000)) == [said]
    assert audit(as_wheel(made)).notes == (said,)
