from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from gate import elf
from gefen.kernels import images
from gefen.kernels.compile import CompileError, build, read_sources

UNIT = 'extern "C" __global__ void unit(const void* table, long long items) {}\n'


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with one kernel, without images, and an empty cache."""
    root = tmp_path / "package"
    (root / "src").mkdir(parents=True)
    (root / "src" / "unit.cu").write_text(UNIT)
    monkeypatch.setattr(images, "SOURCES", root / "src")
    monkeypatch.setattr(images, "EMBEDDED", root / "cubin")
    monkeypatch.setattr("torch.version.cuda", "12.9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images.manifest.cache_clear()
    yield root
    images.manifest.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_libraries", lambda major: iter([f"libabsent.so.{major}"]))


def embed(package: Path, *archs: str) -> None:
    sources = read_sources(package / "src")
    build(package / "cubin", images.nvrtc("sm_90", "12.9"), "12.9.86", sources, archs)
    images.manifest.cache_clear()


def found(major: int, minor: int) -> tuple[list[tuple[str, str]], str]:
    problems: list[str] = []
    codes = list(images.candidates(major, minor, problems))
    for code in codes:
        if code.arch.startswith("sm_"):
            assert elf.cubin_arch(code.data) == code.arch
        else:
            assert elf.ptx_arch(code.data) == code.arch
            assert code.data.endswith(b"\0")
    return [(code.arch, code.origin) for code in codes], "; ".join(problems)


def cached(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


EMBEDDED_90, COMPILED_90 = ("sm_90", "embedded"), ("sm_90", "compiled at first use")
PTX = ("compute_75", "embedded")


def test_the_best_comes_first(package: Path) -> None:
    assert found(9, 0) == ([COMPILED_90], "no usable code for sm_90 is embedded")
    embed(package, "sm_80", "sm_90", "compute_75")
    assert found(9, 0) == ([EMBEDDED_90, COMPILED_90, PTX], "")
    codes, problems = found(13, 0)
    assert codes == [PTX]
    assert "no usable code for sm_130 is embedded; no NVRTC compiles for sm_130" in problems
    assert "12.9 does not know sm_130" in problems
    assert found(7, 0)[0] == [("sm_70", "compiled at first use")]


@pytest.mark.usefixtures("no_compiler")
def test_nothing_at_all() -> None:
    codes, problems = found(9, 0)
    assert codes == []
    assert "no usable code for sm_90 is embedded; no NVRTC compiles for sm_90" in problems
    assert "libabsent.so.12" in problems


@pytest.mark.usefixtures("no_compiler")
def test_images_must_be_of_these_sources(package: Path) -> None:
    with pytest.raises(CompileError):
        images.compiled("sm_90", "12.9")
    (package / "cubin").mkdir()
    for text in ("", "[]", "{}", '{"sources": 3}', "\xff"):
        (package / "cubin" / "manifest.json").write_bytes(text.encode("latin-1"))
        images.manifest.cache_clear()
        assert images.manifest() is None


def test_stale_or_damaged_images_are_not_used(package: Path) -> None:
    embed(package, "sm_90", "compute_75")
    assert images.manifest().archs == ["sm_90", "compute_75"]
    path = package / "cubin" / "sm_90.cubin"
    whole = path.read_bytes()
    for data in (whole[:-1], whole[:-1] + b"x", b""):
        path.write_bytes(data)
        assert found(9, 0)[0] == [COMPILED_90, PTX]
    path.unlink()
    assert found(9, 0)[0] == [COMPILED_90, PTX]

    path.write_bytes(whole)
    (package / "src" / "unit.cu").write_text(UNIT.replace("unit", "other"))
    images.manifest.cache_clear()
    assert found(9, 0)[0] == [COMPILED_90]


def test_compiled_once(tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = images.compiled("sm_90", "12.9")
    (kept,) = cached(tmp_path)
    assert kept.parent.parent == tmp_path / "cache" / "gefen" / "kernels"
    kept.write_bytes(kept.read_bytes()[:-1])
    assert images.compiled("sm_90", "12.9") == data, "a damaged file must not be used"
    monkeypatch.setattr(images, "_libraries", lambda major: iter(()))
    assert images.compiled("sm_90", "12.9") == data
    for arch, cuda in (("sm_80", "12.9"), ("sm_90", "13.0")):
        with pytest.raises(CompileError):
            images.compiled(arch, cuda)
    (package / "src" / "unit.cu").write_text(UNIT.replace("unit", "other"))
    with pytest.raises(CompileError):
        images.compiled("sm_90", "12.9")


def test_many_at_once(tmp_path: Path) -> None:
    """As ranks that start together, on a cache that is still empty."""
    barrier = Barrier(4)

    def rank(_number: int) -> bytes:
        barrier.wait()
        return images.compiled("sm_90", "12.9")

    with ThreadPoolExecutor(4) as pool:
        results = set(pool.map(rank, range(4)))
    assert len(results) == 1
    (kept,) = cached(tmp_path)
    assert kept.read_bytes().endswith(results.pop())


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert elf.cubin_arch(images.compiled("sm_90", "12.9")) == "sm_90"


def test_a_cache_that_is_full(tmp_path: Path) -> None:
    """Writing stops in the middle of a file: nothing of it may stay."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        data = images.compiled("sm_90", "12.9")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert elf.cubin_arch(data) == "sm_90"
    assert cached(tmp_path) == []


@pytest.mark.parametrize("given", ["", "relative"])
def test_where_the_cache_is(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert images.cache_folder() == tmp_path / ".cache" / "gefen" / "kernels"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert images.cache_folder() is None
    assert elf.cubin_arch(images.compiled("sm_90", "12.9")) == "sm_90"


@pytest.mark.parametrize("package_name", ["cu12", "cuda_nvrtc"])
def test_where_torch_installs_the_compiler(
    package_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path(images.nvrtc("sm_90", "12.9").path)
    site = tmp_path / "site"
    target = site / "nvidia" / package_name / "lib"
    target.mkdir(parents=True)
    (target / "libnvrtc.so.12").symlink_to(real)
    monkeypatch.setattr("torch.__file__", str(site / "torch" / "__init__.py"))
    monkeypatch.setattr("sys.path", [])
    assert Path(images.nvrtc("sm_90", "12.9").path) == target / "libnvrtc.so.12"
    with pytest.raises(CompileError, match=r"libnvrtc\.so\.13"):
        images.nvrtc("sm_90", "13.0")
