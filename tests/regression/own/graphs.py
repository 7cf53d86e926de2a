"""A CUDA graph on the CPU: records what a step does to tensors and repeats it in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

SYNCHRONISING = {
    *("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive", "histc", "item"),
}
READING = {
    *(Tensor.cpu, Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__),
    *(Tensor.__int__, Tensor.__index__, Tensor.pin_memory, torch.tensor),
}


class CaptureError(RuntimeError):
    """What CUDA would say: the operation is not permitted when the stream is capturing."""


class Graph:
    """What was done between :meth:`capture`'s beginning and end."""

    def __init__(self) -> None:
        self._actions: list[Callable[[], None]] = []
        self.under_way = False

    @contextmanager
    def capture(self, held: Sequence[Tensor]) -> Iterator[None]:
        """Record; afterwards ``held``, all that is changed, is as before: nothing has run."""
        before = [tensor.detach().clone() for tensor in held]
        self.under_way = True
        try:
            with _Functions(), _Operations(self._actions):
                yield
        finally:
            self.under_way = False
        with torch.no_grad():
            for tensor, value in zip(held, before, strict=True):
                tensor.copy_(value)

    @torch.no_grad()
    def replay(self) -> None:
        for action in self._actions:
            action()

    def driver(self, inner: Any) -> Any:
        """A driver whose launches are recorded as well."""
        return _Driver(self, inner)


class _Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READING:
            raise CaptureError(f"{func} reads the device")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, actions: list[Callable[[], None]]) -> None:
        super().__init__()
        self._actions = actions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(lambda x: x, (args, kwargs or {}))
        name = func.overloadpacket.__name__
        masks = [x for x in tree_leaves(args[1:]) if getattr(x, "dtype", None) == torch.bool]
        if name in SYNCHRONISING or (name.startswith("index") and masks):
            raise CaptureError(f"{func} waits for the device")
        result = func(*args, **kwargs)
        inputs = {_home(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]

        def repeat() -> None:
            again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for old, new in zip(made, again, strict=True):
                if _home(old) not in inputs:
                    old.copy_(new)

        self._actions.append(repeat)
        return result


class _Driver:
    def __init__(self, graph: Graph, inner: Any) -> None:
        self._graph, self._inner = graph, inner

    def launch(self, kernel: str, grid: int, table: Tensor, items: int) -> None:
        self._do(lambda: self._inner.launch(kernel, grid, table, items))

    def store(self, table: Tensor, content: bytes | bytearray) -> None:
        kept = bytes(content)
        self._do(lambda: self._inner.store(table, kept))

    def _do(self, action: Callable[[], None]) -> None:
        if self._graph.under_way:
            self._graph._actions.append(action)
        action()


def _home(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that a step changes."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = [x for entry in optimizer.state.values() for x in entry.values()]
    found = {id(x): x for x in [*params, *state] if isinstance(x, Tensor)}
    return list(found.values())


Make = Callable[[list[Tensor], Any], Any]


class Run:
    """Training with gradients that lie where they lay, and a learning rate in a tensor."""

    def __init__(self, make: Make, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.params = [self._random(shape, dtype).requires_grad_() for shape in shapes]
        for param in self.params:
            param.grad = torch.zeros_like(param)
        self.rate = torch.tensor(0.02)
        self.optimizer = make(self.params, self.rate)

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype)

    def steps(self, count: int, act: Callable[[], Any]) -> None:
        """Give new gradients and another rate each time, then ``act``."""
        for _ in range(count):
            for param in self.params:
                assert param.grad is not None
                param.grad.copy_(self._random(tuple(param.shape), param.dtype))
            self.rate.mul_(0.8)
            act()

    def captured(self, graph: Graph) -> None:
        with graph.capture(tensors_of(self.optimizer)):
            self.optimizer.step()

    def result(self) -> list[Tensor]:
        return [x.detach().clone() for x in tensors_of(self.optimizer)]


def injected(monkeypatch: pytest.MonkeyPatch) -> Graph:
    """A graph whose capture the optimizers notice."""
    graph = Graph()
    monkeypatch.setattr("gefen.capture.under_way", lambda: graph.under_way)
    return graph


def replayed(
    monkeypatch: pytest.MonkeyPatch,
    make: Make,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    warm: int = 2,
    count: int = 4,
) -> tuple[list[Tensor], list[Tensor]]:
    """What ``count`` replays after ``warm`` steps lead to, and what as many steps do."""
    eager, run = Run(make, shapes, dtype), Run(make, shapes, dtype)
    eager.steps(warm + count, eager.optimizer.step)
    graph = injected(monkeypatch)
    run.steps(warm, run.optimizer.step)
    run.captured(graph)
    host = copy.deepcopy([dict(group, params=[], lr=0.0) for group in run.optimizer.param_groups])
    run.steps(count, graph.replay)
    groups = run.optimizer.param_groups
    assert host == [dict(group, params=[], lr=0.0) for group in groups]
    return run.result(), eager.result()
