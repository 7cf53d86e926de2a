"""The driver without a GPU: a fake in Python, and real bindings on a fake libcuda."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, Lock, Thread, local
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gefen.errors import CudaKernelError, CudaUnavailable
from gefen.kernels import cuda, images

HERE = Path(__file__).parent
TEXTS = {201: b"invalid device context", 209: b"no kernel image is available", 500: b"not found"}


class FakeApi:
    """What of ``cuda.bindings.driver`` is used: two devices, contexts with numbers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, int] = {}
        self.numbers = {0x100: 1, 0x101: 2}
        self.retained = 0
        self.lock = Lock()
        self.thread = local()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            with self.lock:
                self.calls.append((name, *arguments))
            if status := self.fails.get(name):
                return (status, None)
            return (0, *getattr(self, f"_{name}", lambda *_: ())(*arguments))

        return call

    @property
    def stack(self) -> list[int]:
        self.thread.__dict__.setdefault("stack", [])
        return self.thread.stack

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def cuGetErrorString(self, status: int) -> tuple[int, bytes | None]:
        return (0, TEXTS[status]) if status in TEXTS else (1, None)

    def _cuDeviceGet(self, index: int) -> tuple[int]:
        return (index,)

    def _cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int]:
        self.retained += 1
        return (0x100 + device,)

    def _cuDevicePrimaryCtxRelease(self, device: int) -> tuple[()]:
        self.retained -= 1
        return ()

    def _cuCtxPushCurrent(self, context: int) -> tuple[()]:
        self.stack.append(context)
        return ()

    def _cuCtxPopCurrent(self) -> tuple[int]:
        return (self.stack.pop(),)

    def _cuCtxGetCurrent(self) -> tuple[int]:
        return (self.stack[-1] if self.stack else 0,)

    def _cuCtxGetId(self, context: int) -> tuple[int]:
        return (self.numbers[context],)

    def _cuModuleLoadData(self, data: bytes) -> tuple[str]:
        return (f"module {data.decode()} in {self.numbers[self.stack[-1]]}",)

    def _cuModuleGetFunction(self, module: str, name: bytes) -> tuple[str]:
        return (f"{name.decode()} of {module}",)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """A fake driver below a torch that seems to have two GPUs of compute capability 9.0."""
    fake = FakeApi()
    monkeypatch.setattr(cuda, "_shared", cuda._Process())
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    stream = SimpleNamespace(cuda_stream=0x77)
    monkeypatch.setattr("torch.cuda.current_stream", lambda index: stream)
    monkeypatch.setattr(images, "candidates", codes)
    return fake


def codes(major: int, minor: int, problems: list[str]) -> Iterator[images.Code]:
    yield images.Code("sm_90", "embedded", b"cubin")
    problems.append("no compiler")
    yield images.Code("compute_75", "embedded", b"ptx")


def table(address: int = 0x1234) -> Any:
    return SimpleNamespace(data_ptr=lambda: address)


FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


def test_a_launch(api: FakeApi) -> None:
    driver = cuda.driver(SECOND)
    driver.launch("step", 7, table(), 2**40)
    driver.launch("step", 8, table(0x5678), 3)
    parameters = (ctypes.c_void_p, ctypes.c_longlong)
    step = "step of module cubin in 2"
    assert api.named("cuLaunchKernel") == [
        (step, 7, 1, 1, 256, 1, 1, 0, 0x77, ((0x1234, 2**40), parameters), 0),
        (step, 8, 1, 1, 256, 1, 1, 0, 0x77, ((0x5678, 3), parameters), 0),
    ]
    assert len(api.named("cuModuleGetFunction")) == len(api.named("cuModuleLoadData")) == 1
    assert api.retained == 0
    assert api.stack == [], "the thread's own context must be current again"


def test_one_driver_for_each_device(api: FakeApi) -> None:
    assert cuda.driver(FIRST) is cuda.driver(torch.device("cuda", 0))
    assert cuda.driver(torch.device("cuda")) is cuda.driver(SECOND), "the current device"
    assert cuda.driver(FIRST) is not cuda.driver(SECOND)
    assert len(api.named("cuModuleLoadData")) == 2


def test_a_context_that_is_current_stays_so(api: FakeApi) -> None:
    driver = cuda.driver(FIRST)
    api.stack.append(0x100)
    api.calls.clear()
    driver.launch("step", 1, table(), 1)
    assert not api.named("cuCtxPushCurrent")
    assert not api.named("cuDevicePrimaryCtxRetain")
    api.stack.append(0x101)
    driver.launch("step", 1, table(), 1)
    assert api.named("cuCtxPushCurrent") == [(0x100,)]
    assert api.stack == [0x100, 0x101]


def test_a_context_that_was_reset_is_loaded_again(api: FakeApi) -> None:
    """The new one may well have the address of the old one."""
    driver = cuda.driver(FIRST)
    driver.launch("step", 1, table(), 1)
    api.numbers[0x100] = 3
    driver.launch("step", 1, table(), 1)
    driver.launch("step", 1, table(), 1)
    functions = [call[0] for call in api.named("cuLaunchKernel")]
    assert functions == [f"step of module cubin in {number}" for number in (1, 3, 3)]


def test_threads(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """All load once, and each launches in a context of its own making current."""
    barrier, drivers, second = Barrier(8), set(), Event()
    load = api._cuModuleLoadData

    def slow_load(data: bytes) -> tuple[str]:
        """Leaves other threads the time to load too, if they are let."""
        if len(api.named("cuModuleLoadData")) > 1:
            second.set()
        second.wait(0.5)
        return load(data)

    monkeypatch.setattr(api, "_cuModuleLoadData", slow_load)

    def work(number: int) -> None:
        barrier.wait()
        driver = cuda.driver(FIRST)
        drivers.add(driver)
        driver.launch("step", number + 1, table(), 1)
        assert api.stack == []

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(drivers) == len(api.named("cuModuleLoadData")) == 1
    assert sorted(call[1] for call in api.named("cuLaunchKernel")) == list(range(1, 9))
    assert api.retained == 0


@pytest.mark.parametrize(
    ("call", "status", "said"),
    [
        ("cuModuleGetFunction", 500, "step: cuModuleGetFunction: not found"),
        ("cuLaunchKernel", 201, "step: cuLaunchKernel: invalid device context"),
        ("cuLaunchKernel", 999, "step: cuLaunchKernel: error 999"),
    ],
)
def test_errors_have_the_drivers_text(api: FakeApi, call: str, status: int, said: str) -> None:
    driver = cuda.driver(FIRST)
    api.fails[call] = status
    with pytest.raises(CudaKernelError) as caught:
        driver.launch("step", 1, table(), 1)
    assert str(caught.value) == said
    assert api.retained == 0
    assert api.stack == []
    api.fails.clear()
    driver.launch("step", 1, table(), 1)


def test_code_that_the_driver_refuses(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next best is tried; where all fail, every reason is given, and not asked for again."""
    load = api._cuModuleLoadData
    monkeypatch.setattr(
        api, "cuModuleLoadData", lambda d: (209, None) if d == b"cubin" else (0, *load(d)), False
    )
    assert cuda.driver(FIRST).code.arch == "compute_75"
    monkeypatch.setattr(api, "cuModuleLoadData", lambda _: (209, None), False)
    for _ in range(2):
        with pytest.raises(CudaUnavailable) as caught:
            cuda.driver(SECOND)
        assert str(caught.value) == (
            "sm_90 (embedded): kernels: cuModuleLoadData: no kernel image is available; "
            "no compiler; "
            "compute_75 (embedded): kernels: cuModuleLoadData: no kernel image is available"
        )
    assert len(api.named("cuDevicePrimaryCtxRetain")) == 2
    assert api.retained == 0


def test_what_cannot_run_kernels(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(what: str, device: torch.device = FIRST) -> None:
        monkeypatch.setattr(cuda, "_shared", cuda._Process())
        with pytest.raises(CudaUnavailable, match=what):
            cuda.driver(device)

    refused("cpu is no CUDA device", torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr("torch.version.cuda", None)
        refused("this torch is built without CUDA")

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cuda.bindings.driver", None)
        refused(r"cuda-bindings cannot be imported .*: pip install cuda-bindings")

    def unusable(*_: Any) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.get_device_capability", unusable)
        patch.setattr("torch.cuda.current_device", unusable)
        refused("cuda:0 cannot be used: Cannot re-initialize")
        refused("cuda cannot be used: Cannot re-initialize", torch.device("cuda"))
    with monkeypatch.context() as patch:
        patch.setattr(api, "cuInit", unusable, False)
        refused("cuInit: Cannot re-initialize")
    api.fails["cuInit"] = 999
    refused("cuInit: error 999")


def test_a_forked_process(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the parent's kernels nor a lock that a thread of the parent holds."""
    driver, process = cuda.driver(FIRST), cuda._shared
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(CudaUnavailable, match=r"step: CUDA cannot be used .* 'spawn'"):
        driver.launch("step", 1, table(), 1)
    assert not api.named("cuLaunchKernel")
    with process.lock:
        child = Thread(target=cuda.driver, args=(FIRST,), daemon=True)
        child.start()
        child.join(30)
        assert not child.is_alive()
    assert cuda.driver(FIRST) is not driver


SCRIPT = """
import os, sys, types
import torch
from gefen.errors import CudaKernelError, CudaUnavailable
from gefen.kernels import cuda, images

torch.version.cuda = "12.9"
torch.cuda.get_device_capability = lambda index: (9, 0)
torch.cuda.current_stream = lambda index: types.SimpleNamespace(cuda_stream=0x55 + index)
images.candidates = lambda *_: iter([
    images.Code("compute_75", "embedded", b".version 99\\0"),
    images.Code("sm_90", "embedded", b"\\x7fELF and more"),
])
table = torch.zeros(1)
for index in (0, 1):
    driver = cuda.driver(torch.device("cuda", index))
    driver.launch("unit", 3, table, 2**40)
    driver.launch("unit", 4, table, 5)
driver.store(table, torch.arange(1100).numpy().tobytes())
print(hex(table.data_ptr())[2:])
for kernel, grid in (("other", 1), ("unit", 0)):
    try:
        driver.launch(kernel, grid, table, 5)
    except CudaKernelError as error:
        print(error)
try:
    cuda.driver(torch.device("cuda:2"))
except CudaUnavailable as error:
    print(error)
"""


def test_the_real_bindings(tmp_path: Path) -> None:
    """What reaches a library with the driver's interface, through cuda-bindings."""
    command = ["g++", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run([*command, HERE / "fake_libcuda.cpp", "-ldl"], check=True, timeout=120)
    log = tmp_path / "log"
    variables = {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_CUDA_LOG": str(log)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    address, *errors = done.stdout.splitlines()
    assert errors == [
        "other: cuModuleGetFunction: named symbol not found",
        "unit: cuLaunchKernel: invalid argument",
        "kernels: cuDeviceGet: invalid argument",
    ]
    expected = [line for index in (0, 1) for line in calls(index, address)]
    lines = log.read_text().splitlines()
    assert lines[: len(expected)] == expected
    stored = [line for line in lines if line.startswith("store")]
    assert stored == ["store 0 to 503", "store 504 to 1007", "store 1008 to 1099"]
    places = [int(line.split("table ")[1].split()[0], 16) for line in lines if "items 504" in line]
    assert [place - int(address, 16) for place in places] == [0, 8 * 504]


def calls(index: int, address: str) -> Iterator[str]:
    bracket = [f"retain {index}", f"push {index}"], ["pop", f"release {index}"]
    yield "init 0"
    yield from bracket[0]
    yield from (f"load text on {index}", f"load cubin on {index}")
    yield from bracket[1]
    for number, (grid, items) in enumerate(((3, 2**40), (4, 5))):
        yield from bracket[0]
        if number == 0:
            yield f"function unit of 20{index}"
        yield (
            f"launch 30{index} grid {grid} 1 1 block 256 1 1 shared 0 stream {0x55 + index:x} "
            f"table {address} items {items}"
        )
        yield from bracket[1]
