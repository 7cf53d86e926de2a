"""Gefen: AdamW at about one byte of optimizer state per parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gefen import hyperparameters as check
from gefen import kernels
from gefen.base import QuantisedOptimizer
from gefen.errors import InvalidArgumentError
from gefen.group_keys import Options
from gefen.kernels.reference import column_means
from gefen.kernels.tasks import Adam, BlockStep, FactoredStep
from gefen.parameters import Slot, held
from gefen.state import (
    MAGNITUDE,
    PERIOD,
    STEP,
    V_COL,
    V_ROW,
    Entry,
    Spec,
    V,
    block_shape,
    momentum_spec,
)
from gefen.work import Work

if TYPE_CHECKING:
    from gefen.distributed.shards import Shards
    from gefen.distributed.stepping import StepFailure


class Gefen(Options, QuantisedOptimizer):
    """AdamW with quantised momentum and shared or factored second moments.

    A drop-in for :class:`torch.optim.AdamW`: float32, bfloat16, float16 and float64 parameters
    of any shape, bare or as (name, parameter) pairs, in groups with their own settings.

    State of a parameter of n elements: a codebook index for each element (n bytes), float32
    magnitudes for each block of elements, and float32 second moments for each block, or for
    each row and column of a matrix with ``factored_v_2d``. Blocks lie within rows; their lengths
    and the codebook are learned from the first gradients that are not all zero. Arithmetic is
    float32, for float64 parameters float64; the state's dtypes are the same for all.

    An element whose gradient has always been 0 does not move but for weight decay, and none moves
    by more than 10 learning rates a step. DTensors are stepped with the numbers of one process
    that has whole parameters, once all ranks agree to step.

    Settings of a group:

    - ``lr`` ≥ 0, or a tensor with one element that may be changed in place; ``betas`` in
      [0, 1), which gefen-x's keys ``beta1`` and ``beta2`` of a group become; ``eps`` ≥ 2^-126;
      ``weight_decay`` ≥ 0, decoupled as in AdamW.
    - ``maximize``: go up the gradient; weights still decay towards zero.
    - ``bf16_stochastic_round``: write bfloat16 parameters rounded up or down at random by
      distance, once a step, so that updates and decay below half a unit in the last place are
      not lost. Repeatable, and equal on replicas. Other dtypes are not affected.
    - ``factored_v_2d``: factored second moments for matrices.
    - ``force_1d_period_one``, ``force_2d_period_one``, ``period_one_substrings``: magnitudes
      for every single element of vectors, of matrices, of parameters whose name contains one, in
      any case.
    - ``stochastic_round``: round the momentum up or down at random by distance, rather than to
      the nearest entry; a resumed run repeats the same numbers.

    Settings of the optimizer:

    - ``codebook_refresh_every``: learn the codebook anew after so many steps; 0 keeps the first.
    - ``fused``: use kernels where there are any for the device; on the CPU there are none.
    - ``deterministic``: only algorithms that repeat bit for bit, as under
      ``torch.use_deterministic_algorithms``: on CUDA the sums that block lengths are chosen by
      are then made on the CPU. The CPU has no others.
    - ``capturable``: the device counts steps and reads a tensor ``lr``, which must be there, so
      that a step can be captured in a CUDA graph; the state's ``step`` is then a tensor. A replay
      counts on and takes the ``lr`` tensor as it is; a number ``lr`` and the other settings are
      those of the capture. Step a few times before it, with the same gradients present, and
      capture anew after loading state or adding parameters. Captured steps learn no codebook.
    - ``verbose``: log learned block lengths and codebooks to the logger ``gefen`` at level INFO,
      which ``logging.basicConfig(level=logging.INFO)`` shows.

    Raises :class:`~gefen.errors.InvalidArgumentError` for settings outside these ranges,
    :class:`~gefen.errors.UnsupportedParameterError` for sparse, complex or integer parameters
    and :class:`~gefen.errors.UnsupportedFeatureError` for what is not available.

    Sources: arXiv 2606.13894; Shazeer & Stern 2018 for factored second moments.
    """

    checks: ClassVar[dict[str, check.Check]] = {
        "lr": check.learning_rate,
        "betas": check.betas,
        "eps": check.divisor,
        "weight_decay": check.at_least_zero,
        "force_1d_period_one": check.flag,
        "force_2d_period_one": check.flag,
        "period_one_substrings": check.strings,
        "factored_v_2d": check.flag,
        "stochastic_round": check.flag,
        "maximize": check.flag,
        "bf16_stochastic_round": check.flag,
    }
    option_checks: ClassVar[dict[str, check.Check]] = {
        **QuantisedOptimizer.option_checks,
        "codebook_refresh_every": check.whole,
    }

    place = 1

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        fused: bool = True,
        force_1d_period_one: bool = False,
        force_2d_period_one: bool = False,
        period_one_substrings: Iterable[str] = (),
        factored_v_2d: bool = True,
        codebook_refresh_every: int = 0,
        stochastic_round: bool = False,
        deterministic: bool = False,
        capturable: bool = False,
        verbose: bool = False,
        maximize: bool = False,
        bf16_stochastic_round: bool = False,
    ) -> None:
        if check.flag("capturable", capturable) and codebook_refresh_every:
            check.refuse(
                "codebook_refresh_every",
                codebook_refresh_every,
                "0 with capturable=True: a captured step learns no codebook",
            )
        super().__init__(params, locals())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in the base class, see :class:`~gefen.group_keys.KnownKeys`."""
        if isinstance(param_group, dict):
            self._check_rounding({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check_rounding(self, settings: Mapping[str, Any]) -> None:
        if self.deterministic and settings["stochastic_round"] and settings["factored_v_2d"]:
            check.refuse(
                "stochastic_round",
                True,
                "False with deterministic=True and factored_v_2d=True, as in gefen-x; or pass "
                "factored_v_2d=False (of a hybrid, backup_factored_v_2d=False)",
            )

    def _resumed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        # torch.distributed.checkpoint loses collections that are empty.
        resumed = super()._resumed({"period_one_substrings": (), **settings})
        self._check_rounding(resumed)
        return resumed

    def _check(self, slot: Slot) -> None:
        super()._check(slot)
        if self.state.get(slot.param):
            return  # its period is known
        if slot.group.get("period_one_substrings") and "param_names" not in slot.group:
            raise InvalidArgumentError(
                f"Invalid period_one_substrings={slot.group['period_one_substrings']!r}: "
                "parameters have no names; pass model.named_parameters()"
            )

    def _forced(self, work: Work) -> int | None:
        settings, dimensions = work.settings, work.param.dim()
        forced = (
            (dimensions == 1 and settings["force_1d_period_one"])
            or (dimensions == 2 and settings["force_2d_period_one"])
            or any(
                part.lower() in work.slot.name.lower()
                for part in settings["period_one_substrings"]
            )
        )
        return 1 if forced else None

    def _moments(self, work: Work, entry: Entry) -> Entry:
        if V in entry or V_ROW in entry:
            return {}
        shape = work.layout.shape
        if work.settings["factored_v_2d"] and len(shape) == 2:
            rows, columns = shape
            return {
                V_ROW: self._zeros(work, V_ROW, (rows,)),
                V_COL: self._zeros(work, V_COL, (columns,)),
            }
        return {V: self._zeros(work, V, block_shape(shape, entry[PERIOD]))}

    def _spec(self, slot: Slot, entry: Entry) -> Spec:
        spec = momentum_spec(self._layout(slot), entry)
        shape = spec.layout.shape
        if len(shape) == 2 and V not in entry:
            spec.tensors[V_ROW] = (torch.float32, (shape[0],))
            spec.tensors[V_COL] = (torch.float32, (shape[1],))
        else:
            spec.tensors[V] = spec.tensors[MAGNITUDE]
        return spec

    def _update(self, works: list[Work]) -> None:
        if not any(work.shared for work in works):
            self._run([work for work in works if work.param.numel()], {})
            return
        from gefen.distributed.stepping import StepFailure

        failure, sharing = StepFailure(), self._sharing()
        means, wholes = self._exchanged(works, sharing, failure)
        # A rank without rows keeps the columns' means even so.
        alone = [w for w in works if w.param.numel() or V_COL in w.entry]
        alone = [work for work in alone if not work.shared or work.layout.in_rows]
        failure.keep(lambda: self._run([*alone, *(whole for _, whole in wholes)], means), None)
        for work, whole in wholes:
            failure.keep(partial(sharing.keep_part, work, whole.param), None)
        if failure.error is not None:
            raise failure.error

    def _exchanged(
        self, works: list[Work], sharing: Shards, failure: StepFailure
    ) -> tuple[dict[Tensor, Tensor], list[tuple[Work, Work]]]:
        """Means of g² in all columns; works that are cut within rows, and the whole of each."""

        def mean(work: Work) -> Tensor:
            return column_means(work.grad, work.layout.shape[0])

        def columns(work: Work) -> int:
            return work.layout.shape[1]

        rows = [w for w in works if w.shared and w.layout.in_rows and V_COL in w.entry]
        means = sharing.total(rows, columns, mean, failure, torch.float32)
        # Ranks need not have registered what lies on different meshes in one order.
        cut = [work for work in works if work.shared and not work.layout.in_rows]
        cut.sort(key=sharing.key)
        wholes = sharing.gathered(cut, failure)
        return means, [
            (work, replace(whole, param=sharing.whole_target(work)))
            for work, whole in zip(cut, wholes, strict=True)
        ]

    def _run(self, works: list[Work], means: Mapping[Tensor, Tensor]) -> None:
        """means: of g² in each column over all rows, for parameters whose rows are cut."""
        blocks, factored = [], []
        adam, settings = None, None
        for work in works:
            entry, step = work.entry, work.entry[STEP]
            # Mostly the same for many in a row, which the kernels make use of.
            if adam is None or work.settings is not settings or not _same(step, adam.step):
                settings = work.settings
                adam = _adam(settings, step)
            momentum = self._momentum(work, adam.beta1)
            task: BlockStep | FactoredStep
            if V in entry:
                blocks.append(task := BlockStep(work.param, momentum, held(entry[V]), adam))
            else:
                rows, columns = held(entry[V_ROW]), held(entry[V_COL])
                task = FactoredStep(work.param, momentum, rows, columns, adam)
                # Mostly there are none, and tensors are slow keys.
                task.column_mean = means.get(work.key) if means else None
                factored.append(task)
            task.rounding = self._rounding(work)
        kernels.block_step(blocks, self.options["fused"])
        kernels.factored_step(factored, self.options["fused"])


def _same(step: int | Tensor, other: int | Tensor) -> bool:
    return step is other or (type(step) is int and step == other)


def _adam(settings: dict[str, Any], step: Any) -> Adam:
    beta1, beta2 = settings["betas"]
    return Adam(
        settings["lr"],
        settings["weight_decay"],
        settings["eps"],
        beta1,
        beta2,
        step,
        settings["maximize"],
    )
