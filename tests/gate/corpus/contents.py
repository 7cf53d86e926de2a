"""Wheels that hold the wrong files, or say the wrong things about them."""

from __future__ import annotations

import random

from tests.gate.corpus.case import Table
from tests.gate.corpus.package import Package
from tests.gate.wheel_builder import cubin

TABLE = Table([])
broken = TABLE.add

INIT = "gefen/__init__.py"
EVIL = b"import os\n"


@broken("audit", "record: gefen/gefen.py: its hash is not the one in RECORD")
def changed_file(package: Package) -> None:
    package.swapped["gefen/gefen.py"] = package.files["gefen/gefen.py"] + b"# changed\n"


@broken("audit", "record: gefen/base.py: is", "bytes, RECORD says 7")
def wrong_size_in_record(package: Package) -> None:
    size = f",{len(package.files['gefen/base.py'])}\n".encode()
    package.edit_record = lambda record: record.replace(size, b",7\n", 1)


@broken("audit", "record: gefen/base.py: is listed in RECORD but missing from the wheel")
def missing_member(package: Package) -> None:
    data = package.files.pop("gefen/base.py")
    row = f"gefen/base.py,sha256=0,{len(data)}\n".encode()
    package.edit_record = lambda record: row + record


@broken("audit", "record: gefen/extra.py: is not listed in RECORD")
def extra_member(package: Package) -> None:
    package.add("gefen/extra.py", EVIL, listed=False)


@broken("audit", "record: gefen/base.py: is listed twice")
def file_listed_twice(package: Package) -> None:
    package.edit_record = lambda record: record + b"gefen/base.py,sha256=0,1\n"


@broken("audit", "dist-info: RECORD is missing")
def no_record(package: Package) -> None:
    package.edit_record = None


@broken("audit", "RECORD does not list itself")
def record_that_does_not_list_itself(package: Package) -> None:
    package.edit_record = lambda record: record.replace(f"{package.record},,\n".encode(), b"")


@broken("audit", "RECORD takes sha256, sha384, sha512")
def weak_hashes(package: Package) -> None:
    package.edit_record = lambda record: record.replace(b"sha256=", b"md5=")


@broken("audit", "record: gefen/__init__.py: has hash ''; RECORD takes")
def file_without_a_hash(package: Package) -> None:
    def bare(record: bytes) -> bytes:
        first, rest = record.split(b"\n", 1)
        return first.split(b",")[0] + b",,\n" + rest

    package.edit_record = bare


@broken("audit", "record: gefen/../gefen/x.py: is not a normalised relative path")
def record_that_leads_elsewhere(package: Package) -> None:
    package.edit_record = lambda record: record + b"gefen/../gefen/x.py,sha256=0,1\n"


@broken("audit", "record: gefen/kernels/: is a directory; RECORD lists files")
def directory_in_record(package: Package) -> None:
    package.edit_record = lambda record: record + b"gefen/kernels/,,\n"


@broken("audit", "RECORD: has mixed line endings")
def mixed_line_endings_in_record(package: Package) -> None:
    package.edit_record = lambda record: record.replace(b"\n", b"\r\n", 3)


@broken("audit", "METADATA: has mixed line endings")
def mixed_line_endings_in_metadata(package: Package) -> None:
    package.edit_info("METADATA", "\nVersion", "\r\nVersion")


@broken("audit", "dist-info: 2 dist-info folders, not 1")
def two_dist_infos(package: Package) -> None:
    package.add("other-1.0.dist-info/METADATA", b"Metadata-Version: 2.1\nName: other\n")


@broken("audit", "dist-info: 2 dist-info folders, not 1")
def two_versions_of_dist_info(package: Package) -> None:
    other = package.files[f"{package.info}/METADATA"].replace(b"Version: 0", b"Version: 9")
    package.add("gefen_cuda-0.0.9.dist-info/METADATA", other)


@broken("audit", "gefen_cuda.egg-info: a second record of what is installed")
def egg_info_beside_dist_info(package: Package) -> None:
    package.add("gefen_cuda.egg-info/PKG-INFO", b"Name: other\n")


@broken("audit", "dist-info", "the file name says gefen-cuda")
def dist_info_of_another_version(package: Package) -> None:
    name = package.filename
    package.rename("gefen_cuda-9.9")
    package.filename = name


@broken("resolve", "its METADATA is of gefen-cuda 9.9, the file name says gefen-cuda")
def metadata_of_another_version(package: Package) -> None:
    version = package.dist.partition("-")[2]
    package.edit_info("METADATA", f"Version: {version}\n", "Version: 9.9\n")


@broken("resolve", "its METADATA is of", "+cu130, the file name says gefen-cuda")
def metadata_with_a_local_version(package: Package) -> None:
    version = package.dist.partition("-")[2]
    package.edit_info("METADATA", f"Version: {version}\n", f"Version: {version}+cu130\n")


@broken("resolve", "its METADATA is of gefen-x")
def metadata_of_another_distribution(package: Package) -> None:
    package.edit_info("METADATA", "Name: gefen-cuda", "Name: gefen-x")


@broken("resolve", "has no *.dist-info/METADATA; this is no wheel")
def no_metadata(package: Package) -> None:
    del package.files[f"{package.info}/METADATA"]


@broken("audit", "is not a valid metadata version")
def metadata_of_an_unknown_kind(package: Package) -> None:
    package.edit_info("METADATA", "Metadata-Version: 2", "Metadata-Version: 9")


@broken("audit", "metadata: License-File LICENSE is missing")
def missing_licence(package: Package) -> None:
    del package.files[f"{package.info}/licenses/LICENSE"]


@broken("audit", "project: requires requests, which is not declared")
def requirement_that_is_not_declared(package: Package) -> None:
    package.edit_info("METADATA", "Requires-Dist:", "Requires-Dist: requests\nRequires-Dist:")


@broken("audit", "metadata: Requires-Dist has a URL")
def requirement_from_a_url(package: Package) -> None:
    url = "Requires-Dist: torch @ https://example.invalid/torch-2.13.0-py3-none-any.whl"
    package.edit_info("METADATA", "Requires-Dist:", f"{url}\nRequires-Dist:")


@broken("audit", "project: does not require numpy, as declared")
def requirement_left_out(package: Package) -> None:
    package.edit_info("METADATA", "Requires-Dist: numpy\n", "")


@broken("audit", "wheel: WHEEL has Tag py3-none-any, the file name does not")
def renamed_to_another_platform(package: Package) -> None:
    package.filename = package.filename.replace("none-any", "none-manylinux_2_28_x86_64")


@broken("audit", "wheel: WHEEL has Tag py2-none-any, the file name does not")
def tag_that_the_name_lacks(package: Package) -> None:
    package.edit_info("WHEEL", "Tag: py3", "Tag: py2-none-any\nTag: py3")


@broken("audit", "wheel: WHEEL has Build none, the file name ['7']")
def build_number_that_wheel_lacks(package: Package) -> None:
    package.filename = package.filename.replace("-py3", "-7-py3")


@broken("audit", "wheel: Root-Is-Purelib is false, but the tags fit any platform")
def wrong_root_is_purelib(package: Package) -> None:
    package.edit_info("WHEEL", "Root-Is-Purelib: true", "Root-Is-Purelib: false")


@broken("audit", "wheel: Wheel-Version is '2.0', installers know 1.x")
def wheel_of_an_unknown_kind(package: Package) -> None:
    package.edit_info("WHEEL", "Wheel-Version: 1.0", "Wheel-Version: 2.0")


@broken("audit", "dist-info: WHEEL is missing")
def no_wheel_file(package: Package) -> None:
    del package.files[f"{package.info}/WHEEL"]


@broken("resolve", "Invalid wheel filename")
def name_of_no_wheel(package: Package) -> None:
    package.filename = "gefen-cuda.whl"


@broken("resolve", "is a source distribution, not a wheel")
def source_distribution(package: Package) -> None:
    package.filename = "gefen_cuda-0.1.0.tar.gz"


@broken("audit", "startup: gefen.pth: runs at every start of Python")
def pth_file(package: Package) -> None:
    package.add("gefen.pth", b"import os; os.environ.get('HOME')\n")


@broken("audit", "runs at every start of Python")
def pth_file_by_way_of_data(package: Package) -> None:
    package.add(f"{package.data}/purelib/zzz.pth", b"import os\n")


@broken("audit", "startup: sitecustomize.py: runs at every start of Python")
def sitecustomize(package: Package) -> None:
    package.add("sitecustomize.py", EVIL)


@broken("audit", "startup: usercustomize: runs at every start of Python")
def usercustomize_as_a_package(package: Package) -> None:
    package.add("usercustomize/__init__.py", EVIL)


@broken("audit", "top-level: tests: stray top-level name; the wheel may install gefen only")
def stray_tests(package: Package) -> None:
    package.add("tests/test_gefen.py", b"def test_it(): pass\n")


@broken("audit", "top-level: torch: stray top-level name; the wheel may install gefen only")
def package_of_another_name(package: Package) -> None:
    package.add("torch/__init__.py", EVIL)


@broken("audit", "top-level: pytest.py: stray top-level name")
def module_that_shadows_pytest(package: Package) -> None:
    package.add("pytest.py", EVIL)


@broken("audit", "top-level: gefen.py: stray top-level name")
def module_that_shadows_gefen(package: Package) -> None:
    package.add("gefen.py", EVIL)


@broken("audit", "top-level: the package gefen is missing")
def no_package(package: Package) -> None:
    package.files = {
        name.replace("gefen/", "gefen_cuda/", 1): data for name, data in package.files.items()
    }


@broken("audit", "tests do not belong into the wheel")
def conftest_in_the_package(package: Package) -> None:
    package.add("gefen/conftest.py", b"collect_ignore_glob = ['*']\n")


@broken("audit", "would be installed outside the package")
def script(package: Package) -> None:
    package.add(f"{package.data}/scripts/python", b"#!python\n")


@broken("audit", "would be installed outside the package")
def package_by_way_of_data(package: Package) -> None:
    package.add(f"{package.data}/purelib/gefen/base.py", EVIL)


@broken("audit", "entry-points: pytest11:gefen: would load itself into every pytest run")
def pytest_plugin(package: Package) -> None:
    package.add(f"{package.info}/entry_points.txt", b"[pytest11]\ngefen = gefen.base\n")


@broken("audit", "entry-points: console_scripts:pip: is not declared")
def console_script(package: Package) -> None:
    package.add(f"{package.info}/entry_points.txt", b"[console_scripts]\npip = gefen:main\n")


@broken("audit", "entry-points: entry_points.txt cannot be parsed")
def unreadable_entry_points(package: Package) -> None:
    package.add(f"{package.info}/entry_points.txt", b"gefen = gefen.base\n")


@broken("audit", "imports: gefen/base.py: imports _pytest, which is not declared")
def import_of_a_test_tool(package: Package) -> None:
    package.files["gefen/base.py"] += b"\n\ndef later():\n    import _pytest.runner\n"


@broken("audit", "imports: gefen/base.py: imports triton, which is not declared")
def import_of_what_nothing_requires(package: Package) -> None:
    package.files["gefen/base.py"] += b"\ntry:\n    import triton\nexcept ImportError: pass\n"


@broken("audit", "imports: gefen/base.py: is not Python")
def syntax_error(package: Package) -> None:
    package.files["gefen/base.py"] += b"\nprint 'hello'\n"


@broken("audit", "imports: gefen/base.py: is not Python")
def conflict_markers(package: Package) -> None:
    package.files["gefen/base.py"] += b"\n<<<<<<< HEAD\nx = 1\n=======\nx = 2\n>>>>>>> other\n"


@broken("audit", "junk: gefen/__pycache__/base.cpython-311.pyc: does not belong into a wheel")
def bytecode(package: Package) -> None:
    package.add("gefen/__pycache__/base.cpython-311.pyc", b"\0" * 16)


@broken("audit", "junk: gefen/.git/config: does not belong into a wheel")
def repository_folder(package: Package) -> None:
    package.add("gefen/.git/config", b"[remote]\n")


@broken("audit", "junk: gefen/deploy: is a private key")
def private_key(package: Package) -> None:
    key = b"-----BEGIN OPENSSH PRIVATE KEY-----\n"
    package.add("gefen/deploy", key)


@broken("audit", "machine code for x86-64 in a wheel for any platform")
def machine_code(package: Package) -> None:
    package.add("gefen/preload.so", b"\x7fELF\2\1\1" + bytes(9) + b"\3\0\x3e\0" + bytes(64))


@broken("audit", "size: ", "allowed")
def too_large(package: Package) -> None:
    package.add("gefen/weights.bin", random.Random(0).randbytes(9 * 2**20))


@broken("audit", "resources: gefen/py.typed: is missing")
def no_py_typed(package: Package) -> None:
    del package.files["gefen/py.typed"]


@broken("audit", "resources: ", ".cu", "is missing")
def no_kernel_source(package: Package) -> None:
    for name in [name for name in package.files if name.endswith(".cu")]:
        del package.files[name]


@broken("audit", "resources: ", "is empty")
def empty_kernel_source(package: Package) -> None:
    package.files[next(name for name in package.files if name.endswith(".cu"))] = b""


def image(arch: str) -> str:
    """Name of the file with the code for an architecture."""
    return f"gefen/kernels/cubin/{arch}.cubin"


@broken("audit", "cuda: sm_90: is declared but not embedded")
def missing_cubin(package: Package) -> None:
    del package.files[image("sm_90")]


@broken("audit", "cuda: compute_75: is declared but not embedded")
def missing_ptx(package: Package) -> None:
    del package.files["gefen/kernels/cubin/compute_75.ptx"]


@broken("audit", "cuda: sm_70: is embedded but not declared")
def cubin_that_is_not_declared(package: Package) -> None:
    package.add(image("sm_70"), cubin(70, 7))


@broken("audit", "cuda: gefen/kernels/cubin/sm_90.cubin: was compiled for sm_80")
def cubin_under_another_name(package: Package) -> None:
    package.files[image("sm_90")] = package.files[image("sm_80")]


@broken("audit", "cuda: gefen/kernels/cubin/sm_90.cubin: is no cubin")
def cubin_that_is_none(package: Package) -> None:
    package.files[image("sm_90")] = b"\x7fELF" + bytes(60)


@broken("audit", "a fat binary, whose architectures the audit cannot read")
def fat_binary(package: Package) -> None:
    package.add("gefen/kernels/cubin/all.fatbin", bytes.fromhex("50ed55ba") + bytes(60))
