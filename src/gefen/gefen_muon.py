"""GefenMuon: Muon at about one byte of optimizer state per parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gefen import hyperparameters as check
from gefen import kernels
from gefen.base import QuantisedOptimizer
from gefen.errors import UnsupportedFeatureError, UnsupportedParameterError
from gefen.group_keys import Options
from gefen.kernels.reference import matrix_step
from gefen.kernels.tasks import DenseMomentum, wide
from gefen.newton_schulz import (
    STANDARD,
    Schedule,
    lr_ratio,
    matrices_of,
    normalise_rows,
    orthogonalise,
    resolve_schedule,
)
from gefen.parameters import Slot, held, is_shared
from gefen.state import (
    NORMUON_STEP,
    NORMUON_V,
    Entry,
    Spec,
    advance,
    momentum_spec,
)
from gefen.work import Work


def _coefficients(name: str, value: Any) -> tuple[float, float, float]:
    return resolve_schedule(None, value, 1)[0]


def _steps(name: str, value: Any) -> int:
    return len(resolve_schedule(None, STANDARD, value))


def _schedule(name: str, value: Any) -> str | Schedule | None:
    resolved = resolve_schedule(value)
    return value if value is None or isinstance(value, str) else resolved


class GefenMuon(Options, QuantisedOptimizer):
    """Muon with quantised momentum, for matrices; others are refused by name.

    The update of a matrix is its momentum with all singular values brought near 1 by
    Newton-Schulz iteration in bfloat16. State of a matrix of n elements: a codebook index for
    each element (n bytes), float32 magnitudes for each block of elements, and with ``normuon``
    one float32 for each row. Besides chunks, a step holds the dense update of one matrix (of
    several with ``batched_ns``) and what the iteration needs.

    Settings of a group:

    - ``lr`` ≥ 0, or a tensor with one element that may be changed in place; ``weight_decay``
      ≥ 0, decoupled; ``momentum`` in [0, 1); ``nesterov``; ``eps`` > 0, the smallest norm that
      a matrix is divided by.
    - ``ns_schedule``: None or "standard" (``ns_coefficients`` repeated ``ns_steps`` times),
      "tuned3", "tuned4", or (a, b, c) triples, one for each iteration.
    - ``adjust_lr_fn``: None or "original" multiplies the rate by sqrt(max(1, rows / columns)),
      "match_rms_adamw" by 0.2 · sqrt(max(rows, columns)).
    - ``normuon``, ``normuon_beta2``, ``normuon_eps``: even out the update's rows.
    - ``cautious``: drop elements of the update that disagree in sign with the gradient.
    - ``batched_ns``: iterate matrices of one shape together, as many as fit in
      ``batched_ns_workspace_bytes``; the results are those of single ones.
    - ``stochastic_round``: as in :class:`~gefen.Gefen`.
    - ``sharded_mode``: "exact", "distributed" or "approx", for DTensors alone: see
      `docs/sharding.md`.
    - ``fp8_ns``: iterate with operands rounded to eight bits where both lengths are at least 512,
      on every device; see :mod:`gefen.fp8`. ``fp8_ns_compile`` changes nothing: there is nothing
      to compile.
    - ``maximize`` and ``bf16_stochastic_round``: as in :class:`~gefen.Gefen`.

    Settings of the optimizer, and errors: as in :class:`~gefen.Gefen`. ``capturable`` cannot step
    matrices that ranks share, other than with ``sharded_mode="approx"``.

    Sources: Jordan et al. 2024 (Muon); arXiv 2510.05491 (NorMuon); arXiv 2411.16085 (cautious).
    """

    checks: ClassVar[dict[str, check.Check]] = {
        "lr": check.learning_rate,
        "weight_decay": check.at_least_zero,
        "momentum": check.decay_rate,
        "nesterov": check.flag,
        "ns_coefficients": _coefficients,
        "eps": check.divisor,
        "ns_steps": _steps,
        "ns_schedule": _schedule,
        "adjust_lr_fn": check.one_of(None, "original", "match_rms_adamw"),
        "sharded_mode": check.one_of("exact", "distributed", "approx"),
        "fp8_ns": check.flag,
        "fp8_ns_compile": check.flag,
        "batched_ns": check.flag,
        "batched_ns_workspace_bytes": check.whole,
        "stochastic_round": check.flag,
        "normuon": check.flag,
        "normuon_beta2": check.decay_rate,
        "normuon_eps": check.divisor,
        "cautious": check.flag,
        "maximize": check.flag,
        "bf16_stochastic_round": check.flag,
    }

    deciding = ("normuon", "sharded_mode")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = STANDARD,
        eps: float = 1e-7,
        ns_steps: int = 5,
        ns_schedule: str | Iterable[Iterable[float]] | None = None,
        adjust_lr_fn: str | None = None,
        *,
        fused: bool = True,
        sharded_mode: str = "exact",
        fp8_ns: bool = False,
        fp8_ns_compile: bool = True,
        batched_ns: bool = False,
        batched_ns_workspace_bytes: int = 268435456,
        stochastic_round: bool = False,
        deterministic: bool = False,
        normuon: bool = False,
        normuon_beta2: float = 0.95,
        normuon_eps: float = 1e-8,
        cautious: bool = False,
        capturable: bool = False,
        verbose: bool = False,
        maximize: bool = False,
        bf16_stochastic_round: bool = False,
    ) -> None:
        self._warned: set[Tensor] = set()
        super().__init__(params, locals())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._warned = set()
        super().__setstate__(state)

    def _check(self, slot: Slot) -> None:
        super()._check(slot)
        shape, shared = tuple(slot.param.shape), self._is_shared(slot.group, slot.param)
        if self.capturable and shared:
            raise UnsupportedFeatureError(
                f"Parameter {slot.name!r} is stepped by several ranks together, which "
                "capturable=True cannot: pass sharded_mode='approx' or capturable=False"
            )
        if len(shape) not in (2, 3):
            raise UnsupportedParameterError(
                f"Parameter {slot.name!r} has shape {shape}: GefenMuon takes matrices, or stacks "
                "of them, only; use GefenMuonHybrid, or give the others to Gefen"
            )
        # How others lie is looked at in a step, of which all ranks hear.
        alone = is_shared(slot.param) and not shared
        if alone and self._layout(slot).gathered:
            raise UnsupportedParameterError(
                f"Parameter {slot.name!r} has placements {slot.param.placements}: "  # type: ignore[attr-defined]
                "sharded_mode='approx' steps rows, and these are cut; pass 'exact'"
            )

    def _moments(self, work: Work, entry: Entry) -> Entry:
        if not work.settings["normuon"] or NORMUON_V in entry:
            return {}
        return {
            NORMUON_V: self._zeros(work, NORMUON_V, work.layout.shape[:-1]),
            NORMUON_STEP: self._zero(work.param),
        }

    def _spec(self, slot: Slot, entry: Entry) -> Spec:
        spec = momentum_spec(self._layout(slot), entry)
        if NORMUON_V in entry:
            spec.tensors[NORMUON_V] = (torch.float32, tuple(slot.param.shape[:-1]))
            spec.counts[NORMUON_STEP] = 0
        return spec

    def _count(self, works: list[Work]) -> None:
        super()._count(works)
        advance([work.entry for work in works if work.settings["normuon"]], NORMUON_STEP)

    def _is_shared(self, group: Mapping[str, Any], param: Tensor) -> bool:
        return group["sharded_mode"] != "approx" and is_shared(param)

    def _sharded_mode(self, slot: Slot) -> str:
        mode: str = slot.group["sharded_mode"]
        return mode

    def _update(self, works: list[Work]) -> None:
        if any(work.shared for work in works):
            from gefen.distributed.matrices import step

            step(self, works)
        else:
            self._step_own(works)

    def _step_own(self, works: list[Work]) -> None:
        """Step matrices of which this rank has all, or its own part alone."""
        for work, update in self._updates([work for work in works if work.param.numel()]):
            self._apply(work, update, self._shape(work))

    def _shape(self, work: Work) -> tuple[int, ...]:
        """Of the matrix that is orthogonalised, or of those of a stack."""
        shape = work.layout.shape if work.shared else work.param.shape
        return tuple(shape[-2:])

    def _updates(self, works: list[Work]) -> Iterator[tuple[Work, Tensor]]:
        """Advance the momenta; yield each work with its update, bfloat16, of its own shape."""
        for bucket in _buckets(works):
            dense = self._directions(bucket)
            for work, update in zip(bucket, self._orthogonal(bucket, dense), strict=True):
                rows = held(work.entry[NORMUON_V]) if work.settings["normuon"] else None
                yield work, self._evened(work, update, rows)

    def _directions(self, bucket: list[Work]) -> Tensor:
        """Advance the momenta; their directions, bfloat16 [parameters, *shape]."""
        param = bucket[0].param
        shape = (len(bucket), *param.shape)
        dense = torch.empty(shape, dtype=torch.bfloat16, device=param.device)
        tasks = [
            DenseMomentum(
                self._momentum(work, work.settings["momentum"]), work.settings["nesterov"], out
            )
            for work, out in zip(bucket, dense, strict=True)
        ]
        kernels.momentum_update(tasks, self.options["fused"])
        return dense

    def _orthogonal(self, bucket: list[Work], dense: Tensor) -> Tensor:
        """Directions, [parameters, *shape], of whole matrices with singular values near 1."""
        settings, stack = bucket[0].settings, dense.flatten(0, -3)
        size = max(settings["batched_ns_workspace_bytes"] // _workspace(stack[0]), 1)
        schedule, eps, fp8 = _resolved(settings), settings["eps"], settings["fp8_ns"]
        parts = [orthogonalise(part, schedule, eps, fp8) for part in torch.split(stack, size)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view_as(dense)

    def _evened(self, work: Work, update: Tensor, averages: Tensor | None) -> Tensor:
        """averages: of the rows' mean squares, changed in place; None leaves rows as they are."""
        if averages is None:
            return update
        settings, entry = work.settings, work.entry
        even = normalise_rows(
            update,
            averages,
            settings["normuon_beta2"],
            entry[NORMUON_STEP],
            settings["normuon_eps"],
        )
        # Sharded updates travel in bfloat16, so every update has that precision.
        return even.bfloat16()

    def _apply(
        self, work: Work, update: Tensor, shape: tuple[int, ...], share: Tensor | None = None
    ) -> None:
        """Step ``work.param``, matrices of ``shape`` or rows of one.

        share: of the elements of all rows that agree with the gradient, for a cautious update.
        """
        settings = work.settings
        lr = wide(settings["lr"])
        ratio, offset = lr_ratio(shape, settings["adjust_lr_fn"]), self._offset(work)
        parts = zip(*(matrices_of(t) for t in (work.param, update, work.grad)), strict=True)
        for param, own, grad in parts:
            matrix_step(
                param,
                own,
                lr=lr * (-ratio if settings["maximize"] else ratio),
                weight_decay=lr * settings["weight_decay"] if settings["weight_decay"] else 0.0,
                cautious=grad if settings["cautious"] else None,
                rounding=self._rounding(work),
                offset=offset,
                share=share,
            )
            offset += param.numel()


def _resolved(settings: dict[str, Any]) -> Schedule:
    keys = ("ns_schedule", "ns_coefficients", "ns_steps")
    return resolve_schedule(*(settings[key] for key in keys))


def _buckets(works: list[Work]) -> Iterator[list[Work]]:
    """Works whose matrices are iterated together: alike, and within the workspace."""
    alike: dict[Any, list[Work]] = {}
    for number, work in enumerate(works):
        settings, param = work.settings, work.param
        key: Any = number
        if settings["batched_ns"]:
            key = (
                param.shape,
                param.device,
                _resolved(settings),
                settings["eps"],
                settings["fp8_ns"],
            )
        alike.setdefault(key, []).append(work)
    for group in alike.values():
        fitting = group[0].settings["batched_ns_workspace_bytes"] // _workspace(group[0].param)
        size = max(fitting, 1)
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _workspace(param: Tensor) -> int:
    """Bytes of an iteration: for each matrix, two bfloat16 copies of it and of its Gram matrix."""
    rows, columns = param.shape[-2:]
    matrices = param.numel() // max(rows * columns, 1)
    return 4 * matrices * (rows * columns + min(rows, columns) ** 2)
