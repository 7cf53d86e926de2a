"""A real wheel taken apart, to be changed and put together again."""

from __future__ import annotations

import hashlib
import warnings
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePath

Edit = Callable[[bytes], bytes]


def unchanged(data: bytes) -> bytes:
    return data


def as_it_is(header: zipfile.ZipInfo) -> None:
    pass


@dataclass
class Extra:
    """A member that is added as it is: RECORD does not list it unless asked to."""

    name: str
    data: bytes
    listed: bool = False


@dataclass
class Package:
    """The files of a wheel by name; ``write`` makes a consistent wheel of them, then breaks it.

    Attributes:
        filename: the name of the wheel file.
        dist: name and version, as in the names of its folders.
        files: contents of all members but RECORD.
        modes: Unix file types and permissions, where they are not a builder's.
        methods: compression methods, where they are not a builder's.
        swapped: what is packed in place of what RECORD lists.
        extras: further members, also such with the names of others.
        edit_record: changes RECORD; with None there is no RECORD.
        edit_header: changes the header of each member, once the others are applied.
        edit_archive: changes the finished file.
    """

    filename: str
    dist: str
    files: dict[str, bytes]
    headers: dict[str, zipfile.ZipInfo] = field(repr=False)
    modes: dict[str, int] = field(default_factory=dict)
    methods: dict[str, int] = field(default_factory=dict)
    swapped: dict[str, bytes] = field(default_factory=dict)
    extras: list[Extra] = field(default_factory=list)
    edit_record: Edit | None = unchanged
    edit_header: Callable[[zipfile.ZipInfo], None] = as_it_is
    edit_archive: Edit = unchanged

    @classmethod
    def read(cls, wheel: Path) -> Package:
        with zipfile.ZipFile(wheel) as archive:
            headers = {info.filename: info for info in archive.infolist()}
            files = {name: archive.read(name) for name in headers}
        info = next(name.partition("/")[0] for name in files if ".dist-info/" in name)
        del files[f"{info}/RECORD"]
        dist = info.removesuffix(".dist-info")
        return cls(filename=wheel.name, dist=dist, files=files, headers=headers)

    @property
    def info(self) -> str:
        return f"{self.dist}.dist-info"

    @property
    def data(self) -> str:
        return f"{self.dist}.data"

    @property
    def record(self) -> str:
        return f"{self.info}/RECORD"

    def edit(self, name: str, old: bytes, new: bytes) -> None:
        """Replace text that must be there."""
        assert old in self.files[name], f"{name} does not hold {old!r}"
        self.files[name] = self.files[name].replace(old, new, 1)

    def edit_info(self, document: str, old: str, new: str) -> None:
        self.edit(f"{self.info}/{document}", old.encode(), new.encode())

    def on_import(self, code: str) -> None:
        """Run code once the package has been imported; CHECKOUT in it is the checkout."""
        code = code.replace("CHECKOUT", str(Path(__file__).parents[3]))
        self.files["gefen/__init__.py"] += f"\n{code}\n".encode()

    def on_step(self, code: str) -> None:
        """Run code in place of each step; ``inner(self, *args, **kwargs)`` is the real one."""
        body = "\n".join(f"        {line}" for line in code.strip().splitlines())
        self.on_import(STEP.replace("        BODY", body))

    def rename(self, dist: str) -> None:
        """Move what is in folders named for the name and version to others."""
        for name in list(self.files):
            if name.startswith(f"{self.dist}."):
                moved = dist + name.removeprefix(self.dist)
                self.files[moved] = self.files.pop(name)
                self.headers[moved] = self.headers[name]
        self.headers[f"{dist}.dist-info/RECORD"] = self.headers[self.record]
        self.filename = self.filename.replace(self.dist, dist)
        self.dist = dist

    def add_folders(self) -> None:
        """Add an entry for each folder, as tools do that pack folders."""
        folders = {
            str(parent) for name in [*self.files, self.record] for parent in PurePath(name).parents
        }
        for folder in sorted(folders - {"."}):
            self.extras.insert(0, Extra(f"{folder}/", b""))
            self.modes[f"{folder}/"] = 0o040755
            self.methods[f"{folder}/"] = zipfile.ZIP_STORED

    def edit_metadata(self, edit: Callable[[list[str]], list[str]]) -> None:
        """Change the fields of METADATA, each a line, and leave the description as it is."""
        name = f"{self.info}/METADATA"
        fields, _, description = self.files[name].partition(b"\n\n")
        lines = edit(fields.decode().splitlines())
        self.files[name] = "\n".join(lines).encode() + b"\n\n" + description

    def add(self, name: str, data: bytes, *, listed: bool = True) -> None:
        self.extras.append(Extra(name, data, listed))

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.filename
        members = [*self.files.items(), *((extra.name, extra.data) for extra in self.extras)]
        if self.edit_record is not None:
            members.append((self.record, self.edit_record(self._record())))
        with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
            warnings.simplefilter("ignore")  # a name that comes twice is often the point
            for name, data in members:
                archive.writestr(self._header(name), self.swapped.get(name, data))
        path.write_bytes(self.edit_archive(path.read_bytes()))
        return path

    def _record(self) -> bytes:
        listed = [*self.files.items(), *((e.name, e.data) for e in self.extras if e.listed)]
        rows = [f"{name},sha256={encoded(data)},{len(data)}\n" for name, data in listed]
        return "".join([*rows, f"{self.record},,\n"]).encode()

    def _header(self, name: str) -> zipfile.ZipInfo:
        beside = [key for key in self.headers if key.split("/")[0] == name.split("/")[0]]
        like = next(iter(beside), "gefen/__init__.py")
        source = self.headers.get(name, self.headers[like])
        header = zipfile.ZipInfo(name, source.date_time)
        header.create_system = source.create_system
        header.external_attr = source.external_attr
        header.compress_type = self.methods.get(name, source.compress_type)
        if name in self.modes:
            header.external_attr = self.modes[name] << 16
        self.edit_header(header)
        return header


STEP = """
def _sabotage(cls):
    inner = cls.step

    def step(self, *args, **kwargs):
        BODY

    cls.step = step


for _cls in (Gefen, GefenMuon):
    _sabotage(_cls)
"""


def encoded(data: bytes) -> str:
    return urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
