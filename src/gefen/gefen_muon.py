"""GefenMuon: Muon at about one byte of optimizer state per parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gefen import hyperparameters as check
from gefen import kernels
from gefen.base import Plan, QuantisedOptimizer, Work
from gefen.blocks import find_period
from gefen.errors import UnsupportedFeatureError, UnsupportedParameterError
from gefen.group_keys import Options
from gefen.kernels.reference import matrix_step
from gefen.kernels.tasks import DenseMomentum, wide
from gefen.momentum import learn_from
from gefen.newton_schulz import (
    STANDARD,
    Schedule,
    lr_ratio,
    normalise_rows,
    orthogonalise,
    resolve_schedule,
)
from gefen.parameters import Slot, is_dtensor, is_shared, slots
from gefen.state import (
    CODEBOOK,
    GLOBAL_STEP,
    NORMUON_STEP,
    NORMUON_V,
    Entry,
    Spec,
    advance,
    momentum_spec,
)

if TYPE_CHECKING:
    from gefen.distributed.sharding import Agreement
    from gefen.distributed.stepping import StepFailure
    from gefen.distributed.wholes import WholeMatrices


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
    - ``sharded_mode``: "exact", "distributed" or "approx"; one and the same for plain tensors.
    - ``fp8_ns``: iterate with operands rounded to eight bits where both lengths are at least 256,
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
        self._wholes: WholeMatrices | None = None
        self._owners: dict[Tensor, int] = {}
        super().__init__(params, locals())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_owners": self._owners}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._wholes = None
        super().__setstate__(state)

    def _check(self, slot: Slot) -> None:
        super()._check(slot)
        if self.capturable and self._is_whole(slot):
            raise UnsupportedFeatureError(
                f"Parameter {slot.name!r} is stepped by several ranks together, which "
                "capturable=True cannot: pass sharded_mode='approx' or capturable=False"
            )
        if slot.param.dim() != 2:
            raise UnsupportedParameterError(
                f"Parameter {slot.name!r} has shape {tuple(slot.param.shape)}: GefenMuon takes "
                "matrices only; use GefenMuonHybrid, or give the others to Gefen"
            )

    def _period(self, work: Work) -> int:
        return find_period(work.grad, self.options["deterministic"])

    def _moments(self, work: Work, entry: Entry) -> Entry:
        if not work.settings["normuon"] or NORMUON_V in entry:
            return {}
        rows, device = work.param.shape[0], work.param.device
        return {
            NORMUON_V: torch.zeros(rows, dtype=torch.float32, device=device),
            NORMUON_STEP: self._zero(work.param),
        }

    def _spec(self, param: Tensor, entry: Entry) -> Spec:
        spec = momentum_spec(param, entry)
        if NORMUON_V in entry:
            spec.tensors[NORMUON_V] = (torch.float32, (param.shape[0],))
            spec.counts[NORMUON_STEP] = 0
        return spec

    def _count(self, works: list[Work]) -> None:
        super()._count(works)
        counted = [w for w in works if w.settings["normuon"] and not self._is_whole(w.slot)]
        advance([work.entry for work in counted], NORMUON_STEP)

    def _is_whole(self, slot: Slot) -> bool:
        """Whether ranks that share the matrix step it as a whole, rather than their shards."""
        shared = slot.group["sharded_mode"] != "approx" and is_shared(slot.param)
        return shared and slot.param.numel() > 0

    def _whole_matrices(self) -> WholeMatrices:
        if self._wholes is None:
            from gefen.distributed.wholes import WholeMatrices

            self._wholes = WholeMatrices(self)
        return self._wholes

    def _has_wholes(self) -> bool:
        return any(self._is_whole(slot) for slot in slots(self.param_groups))

    def _agreement(self) -> Agreement | None:
        return self._joint_agreement() if self._has_wholes() else None

    def _sharded_mode(self, slot: Slot) -> str:
        mode: str = slot.group["sharded_mode"]
        return mode

    def _view(self, slot: Slot) -> Tensor:
        return slot.param if self._is_whole(slot) else super()._view(slot)

    def _facts(self) -> dict[str, Any]:
        facts = super()._facts()
        # Ranks that each step their own have codebooks of their own.
        if self._has_wholes():
            shared = self._shared(CODEBOOK), self._shared(GLOBAL_STEP)
            facts |= self._whole_matrices().facts(*shared)
        return facts

    def _wants_survey(self) -> bool:
        return self._has_wholes() and self._wants_codebook()

    def _prepare(self, works: list[Work]) -> Plan:
        if not self._has_wholes():
            return super()._prepare(works)
        wholes = self._whole_matrices()
        wholes.refresh()
        return Plan(
            works,
            {
                work.key: wholes.missing(work)
                if self._is_whole(work.slot)
                else self._missing(work)
                for work in works
            },
        )

    def _survey(self, plan: Plan, failure: StepFailure, first: bool) -> Tensor | None:
        if not self._has_wholes():
            return None
        whole, rest = self._divided(plan.works)
        counted = [work for work in rest if first or is_dtensor(work.key)]
        own = failure.keep(lambda: self._histogram(counted, plan.missing), None)
        return self._whole_matrices().survey(whole, plan.missing, own, failure)

    def _surveyed(self, plan: Plan, counts: Tensor) -> Plan:
        return replace(plan, codebook=learn_from(counts)) if self._wants_survey() else plan

    def _divided(self, works: list[Work]) -> tuple[list[Work], list[Work]]:
        """Works that ranks do together, and this rank's own."""
        whole = [work for work in works if self._is_whole(work.slot)]
        return whole, [work for work in works if not self._is_whole(work.slot)]

    def _gathered(self) -> dict[Tensor, Entry]:
        return self._whole_matrices().gathered() if self._has_wholes() else {}

    def _kept(self, entries: dict[Tensor, Entry]) -> dict[Tensor, Entry]:
        return self._whole_matrices().kept(entries) if self._has_wholes() else entries

    def _loaded(self) -> None:
        super()._loaded()
        if self._has_wholes():
            self._whole_matrices().refresh(anew=True)

    def _update(self, works: list[Work]) -> None:
        whole, rest = self._divided(works)
        for work, update in self._updates(rest):
            self._apply(work, update, work.param.shape)
        if whole:
            self._whole_matrices().step(whole)

    def _updates(self, works: list[Work]) -> Iterator[tuple[Work, Tensor]]:
        """Advance the momenta; yield each work with its update, bfloat16 [rows, columns]."""
        for bucket in _buckets(works):
            dense = self._directions(bucket)
            settings = bucket[0].settings
            schedule, eps = _resolved(settings), settings["eps"]
            updates = orthogonalise(dense, schedule, eps, settings["fp8_ns"])
            for work, update in zip(bucket, updates.view_as(dense), strict=True):
                yield work, self._evened(work, update)

    def _evened(self, work: Work, update: Tensor) -> Tensor:
        settings, entry = work.settings, work.entry
        if not settings["normuon"]:
            return update
        even = normalise_rows(
            update,
            entry[NORMUON_V],
            settings["normuon_beta2"],
            entry[NORMUON_STEP],
            settings["normuon_eps"],
        )
        # Sharded updates travel in bfloat16, so every update has that precision.
        return even.bfloat16()

    def _directions(self, bucket: list[Work]) -> Tensor:
        """Advance the momenta; their directions, bfloat16 [matrices, rows, columns]."""
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

    def _apply(
        self, work: Work, update: Tensor, shape: tuple[int, ...], masked: bool = False
    ) -> None:
        """Step ``work.param``, a matrix of ``shape`` or a shard of one."""
        settings = work.settings
        lr = wide(settings["lr"])
        ratio = lr_ratio(shape, settings["adjust_lr_fn"])
        matrix_step(
            work.param.detach(),
            update,
            lr=lr * (-ratio if settings["maximize"] else ratio),
            weight_decay=lr * settings["weight_decay"] if settings["weight_decay"] else 0.0,
            cautious=work.grad if settings["cautious"] and not masked else None,
            rounding=self._rounding(work),
        )


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
    """Bytes of one matrix's iteration: two bfloat16 copies of it and two of its Gram matrix."""
    return 4 * (param.numel() + min(param.shape) ** 2)
