"""How far optimizers move parameters, and at which learning rate the loss falls fastest.

Names, arguments and results are those of gefen-x's ``gefen.tools``; the trials are taken back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gefen.errors import InvalidArgumentError
from gefen.newton_schulz import lr_ratio
from gefen.parameters import local, slots
from gefen.tools.trial import Closure, backward, parameters, set_rate, taken_back


@dataclass
class GroupUpdateStats:
    """How far one group's parameters moved in a step, as root mean squares of the movement."""

    label: str
    """``<number of the group>:muon`` or ``<number>:gefen``, the latter for all but Muon."""
    is_muon: bool
    num_params: int
    applied_rms: float
    """Median of ``per_step_rms``."""
    per_step_rms: list[float] = field(default_factory=list)
    analytic_original_ratio: float | None = None
    """What ``adjust_lr_fn="original"`` multiplies the rate of the first matrix by."""
    analytic_match_rms_ratio: float | None = None
    active_ratio: float = 1.0


@dataclass
class RelativeCalibration:
    """Factors on the groups' learning rates that make all move as far as the reference."""

    reference_label: str
    stats: list[GroupUpdateStats]
    multipliers: dict[str, float]
    analytic_comparison: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass
class ParamVsAdamw:
    """Root mean square movement of a parameter, and AdamW's from the same gradients."""

    name: str
    is_muon: bool
    rows: int
    cols: int
    gefen_rms: float
    adamw_rms: float
    ratio: float
    """``adamw_rms / gefen_rms``: the factor on the rate that makes both equal."""
    active_ratio: float
    sqrt_max: float | None


@dataclass
class LRRangeResult:
    """Losses of a ramp of learning rates."""

    lrs: list[float]
    losses: list[float]
    smoothed: list[float]
    suggested_lr: float
    """Where the smoothed loss falls fastest."""
    min_loss_lr: float
    """Where it is lowest, which is too high to train with."""
    diverged_at: float | None


def measure_update_rms(
    optimizer: Any,
    closure: Closure,
    *,
    num_steps: int = 20,
    warmup: int = 3,
    zero_weight_decay: bool = True,
    model: nn.Module | None = None,
) -> list[GroupUpdateStats]:
    """The movement of every group in ``num_steps`` trial steps, the first ``warmup`` left out.

    ``closure`` computes a loss, calls ``backward`` and returns it. With ``zero_weight_decay``
    nothing decays meanwhile. Everything is put back; pass ``model`` if it has buffers that a
    forward pass changes.
    """
    _check_steps(num_steps, warmup)
    groups = optimizer.param_groups
    moved: list[list[float]] = [[] for _ in groups]
    with taken_back(optimizer, model):
        if zero_weight_decay:
            _stop_decay(optimizer)
        for number in range(num_steps):
            backward(optimizer, closure)
            steps = _moved(optimizer)
            if number >= warmup:
                for group, found in zip(groups, moved, strict=True):
                    found.append(_rms([steps[id(param)] for param in group["params"]]))
    return [_stats(i, g, m) for i, (g, m) in enumerate(zip(groups, moved, strict=True))]


def calibrate_relative(
    optimizer: Any,
    closure: Closure,
    *,
    reference: str = "gefen",
    num_steps: int = 20,
    warmup: int = 3,
    model: nn.Module | None = None,
) -> RelativeCalibration:
    """Factors on the groups' rates that make all of them move as far as ``reference``.

    That is a label, or "gefen" or "muon" for the first group of that kind. Apply them as
    ``group["lr"] *= factor``. Groups that did not move get the factor NaN.
    """
    stats = measure_update_rms(optimizer, closure, num_steps=num_steps, warmup=warmup, model=model)
    fits: dict[str, Callable[[GroupUpdateStats], bool]] = {
        "gefen": lambda s: not s.is_muon,
        "muon": lambda s: s.is_muon,
    }
    fit = fits.get(reference, lambda s: s.label == reference)
    chosen = next(filter(fit, stats), None)
    if chosen is None:
        labels = [s.label for s in stats]
        raise InvalidArgumentError(
            f"Invalid {reference=}: must be 'gefen', 'muon' or one of {labels}, and there"
        )
    factors = {s.label: _quotient(chosen.applied_rms, s.applied_rms) for s in stats}
    compared = {s.label: _compared(s, factors[s.label]) for s in stats if s.is_muon}
    return RelativeCalibration(chosen.label, stats, factors, compared)


def calibrate_vs_adamw(
    optimizer: Any,
    closure: Closure,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    num_steps: int = 40,
    warmup: int = 5,
    model: nn.Module | None = None,
) -> list[ParamVsAdamw]:
    """The movement of every parameter beside that of an AdamW that gets the same gradients.

    ``optimizer`` leads; AdamW, with the rates of its groups, steps copies that nobody reads.
    """
    _check_steps(num_steps, warmup)
    found: dict[int, list[tuple[float, float]]] = {id(p): [] for p in parameters(optimizer)}
    with taken_back(optimizer, model):
        _stop_decay(optimizer)
        shadows = {id(p): nn.Parameter(local(p).detach().float()) for p in parameters(optimizer)}
        other = torch.optim.AdamW(
            [
                {"params": [shadows[id(p)] for p in group["params"]], "lr": float(group["lr"])}
                for group in optimizer.param_groups
            ],
            betas=betas,
            eps=eps,
            weight_decay=0.0,
        )
        for number in range(num_steps):
            backward(optimizer, closure)
            for param in parameters(optimizer):
                grad = param.grad
                shadows[id(param)].grad = None if grad is None else local(grad).float()
            theirs, ours = _moved(other), _moved(optimizer)
            for key, pairs in found.items():
                if number >= warmup:
                    pairs.append((_rms([ours[key]]), _rms([theirs[id(shadows[key])]])))
    return [
        _versus(slot.name, slot.group, slot.param, found[id(slot.param)])
        for slot in slots(optimizer.param_groups)
    ]


def lr_range_test(
    optimizer: Any,
    closure: Closure,
    *,
    num_iter: int = 100,
    start_lr: float = 1e-7,
    end_lr: float = 1.0,
    smooth_beta: float = 0.9,
    diverge_factor: float = 4.0,
    model: nn.Module | None = None,
) -> LRRangeResult:
    """Train ``num_iter`` trial steps at rates from ``start_lr`` to ``end_lr``, each one higher.

    Losses are smoothed by a bias-corrected average with ``smooth_beta``. The ramp ends early
    where the smoothed loss exceeds ``diverge_factor`` times the lowest, or is not finite.
    Everything is put back. Source: Smith 2017 (arXiv 1506.01186).
    """
    if num_iter < 3 or not 0 < start_lr < end_lr < math.inf:
        raise InvalidArgumentError(
            f"Invalid {num_iter=}, {start_lr=}, {end_lr=}: must be at least 3 steps, from a rate "
            "above 0 to a higher one"
        )
    lrs: list[float] = []
    losses: list[float] = []
    smoothed: list[float] = []
    average, diverged_at = 0.0, None
    with taken_back(optimizer, model):
        for rate in np.geomspace(start_lr, end_lr, num_iter).tolist():
            set_rate(optimizer, rate)
            loss = backward(optimizer, closure)
            average = smooth_beta * average + (1 - smooth_beta) * loss
            level = average / (1 - smooth_beta ** (len(lrs) + 1))
            if not math.isfinite(loss) or (smoothed and level > diverge_factor * min(smoothed)):
                diverged_at = rate
                break
            lrs.append(rate)
            losses.append(loss)
            smoothed.append(level)
            optimizer.step()
    if len(lrs) < 3:
        raise InvalidArgumentError(
            f"Invalid {start_lr=}: the loss is {loss} within {len(lrs) + 1} steps; start lower"
        )
    lowest = int(np.argmin(smoothed))
    return LRRangeResult(
        lrs, losses, smoothed, lrs[_steepest(lrs, smoothed, lowest)], lrs[lowest], diverged_at
    )


def _steepest(lrs: Sequence[float], smoothed: Sequence[float], lowest: int) -> int:
    """Where the loss falls fastest per factor of the rate, before it is lowest.

    The first tenth is left out: there the average still follows single losses.
    """
    slopes = np.gradient(np.asarray(smoothed), np.log(lrs))
    first = min(len(lrs) // 10, lowest)
    return first + int(np.argmin(slopes[first : lowest + 1]))


def _check_steps(num_steps: int, warmup: int) -> None:
    if not 0 <= warmup < num_steps:
        raise InvalidArgumentError(f"Invalid {num_steps=}: must exceed {warmup=}, which is >= 0")


def _stop_decay(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0


def _moved(optimizer: Any) -> dict[int, Tensor]:
    """Step; how far every parameter, or this rank's shard of it, moved, by the parameter's id."""
    params = parameters(optimizer)
    before = [local(param).detach().clone() for param in params]
    optimizer.step()
    return {
        id(param): local(param).detach().double() - was
        for param, was in zip(params, before, strict=True)
    }


def _rms(steps: Sequence[Tensor]) -> float:
    count = sum(step.numel() for step in steps)
    total = sum(float(step.square().sum()) for step in steps)
    return math.sqrt(total / count) if count else 0.0


def _quotient(above: float, below: float) -> float:
    return above / below if below else math.nan


def _is_muon(group: dict[str, Any]) -> bool:
    return "ns_steps" in group


def _active(group: dict[str, Any], shape: tuple[int, ...]) -> float:
    if not _is_muon(group) or len(shape) != 2:
        return 1.0
    return lr_ratio(shape, group.get("adjust_lr_fn"))


def _stats(number: int, group: dict[str, Any], moved: list[float]) -> GroupUpdateStats:
    muon, shape = _is_muon(group), tuple(group["params"][0].shape)
    return GroupUpdateStats(
        f"{number}:{'muon' if muon else 'gefen'}",
        muon,
        len(group["params"]),
        float(np.median(moved)),
        moved,
        lr_ratio(shape, "original") if muon else None,
        lr_ratio(shape, "match_rms_adamw") if muon else None,
        _active(group, shape),
    )


def _compared(stats: GroupUpdateStats, factor: float) -> dict[str, float]:
    """What was measured beside what the formulas of ``adjust_lr_fn`` give."""
    assert stats.analytic_original_ratio is not None
    assert stats.analytic_match_rms_ratio is not None
    total = factor * stats.active_ratio
    return {
        "empirical_vs_ref": factor,
        "active_ratio": stats.active_ratio,
        "total_empirical": total,
        "original": stats.analytic_original_ratio,
        "match_rms_adamw": stats.analytic_match_rms_ratio,
        "match_rms_rel_error": abs(_quotient(total - stats.analytic_match_rms_ratio, total)),
    }


def _versus(
    name: str, group: dict[str, Any], param: Tensor, pairs: list[tuple[float, float]]
) -> ParamVsAdamw:
    ours, theirs = (float(np.median(side)) for side in zip(*pairs, strict=True))
    rows = param.shape[0] if param.dim() else 1
    columns = param.numel() // max(rows, 1)
    return ParamVsAdamw(
        name,
        _is_muon(group),
        rows,
        columns,
        ours,
        theirs,
        _quotient(theirs, ours),
        _active(group, tuple(param.shape)),
        math.sqrt(max(rows, columns)) if _is_muon(group) else None,
    )
