from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gate import elf
from gefen.kernels import compile as module
from gefen.kernels import images
from gefen.kernels.compile import (
    ARCHS,
    CompileError,
    Nvrtc,
    Resources,
    build,
    digest,
    read_sources,
    resources_in,
)

UNITS = {
    "first.cu": b"""\
#include "half.cuh"
extern "C" __global__ void first(const void* table, long long items) {
    __shared__ float kept[256];
    kept[threadIdx.x] = half(items);
    __syncthreads();
    **(float* const*)table = kept[255 - threadIdx.x];
}
""",
    "half.cuh": b"#pragma once\nstatic __device__ float half(float x) { return 0.5f * x; }\n",
    "second.cu": b"""\
#include "half.cuh"
extern "C" __global__ void second(const void* table, long long items) {
    **(float* const*)table = half(threadIdx.x);
}
""",
}
# Sixty-four values that live through a loop, and room for fewer.
SPILLING = {
    "spill.cu": b"""\
extern "C" __launch_bounds__(256, 8) __global__ void spill(const void* table, long long items) {
    float* data = *(float* const*)table;
    float kept[64];
    for (int i = 0; i < 64; i++) kept[i] = data[i * items + threadIdx.x];
    for (long long j = 0; j < items; j++)
        for (int i = 0; i < 64; i++) kept[i] = kept[i] * kept[(i + 1) % 64] + data[j];
    for (int i = 0; i < 64; i++) data[i * items + threadIdx.x] = kept[i];
}
"""
}


@pytest.fixture(scope="module")
def compiler() -> Nvrtc:
    return images.nvrtc("sm_90", "12.9")


def test_one_image_for_each_architecture(compiler: Nvrtc, tmp_path: Path) -> None:
    build(tmp_path / "out", compiler, "12.9.86", UNITS, ARCHS)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["compiler"] == "NVRTC 12.9.86"
    assert manifest["sources"] == {
        name: hashlib.sha256(data).hexdigest() for name, data in UNITS.items()
    }
    found = []
    for name, entry in manifest["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        found.append(elf.ptx_arch(data) if name.endswith(".ptx") else elf.cubin_arch(data))
        assert entry["arch"] == found[-1]
        for kernel in (b"first", b"second"):
            assert kernel in data
        if name.endswith(".cubin"):
            assert set(entry["kernels"]) == {"first", "second"}
            assert entry["kernels"]["first"]["shared"] >= 1024
            assert entry["kernels"]["first"]["registers"] > 0
    assert found == list(ARCHS)


def test_spills_are_seen(compiler: Nvrtc) -> None:
    used = compiler.compile(SPILLING, "sm_90").resources
    assert used["spill"].spills > 0
    assert used["spill"].registers <= 32
    assert compiler.compile(UNITS, "sm_90").resources["first"].spills == 0


def test_products_are_not_contracted(compiler: Nvrtc) -> None:
    unit = b"""\
extern "C" __global__ void axpy(const void* table, long long items) {
    float* data = *(float* const*)table;
    data[0] = data[1] * data[2] + data[3];
}
"""
    ptx = compiler.compile({"axpy.cu": unit}, "compute_75").data
    assert b"fma" not in ptx
    assert b"mul.rn.f32" in ptx


def test_kernels_have_few_copies_of_each_part(compiler: Nvrtc) -> None:
    """What is inlined twice is compiled twice, for each architecture and on users' machines."""
    sources = {
        name: data
        for name, data in read_sources().items()
        if name.endswith(".cuh") or name == "momentum.cu"
    }
    ptx = compiler.compile(sources, "compute_75").data
    assert ptx.count(b"-766435501") == 1  # a multiplier of the random numbers
    assert ptx.count(b"div.rn.f32") == 1 + 1  # by magnitudes, and by the distance of two entries
    # Of gradients that are blended, then of Nesterov's; each once more for plain tensors.
    assert ptx.count(b"cvt.f32.f16") == 2 * (8 + 8)


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({"broken.cu": b"\nint f( {\n"}, "broken.cu(2): error"),
        ({"lonely.cu": b'#include "gone.cuh"\n'}, "gone.cuh"),
        ({"one.cu": UNITS["second.cu"], "half.cuh": b""}, '"half" is undefined'),
    ],
)
def test_what_does_not_compile(compiler: Nvrtc, sources: dict[str, bytes], said: str) -> None:
    with pytest.raises(CompileError) as caught:
        compiler.compile(sources, "sm_90")
    assert str(caught.value).startswith("sm_90: NVRTC_ERROR_COMPILATION\n")
    assert said in str(caught.value)


def test_what_is_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    for path in (tmp_path / "text.so", tmp_path / "absent.so", "libc.so.6"):
        with pytest.raises(CompileError, match="cannot load NVRTC"):
            Nvrtc(path)


def test_architectures_known(compiler: Nvrtc) -> None:
    assert all(map(compiler.supports, ARCHS))
    assert not compiler.supports("sm_130")


def test_sources(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="no kernel sources in"):
        read_sources(tmp_path)
    for name in ("b.cu", "a.cuh", "notes.txt", "c.cubin"):
        (tmp_path / name).write_text(name)
    assert read_sources(tmp_path) == {"a.cuh": b"a.cuh", "b.cu": b"b.cu"}
    (tmp_path / "d.cu").mkdir()
    with pytest.raises(CompileError, match=r"d\.cu: Is a directory"):
        read_sources(tmp_path)


def test_digest_covers_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {digest(UNITS), digest({**UNITS, "half.cuh": b""}), digest({"x.cu": b"", "y.cu": b""})}
    seen |= {digest({"x.cu": b"y.cu", "y.cu": b""}), digest({"x.cu": b""})}
    monkeypatch.setattr(module, "OPTIONS", (*module.OPTIONS, "--use_fast_math"))
    assert len(seen | {digest(UNITS)}) == 6


LOG = """\
ptxas info    : Compiling entry function 'step' for 'sm_90'
ptxas info    : Function properties for step
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for _Z4helpf
ptxas         .     0 bytes stack frame, 20 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem
"""


def test_log_of_the_assembler() -> None:
    """Functions that were not inlined can spill too."""
    assert resources_in(LOG) == {
        "_Z4helpf": Resources(spills=20),
        "step": Resources(registers=32, shared=1024, stack=16, spills=12),
    }
    with pytest.raises(CompileError, match="does not say what the kernels use"):
        resources_in(LOG.replace("Used", "Took"))


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The file as the build runs it: by its path, isolated, without this package."""
    return subprocess.run(
        [sys.executable, "-IBS", module.__file__, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={"TZ": "Asia/Tokyo"},
    )


def test_the_script(compiler: Nvrtc, tmp_path: Path) -> None:
    sources = tmp_path / "a b"
    sources.mkdir()
    for name, data in UNITS.items():
        (sources / name).write_bytes(data)
    common = ("--nvrtc", compiler.path, "--sources", sources, "--arch", "sm_90", "sm_121")
    done = run(tmp_path / "out", *common, "--release", "12.9.86", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    build(tmp_path / "again", compiler, "12.9.86", UNITS, ("sm_90", "sm_121"))
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()

    done = run(tmp_path / "other", *common, "--release", "13.0.1", cwd=tmp_path)
    assert done.returncode == 1
    assert "is NVRTC 12.9, not 13.0.1" in done.stderr
    assert not (tmp_path / "other").exists()
