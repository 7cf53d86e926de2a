"""Wheels that are odd, but in order: the gate must let them pass."""

from __future__ import annotations

import hashlib
import re
import struct
import zipfile
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


def executable_file(package: Package) -> None:
    package.modes["gefen/__main__.py"] = 0o100755


# What follows was recorded from wheels that these tools made of one small project.


def built_by_flit(package: Package) -> None:
    """flit 4.2: its RECORD has the line endings of Windows everywhere."""
    package.edit_record = lambda record: record.replace(b"\n", b"\r\n")
    package.edit_metadata(lambda lines: [*sorted(lines, key=_by_flit), "Import-Name: gefen"])
    package.modes.update(dict.fromkeys([*package.files, package.record], 0o100644))


def _by_flit(line: str) -> bool:
    return line.startswith(("License", "Requires-Dist"))


def built_by_pdm(package: Package) -> None:
    """pdm-backend 2.5: a private RECORD, and entry points that are none."""
    package.files[f"{package.info}/entry_points.txt"] = b"[console_scripts]\n\n[gui_scripts]\n\n"
    package.modes.update(dict.fromkeys(package.files, 0o100644))
    package.modes[package.record] = 0o600


def built_by_poetry(package: Package) -> None:
    """poetry-core 2.5: versions in brackets; RECORD alone has no type in its mode."""
    name = f"{package.info}/METADATA"
    package.files[name] = re.sub(
        rb"^(Requires-Dist: \w+) ?([<>=]\S+)$", rb"\1 (\2)", package.files[name], flags=re.M
    )
    assert b"torch (>=2.6)" in package.files[name]
    package.modes.update(dict.fromkeys(package.files, 0o100644))
    package.modes[package.record] = 0o644


def built_by_setuptools(package: Package) -> None:
    """setuptools 84: it lists the package, and its RECORD may be written by the group."""
    package.files[f"{package.info}/top_level.txt"] = b"gefen\n"
    package.edit_metadata(lambda lines: [*lines, "Dynamic: license-file"])
    package.modes.update(dict.fromkeys(package.files, 0o100644))
    package.modes[package.record] = 0o100664


def built_by_old_setuptools(package: Package) -> None:
    """setuptools 68: License-File in Metadata 2.1, and the licence without a folder."""
    licence = package.files.pop(f"{package.info}/licenses/LICENSE")
    package.files[f"{package.info}/LICENSE"] = licence
    package.edit_metadata(lambda lines: [_in_2_1(line) for line in lines])
    package.modes[package.record] = 0o100664


def _in_2_1(line: str) -> str:
    line = line.replace("License-Expression:", "License:")
    return "Metadata-Version: 2.1" if line.startswith("Metadata-Version:") else line


def built_by_uv(package: Package) -> None:
    """uv 0.13: entries of folders, headers of version 6.3, all names marked as UTF-8."""
    package.add_folders()

    def header(info: zipfile.ZipInfo) -> None:
        info.create_version = 63

    package.edit_header = header


def packed_by_zipfile(package: Package) -> None:
    """``python -m zipfile -c``: entries of folders, nothing else."""
    package.add_folders()
    package.modes.update(dict.fromkeys([*package.files, package.record], 0o100644))


def packed_by_info_zip(package: Package) -> None:
    """``zip -r``: owners and times in extra fields, what is text marked as such."""
    package.add_folders()
    times = struct.pack("<2HBL", 0x5455, 5, 3, 0x6B0E8F39)
    owners = struct.pack("<2H2BLBL", 0x7875, 11, 1, 4, 0, 4, 0)
    package.modes.update(dict.fromkeys([*package.files, package.record], 0o100644))

    def header(info: zipfile.ZipInfo) -> None:
        info.create_version, info.extra = 30, times + owners
        info.internal_attr = int(info.filename.endswith((".py", "METADATA")))
        if info.is_dir():
            info.external_attr |= 0x10

    package.edit_header = header


def packed_on_windows(package: Package) -> None:
    """Modes that Windows makes up, and its line endings in all documents."""
    package.modes.update(dict.fromkeys([*package.files, package.record], 0o100666))
    package.edit_record = lambda record: record.replace(b"\n", b"\r\n")
    for document in ("METADATA", "WHEEL", "licenses/LICENSE"):
        name = f"{package.info}/{document}"
        package.files[name] = package.files[name].replace(b"\n", b"\r\n")

    def header(info: zipfile.ZipInfo) -> None:
        info.create_system = 0

    package.edit_header = header


def spelled_requirements(package: Package) -> None:
    """The same requirements in another order, with capitals and spaces."""

    def edit(lines: list[str]) -> list[str]:
        others = [line for line in lines if not line.startswith("Requires-Dist:")]
        return [*others, "Requires-Dist: Torch >= 2.6.0", "Requires-Dist:  NumPy"]

    package.edit_metadata(edit)


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
    executable_file,
    built_by_flit,
    built_by_pdm,
    built_by_poetry,
    built_by_setuptools,
    built_by_old_setuptools,
    built_by_uv,
    packed_by_zipfile,
    packed_by_info_zip,
    packed_on_windows,
    spelled_requirements,
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
