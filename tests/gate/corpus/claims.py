"""Wheels that claim what the project does not, or lack what their own modules use."""

from __future__ import annotations

from tests.gate.corpus.case import Table
from tests.gate.corpus.package import Package

TABLE = Table([])
broken = TABLE.add


@broken("audit", "project: Requires-Python is >=3.8, pyproject.toml says >=3.10")
def wider_requires_python(package: Package) -> None:
    package.edit_info("METADATA", "Requires-Python: >=3.10", "Requires-Python: >=3.8")


@broken("audit", "project: Requires-Python is missing")
def no_requires_python(package: Package) -> None:
    package.edit_info("METADATA", "Requires-Python: >=3.10\n", "")


@broken("audit", "project: requires torch>=1.0, which is not declared")
def older_torch(package: Package) -> None:
    package.edit_info("METADATA", "Requires-Dist: torch>=2.6", "Requires-Dist: torch>=1.0")


@broken("audit", "project: License-Expression is GPL-3.0-only, pyproject.toml says MIT")
def another_licence(package: Package) -> None:
    package.edit_info("METADATA", "License-Expression: MIT", "License-Expression: GPL-3.0-only")


@broken("audit", "project: LICENSE: is another text than the project's")
def another_licence_text(package: Package) -> None:
    package.files[f"{package.info}/licenses/LICENSE"] = b"All rights reserved.\n"


@broken("audit", "own-imports: gefen: __version__ is 9.9, the wheel's is")
def another_version_in_the_package(package: Package) -> None:
    package.files["gefen/__init__.py"] += b'\n__version__ = "9.9"\n'


@broken("audit", "project: Requires-Python is >=4, pyproject.toml says >=3.10")
def for_another_python(package: Package) -> None:
    package.edit_info("METADATA", "Requires-Python: >=3.10", "Requires-Python: >=4")


@broken("audit", "wheel: tag py3-none-win_amd64 is not declared")
def for_another_platform(package: Package) -> None:
    package.filename = package.filename.replace("none-any", "none-win_amd64")
    package.edit_info("WHEEL", "none-any", "none-win_amd64")


@broken("audit", "wheel: tag py3-none-any is declared but missing")
def tag_of_one_python(package: Package) -> None:
    package.filename = package.filename.replace("py3-", "py311-")
    package.edit_info("WHEEL", "Tag: py3-", "Tag: py311-")


@broken("audit", "wheel: PyPI takes no files for the platform linux_x86_64")
def platform_that_an_index_refuses(package: Package) -> None:
    package.filename = package.filename.replace("none-any", "none-linux_x86_64")
    package.edit_info("WHEEL", "none-any", "none-linux_x86_64")
    package.edit_info("WHEEL", "Root-Is-Purelib: true", "Root-Is-Purelib: false")


@broken("audit", "metadata: Classifier Private :: Do Not Upload: indexes refuse it")
def private_classifier(package: Package) -> None:
    classifier = "Classifier: Private :: Do Not Upload\n"
    package.edit_info("METADATA", "Classifier:", f"{classifier}Classifier:")


@broken("audit", "imports gefen.blocks, which is not in the wheel")
def module_left_out(package: Package) -> None:
    del package.files["gefen/blocks.py"]


@broken(
    "audit", "own-imports: gefen/__init__.py, line", "imports routing_table from gefen.routing"
)
def name_left_out(package: Package) -> None:
    package.edit("gefen/routing.py", b"def routing_table(", b"def routing_tables(")


@broken("audit", "own-imports: gefen/kernels/launch.py, line", "uses packing.KINDS, but")
def attribute_left_out(package: Package) -> None:
    package.edit("gefen/kernels/packing.py", b"\nKINDS", b"\nKIND")


@broken("audit", "resources: gefen/__main__.py: is missing")
def no_command(package: Package) -> None:
    del package.files["gefen/__main__.py"]


@broken("audit", "python: gefen/base.py, is not Python 3.10")
def syntax_of_a_newer_python(package: Package) -> None:
    package.files["gefen/base.py"] += b"\ntry:\n    pass\nexcept* OSError:\n    pass\n"


@broken("audit", "python: gefen/base.py, line", "'tomllib' module needs Python 3.11")
def library_of_a_newer_python(package: Package) -> None:
    package.files["gefen/base.py"] += b"\n\ndef later():\n    import tomllib\n"


@broken("audit", "names: gefen/aux.py: Windows reserves the name aux.py")
def name_of_a_device(package: Package) -> None:
    package.files["gefen/aux.py"] = b""


@broken("audit", "INSTALLER: is written by installers only")
def mark_of_an_installer(package: Package) -> None:
    package.files[f"{package.info}/INSTALLER"] = b"pip\n"


@broken("audit", "direct_url.json: is written by installers only")
def origin_noted_by_an_installer(package: Package) -> None:
    package.files[f"{package.info}/direct_url.json"] = b'{"url": "file:///home/a", "dir_info": {}}'
