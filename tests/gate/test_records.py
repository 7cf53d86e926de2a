from __future__ import annotations

import os
from pathlib import Path

from gate import records


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "fifo")
    assert records.read(tmp_path / "file") == b"{}"
    for name in ("link", "fifo", "absent", "."):
        assert records.read(tmp_path / name) is None


def test_json_of_another_kind_is_none(tmp_path: Path) -> None:
    for text in ("", "{", "[]", "\xff"):
        (tmp_path / "file").write_text(text, encoding="latin-1")
        assert records.read_json(tmp_path / "file", dict) is None
    (tmp_path / "file").write_text('{"a": 1}')
    assert records.read_json(tmp_path / "file", dict) == {"a": 1}


def test_links_and_pipes_are_not_kept(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_text("x")
    (source / "link").symlink_to("/etc/passwd")
    (source / "folder").symlink_to("/etc")
    os.mkfifo(source / "fifo")
    records.keep(source, tmp_path / "kept")
    kept = [
        path.relative_to(tmp_path / "kept").as_posix() for path in records.files(tmp_path / "kept")
    ]
    assert kept == ["deep/file"]
    assert records.size(source) >= 1
