"""The audit's rules about the members of the archive: names, permissions, headers."""

from __future__ import annotations

import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterator

from gate.archive import Member
from gate.scan import Facts

_MAX_COMPONENT = 255
# Control characters, line separators, and marks that change the direction of writing.
_INVISIBLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]")
_TRAILING = re.compile(r"[ .](/|$)")
# Devices, with any suffix and in any case (learn.microsoft.com, "Naming Files").
_RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])\s*(\..*)?", re.I)
_NOT_ON_WINDOWS = re.compile(r'[<>"|?*]')
_UNIX, _DOS_FOLDER = 3, 0x10
# FAT, NTFS as Info-ZIP and as APPNOTE numbers it, VFAT: their modes are made up.
_WINDOWS = (0, 10, 11, 14)


def check_names(facts: Facts) -> Iterator[str]:
    """Members must be plain relative paths, each once, on any file system."""
    seen: dict[str, Member] = {}
    folders: set[str] = set()
    for member in facts.members:
        problem = _name_problem(member.name)
        if problem:
            yield f"{member.name}: {problem}"
        elif reason := _windows_problem(member.name):
            if _is_for_windows(facts):
                yield f"{member.name}: {reason}"
            else:
                facts.note("names", f"{member.name}: {reason}")
        path = member.name.removesuffix("/")
        if path in seen:
            yield f"{member.name}: is in the archive more than once"
        seen[path] = member
        folder = path if member.is_folder else path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    for path in sorted(folders & seen.keys()):
        if not seen[path].is_folder:
            yield f"{path}: is a file and a directory at once"
    spelled: dict[str, str] = {}
    for path in sorted(folders | seen.keys()):
        other = spelled.setdefault(_folded(path), path)
        if other != path:
            yield f"{path}: is the same path as {other} where case or accents are ignored"


def _folded(path: str) -> str:
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _name_problem(name: str) -> str | None:
    parts = name.removesuffix("/").split("/")
    if name.startswith("/") or ".." in parts:
        return "leads out of the installation directory"
    if "\\" in name or ":" in name:
        return "has a backslash or a colon; on Windows that is another path"
    if "" in parts or "." in parts:
        return "is not a normalised path"
    if _INVISIBLE.search(name):
        return "has control characters in its name"
    if any(len(part.encode()) > _MAX_COMPONENT for part in parts):
        return f"has a name longer than {_MAX_COMPONENT} bytes"
    if _TRAILING.search(name):
        return "has a part that ends in a space or a dot; Windows drops it"
    return None


def _windows_problem(name: str) -> str | None:
    for part in name.removesuffix("/").split("/"):
        if _RESERVED.fullmatch(part):
            return f"Windows reserves the name {part}"
        if _NOT_ON_WINDOWS.search(part):
            return "has a character that no name has on Windows"
    return None


def _is_for_windows(facts: Facts) -> bool:
    return any(tag.platform == "any" or tag.platform.startswith("win") for tag in facts.tags)


def check_permissions(facts: Facts) -> Iterator[str]:
    """Files must be regular and readable by all, and nothing writable by all or setuid."""
    for member in facts.members:
        kind, bits = stat.S_IFMT(member.mode), stat.S_IMODE(member.mode)
        if kind == stat.S_IFLNK:
            yield f"{member.name}: is a symbolic link"
            continue
        if kind not in (0, stat.S_IFDIR if member.is_folder else stat.S_IFREG):
            yield f"{member.name}: is a special file (mode {member.mode:#o})"
        if member.is_folder and member.size:
            yield f"{member.name}: is a directory with content"
        if member.external & _DOS_FOLDER and not member.is_folder:
            yield f"{member.name}: says that it is a directory, but has no name of one"
        if member.system not in _WINDOWS and not member.is_folder:
            yield from _mode_problems(member, bits)


def _mode_problems(member: Member, bits: int) -> Iterator[str]:
    if bits & 0o7002:
        yield f"{member.name}: is setuid or writable by everyone (mode {bits:#o})"
    elif member.mode and bits & 0o444 != 0o444 and not _is_info(member):
        yield f"{member.name}: is not readable by everyone (mode {bits:#o})"


def _is_info(member: Member) -> bool:
    """Installers make their own copies of these, and builders leave them private."""
    return member.name.partition("/")[0].endswith(".dist-info")


def check_headers(facts: Facts) -> Iterator[str]:
    """Nothing here reaches what is installed, but a header unlike the others may be altered."""
    odd: dict[str, list[str]] = {}
    tools = Counter(map(_tool, facts.members))
    modes = {info: Counter(_modes(facts, info)) for info in (True, False)}
    for member in facts.members:
        for what in _oddities(member, tools, modes[_is_info(member)]):
            odd.setdefault(what, []).append(member.name)
    for what, names in odd.items():
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        facts.note("headers", f"{names[0]}{others}: {what}")
    return iter(())


def _tool(member: Member) -> tuple[int, int, int]:
    """What one tool writes into the header of every file."""
    return member.system, member.made_by, member.flags & ~0x80E


def _modes(facts: Facts, info: bool) -> Iterator[int]:
    return (m.mode for m in facts.members if not m.is_folder and _is_info(m) == info)


def _oddities(
    member: Member, tools: Counter[tuple[int, int, int]], modes: Counter[int]
) -> Iterator[str]:
    tool = _tool(member)
    if tool != tools.most_common(1)[0][0]:
        yield "was packed by another tool than the other members"
    if member.system not in (0, _UNIX) or member.made_by not in range(10, 64):
        yield f"made by an unusual system, {member.system}/{member.made_by}"
    if member.extra:
        yield "has extra fields"
    if member.internal or member.external & 0xFFFF & ~0x30:
        yield "has attributes of other systems"
    if member.is_folder:
        yield "is an entry of a directory"
        return
    if member.mode and stat.S_IMODE(member.mode) & ~0o20 != 0o644:
        yield f"has mode {stat.S_IMODE(member.mode):#o}, not 0644"
    is_record = member.name.endswith(".dist-info/RECORD") and member.mode == 0o100664
    if member.mode != modes.most_common(1)[0][0] and not is_record:
        yield "has another mode than most"
