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


PUBLISH = """
[tool.gate.publish.pypi]
profiles = ["cpu", "gpu"]
signers = ["ada@example.org"]
url = "https://upload.pypi.org/legacy/"
index = "https://pypi.org/simple/"
"""


def load(tmp_path: Path, text: str) -> policy.Policy:
    (tmp_path / "pyproject.toml").write_text(text)
    return policy.load(tmp_path)


def test_all_keys_are_read(tmp_path: Path) -> None:
    read = load(tmp_path, AUDIT + PUBLISH)
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
    assert read.publish == {
        "pypi": policy.PublishPolicy(
            profiles=("cpu", "gpu"),
            signers=("ada@example.org",),
            url="https://upload.pypi.org/legacy/",
            index="https://pypi.org/simple/",
        )
    }


def test_the_repository_has_a_policy() -> None:
    read = policy.load(Path(__file__).parents[2])
    assert read.audit_of("gefen-cuda").package == "gefen"
    assert set(read.publish) == {"testpypi", "pypi"}


def test_a_repository_without_a_policy(tmp_path: Path) -> None:
    assert load(tmp_path, "[project]\nname = 'x'\n") == policy.Policy(distribution="x")


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
        (PUBLISH.replace('"cpu", "gpu"', ""), "publish.pypi.profiles", "names no profile"),
        (PUBLISH.replace("cpu", "tpu"), "publish.pypi.profiles", "unknown profile 'tpu'"),
        (PUBLISH.replace('["cpu", "gpu"]', '"cpu"'), "publish.pypi.profiles", "list of strings"),
        (PUBLISH.replace('["ada@example.org"]', "[1]"), "publish.pypi.signers", "list of strings"),
        (PUBLISH.replace("signers", "singers"), "publish.pypi.singers", "unknown key; known are"),
        (PUBLISH.replace("url", "#"), "publish.pypi.url", "must be an https:// URL, not None"),
        (PUBLISH.replace("https", "http", 1), "publish.pypi.url", "https:// URL, not 'http:"),
        (PUBLISH.replace('"https://pypi.org/simple/"', "3"), "publish.pypi.index", "not 3"),
        ('[tool.gate.publish]\npypi = ["cpu"]\n', "tool.gate.publish.pypi", "must be a table"),
        ("[tool\n", "", "is not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, where: str, why: str) -> None:
    with pytest.raises(UsageFailure) as caught:
        load(tmp_path, text)
    assert where in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("signers", "words"),
    [
        ("", "profiles cpu, gpu; no signature, as no signers are named"),
        ('"ada", "bob"', "profiles cpu, gpu, signed by ada or bob"),
    ],
)
def test_what_is_required_can_be_told(tmp_path: Path, signers: str, words: str) -> None:
    read = load(tmp_path, PUBLISH.replace('"ada@example.org"', signers))
    assert read.publishing_to("pypi").describe() == words
    elsewhere = read.publishing_to("http://127.0.0.1:1/").describe()
    assert elsewhere == "any profile; no signature, as no signers are named"


def test_no_pyproject(tmp_path: Path) -> None:
    with pytest.raises(UsageFailure, match="No such file"):
        policy.load(tmp_path)


def test_an_index_to_download_from_is_a_name_or_a_url(tmp_path: Path) -> None:
    read = load(tmp_path, PUBLISH)
    assert read.index_of("pypi") == "https://pypi.org/simple/"
    assert read.index_of("http://127.0.0.1:1/") == "http://127.0.0.1:1/"
    for name in ("pipy", "http://pypi.org/simple/"):
        with pytest.raises(UsageFailure, match=r"(?s)--from .*known are pypi"):
            read.index_of(name)


def test_a_url_cannot_evade_the_policy_of_its_index(tmp_path: Path) -> None:
    read = load(tmp_path, PUBLISH)
    for url in (
        "https://upload.pypi.org/legacy/",
        "https://UPLOAD.pypi.org.:443/legacy",
        "https://name:word@upload.pypi.org/other",
        "https://pypi.org/legacy/",
    ):
        target = read.publishing_to(url)
        assert (target.profiles, target.signers) == (("cpu", "gpu"), ("ada@example.org",))
        assert target.url == url
    assert read.publishing_to("pypi") == read.publish["pypi"]


def test_any_other_url_needs_evidence_of_some_profile(tmp_path: Path) -> None:
    for url in ("https://pypi.example.org/", "http://127.0.0.1:8080/", "http://[::1]:1/"):
        target = load(tmp_path, PUBLISH).publishing_to(url)
        assert target == policy.PublishPolicy(url=url)


@pytest.mark.parametrize(
    "name",
    [
        "pipy",
        "",
        "http://upload.pypi.org/",
        "https://",
        "ftp://x/",
        "https://upload\u3002pypi.org/",
    ],
)
def test_an_unknown_repository(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageFailure, match=r"has no entry in \[tool.gate.publish\]"):
        load(tmp_path, PUBLISH).publishing_to(name)
