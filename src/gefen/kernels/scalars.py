"""The scalars of an operation's tasks as columns of tables, on the host or on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gefen.kernels.packing import DECAYS, STOCHASTIC
from gefen.kernels.plan import Numbers
from gefen.kernels.tasks import Adam, BlockStep, DenseMomentum, FactoredStep, Scalar, wide


class Momenta:
    """Those of quantised momenta."""

    constants = 0
    """float64 numbers that :meth:`on_device` needs there."""

    def __init__(self, tasks: Sequence[DenseMomentum | BlockStep | FactoredStep]) -> None:
        self.tasks = tasks
        seeds = [task.momentum.seed for task in tasks]
        self._stochastic = any(seed is not None for seed in seeds)
        self._seeds = [(0, 0) if seed is None else seed for seed in seeds]
        self._random = np.array([seed is not None for seed in seeds])

    def columns(self, flags: Numbers) -> dict[str, Numbers]:
        """Fields by name, one value for each task; ``flags`` are added to."""
        mix = np.array([1 - task.momentum.beta for task in self.tasks])
        columns: dict[str, Numbers] = {"mix": mix, "flags": flags | STOCHASTIC * self._random}
        if self._stochastic:
            steps, parameters = zip(*self._seeds, strict=True)
            columns["parameter"] = _words(parameters)
            columns["step"] = _words([0 if isinstance(s, Tensor) else s for s in steps])
        return columns

    def write_constants(self, out: Numbers) -> None:
        """Write what :meth:`on_device` needs."""

    def on_device(self, memory: Tensor) -> Mapping[str, Tensor]:
        """Fields that only the device knows; ``memory`` ends with the constants."""
        steps = [step for step, _ in self._seeds if isinstance(step, Tensor)]
        return {"step": steps[0]} if steps else {}


class Adams(Momenta):
    """Those of Adam steps as well."""

    def __init__(self, tasks: Sequence[BlockStep | FactoredStep]) -> None:
        super().__init__(tasks)
        self._adams = [task.adam for task in tasks]
        keys = list(map(id, self._adams))
        different = dict(zip(keys, self._adams, strict=True))
        numbers = {key: number for number, key in enumerate(different)}
        self._different = list(different.values())
        self._which = np.array(list(map(numbers.__getitem__, keys)))
        self._deferred = any(isinstance(adam.step, Tensor) for adam in self._different)
        self.constants = 4 * len(tasks) if self._deferred else 0

    def columns(self, flags: Numbers) -> dict[str, Numbers]:
        """See :meth:`Momenta.columns`."""
        columns = super().columns(flags)
        rows = [_row(adam, self._deferred) for adam in self._different]
        eps, beta2, rate, decay, root2, correction2, decays = np.array(rows).T[:, self._which]
        columns["flags"] = columns["flags"] | DECAYS * (decays != 0)
        columns |= {"eps": eps, "beta2": beta2}
        periods = np.array([task.momentum.period for task in self.tasks])
        shares = {"share": periods}
        shapes = [task.param.shape for task in self.tasks if isinstance(task, FactoredStep)]
        if shapes:
            heights, widths = np.array(shapes).T
            shares = {"row_share": widths, "column_share": heights}
        columns |= {name: (1 - beta2) / count for name, count in shares.items()}
        if not self._deferred:
            columns |= {"rate": rate, "keep": 1 - decay}
            columns |= {"root2": root2, "correction2": correction2}
        return columns

    def write_constants(self, out: Numbers) -> None:
        """See :meth:`Momenta.write_constants`."""
        if self._deferred:
            numbers = {id(lr): i for i, lr in enumerate(self._rates())}
            rows = [(a.beta1, a.beta2, a.weight_decay, numbers[id(a.lr)]) for a in self._adams]
            out[:] = np.array(rows).T.reshape(-1)

    def _rates(self) -> list[Scalar]:
        return list({id(adam.lr): adam.lr for adam in self._adams}.values())

    def on_device(self, memory: Tensor) -> Mapping[str, Tensor]:
        """See :meth:`Momenta.on_device`; computed from steps and learning rates there."""
        found = super().on_device(memory)
        if not self._deferred:
            return found
        constants = memory[-self.constants :].view(torch.float64).view(4, -1)
        beta1, beta2, weight_decay, number = constants
        rates = [_filled(rate, memory.device) for rate in self._rates()]
        lr = rates[0] if len(rates) == 1 else torch.stack(rates)[number.long()]
        steps = torch.stack([torch.as_tensor(adam.step).view(()) for adam in self._adams]).double()
        correction2 = 1 - beta2**steps
        return {
            **found,
            "rate": lr / (1 - beta1**steps),
            "keep": 1 - lr * weight_decay,
            "root2": correction2.sqrt(),
            "correction2": correction2,
        }


Scalars = Momenta
"""What an operation is told of its tasks' scalars."""


def _row(adam: Adam, deferred: bool) -> tuple[Any, ...]:
    if deferred:
        return adam.eps, adam.beta2, 0.0, 0.0, 0.0, 0.0, adam.weight_decay
    decay = adam.decay
    return adam.eps, adam.beta2, adam.rate, decay, adam.root2, adam.correction2, decay


def _filled(value: Scalar, device: torch.device) -> Tensor:
    """A scalar as a float64 tensor on the device, without a copy from the host."""
    if isinstance(value, Tensor):
        found = wide(value)
        assert isinstance(found, Tensor)
        return found
    return torch.full((), value, dtype=torch.float64, device=device)


def _words(numbers: Sequence[int]) -> Numbers:
    return np.array([number % (1 << 64) for number in numbers], dtype=np.uint64)
