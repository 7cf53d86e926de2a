"""Runs the updates as kernels: packs tasks into tables and hands them to a driver."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from gefen import capture
from gefen.codebook import Quantizer
from gefen.kernels import packing, reference, scalars
from gefen.kernels.packing import Factors, Geometry, Task
from gefen.kernels.plan import Numbers, Plan, place
from gefen.kernels.scalars import Scalars
from gefen.kernels.tasks import BlockStep, DenseMomentum, FactoredStep, Momentum

BLOCK = 256
"""Threads of each block, in every kernel: THREADS in platform.cuh."""

RESIDENT = 4
"""Blocks of threads that a multiprocessor is given; each works through many items."""

REMEMBERED = 1024
"""Plans that are kept for each driver: of the matrices of a GefenMuon, each has one."""


class Driver(Protocol):
    """Runs kernels ``extern "C" __global__ void NAME(const void* table, long long items)``."""

    def launch(self, kernel: str, grid: int, table: Tensor, items: int) -> None:
        """Start ``grid`` blocks of ``BLOCK`` threads on the current stream of the table's device.

        ``table`` is contiguous and lies on the device; it may be freed once this returns.

        Raises:
            CudaKernelError: there is no such kernel, or the launch was refused.
        """

    def store(self, table: Tensor, content: bytes | bytearray) -> None:
        """Write ``content``, whole words of 64 bits, to a tensor on the current stream.

        It travels as arguments of launches, so that a CUDA graph that is being captured keeps it:
        copies from the host's memory would be made anew with each replay, from memory that is
        long something else, and graphs cannot hold those that wait for it.
        """


def probe(driver: Driver, device: torch.device | str, items: int = 1000) -> bool:
    """Whether a kernel that squares numbers does so on ``device``."""
    out = torch.zeros(items, dtype=torch.int64, device=device)
    table = torch.tensor([out.data_ptr()], dtype=torch.int64, device=device)
    driver.launch("probe", 2, table, items)
    return torch.equal(out.cpu(), torch.arange(items) ** 2)


T = TypeVar("T", DenseMomentum, BlockStep, FactoredStep)

_Plans: TypeAlias = OrderedDict[Hashable, tuple[Any, Plan]]

_plans: weakref.WeakKeyDictionary[Driver, _Plans] = weakref.WeakKeyDictionary()

_ready: weakref.WeakSet[Driver] = weakref.WeakSet()
"""Drivers that have run ``store``."""


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
            nesterov = [task.nesterov for task in part]
            self._step("momentum", part, [], nesterov, quantizer, scalars.Momenta(part))

    def block_step(self, tasks: Sequence[BlockStep]) -> None:
        """As :func:`gefen.kernels.reference.block_step`."""
        for quantizer, part in self._served(tasks, reference.block_step):
            moments = [task.v for task in part]
            self._step("block_step", part, moments, [], quantizer, scalars.Adams(part))

    def factored_step(self, tasks: Sequence[FactoredStep]) -> None:
        """As :func:`gefen.kernels.reference.factored_step`."""
        for quantizer, part in self._served(tasks, reference.factored_step):
            moments = [tensor for task in part for tensor in (task.row, task.column)]
            self._step("factored_step", part, moments, [], quantizer, scalars.Adams(part))

    def histogram(self, gradients: Sequence[tuple[Tensor, int]], counts: Tensor) -> None:
        """As :func:`gefen.kernels.reference.histogram`; ``counts`` lies on this device."""
        launch = Launch(self._geometry, self._arena)
        grads, entries = [], []
        for grad, period in gradients:
            if grad.dtype not in packing.KINDS:
                reference.histogram([(grad, period)], counts)
            elif grad.numel():
                grads.append(grad)
                entries.append(launch.task(grad, period))
        if entries:
            launch.steps("histogram", entries)
            views = {"grad": launch.lying(grads)}
            self._run(launch.plan(entries, 0), views, 0, counts.data_ptr(), None)

    def _served(
        self, tasks: Sequence[T], fallback: Callable[[Sequence[T]], None]
    ) -> Iterator[tuple[Quantizer, list[T]]]:
        """Tasks by codebook; those that kernels cannot serve go to the fallback."""
        targets: list[Tensor] = _targets(tasks)
        grads: list[Tensor] = [task.momentum.grad for task in tasks]
        kinds = packing.KINDS
        quantizers = {id(task.momentum.quantizer) for task in tasks}
        dtypes_seen = {*map(_DTYPE, targets), *map(_DTYPE, grads)}
        if len(quantizers) == 1 and dtypes_seen <= kinds.keys() and all(map(_SIZE, targets)):
            yield tasks[0].momentum.quantizer, list(tasks)
            return
        dtypes = zip(map(_DTYPE, targets), map(_DTYPE, grads), strict=True)
        sizes = map(_SIZE, targets)
        parts: dict[Quantizer, list[T]] = {}
        for task, (dtype, other), size in zip(tasks, dtypes, sizes, strict=True):
            if dtype not in kinds or other not in kinds or not size:
                fallback([task])
            else:
                parts.setdefault(task.momentum.quantizer, []).append(task)
        yield from parts.items()

    def _step(
        self,
        kernel: str,
        tasks: Sequence[Any],
        moments: list[Tensor],
        nesterov: list[bool],
        quantizer: Quantizer,
        values: Scalars,
    ) -> None:
        """Run an operation as it ran before, where all tensors lie as they did."""
        momenta: list[Momentum] = [task.momentum for task in tasks]
        grads, targets = [momentum.grad for momentum in momenta], _targets(tasks)
        states = [t for m in momenta for t in (m.index, m.magnitude)] + moments
        pointers = list(map(Tensor.data_ptr, states))
        key = kernel, self._geometry, self._arena, self._device, pointers[0]
        periods = [m.period for m in momenta]
        form = pointers, periods, nesterov, _forms(grads), _forms(targets), values.constants
        plans = _plans.setdefault(self._driver, OrderedDict())
        # Taken out while in use: another thread makes its own.
        known, plan = plans.pop(key, (None, None))
        launch = None
        if plan is None or known != form:
            launch = Launch(self._geometry, self._arena)
            plan = launch.operation(kernel, tasks, nesterov, values.constants)
            grads, targets = launch.lying(grads), launch.lying(targets)
        book, views = packing.codebook(quantizer), {"grad": grads, "param": targets}
        self._run(plan, views, book.data_ptr(), 0, values)
        # Of kernels, autograd notices nothing by itself.
        torch.autograd.graph.increment_version([t for t in targets if not t.is_inference()])
        if launch is None or not launch.copied:
            plans[key] = form, plan
        else:
            launch.finish()
        while len(plans) > REMEMBERED:
            plans.popitem(last=False)

    def _run(
        self,
        plan: Plan,
        views: Mapping[str, Sequence[Tensor]],
        book: int,
        counts: int,
        values: Scalars | None,
    ) -> None:
        plan.place({name: _addresses(lying) for name, lying in views.items()}, book, counts)
        if values is not None:
            plan.write(values.columns(plan.flags))
            values.write_constants(plan.constants)
        buffers = plan.scratch(self._device)
        memory = self._uploaded(plan.content)
        found = {} if values is None else values.on_device(memory)
        for part, table in plan.tables(memory, found):
            self._driver.launch(part.kernel, min(part.items, self._most), table, part.items)
        del buffers  # not before

    def _uploaded(self, content: bytearray) -> Tensor:
        """A copy on the device, without waiting for what that is doing."""
        words = torch.frombuffer(content, dtype=torch.int64)
        if capture.under_way():
            memory = torch.empty(words.numel(), dtype=torch.int64, device=self._device)
            self._driver.store(memory, content)
            return memory
        if self._device.type == "cuda":
            memory = words.pin_memory().to(self._device, non_blocking=True)
            if self._driver not in _ready:
                # A kernel is loaded when it is first used, which a capture does not allow.
                _ready.add(self._driver)
                self._driver.store(memory[:1], content[:8])
            return memory
        return words.to(self._device, copy=True)


def _targets(tasks: Sequence[Any]) -> list[Tensor]:
    """What tasks of one kind write."""
    if tasks and isinstance(tasks[0], DenseMomentum):
        return [task.out for task in tasks]
    return [task.param for task in tasks]


def _forms(tensors: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """All of how tensors lie, but for where."""
    return list(map(_DTYPE, tensors)), list(map(_SHAPE, tensors)), list(map(_STRIDE, tensors))


_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
_STRIDE, _SIZE = Tensor.stride, Tensor.numel


def _addresses(tensors: Sequence[Tensor]) -> Numbers:
    return np.array(list(map(Tensor.data_ptr, tensors)), dtype=np.int64)


class Launch:
    """Plans the launches of one operation."""

    def __init__(self, geometry: Geometry, arena: int) -> None:
        self._arena, self._geometry = arena, geometry
        self._buffers: list[int] = []
        self._free = 0
        self._lying: dict[int, Tensor] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._planned: list[tuple[str, list[int], Sequence[Task | Factors], list[int]]] = []

    @property
    def copied(self) -> bool:
        """Whether tensors had to be copied, so that the plan holds for this once."""
        return bool(self._lying)

    def read(self, tensor: Tensor) -> packing.View:
        """Where a tensor lies that is only read; a copy of it if it has many strides."""
        found = packing.view(tensor)
        if found is None:
            copy = self._lying[id(tensor)] = tensor.contiguous()
            return self.read(copy)
        return found

    def lying(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that were looked at, or the copies of them."""
        return [self._lying.get(id(tensor), tensor) for tensor in tensors]

    def edited(self, tensor: Tensor) -> packing.View:
        """Where a tensor lies that is changed in place."""
        found = packing.view(tensor)
        if found is None:
            copy = self._lying[id(tensor)] = tensor.contiguous()
            self._copies.append((tensor, copy))
            return self.edited(copy)
        return found

    def scratch(self, count: int) -> int:
        """Place of ``count`` words of 32 bits with arbitrary content, aligned to 64 bits."""
        words = -(-count // 2)
        if words > self._free:
            self._free = max(words, self._arena // 2)
            self._buffers.append(0)
        at = self._buffers[-1]
        self._buffers[-1], self._free = at + words, self._free - words
        return place(len(self._buffers) - 1, 8 * at)

    def task(self, grad: Tensor, period: int) -> Task:
        """A gradient in blocks."""
        span, chunks = self._geometry.cut(period)
        return Task(self.read(grad), grad.numel(), period, span, chunks)

    def operation(
        self, kernel: str, tasks: Sequence[Any], nesterov: list[bool], constants: int
    ) -> Plan:
        """The plan of a step's kernel and of those that it needs before."""
        entries = [self._momentum(task) for task in tasks]
        for entry, flag in zip(entries, nesterov, strict=False):
            entry.flags |= packing.NESTEROV * flag
        if kernel == "factored_step":
            factors = [self._factors(*pair) for pair in zip(tasks, entries, strict=True)]
            self._averages(factors)
        self.steps(kernel, entries)
        return self.plan(entries, constants)

    def plan(self, entries: Sequence[Task], constants: int) -> Plan:
        """Of everything that was planned."""
        flags = np.array([entry.flags for entry in entries], dtype=np.int32)
        return Plan(self._planned, self._buffers, constants, flags)

    def _momentum(self, task: Any) -> Task:
        """A gradient, the momentum that it advances and what that is made into."""
        momentum: Momentum = task.momentum
        entry = self.task(momentum.grad, momentum.period)
        entry.param = self.edited(task.out if isinstance(task, DenseMomentum) else task.param)
        entry.index, entry.magnitude = momentum.index.data_ptr(), momentum.magnitude.data_ptr()
        if isinstance(task, BlockStep):
            entry.v = task.v.data_ptr()
        if entry.index % packing.WIDTH == 0:
            entry.flags |= packing.ALIGNED
        return entry

    def _factors(self, task: FactoredStep, entry: Task) -> Factors:
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
        )

    def _averages(self, factors: list[Factors]) -> None:
        """Plan the launches that advance factored second moments."""
        threads, warp = self._geometry.threads, self._geometry.warp
        means = [-(-f.rows // threads) + -(-f.columns // warp) for f in factors]
        every = list(range(len(factors)))
        sums = [f.panels * f.strips for f in factors]
        for kernel, items in (("factor_sums", sums), ("factor_means", means)):
            self._planned.append((kernel, every, factors, items))
        self._planned.append(("factor_roots", every, factors, [1] * len(factors)))

    def steps(self, kernel: str, entries: list[Task]) -> None:
        """Plan ``kernel``, and before it the peaks of blocks that are cut in chunks."""
        cut = [i for i, entry in enumerate(entries) if entry.chunks > 1]
        for i in cut:
            entries[i].peaks = self.scratch(2 * entries[i].items)
            entries[i].before = self.scratch(2 * entries[i].blocks)
        if cut:
            some = [entries[i] for i in cut]
            self._planned.append(("peaks", cut, some, [entry.items for entry in some]))
        items = [entry.items for entry in entries]
        self._planned.append((kernel, list(range(len(entries))), entries, items))

    def finish(self) -> None:
        """Write back what was copied, once the launches are under way."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)
