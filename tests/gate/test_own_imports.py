from __future__ import annotations

from pathlib import Path

import pytest

from gate.audit import audit
from tests.gate.wheel_builder import POLICY, WheelBuilder, as_wheel, findings

FILES = {
    "demo/sub/__init__.py": "from .leaf import *\nfrom . import leaf, leaf as twig\n",
    "demo/sub/leaf.py": "value = 1\nfor item in (): pass\ndef f():\n  global late\n  late = 1\n",
    "demo/hides/__init__.py": "from .driver import driver\n",
    "demo/hides/driver.py": "driver = make()\n",
    "demo/lazy.py": "def __getattr__(name): ...\n",
    "demo/fills.py": "globals()['x'] = 1\n",
    "demo/outside.py": "from os import *\n",
    "demo/folder/data.txt": "",
    "demo/fast.cpython-311-x86_64-linux-gnu.so": "",
}


def wheel(folder: Path, code: str, name: str = "demo/a.py") -> Path:
    builder = WheelBuilder()
    for path, text in FILES.items():
        builder.add(path, text.encode())
    return builder.add(name, code.encode()).write(folder)


FINE = [
    "from demo.hides import driver\ndriver.active\n",
    "from demo.lazy import anything\nfrom demo import sub\nsub.__dict__, sub.__class__\n",
    "import demo.sub.leaf as leaf\nfrom demo.sub.leaf import value, item, late, f\n",
    "from demo.sub import leaf, twig, value\nfrom . import sub\nfrom .sub import *\n",
    "from demo.lazy import anything\nfrom demo.fills import x\nfrom demo.outside import path\n",
    "from demo import folder, __file__, fast\nfrom demo.fast import f\nimport demo.fast.inner\n",
    "try:\n    from demo.gone import x\nexcept ImportError:\n    x = None\n",
    "from contextlib import suppress\nwith suppress(ImportError):\n    import demo.gone\n",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from demo.gone import X\n",
    "import demonstration\nfrom os import gone\n",
    "from demo.sub import leaf\nimport demo.lazy as lazy\nx = leaf.value, leaf.__name__, lazy.x\n",
    "from demo.sub import leaf\ndef f(leaf):\n    return leaf.gone\n",
    "from demo.sub import leaf\ndef f():\n    leaf = 1\n    return leaf.gone\n",
    "from demo.sub import leaf\nleaf = wrap(leaf)\nleaf.gone\n",
    "from demo.sub.leaf import value\nvalue.gone\n",
    "from demo.sub import leaf\ntry:\n    leaf.gone\nexcept Exception:\n    pass\n",
]


@pytest.mark.parametrize("code", FINE)
def test_what_the_wheel_holds(tmp_path: Path, code: str) -> None:
    result = audit(as_wheel(wheel(tmp_path, code)), POLICY)
    assert not [note for note in result.notes if note.startswith("own-imports")]
    assert "own-imports: 9 modules find what they import of each other" in result.checks


WRONG = {
    "import demo.gone\n": "line 1: imports demo.gone, which is not in the wheel",
    "def f():\n    from demo.sub.gone import x\n": "line 2: imports demo.sub.gone, which is",
    "from .gone import x\n": "line 1: imports demo.gone, which is not in the wheel",
    "from demo.sub.leaf import valu\n": "line 1: imports valu from demo.sub.leaf, which has none",
    "from demo.sub import f, g\n": "line 1: imports g from demo.sub, which has none",
    "from demo.sub import leaf\ndef f():\n    leaf.f, leaf.g\n": "line 3: uses leaf.g, but",
    "import demo.sub.leaf as t\nt.gone()\n": "line 2: uses t.gone, but demo.sub.leaf has no gone",
    "from .. import x\n": "line 1: imports from outside of all packages",
    "try:\n    import demo.gone\nexcept ValueError:\n    pass\n": "line 2: imports demo.gone",
    "try:\n    pass\nexcept ImportError:\n    import demo.gone\n": "line 4: imports demo.gone",
    "from demo.sub import leaf\nfrom demo.folder import data\n": "line 2: imports data from demo",
}


@pytest.mark.parametrize("code", WRONG)
def test_what_the_wheel_lacks(tmp_path: Path, code: str) -> None:
    path = wheel(tmp_path, code)
    (finding,) = findings(path)
    assert finding.startswith(f"own-imports: demo/a.py, {WRONG[code]}")
    assert audit(as_wheel(path)).notes == (finding,)


def test_from_deeper_down(tmp_path: Path) -> None:
    code = "from . import leaf\nfrom ..lazy import x\nfrom .. import answer, gone\n"
    (finding,) = findings(wheel(tmp_path, code, "demo/sub/b.py"))
    assert finding == "own-imports: demo/sub/b.py, line 3: imports gone from demo, which has none"


@pytest.mark.parametrize(
    ("code", "accepted"),
    [
        ('__version__ = "1.0"', True),
        ('__version__: str = "1.0.0"', True),
        ("__version__ = version()", True),
        ('try:\n    __version__ = find()\nexcept OSError:\n    __version__ = "0+unknown"', True),
        ('__version__ = "1.1"', False),
        ('__version__ = find()\n__version__ = "one"', False),
    ],
)
def test_the_version_that_the_package_names(tmp_path: Path, code: str, accepted: bool) -> None:
    builder = WheelBuilder().drop("demo/__init__.py").add("demo/__init__.py", code.encode())
    path = builder.write(tmp_path)
    if accepted:
        audit(as_wheel(path), POLICY)
    else:
        (finding,) = findings(path)
        assert finding.startswith("own-imports: demo: __version__ is ")
        assert audit(as_wheel(path)).notes == (finding,)


def test_a_local_version_may_be_left_out(tmp_path: Path) -> None:
    builder = WheelBuilder(version="1.0+cu130").drop("demo/__init__.py")
    builder.add("demo/__init__.py", b'__version__ = "1.0"')
    audit(as_wheel(builder.write(tmp_path)), POLICY)
