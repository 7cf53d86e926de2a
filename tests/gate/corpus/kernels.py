"""Stands in for GPU code where a wheel was built without a compiler for it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from gate import policy
from gate.elf import cubin_arch
from tests.gate.corpus.package import Package
from tests.gate.wheel_builder import cubin, ptx

IMAGES, SOURCES = "gefen/kernels/cubin", "gefen/kernels/src"
FIRST_OF_NEW_ABI = 100


def arm(package: Package, root: Path) -> None:
    """Give a wheel that has no GPU code an image for each architecture that the policy asks for.

    They have the headers of real ones, and a manifest, but no code.
    """
    if any(cubin_arch(data[:64]) for data in package.files.values()):
        return
    images = {}
    for arch in sorted(policy.load(root).audits["gefen-cuda"].cuda_archs):
        name, data = _image(arch)
        package.files[f"{IMAGES}/{name}"] = data
        images[name] = {"arch": arch, "sha256": sha256(data), "kernels": {}}
    sources = {
        name.removeprefix(f"{SOURCES}/"): sha256(data)
        for name, data in package.files.items()
        if name.startswith(f"{SOURCES}/")
    }
    manifest = json.dumps({"compiler": "none", "files": images, "sources": sources})
    package.files[f"{IMAGES}/manifest.json"] = manifest.encode()


def _image(arch: str) -> tuple[str, bytes]:
    number = int(arch.partition("_")[2])
    if arch.startswith("compute_"):
        return f"{arch}.ptx", ptx(f"sm_{number}")
    is_new = number >= FIRST_OF_NEW_ABI
    return f"{arch}.cubin", cubin(number << 8 if is_new else number, 8 if is_new else 7)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
