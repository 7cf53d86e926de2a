"""The command line as a real process: what is refused, and the exit code of every outcome."""

from __future__ import annotations

import errno
import json
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gate import cli
from gate.errors import EXIT_CODES, GateError
from gate.evidence import suite_digest
from tests.gate.conftest import ROOT, SITE, Gate, MakeSuite, mini_wheel

pytestmark = pytest.mark.processes


def every_error(base: type[GateError] = GateError) -> list[type[GateError]]:
    return [base, *(found for each in base.__subclasses__() for found in every_error(each))]


def test_every_error_has_a_documented_exit_code() -> None:
    assert {error.exit_code for error in every_error()} | {0} == set(EXIT_CODES)


@pytest.mark.parametrize(
    "command", [[], *([name] for name in cli.gate.commands)], ids=lambda words: " ".join(words)
)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_tells_everything(gate: Gate, command: list[str], flag: str) -> None:
    done = gate(*command, flag)
    assert done.returncode == 0
    for words in (*EXIT_CODES.values(), "GATE_CACHE", "CUDA_VISIBLE_DEVICES", "Examples:"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--wheel"], "--wheel"),
        (["--wheel", ""], "--wheel"),
        (["--wheel="], "--wheel"),
        (["--wheel", "--help"], "--wheel"),
        (["--wheel", "--profile", "cpu"], "--wheel"),
        (["--wheel=-x"], "./-odd.whl"),
        (["--wheel", "--"], "--wheel"),
        (["--wheel", "absent.whl"], "absent.whl"),
        (["--wheel", "*.whl"], "*.whl"),
        (["--wheel", "."], "--wheel"),
        (["--wheel", "~nobody-at-all/x.whl"], "--wheel"),
        (["v0.1.0", "stray"], "stray"),
        (["some.whl"], "a wheel is given with --wheel"),
        (["--profile", "tpu"], "--profile"),
        (["--timeout", "0"], "--timeout"),
        (["--timeout", "nan"], "--timeout"),
        (["--torch", "numpy"], "--torch"),
        (["--torch", ""], "--torch"),
        (["--torch", "--help"], "--torch"),
        (["--torch", "2.13.0", "--torch", "new"], "--torch 'new'"),
        (["--environment"], "--environment"),
        (["--environment", "--help"], "--environment '--help'"),
        (["--environment", "nowhere"], "known are floor, newest, all"),
        (["--environment", "all", "--site", "."], "--site"),
        (["--evidence", "--fresh"], "--evidence"),
        (["--nonsense"], "--nonsense"),
        (["--python", "absent"], "--python"),
        (["--site", "absent"], "--site"),
        (["--suite", "absent"], "--suite"),
        (["--only"], "--only"),
        (["--only", ""], "--only"),
        (["--only", "--fresh"], "--only"),
        (["--only", "single", "--sign", "key"], "--only"),
    ],
)
def test_usage_errors_exit_2(gate: Gate, arguments: list[str], words: str) -> None:
    done = gate("run", *arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_commands_on_wheels_need_one(gate: Gate, command: str) -> None:
    assert gate(command).returncode == 2
    done = gate(command, "absent.whl")
    assert done.returncode == 2
    assert "absent.whl" in done.stderr


def test_a_good_wheel_passes_and_its_evidence_verifies(
    gate: Gate, make_suite: MakeSuite, tmp_path: Path
) -> None:
    wheel = mini_wheel(tmp_path / "a b#c")
    evidence = tmp_path / "evidence"
    # What the gate's surroundings may try to slip in.
    for decoy in ("mini", "gefen", "torch", "pytest"):
        (tmp_path / decoy).mkdir()
        (tmp_path / decoy / "__init__.py").write_text("raise SystemExit('decoy')\n")
    (wheel.parent / "mini.egg-info").mkdir()
    (tmp_path / "pip.conf").write_text("[install]\nuser = true\nno-index = false\n")
    home = tmp_path / "home"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    user_site = home / ".local" / "lib" / version / "site-packages"
    user_site.mkdir(parents=True)
    (user_site / "decoy.pth").write_text("import sys; sys.exit('decoy')\n")
    options = ("--profile", "cpu", "--site", SITE, "--suite", make_suite(), "--evidence", evidence)
    done = gate(
        "run",
        "--wheel",
        wheel.relative_to(tmp_path),
        *options,
        HOME=str(home),
        PIP_CONFIG_FILE=str(tmp_path / "pip.conf"),
        PIP_TARGET=str(tmp_path / "target"),
        VIRTUAL_ENV=str(tmp_path),
        CONDA_PREFIX=str(tmp_path),
        PYTEST_ADDOPTS="-k nothing",
        RANK="5",
        WORLD_SIZE="9",
        MASTER_ADDR="example.invalid",
        MASTER_PORT="29500",
    )
    assert done.returncode == 0, done.stderr
    assert "not covered: gpu" in done.stderr
    assert "passed profile cpu: 3 tests" in done.stderr
    assert not (tmp_path / "target").exists()

    report = json.loads(next(evidence.rglob("report.json")).read_text())
    assert report["result"] == "passed"
    assert len(list(evidence.rglob("junit-*.xml"))) == 1 + 1 + 2 + 3  # the first of collecting

    # Evidence of another suite than the checkout's does not count.
    verified = gate("verify", wheel, "--evidence", evidence)
    assert verified.returncode == 5
    assert "stale" in verified.stderr


def test_verify_accepts_and_rejects(gate: Gate, tmp_path: Path) -> None:
    from gate.evidence import write_statement
    from tests.gate.wheel_builder import as_wheel

    wheel, evidence = mini_wheel(tmp_path), tmp_path / "evidence"
    arguments = ("verify", wheel, "--evidence", evidence)
    assert gate(*arguments).returncode == 5
    write_statement(
        evidence,
        wheel=as_wheel(wheel),
        profile="cpu",
        environment={"torch": "2.13.0"},
        suite_digest=suite_digest(ROOT / "tests" / "regression"),
        commit=None,
        executed_archs=(),
        embedded_archs=(),
        passed_tests=["a"],
        files=[],
        started="2026-01-01T00:00:00Z",
        finished="2026-01-01T00:00:01Z",
    )
    accepted = gate(*arguments, "--require", "cpu")
    assert accepted.returncode == 0, accepted.stderr
    assert "passed: cpu" in accepted.stdout
    missing = gate(*arguments, "--require", "gpu")
    assert missing.returncode == 5
    assert "gpu" in missing.stderr
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)
    assert gate(*arguments).returncode == 5
    assert gate("inspect", wheel).returncode == 4
    assert gate("run", "--wheel", wheel).returncode == 4


def test_the_version_is_the_commit(gate: Gate) -> None:
    done = gate("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("gate of ")


PLATFORM = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: false\nTag: {tag}\n"


@pytest.mark.parametrize(
    ("wheel", "status", "words"),
    [
        ({"tag": "cp27-cp27m-win32", "wheel": PLATFORM}, 4, "not a supported wheel"),
        ({"code": b"import sys; sys.exit(0)\n"}, 1, "mini cannot be imported"),
    ],
    ids=["install", "identity"],
)
def test_what_fails_between_audit_and_tests(
    wheel: dict[str, Any], status: int, words: str, gate: Gate, tmp_path: Path
) -> None:
    options = ("--profile", "cpu", "--site", SITE, "--evidence", tmp_path / "evidence")
    done = gate("run", "--wheel", mini_wheel(tmp_path, **wheel), *options)
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert "FAILED" in done.stderr


def test_a_machine_without_gpu_exits_3(gate: Gate) -> None:
    done = gate("machine", "--profile", "gpu", "--site", SITE, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 3
    assert "Profile gpu cannot run here" in done.stderr
    assert "use --profile cpu, which can run here" in done.stderr


def test_a_site_without_torch_exits_3(gate: Gate, tmp_path: Path) -> None:
    done = gate("run", "--wheel", mini_wheel(tmp_path), "--site", tmp_path)
    assert done.returncode == 3
    assert "lacks torch" in done.stderr


@pytest.mark.parametrize("evidence", ["/dev/full/evidence", "/proc/evidence"])
@pytest.mark.parametrize("profile", ["cpu", "auto"])
def test_evidence_that_cannot_be_written_exits_3_at_once(
    gate: Gate, evidence: str, profile: str, tmp_path: Path
) -> None:
    options = ("--profile", profile, "--site", SITE, "--evidence", evidence)
    done = gate("run", "--wheel", mini_wheel(tmp_path), *options)
    assert done.returncode == 3, done.stderr
    assert f"The evidence folder {evidence} cannot be written" in done.stderr
    assert "environment" not in done.stderr


def test_a_full_disk_exits_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/file")

    monkeypatch.setattr(cli.pipeline, "run", fail)
    assert cli.call(["run", "--wheel", str(mini_wheel(tmp_path))]) == 3
    assert "No space left on device (/full/file)" in capsys.readouterr().err


def test_a_wheel_whose_requirements_are_not_met_exits_3(gate: Gate, tmp_path: Path) -> None:
    metadata = (
        "Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nRequires-Dist: torch>=99\n"
    )
    wheel = mini_wheel(tmp_path, metadata=metadata)
    done = gate("run", "--wheel", wheel, "--site", SITE, "--evidence", tmp_path / "evidence")
    assert done.returncode == 3
    assert "lacks what the wheel requires: torch>=99" in done.stderr


def test_verify_knows_what_a_repository_requires(gate: Gate, tmp_path: Path) -> None:
    wheel = mini_wheel(tmp_path)
    done = gate("verify", wheel, "--evidence", tmp_path, "--repository", "pypi")
    assert done.returncode == 5
    done = gate("verify", wheel, "--evidence", tmp_path, "--repository", "nowhere")
    assert done.returncode == 2
    assert "known are testpypi, pypi" in done.stderr


def test_a_tag_must_be_the_version(gate: Gate, tmp_path: Path) -> None:
    done = gate("run", "v9.9", "--wheel", mini_wheel(tmp_path), "--site", SITE)
    assert done.returncode == 2
    assert "There is no tag v9.9" in done.stderr


def test_every_wheel_gets_its_verdict(gate: Gate, make_suite: MakeSuite, tmp_path: Path) -> None:
    bad = mini_wheel(tmp_path / "1", b"answer = 41\n")
    good = mini_wheel(tmp_path / "2")
    suite, evidence = make_suite(), tmp_path / "evidence"
    options = ("--profile", "cpu", "--suite", suite, "--evidence", evidence)
    done = gate("run", "--wheel", bad, "--wheel", good, "--site", SITE, *options)
    assert done.returncode == 1
    assert "  single/test_one.py::test_answer\n    failed: assert 41 == 42\n" in done.stderr
    assert "next:" in done.stderr
    assert len(list(evidence.rglob("report.json"))) == 2
    statement = list(evidence.rglob("*.intoto.json"))
    assert [json.loads(path.read_text())["subject"] for path in statement] == [
        [{"name": good.name, "digest": {"sha256": sha256(good.read_bytes()).hexdigest()}}]
    ]
    # A later run that fails takes back what an earlier one attested.
    (tmp_path / "empty").mkdir()
    assert gate("run", "--wheel", good, "--site", tmp_path / "empty", *options).returncode == 3
    assert not statement[0].exists()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_inspect_lists_what_was_checked(gate: Gate, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        wheel = mini_wheel(tmp_path)
    finally:
        os.umask(before)
    done = gate("inspect", wheel.name)
    assert done.returncode == 0, done.stderr
    assert "ok  record" in done.stdout
