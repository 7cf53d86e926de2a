from __future__ import annotations

from pathlib import Path

import pytest

from gate import own_imports, pythons
from gate.audit import audit
from tests.gate.wheel_builder import POLICY, WheelBuilder, as_wheel, findings


def wheel(folder: Path, code: str, pythons: str = ">=3.10") -> Path:
    builder = WheelBuilder().add("demo/a.py", code.encode())
    builder.metadata += f"Requires-Python: {pythons}\n" if pythons else ""
    return builder.write(folder)


NEWER = {
    "import tomllib\n": "line 1: 'tomllib' module needs Python 3.11",
    "\nfrom datetime import UTC\n": "line 2: 'datetime.UTC' member needs Python 3.11",
    "import typing\ndef f() -> typing.Self: ...\n": "line 2: 'typing.Self' member",
    "try:\n    pass\nexcept* OSError:\n    pass\n": "is not Python 3.10: ",
    "def f():\n    raise ExceptionGroup('', [])\n": "line 2: 'ExceptionGroup' member needs Python",
}
GUARDED = [
    "import sys\nif sys.version_info >= (3, 11):\n    import tomllib\nelse:\n    tomllib = None\n",
    "try:\n    import tomllib\nexcept ModuleNotFoundError:\n    tomllib = None\n",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from typing import Self\n",
    "from __future__ import annotations\nimport typing\ndef f() -> typing.Self: ...\n",
    "import tomllib  # novm\n",
    "import sys\nif sys.version_info < (3, 11):\n    from exceptiongroup import ExceptionGroup\n"
    "def f():\n    raise ExceptionGroup('', [])\n",
    "import sys\nx = sys.exception() if sys.version_info >= (3, 11) else None\n",
    "def f(x: int | None) -> list[int]:\n    match x:\n        case 1:\n            return []\n",
]


@pytest.mark.parametrize("code", NEWER)
def test_what_the_oldest_python_lacks(tmp_path: Path, code: str) -> None:
    path = wheel(tmp_path, code)
    (finding,) = findings(path)
    assert finding.startswith("python: demo/a.py, "), finding
    assert NEWER[code] in finding
    assert audit(as_wheel(path)).notes == (finding,)
    audit(as_wheel(wheel(tmp_path, code, "")), POLICY)
    audit(as_wheel(wheel(tmp_path, code, ">=3.11")), POLICY)


@pytest.mark.parametrize("code", GUARDED)
def test_what_is_run_only_where_it_is(tmp_path: Path, code: str) -> None:
    result = audit(as_wheel(wheel(tmp_path, code)), POLICY)
    assert "python: nothing that Python 3.10 lacks" in result.checks
    assert result.notes == ()


def test_a_python_newer_than_the_gate_s_is_not_looked_at(tmp_path: Path) -> None:
    audit(as_wheel(wheel(tmp_path, "type x = int\n", ">=3.39")), POLICY)


def test_a_wheel_with_very_much_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_imports, "_MOST_BYTES", 10)
    (note,) = audit(as_wheel(wheel(tmp_path, "import tomllib\n"))).notes
    assert note == "python: more than 10 bytes of modules: not compared"


def test_without_vermin_only_syntax_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pythons.lacking.cache_clear()
    monkeypatch.setattr(pythons, "vermin", None)
    (note,) = audit(as_wheel(wheel(tmp_path, "import tomllib\n")), POLICY).notes
    assert note == "python: vermin is not installed: only the syntax was compared"
    (finding,) = findings(wheel(tmp_path, "try: pass\nexcept* OSError: pass\n"))
    assert "is not Python 3.10" in finding
    pythons.lacking.cache_clear()
