"""Runs the updates as kernels: packs tasks into tables and hands them to a driver."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gefen.codebook import Quantizer
from gefen.kernels import packing, reference
from gefen.kernels.packing import Factors, Geometry, Task
from gefen.kernels.tasks import Adam, BlockStep, DenseMomentum, FactoredStep, Momentum

BLOCK = 256
"""Threads of each block, in every kernel: THREADS in platform.cuh."""

RESIDENT = 4
"""Blocks of threads that a multiprocessor is given; each works through many items."""


class Driver(Protocol):
    """Runs kernels ``extern "C" __global__ void NAME(const void* table, long long items)``."""

    def launch(self, kernel: str, grid: int, table: Tensor, items: int) -> None:
        """Start ``grid`` blocks of ``BLOCK`` threads on the current stream of the table's device.

        ``table`` is contiguous and lies on the device; it may be freed once this returns.

        Raises:
            CudaKernelError: there is no such kernel, or the launch was refused.
        """


def probe(driver: Driver, device: torch.device | str, items: int = 1000) -> bool:
    """Whether a kernel that squares numbers does so on ``device``."""
    out = torch.zeros(items, dtype=torch.int64, device=device)
    table = torch.tensor([out.data_ptr()], dtype=torch.int64, device=device)
    driver.launch("probe", 2, table, items)
    return torch.equal(out.cpu(), torch.arange(items) ** 2)


T = TypeVar("T", DenseMomentum, BlockStep, FactoredStep)


class Kernels:
    """The operations of :mod:`gefen.kernels.reference` on one device, through a driver.

    float64 goes to the reference.
    """

    name = "cuda"

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        processors: int,
        geometry: Geometry | None = None,
        arena: int = 1 << 18,
    ) -> None:
        """``arena``: words of scratch memory that are allocated at a time, at least."""
        self._arena = arena
        self._driver, self._device = driver, device
        self._most = RESIDENT * processors
        self._geometry = geometry or Geometry(BLOCK)

    def momentum_update(self, tasks: Sequence[DenseMomentum]) -> None:
        """As :func:`gefen.kernels.reference.momentum_update`."""
        for quantizer, part in self._served(tasks, reference.momentum_update):
            launch = Launch(self._geometry, self._device, self._arena)
            entries = [
                launch.momentum(
                    task.momentum,
                    param=launch.written(task.out),
                    flags=packing.NESTEROV * task.nesterov,
                )
                for task in part
            ]
            launch.steps("momentum", entries, quantizer)
            self._run(launch)

    def block_step(self, tasks: Sequence[BlockStep]) -> None:
        """As :func:`gefen.kernels.reference.block_step`."""
        for quantizer, part in self._served(tasks, reference.block_step):
            launch = Launch(self._geometry, self._device, self._arena)
            entries = []
            for task in part:
                entry = launch.momentum(task.momentum, param=launch.edited(task.param))
                entry.v = task.v.data_ptr()
                entry.beta2 = task.adam.beta2
                entry.share = (1 - task.adam.beta2) / task.momentum.period
                entry.root2 = math.sqrt(task.adam.correction2)
                _set_rates(entry, task.adam)
                entries.append(entry)
            launch.steps("block_step", entries, quantizer)
            self._run(launch)

    def factored_step(self, tasks: Sequence[FactoredStep]) -> None:
        """As :func:`gefen.kernels.reference.factored_step`."""
        for quantizer, part in self._served(tasks, reference.factored_step):
            launch = Launch(self._geometry, self._device, self._arena)
            factors, entries = [], []
            for task in part:
                entry = launch.momentum(task.momentum, param=launch.edited(task.param))
                _set_rates(entry, task.adam)
                factors.append(launch.factors(task, entry))
                entries.append(entry)
            launch.averages(factors)
            launch.steps("factored_step", entries, quantizer)
            self._run(launch)

    def histogram(self, gradients: Sequence[tuple[Tensor, int]], counts: Tensor) -> None:
        """As :func:`gefen.kernels.reference.histogram`; ``counts`` lies on this device."""
        launch = Launch(self._geometry, self._device, self._arena)
        entries = []
        for grad, period in gradients:
            if grad.dtype not in packing.KINDS:
                reference.histogram([(grad, period)], counts)
            elif grad.numel():
                entries.append(launch.task(grad, period))
        if entries:
            launch.counts = counts.data_ptr()
            launch.steps("histogram", entries, None)
            self._run(launch)

    def _served(
        self, tasks: Sequence[T], fallback: Callable[[Sequence[T]], None]
    ) -> Iterator[tuple[Quantizer, list[T]]]:
        """Tasks by codebook; those that kernels cannot serve go to the fallback."""
        parts: dict[Quantizer, list[T]] = {}
        for task in tasks:
            target = task.out if isinstance(task, DenseMomentum) else task.param
            if not {target.dtype, task.momentum.grad.dtype} <= packing.KINDS.keys():
                fallback([task])
            elif target.numel():
                parts.setdefault(task.momentum.quantizer, []).append(task)
        yield from parts.items()

    def _run(self, launch: Launch) -> None:
        for kernel, table, items in launch.tables():
            self._driver.launch(kernel, min(items, self._most), table, items)
        launch.finish()


def _set_rates(entry: Task, adam: Adam) -> None:
    decay = adam.lr * adam.weight_decay
    entry.rate = adam.lr / adam.correction1
    entry.eps, entry.keep = adam.eps, 1 - decay
    entry.flags |= packing.DECAYS * bool(decay)


class Launch:
    """The launches of one operation: their tables, and what must stay alive meanwhile."""

    def __init__(self, geometry: Geometry, device: torch.device, arena: int) -> None:
        self.counts = 0
        self._arena, self._free, self._next = arena, 0, 0
        self._geometry, self._device = geometry, device
        self._alive: list[Tensor] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._planned: list[tuple[str, bytes, int]] = []

    def read(self, tensor: Tensor) -> packing.View:
        """Where a tensor lies that is only read; a copy of it if it has many strides."""
        found = packing.view(tensor)
        if found is None:
            tensor = tensor.contiguous()
            self._alive.append(tensor)
            return self.read(tensor)
        return found

    def edited(self, tensor: Tensor) -> packing.View:
        """Where a tensor lies that is changed in place."""
        found = packing.view(tensor)
        if found is None:
            copy = tensor.contiguous()
            self._copies.append((tensor, copy))
            return self.edited(copy)
        return found

    written = edited

    def scratch(self, count: int) -> int:
        """Address of ``count`` words of 32 bits with arbitrary content, aligned to 64 bits."""
        words = -(-count // 2) * 2
        if words > self._free:
            self._free = max(words, self._arena)
            buffer = torch.empty(self._free // 2, dtype=torch.int64, device=self._device)
            self._alive.append(buffer)
            self._next = buffer.data_ptr()
        found = self._next
        self._next, self._free = found + 4 * words, self._free - words
        return found

    def task(self, grad: Tensor, period: int) -> Task:
        """A gradient in blocks."""
        span, chunks = self._geometry.cut(period)
        return Task(self.read(grad), grad.numel(), period, span, chunks)

    def momentum(self, momentum: Momentum, param: packing.View, flags: int = 0) -> Task:
        """A gradient and the momentum that it advances."""
        entry = self.task(momentum.grad, momentum.period)
        entry.param, entry.flags = param, flags
        entry.index, entry.magnitude = momentum.index.data_ptr(), momentum.magnitude.data_ptr()
        entry.mix = 1 - momentum.beta
        if momentum.seed is not None:
            entry.seed = momentum.seed
            entry.flags |= packing.STOCHASTIC
        if entry.index % packing.WIDTH == 0:
            entry.flags |= packing.ALIGNED
        return entry

    def factors(self, task: FactoredStep, entry: Task) -> Factors:
        """The second moment of a matrix; ``entry`` learns where its roots will lie."""
        rows, columns = task.param.shape
        strips, panels = -(-columns // self._geometry.strip), -(-rows // packing.PANEL)
        entry.columns = columns
        entry.row_root, entry.column_root = self.scratch(rows), self.scratch(columns)
        return Factors(
            grad=entry.grad,
            row=task.row.data_ptr(),
            column=task.column.data_ptr(),
            row_root=entry.row_root,
            column_root=entry.column_root,
            row_parts=self.scratch(rows * strips),
            column_parts=self.scratch(panels * columns),
            rows=rows,
            columns=columns,
            strips=strips,
            panels=panels,
            beta2=task.adam.beta2,
            correction2=task.adam.correction2,
        )

    def averages(self, factors: list[Factors]) -> None:
        """Plan the launches that advance factored second moments."""
        threads, warp = self._geometry.threads, self._geometry.warp
        means = [-(-f.rows // threads) + -(-f.columns // warp) for f in factors]
        self._plan("factor_sums", factors, [f.panels * f.strips for f in factors])
        self._plan("factor_means", factors, means)
        self._plan("factor_roots", factors, [1] * len(factors))

    def steps(self, kernel: str, entries: list[Task], quantizer: Quantizer | None) -> None:
        """Plan ``kernel``, and before it the peaks of blocks that are cut in chunks."""
        book = 0
        if quantizer is not None:
            values = packing.codebook(quantizer)
            self._alive.append(values)
            book = values.data_ptr()
        cut = [entry for entry in entries if entry.chunks > 1]
        for entry in cut:
            entry.peaks, entry.before = (
                self.scratch(2 * entry.items),
                self.scratch(2 * entry.blocks),
            )
        if cut:
            self._plan("peaks", cut, [entry.items for entry in cut], book)
        self._plan(kernel, entries, [entry.items for entry in entries], book)

    def _plan(
        self, kernel: str, entries: Sequence[Task | Factors], items: list[int], book: int = 0
    ) -> None:
        table = packing.table(entries, items, book, self.counts)
        self._planned.append((kernel, table, sum(items)))

    def tables(self) -> Iterator[tuple[str, Tensor, int]]:
        """(kernel, its table on the device, items) in order; all tables are copied at once."""
        whole = bytearray(b"".join(table for _, table, _ in self._planned))
        memory = torch.frombuffer(whole, dtype=torch.int64).to(self._device, copy=True)
        at = 0
        for kernel, table, items in self._planned:
            yield kernel, memory[at : at + len(table) // 8], items
            at += len(table) // 8

    def finish(self) -> None:
        """Write back what was copied, once the launches are under way."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)
