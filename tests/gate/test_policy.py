from __future__ import annotations

from pathlib import Path

import pytest

from gate import policy
from gate.errors import UsageFailure

AUDIT = """
[tool.gate.audit.Gefen_Cuda]
package = "gefen"
resources = ["gefen/py.typed"]
cuda-archs = ["sm_90", "compute_121"]
max-bytes = 100
entry-points = ["console_scripts:gefen"]
source = "src"
built = ["gefen/kernels/cubin/*"]
"""


def load(tmp_path: Path, text: str) -> policy.Policy:
    (tmp_path / "pyproject.toml").write_text(text)
    return policy.load(tmp_path)


def test_all_keys_are_read(tmp_path: Path) -> None:
    read = load(tmp_path, AUDIT + '[tool.gate.publish]\npypi = ["cpu", "gpu"]\n')
    audit = read.audit_of("gefen.cuda")
    assert audit == policy.AuditPolicy(
        package="gefen",
        resources=("gefen/py.typed",),
        cuda_archs=frozenset({"sm_90", "compute_121"}),
        max_bytes=100,
        entry_points=frozenset({"console_scripts:gefen"}),
        source="src",
        built=("gefen/kernels/cubin/*",),
    )
    assert read.audit_of("gefen-x") is None
    assert read.publish == {"pypi": ("cpu", "gpu")}


def test_the_repository_has_a_policy() -> None:
    read = policy.load(Path(__file__).parents[2])
    assert read.audit_of("gefen-cuda").package == "gefen"
    assert set(read.publish) == {"testpypi", "pypi"}


def test_a_repository_without_a_policy(tmp_path: Path) -> None:
    assert load(tmp_path, "[project]\nname = 'x'\n") == policy.Policy()


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        (AUDIT + "sise = 1\n", "audit.Gefen_Cuda.sise", "unknown key; known are built"),
        (AUDIT.replace("100", '"100"'), "max-bytes", "positive number of bytes, not '100'"),
        (AUDIT.replace("100", "true"), "max-bytes", "positive number of bytes, not True"),
        (AUDIT.replace("100", "0"), "max-bytes", "positive number of bytes, not 0"),
        (AUDIT.replace('"gefen"', "1"), "package", "the name of a package, not 1"),
        (AUDIT.replace('"gefen"', '"a/b"'), "package", "the name of a package, not 'a/b'"),
        (AUDIT.replace("sm_90", "90"), "cuda-archs", "'90' is not like 'sm_90'"),
        (AUDIT.replace('["sm_90", "compute_121"]', "[90]"), "cuda-archs", "a list of strings"),
        (AUDIT.replace('["gefen/py.typed"]', '"gefen/py.typed"'), "resources", "list of strings"),
        (AUDIT.replace("compute_121", "sm_90"), "cuda-archs", "names something twice"),
        (AUDIT.replace('"src"', "3"), "source", "must be a folder"),
        ("[tool.gate]\naudit = 3\n", "tool.gate.audit", "must be a table"),
        ("[tool.gate.audit]\nx = 3\n", "tool.gate.audit.x", "must be a table"),
        ("tool = 3\n", "tool.gate", "must be a table"),
        ("[tool.gate.publish]\npypi = []\n", "publish.pypi", "at least one profile"),
        ("[tool.gate.publish]\npypi = ['tpu']\n", "publish.pypi", "unknown profile 'tpu'"),
        ("[tool.gate.publish]\npypi = 'cpu'\n", "publish.pypi", "a list of strings"),
        ("[tool\n", "", "is not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, where: str, why: str) -> None:
    with pytest.raises(UsageFailure) as caught:
        load(tmp_path, text)
    assert where in str(caught.value)
    assert why in str(caught.value)


def test_no_pyproject(tmp_path: Path) -> None:
    with pytest.raises(UsageFailure, match="No such file"):
        policy.load(tmp_path)
