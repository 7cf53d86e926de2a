"""Run kernels through the CUDA driver, in the context and on the stream that torch uses.

Kernels are loaded once for each device and primary context; nothing is retained, so that the
context ends when torch lets go of it. Needs ``cuda-bindings``, which CUDA builds of torch 2.12
and later install; it is imported at first use.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from gefen.errors import CudaKernelError, CudaUnavailable
from gefen.kernels import images
from gefen.kernels.launch import BLOCK

_PARAMETERS = (ctypes.c_void_p, ctypes.c_longlong)

PAYLOAD = 8 * 504
"""Bytes that one launch of ``store`` writes: PAYLOAD in store.cu."""


def driver(device: torch.device) -> CudaDriver:
    """What launches kernels on ``device``; the same object each time, kernels loaded.

    Raises:
        CudaUnavailable: they cannot run there; asked again, the answer is the same.
    """
    if device.type != "cuda":
        raise CudaUnavailable(f"{device} is no CUDA device")
    process = _process()
    with process.lock:
        index = _index(device)
        if index not in process.drivers:
            process.drivers[index] = _opened(index)
        found = process.drivers[index]
    if isinstance(found, str):
        raise CudaUnavailable(found)
    return found


def _index(device: torch.device) -> int:
    if device.index is not None:
        return device.index
    try:
        return torch.cuda.current_device()
    except (RuntimeError, AssertionError) as error:  # no GPU, a forked process, a CPU build
        raise CudaUnavailable(f"{device} cannot be used: {error}") from error


def _opened(index: int) -> CudaDriver | str:
    """A driver, or why there is none."""
    try:
        return CudaDriver(index)
    except (CudaUnavailable, CudaKernelError) as error:
        return str(error)


class _Process:
    """The drivers of one process: a forked child must not use those of its parent."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = Lock()
        self.drivers: dict[int, CudaDriver | str] = {}


_shared = _Process()


def _process() -> _Process:
    global _shared
    if _shared.pid != os.getpid():
        # Not under the old lock, which a thread of the parent may have held when it forked.
        _shared = _Process()
    return _shared


class _Module:
    """Kernels in one context: its handle and unique number, the code, functions by name."""

    def __init__(self, context: Any, number: int, code: images.Code, handle: Any) -> None:
        self.context, self.number, self.code, self.handle = int(context), number, code, handle
        self.functions: dict[str, Any] = {}


class CudaDriver:
    """Launches kernels on CUDA device ``index``.

    Raises:
        CudaUnavailable: this torch, driver or device cannot run them; with every reason.
    """

    def __init__(self, index: int) -> None:
        self._index, self._pid, self._lock = index, os.getpid(), Lock()
        self._api = _bindings()
        try:
            self._capability = torch.cuda.get_device_capability(index)
        except (RuntimeError, AssertionError) as error:
            raise CudaUnavailable(f"cuda:{index} cannot be used: {error}") from error
        _check(self._api, "cuInit", 0)
        self._device = _check(self._api, "cuDeviceGet", index)
        with self._primary_context() as context:
            self._module = self._load(context)

    @property
    def code(self) -> images.Code:
        """What was loaded."""
        return self._module.code

    def launch(self, kernel: str, grid: int, table: Tensor, items: int) -> None:
        """Start a kernel, see :meth:`gefen.kernels.launch.Driver.launch`.

        Raises:
            CudaUnavailable: this process was forked from the one that made this object.
        """
        self._start(kernel, grid, ((table.data_ptr(), items), _PARAMETERS))

    def store(self, table: Tensor, content: bytes | bytearray) -> None:
        """Write ``content``, see :meth:`gefen.kernels.launch.Driver.store`."""
        for start in range(0, len(content), PAYLOAD):
            piece = bytes(content[start : start + PAYLOAD])
            arguments = (
                ctypes.c_void_p(table.data_ptr() + start),
                ctypes.c_longlong(len(piece) // 8),
                ctypes.create_string_buffer(piece, PAYLOAD),
            )
            addresses = (ctypes.c_void_p * 3)(*map(ctypes.addressof, arguments))
            self._start("store", 1, ctypes.addressof(addresses))

    def _start(self, kernel: str, grid: int, arguments: Any) -> None:
        if self._pid != os.getpid():
            raise CudaUnavailable(
                f"{kernel}: CUDA cannot be used in a process forked from one that used it; "
                "start it with the multiprocessing method 'spawn'"
            )
        context = _check(self._api, "cuCtxGetCurrent", kernel=kernel)
        if int(context) == self._module.context:
            self._launch(kernel, context, grid, arguments)
        else:
            with self._primary_context() as primary:
                self._launch(kernel, primary, grid, arguments)

    def _launch(self, kernel: str, context: Any, grid: int, arguments: Any) -> None:
        function = self._function(kernel, context)
        stream = torch.cuda.current_stream(self._index).cuda_stream
        shape = (grid, 1, 1, BLOCK, 1, 1)
        _check(
            self._api,
            "cuLaunchKernel",
            *(function, *shape, 0, stream, arguments, 0),
            kernel=kernel,
        )

    def _function(self, kernel: str, context: Any) -> Any:
        """The kernel in the context, which is current; loads it where the context is new."""
        module = self._module
        if _check(self._api, "cuCtxGetId", context) != module.number:
            with self._lock:
                if _check(self._api, "cuCtxGetId", context) != self._module.number:
                    self._module = self._load(context)
                module = self._module
        if kernel not in module.functions:
            module.functions[kernel] = _check(
                self._api, "cuModuleGetFunction", module.handle, kernel.encode(), kernel=kernel
            )
        return module.functions[kernel]

    def _load(self, context: Any) -> _Module:
        problems: list[str] = []
        number = _check(self._api, "cuCtxGetId", context)
        for code in images.candidates(*self._capability, problems):
            try:
                handle = _check(self._api, "cuModuleLoadData", code.data)
            except CudaKernelError as error:
                problems.append(f"{code.arch} ({code.origin}): {error}")
            else:
                return _Module(context, number, code, handle)
        raise CudaUnavailable("; ".join(problems))

    @contextmanager
    def _primary_context(self) -> Iterator[Any]:
        """Make the device's primary context current, for this thread and while in the body."""
        context = _check(self._api, "cuDevicePrimaryCtxRetain", self._device)
        try:
            _check(self._api, "cuCtxPushCurrent", context)
            try:
                yield context
            finally:
                _check(self._api, "cuCtxPopCurrent")
        finally:
            _check(self._api, "cuDevicePrimaryCtxRelease", self._device)


def _bindings() -> Any:
    if torch.version.cuda is None:
        raise CudaUnavailable("this torch is built without CUDA")
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise CudaUnavailable(
            f"cuda-bindings cannot be imported ({error}): pip install cuda-bindings"
        ) from error


def _check(api: Any, name: str, *arguments: Any, kernel: str = "") -> Any:
    """Call the driver; return what it returns beside its status."""
    try:
        status, *results = getattr(api, name)(*arguments)
    except RuntimeError as error:  # cuda-bindings: the driver, or this function of it, is absent
        raise CudaUnavailable(f"{name}: {error}") from error
    if int(status):
        raise CudaKernelError(f"{kernel or 'kernels'}: {name}: {_text(api, status)}")
    return results[0] if results else None


def _text(api: Any, status: Any) -> str:
    failed, text = api.cuGetErrorString(status)
    return f"error {int(status)}" if int(failed) else text.decode()
