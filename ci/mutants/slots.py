"""Copies of the checkout, each with an environment and a process that runs its tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Slot:
    """A copy of the checkout at ``root`` and the process that runs its tests."""

    root: Path
    process: subprocess.Popen[str]

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Have other contents in one file, for a while."""
        path = self.root / file
        before = path.read_text()
        path.write_text(text)
        try:
            yield
        finally:
            path.write_text(before)

    def ask(self, starts: Sequence[dict[str, Any]], trace: Path | None = None) -> dict[str, Any]:
        """Run tests; return the answer that ``zygote.py`` describes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"starts": list(starts), "trace": trace and str(trace)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that runs the tests of {self.root} ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def slots(folder: Path, count: int, imports: Sequence[str]) -> Iterator[list[Slot]]:
    """Make ``count`` slots in ``folder``; end their processes afterwards."""
    with ExitStack() as stack:
        made = []
        for number in range(count):
            root = folder / f"slot{number}"
            _copy(root)
            process = subprocess.Popen(
                [_environment(root), "-B", CHECKOUT / "ci/mutants/zygote.py", root, *imports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=root,
            )
            stack.callback(process.wait)
            assert process.stdin is not None
            stack.callback(process.stdin.close)
            made.append(Slot(root, process))
        yield made


def _copy(root: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.split("\0"):
        if name and (CHECKOUT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, root / name)


def _environment(root: Path) -> Path:
    """An environment that has what this one has, and the package of the slot."""
    place = root.with_name(f"{root.name}.venv")
    venv.create(place, symlinks=True)
    inside = next((place / "lib").glob("python*")) / "site-packages"
    lines = [str(root / "src"), *(entry for entry in sys.path if "site-packages" in entry)]
    (inside / "slot.pth").write_text("\n".join(lines) + "\n")
    return place / "bin" / Path(sys.executable).name
