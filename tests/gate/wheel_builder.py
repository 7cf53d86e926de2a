"""Build real, tiny wheels, and break their real bytes."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import parse_wheel_filename

from gate import elf
from gate.audit import audit
from gate.errors import WheelRejected
from gate.policy import AuditPolicy
from gate.wheels import Wheel

REGULAR = 0o100644

POLICY = AuditPolicy(
    package="demo",
    resources=("demo/py.typed", "demo/kernels/*.cu"),
    max_bytes=1_000_000,
)


@dataclass
class Entry:
    """One member; what is None in ``info`` follows from the rest."""

    name: str
    data: bytes
    mode: int = REGULAR
    method: int = zipfile.ZIP_DEFLATED
    listed: bool = True
    date: tuple[int, int, int, int, int, int] = (2020, 2, 2, 0, 0, 0)
    system: int = 3

    def write(self, archive: zipfile.ZipFile) -> None:
        info = zipfile.ZipInfo(self.name, self.date)
        info.external_attr = self.mode << 16
        info.compress_type = self.method
        info.create_system = self.system
        archive.writestr(info, self.data)


@dataclass
class WheelBuilder:
    """A wheel that passes the audit under ``POLICY``, until something in it is changed."""

    name: str = "demo"
    version: str = "1.0"
    build: str = ""
    tag: str = "py3-none-any"
    folder: str = ""
    metadata: str = "Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
    wheel: str = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n"
    entries: list[Entry] = field(default_factory=list)
    edit_record: Callable[[str], str] = str
    record_mode: int = REGULAR

    def __post_init__(self) -> None:
        self.folder = self.folder or f"{self.name}-{self.version}.dist-info"
        if not self.entries:
            self.add("demo/__init__.py", b"answer = 42\n")
            self.add("demo/py.typed", b"")
            self.add("demo/kernels/step.cu", b"__global__ void step() {}\n")

    def add(self, name: str, data: bytes, **options: object) -> WheelBuilder:
        self.entries.append(Entry(name, data, **options))  # type: ignore[arg-type]
        return self

    def drop(self, name: str) -> WheelBuilder:
        kept = [entry for entry in self.entries if entry.name != name]
        assert len(kept) < len(self.entries), name
        self.entries = kept
        return self

    @property
    def filename(self) -> str:
        build = f"-{self.build}" if self.build else ""
        return f"{self.name}-{self.version}{build}-{self.tag}.whl"

    def all_entries(self) -> list[Entry]:
        values = {"name": self.name, "version": self.version, "tag": self.tag}
        documents = [
            Entry(f"{self.folder}/METADATA", self.metadata.format(**values).encode()),
            Entry(f"{self.folder}/WHEEL", self.wheel.format(**values).encode()),
        ]
        return [*self.entries, *(entry for entry in documents if entry.data)]

    def record(self) -> str:
        rows = [row(entry) for entry in self.all_entries() if entry.listed]
        return self.edit_record("".join([*rows, f"{self.folder}/RECORD,,\n"]))

    def write(self, directory: Path, filename: str | None = None) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / (filename or self.filename)
        record = Entry(f"{self.folder}/RECORD", self.record().encode(), mode=self.record_mode)
        with zipfile.ZipFile(path, "w") as archive:
            for entry in [*self.all_entries(), record]:
                entry.write(archive)
        return path


def row(entry: Entry) -> str:
    digest = urlsafe_b64encode(hashlib.sha256(entry.data).digest()).rstrip(b"=").decode()
    return f"{entry.name},sha256={digest},{len(entry.data)}\n"


def as_wheel(path: Path) -> Wheel:
    """The record of a wheel file, without the checks of resolving it."""
    name, version, _, _ = parse_wheel_filename(path.name)
    return Wheel(
        path=path,
        filename=path.name,
        name=name,
        version=version,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        copy=path,
    )


def findings(path: Path, policy: AuditPolicy | None = POLICY, **options: Any) -> list[str]:
    """What the audit says against a wheel that it must reject."""
    with pytest.raises(WheelRejected) as caught:
        audit(as_wheel(path), policy, **options)
    assert caught.value.exit_code == 4
    for finding in caught.value.findings:
        assert finding in str(caught.value)
    return list(caught.value.findings)


def rejects(path: Path, *expected: str, policy: AuditPolicy | None = POLICY) -> None:
    """All of the findings are those expected, each recognised by a part of it."""
    found = findings(path, policy)
    assert len(found) == len(expected), found
    for one, part in zip(found, expected, strict=True):
        assert part in one, found


def flip(path: Path, offset: int, mask: int = 0xFF) -> Path:
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)
    return path


def central(path: Path, name: str) -> int:
    """Offset of a member's entry in the central directory."""
    data = path.read_bytes()
    position = struct.unpack_from("<L", data, len(data) - 6)[0]
    while data[position : position + 4] == b"PK\1\2":
        lengths = struct.unpack_from("<3H", data, position + 28)
        if data[position + 46 : position + 46 + lengths[0]] == name.encode():
            return position
        position += 46 + sum(lengths)
    raise LookupError(name)


def local(path: Path, name: str) -> int:
    """Offset of a member's local header."""
    with zipfile.ZipFile(path) as archive:
        return archive.getinfo(name).header_offset


def patch(path: Path, offset: int, layout: str, *values: int) -> Path:
    """Overwrite a field of a header."""
    data = bytearray(path.read_bytes())
    struct.pack_into(layout, data, offset, *values)
    path.write_bytes(data)
    return path


def cubin(flags: int, abi: int) -> bytes:
    """The ELF header that NVRTC and nvcc write, followed by nothing."""
    system = 0x33 if abi <= 7 else 0x41
    ident = b"\x7fELF" + bytes([2, 1, 1, system, abi]) + bytes(7)
    return ident + struct.pack("<HHLQQQLHHHHHH", 2, 190, 1, 0, 0, 0, flags, 64, 0, 0, 0, 0, 0)


def ptx(target: str) -> bytes:
    return f"//\n// Generated\n//\n\n.version 8.8\n.target {target}\n.address_size 64\n".encode()


def manifest(builder: WheelBuilder) -> dict[str, dict[str, object]]:
    """What a build would list of the GPU code in demo/cubin and the sources in demo/src."""
    files, sources = {}, {}
    for entry in builder.entries:
        folder, _, name = entry.name.rpartition("/")
        digest = hashlib.sha256(entry.data).hexdigest()
        arch = elf.ptx_arch(entry.data) or elf.cubin_arch(entry.data)
        if folder == "demo/cubin" and arch:
            files[name] = {"arch": arch, "sha256": digest}
        elif folder == "demo/src":
            sources[name] = digest
    return {"files": files, "sources": sources}


def add_manifest(builder: WheelBuilder) -> WheelBuilder:
    return builder.add("demo/cubin/manifest.json", json.dumps(manifest(builder)).encode())
