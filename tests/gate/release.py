"""A small project at a tagged commit, with wheels and evidence, ready to be published."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gate.errors import GateError
from gate.evidence import suite_digest, write_statement
from gate.publish import Options, Published, publish
from gate.report import Display
from tests.gate.conftest import GREEN, ROOT
from tests.gate.index_server import LOGIN
from tests.gate.wheel_builder import WheelBuilder, as_wheel

CODE = b"answer = 42\n"
PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "mini"
version = "1.0"
readme = "README.md"
[tool.hatch.build.targets.wheel]
packages = ["src/mini"]
[tool.hatch.build.targets.sdist]
include = ["/src", "/README.md"]
[tool.gate.audit.mini]
package = "mini"
source = "src"
max-bytes = 1_000_000
"""
METADATA = (
    "Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
    "Description-Content-Type: text/plain\n\nA small project.\n"
)
ENVIRON = {"TWINE_USERNAME": LOGIN[0], "TWINE_PASSWORD": LOGIN[1]}
IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@example.invalid")


@dataclass
class Checkout:
    """A clone of the project ``mini``, whose HEAD is v1.0."""

    root: Path

    @classmethod
    def make(cls, root: Path) -> Checkout:
        suite = {f"tests/regression/{name}": text for name, text in GREEN.items()}
        ignored = "/dist/\n/gate-evidence/\n__pycache__/\n"
        files = {
            **suite,
            "src/mini/__init__.py": CODE.decode(),
            "pyproject.toml": PYPROJECT,
            "README.md": "# mini\n",
            ".gitignore": ignored,
            "ci/allowed_signers": "",
        }
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        checkout = cls(root)
        checkout.git("init", "--quiet")
        checkout.release()
        return checkout

    def with_gate(self) -> Checkout:
        """Put a copy of the gate into the release, which can then be run from it."""
        names = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "gate", self.root / "gate", ignore=names)
        shutil.copyfile(ROOT / "ci" / "constraints.txt", self.root / "ci" / "constraints.txt")
        self.release()
        return self

    def release(self) -> None:
        """Commit everything there is, and tag it v1.0."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "release")
        self.git("tag", "--force", "v1.0")

    def git(self, *words: str) -> str:
        command = ["git", "-C", self.root, *IDENTITY, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    @property
    def evidence(self) -> Path:
        return self.root / "gate-evidence"

    def wheel(
        self,
        build: str = "",
        code: bytes = CODE,
        folder: str = "dist",
        method: int = zipfile.ZIP_DEFLATED,
        **options: Any,
    ) -> Path:
        given = {"metadata": METADATA, **options}
        builder = WheelBuilder(name="mini", build=build, **given)
        for name in ("demo/__init__.py", "demo/py.typed", "demo/kernels/step.cu"):
            builder.drop(name)
        if build:
            builder.wheel += f"Build: {build}\n"
        builder.add("mini/__init__.py", code, method=method)
        return builder.write(self.root / folder)

    def attest(self, *wheels: Path, **changes: Any) -> None:
        """Leave the evidence that a passing gate run leaves."""
        for wheel in wheels:
            given = {
                "profile": "cpu",
                "environment": {"torch": "2.13.0", "python": "3.11.7", "dirty": False},
                "suite_digest": suite_digest(self.root / "tests" / "regression"),
                "commit": self.git("rev-parse", "HEAD"),
                "executed_archs": (),
                "embedded_archs": (),
                "passed_tests": ["a"],
                "files": [],
                "started": "2026-01-01T00:00:00Z",
                "finished": "2026-01-01T00:00:01Z",
            }
            write_statement(self.evidence, wheel=as_wheel(wheel), **{**given, **changes})

    def publish(self, url: str, *files: Path | str, **changes: Any) -> list[Published]:
        given = {
            "repository": url,
            "evidence": self.evidence,
            "environ": ENVIRON,
            "timeout": 30.0,
            "files": tuple(map(str, files)) or ("dist",),
        }
        return publish(Options(base=self.root, root=self.root, **{**given, **changes}), Display())

    def refusal(self, kind: type[GateError], url: str, *files: Path | str, **changes: Any) -> str:
        """Why publishing is refused."""
        with pytest.raises(kind) as caught:
            self.publish(url, *files, **changes)
        assert caught.type is kind
        return str(caught.value)
