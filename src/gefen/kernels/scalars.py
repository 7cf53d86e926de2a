"""The scalars of an operation's tasks as columns of tables, on the host or on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gefen.kernels.packing import DECAYS, ROUNDS, STOCHASTIC, unit
from gefen.kernels.plan import Numbers
from gefen.kernels.tasks import (
    BOUND,
    ROUNDING,
    Adam,
    BlockStep,
    DenseMomentum,
    FactoredStep,
    Scalar,
    Seed,
    shrink,
    wide,
)


class _Random:
    """The random numbers of some tasks: the fields that choose them and the flag of their use."""

    def __init__(self, seeds: Sequence[Seed | None], prefix: str, flag: int) -> None:
        self.used = any(seed is not None for seed in seeds)
        self._step, self._parameter = f"{prefix}step", f"{prefix}parameter"
        self._seeds = [(0, 0) if seed is None else seed for seed in seeds]
        self.flags = flag * np.array([seed is not None for seed in seeds])

    def columns(self) -> dict[str, Numbers]:
        if not self.used:
            return {}
        steps, parameters = zip(*self._seeds, strict=True)
        on_host = [0 if isinstance(step, Tensor) else step for step in steps]
        return {self._step: _words(on_host), self._parameter: _words(parameters)}

    def on_device(self) -> dict[str, Tensor]:
        steps = [step for step, _ in self._seeds if isinstance(step, Tensor)]
        return {self._step: steps[0]} if steps else {}


class Momenta:
    """Those of quantised momenta."""

    constants = 0
    """float64 numbers that :meth:`on_device` needs there."""

    def __init__(self, tasks: Sequence[DenseMomentum | BlockStep | FactoredStep]) -> None:
        self.tasks = tasks
        self._random = [_Random([task.momentum.seed for task in tasks], "", STOCHASTIC)]

    def columns(self, flags: Numbers) -> dict[str, Numbers]:
        """Fields by name, one value for each task; ``flags`` are added to."""
        columns = {"mix": np.array([1 - task.momentum.beta for task in self.tasks])}
        for random in self._random:
            columns |= random.columns()
            flags = flags | random.flags
        if any(random.used for random in self._random):
            columns["offset"] = np.array([task.momentum.offset for task in self.tasks])
        return {**columns, "flags": flags}

    def write_constants(self, out: Numbers) -> None:
        """Write what :meth:`on_device` needs."""

    def on_device(self, memory: Tensor) -> Mapping[str, Tensor]:
        """Fields that only the device knows; ``memory`` ends with the constants."""
        return {name: step for random in self._random for name, step in random.on_device().items()}


class Adams(Momenta):
    """Those of Adam steps as well."""

    def __init__(self, tasks: Sequence[BlockStep] | Sequence[FactoredStep]) -> None:
        super().__init__(tasks)
        self._random.append(_Random([_rounding(task) for task in tasks], "round_", ROUNDS))
        self._factored = [task for task in tasks if isinstance(task, FactoredStep)]
        self._periods = [task.momentum.period for task in tasks]
        self._adams = [task.adam for task in tasks]
        keys = list(map(id, self._adams))
        different = dict(zip(keys, self._adams, strict=True))
        numbers = {key: number for number, key in enumerate(different)}
        self._different = list(different.values())
        self._which = np.array(list(map(numbers.__getitem__, keys)))
        self._deferred = any(isinstance(adam.step, Tensor) for adam in self._different)
        self.constants = 5 * len(tasks) if self._deferred else 0

    def columns(self, flags: Numbers) -> dict[str, Numbers]:
        """See :meth:`Momenta.columns`."""
        columns = super().columns(flags)
        rows = np.array([_row(adam, self._deferred) for adam in self._different]).T
        eps, beta2, rate, reach, decay, root2, correction2, decays = rows[:, self._which]
        columns["flags"] = columns["flags"] | DECAYS * (decays != 0)
        columns |= {"eps": eps, "beta2": beta2, **self._shares(1 - beta2)}
        if not self._deferred:
            columns |= {"rate": rate, "reach": reach, "keep": 1 - decay}
            columns |= {"root2": root2, "correction2": correction2}
        return columns

    def _shares(self, fresh: Numbers) -> dict[str, Numbers]:
        """What sums of scaled squares are multiplied by, and where means are given."""
        periods = np.array(self._periods)
        if not self._factored:
            return {"share": fresh / periods / unit(periods)}
        scales = np.array([shrink(max(task.param.shape)) for task in self._factored])
        heights, widths = np.array([task.param.shape for task in self._factored]).T
        means = np.array([_address(task.column_mean) for task in self._factored])
        return {
            "row_share": fresh / widths / scales,
            "column_share": np.where(means, fresh, fresh / heights / scales),
            "column_mean": means,
        }

    def write_constants(self, out: Numbers) -> None:
        """See :meth:`Momenta.write_constants`."""
        if self._deferred:
            numbers = {id(lr): i for i, lr in enumerate(self._rates())}
            rows = [
                (a.beta1, a.beta2, a.weight_decay, -1 if a.maximize else 1, numbers[id(a.lr)])
                for a in self._adams
            ]
            out[:] = np.array(rows).T.reshape(-1)

    def _rates(self) -> list[Scalar]:
        return list({id(adam.lr): adam.lr for adam in self._adams}.values())

    def on_device(self, memory: Tensor) -> Mapping[str, Tensor]:
        """See :meth:`Momenta.on_device`; computed from steps and learning rates there."""
        found = super().on_device(memory)
        if not self._deferred:
            return found
        constants = memory[-self.constants :].view(torch.float64).view(5, -1)
        beta1, beta2, weight_decay, sign, number = constants
        rates = [_filled(rate, memory.device) for rate in self._rates()]
        lr = rates[0] if len(rates) == 1 else torch.stack(rates)[number.long()]
        steps = torch.stack([torch.as_tensor(adam.step).view(()) for adam in self._adams]).double()
        correction2 = 1 - beta2**steps
        return {
            **found,
            "rate": sign * lr / (1 - beta1**steps),
            "reach": (BOUND * lr).expand(len(sign)),
            "keep": 1 - lr * weight_decay,
            "root2": correction2.sqrt(),
            "correction2": correction2,
        }


Scalars = Momenta
"""What an operation is told of its tasks' scalars."""


def _row(adam: Adam, deferred: bool) -> tuple[Any, ...]:
    if deferred:
        return adam.eps, adam.beta2, 0.0, 0.0, 0.0, 0.0, 0.0, adam.weight_decay
    decay, corrections = adam.decay, (adam.root2, adam.correction2)
    return adam.eps, adam.beta2, adam.rate, adam.reach, decay, *corrections, decay


def _rounding(task: BlockStep | FactoredStep) -> Seed | None:
    """The seed of a parameter's own rounding, if there is any."""
    if task.rounding is None or task.param.dtype != torch.bfloat16:
        return None
    step, number = task.rounding
    return step, number | ROUNDING


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _filled(value: Scalar, device: torch.device) -> Tensor:
    """A scalar as a float64 tensor on the device, without a copy from the host."""
    if isinstance(value, Tensor):
        found = wide(value)
        assert isinstance(found, Tensor)
        return found
    return torch.full((), value, dtype=torch.float64, device=device)


def _words(numbers: Sequence[int]) -> Numbers:
    return np.array([number % (1 << 64) for number in numbers], dtype=np.uint64)
