from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gate import elf, kernels
from gate.errors import BuildFailed, KernelsSpill
from gate.policy import load
from gate.runner import Runner

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree, in a folder with a space, with this project's compiling and one kernel."""
    monkeypatch.setenv("GATE_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "a tree"
    sources = root / kernels.PACKAGE / "src"
    sources.mkdir(parents=True)
    shutil.copy(ROOT / kernels.PACKAGE / "compile.py", root / kernels.PACKAGE)
    unit = 'extern "C" __global__ void unit(const void* table, long long items) {}\n'
    (sources / "unit.cu").write_text(unit)
    return root


def compiled(tree: Path, scratch: Path) -> Path:
    kernels.compile_into(tree, Runner(), {}, scratch)
    return tree / kernels.PACKAGE / "cubin"


def test_every_declared_architecture_is_compiled(tree: Path, tmp_path: Path) -> None:
    folder = compiled(tree, tmp_path)
    archs = set()
    for path in folder.iterdir():
        data = path.read_bytes()
        arch = elf.cubin_arch(data) or elf.ptx_arch(data)
        if arch and arch.startswith("sm_"):
            assert elf.extent(data[:64]) == len(data)
        archs.add(arch)
    assert archs - {None} == load(ROOT).audit_of("gefen-cuda").cuda_archs
    lines = list(kernels.table(kernels.usage(folder)))
    assert lines[0].split() == ["kernel", "arch", "registers", "shared", "stack", "spills"]
    assert [line.split()[0] for line in lines[1:]] == ["unit"] * (len(archs) - 2)


def test_spills_are_refused(tree: Path, tmp_path: Path) -> None:
    """More values than the registers of a thread can hold where many threads share them."""
    (tree / kernels.PACKAGE / "src" / "unit.cu").write_text(
        'extern "C" __launch_bounds__(256, 8) __global__ void unit(const void* t, long long n) {\n'
        "    float* data = *(float* const*)t;\n"
        "    float kept[64];\n"
        "    for (int i = 0; i < 64; i++) kept[i] = data[i * n + threadIdx.x];\n"
        "    for (long long j = 0; j < n; j++)\n"
        "        for (int i = 0; i < 64; i++) kept[i] = kept[i] * kept[(i + 1) % 64] + data[j];\n"
        "    for (int i = 0; i < 64; i++) data[i * n + threadIdx.x] = kept[i];\n"
        "}\n"
    )
    with pytest.raises(KernelsSpill, match=r"unit on sm_90: \d+ bytes"):
        compiled(tree, tmp_path)
    assert {item.kernel for item in kernels.compile_sources(tree, Runner(), tmp_path)} == {"unit"}


def test_what_does_not_compile(tree: Path, tmp_path: Path) -> None:
    (tree / kernels.PACKAGE / "src" / "unit.cu").write_text("int f( {\n")
    with pytest.raises(BuildFailed, match=r"(?s)exit status 1.*unit\.cu\(1\): error"):
        compiled(tree, tmp_path)


@pytest.mark.parametrize(
    ("version", "said"),
    [(None, "nvidia-cuda-nvrtc-cu12 is not installed"), ("12.8.93", "is 12.8.93, not 12.9")],
)
def test_the_compiler_must_be_the_pinned_one(
    version: str | None, said: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "nvidia_cuda_nvrtc_cu12-1.dist-info"
    if version:
        info.mkdir(parents=True)
        name = "Metadata-Version: 2.1\nName: nvidia-cuda-nvrtc-cu12\n"
        (info / "METADATA").write_text(f"{name}Version: {version}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    with pytest.raises(BuildFailed, match=said) as caught:
        compiled(tree, tmp_path)
    assert "nox -s build" in str(caught.value)


def test_what_was_compiled_twice_is_kept(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "ARCHS", ("sm_90", "compute_75"))
    folder = compiled(tree, tmp_path)
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(made) == {"sm_90.cubin", "compute_75.ptx", "manifest.json"}
    assert not (tmp_path / "cache").exists(), "not before both builds are known to be equal"
    kernels.remember(tree)
    kernels.remember(tree)

    def compiles() -> bool:
        shutil.rmtree(folder)
        (tmp_path / "kernels.log").unlink(missing_ok=True)
        assert {
            path.name: path.read_bytes() for path in compiled(tree, tmp_path).iterdir()
        } == made
        return (tmp_path / "kernels.log").exists()

    assert not compiles()
    (kept,) = (tmp_path / "cache" / "kernels").iterdir()
    (kept / "sm_90.cubin").write_bytes(made["sm_90.cubin"][:-1])
    assert compiles(), "a damaged copy must not be used"
    kernels.remember(tree)
    assert not compiles()
    (kept / "other").write_text("")
    assert compiles()
    with (tree / kernels.PACKAGE / "compile.py").open("a") as script:
        script.write("# another way\n")
    assert compiles()


def test_a_cache_that_cannot_be_written(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").write_text("a file where the folder should be")
    compiled(tree, tmp_path)
    kernels.remember(tree)
    assert compiled(tree, tmp_path)


def test_a_project_without_kernels(tmp_path: Path) -> None:
    assert not kernels.has_kernels(tmp_path)
    assert kernels.has_kernels(ROOT)
