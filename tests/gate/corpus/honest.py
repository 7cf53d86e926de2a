"""Wheels that are odd, but in order: the gate must let them pass."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode

from tests.gate.corpus.case import Case, Sabotage
from tests.gate.corpus.package import Package


def as_built(package: Package) -> None:
    """Nothing changed."""


def very_compressible(package: Package) -> None:
    """A table of 96 MiB of zeros: a thousandth of it is downloaded."""
    package.files["gefen/table.bin"] = bytes(96 * 2**20)


def many_members(package: Package) -> None:
    for number in range(3000):
        package.files[f"gefen/data/{number % 100}/{number}.txt"] = b"%d\n" % number


def local_version(package: Package) -> None:
    version = package.dist.partition("-")[2]
    local = f"{version}+cu130.torch2.13.local.1"
    package.edit_info("METADATA", f"Version: {version}\n", f"Version: {local}\n")
    package.rename(f"gefen_cuda-{local}")


def build_tag(package: Package) -> None:
    package.filename = package.filename.replace("-py3", "-20261130build.7-py3")
    package.edit_info("WHEEL", "Tag: ", "Build: 20261130build.7\nTag: ")


def long_names(package: Package) -> None:
    part = "deep_" * 40
    package.files[f"gefen/{part}/{part}/{'long_' * 49}.txt"] = b"\n"


def spelled_otherwise(package: Package) -> None:
    """A name that is the same only once normalised, and several tags in one."""
    name = package.filename
    version = package.dist.partition("-")[2]
    package.rename(f"Gefen.CUDA-{version}")
    package.filename = name.replace("py3-", "py2.py3-")
    package.edit_info("WHEEL", "Tag: py3-", "Tag: py2-none-any\nTag: py3-")


def non_ascii_names(package: Package) -> None:
    package.files["gefen/données/größe ü.txt"] = "größer\n".encode()


def non_ascii_metadata(package: Package) -> None:
    package.files[f"{package.info}/METADATA"] += "\nÜber Optimierer: größer, 更快\n".encode()


def stronger_hashes(package: Package) -> None:
    """The manifest of GPU code has its own, so that only the others can be of another kind."""

    def longer(record: bytes) -> bytes:
        return b"".join(map(_stronger, record.splitlines(keepends=True)))

    def _stronger(row: bytes) -> bytes:
        name = row.split(b",")[0].decode()
        data = package.files.get(name)
        if data is None or name.startswith("gefen/kernels/"):
            return row
        digest = urlsafe_b64encode(hashlib.sha512(data).digest()).rstrip(b"=").decode()
        return f"{name},sha512={digest},{len(data)}\n".encode()

    package.edit_record = longer


ODD: tuple[Sabotage, ...] = (
    as_built,
    very_compressible,
    many_members,
    local_version,
    build_tag,
    long_names,
    spelled_otherwise,
    non_ascii_names,
    non_ascii_metadata,
    stronger_hashes,
)


def odd_in_every_way(package: Package) -> None:
    for change in (very_compressible, many_members, build_tag, long_names, local_version):
        change(package)


def passing(name: str, sabotage: Sabotage, tests: tuple[str, ...], seconds: float) -> Case:
    return Case(
        name=name,
        sabotage=sabotage,
        phase="",
        words=("passed profile cpu",),
        exit_code=0,
        seconds=seconds,
        tests=tests,
    )
