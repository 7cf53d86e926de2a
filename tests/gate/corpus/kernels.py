"""GPU code for wheels that were built without, and ways to change it so that all lists agree."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock

from gate import kernels
from gate.elf import cubin_arch
from gate.runner import Runner
from tests.gate.corpus.package import Package

_ONCE = Lock()
IMAGES = "gefen/kernels/cubin"
MANIFEST = f"{IMAGES}/manifest.json"


def arm(package: Package, root: Path) -> None:
    """Give a wheel that has no GPU code what its build would have compiled."""
    if any(cubin_arch(data[:64]) for data in package.files.values()):
        return
    with _ONCE:
        package.files.update(_images(root))


@cache
def _images(root: Path) -> dict[str, bytes]:
    """Kept where the gate keeps them, so that only the first gate of all compiles."""
    sources = {path.name: path.read_bytes() for path in (root / kernels.PACKAGE / "src").iterdir()}
    with tempfile.TemporaryDirectory() as folder:
        kernels.compile_again(sources, {}, Runner(), Path(folder))
        tree = Path(folder) / "tree"
        kernels.remember(tree)
        made = (tree / kernels.IMAGES).iterdir()
        return {f"{IMAGES}/{path.name}": path.read_bytes() for path in made}


def edit(package: Package, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change an image or a source, and what the manifest says of it."""
    path = next(path for path in package.files if path.endswith(f"/{name}"))
    changed = change(package.files[path])
    assert changed != package.files[path], f"nothing was changed in {name}"
    package.files[path] = changed

    def relist(listed: dict[str, dict[str, object]]) -> None:
        digest = hashlib.sha256(changed).hexdigest()
        if name in listed["sources"]:
            listed["sources"][name] = digest
        else:
            listed["files"][name] = {**listed["files"][name], "sha256": digest}  # type: ignore[dict-item]

    edit_manifest(package, relist)


def edit_manifest(package: Package, change: Callable[..., None]) -> None:
    listed = json.loads(package.files[MANIFEST])
    change(listed)
    package.files[MANIFEST] = json.dumps(listed).encode()
