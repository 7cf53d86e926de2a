"""Orthogonalisation of a momentum matrix by Newton-Schulz iteration, and what surrounds it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from gefen import fp8
from gefen.errors import InvalidArgumentError
from gefen.kernels.tasks import Count, wide

Triple: TypeAlias = tuple[float, float, float]
Schedule: TypeAlias = tuple[Triple, ...]

STANDARD: Triple = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan et al. 2024, repeated ``ns_steps`` times."""

TUNED3: Schedule = (
    (5.0067, -14.4125, 10.6001),
    (3.7534, -6.8083, 3.3840),
    (3.2080, -4.3501, 2.0330),
)

TUNED4: Schedule = (
    (5.4261, -15.5285, 11.2657),
    (3.0766, -4.9701, 2.1297),
    (3.0008, -6.4486, 4.3696),
    (2.8386, -4.1421, 2.5758),
)

MAX_STEPS = 99


def resolve_schedule(
    ns_schedule: str | Iterable[Iterable[float]] | None,
    ns_coefficients: Iterable[float] = STANDARD,
    ns_steps: int = 5,
) -> Schedule:
    """The (a, b, c) triple of every iteration.

    ``None`` and ``"standard"`` repeat ``ns_coefficients`` ``ns_steps`` times; ``"tuned3"`` and
    ``"tuned4"`` are fixed; an iterable of triples is taken as given. Raises
    :class:`InvalidArgumentError` for anything else, for ``ns_steps`` outside 1 to 99 and for
    coefficients that are not three finite numbers.
    """
    coefficients = _triple("ns_coefficients", ns_coefficients)
    if (
        isinstance(ns_steps, bool)
        or not isinstance(ns_steps, int)
        or not 1 <= ns_steps <= MAX_STEPS
    ):
        raise InvalidArgumentError(
            f"Invalid {ns_steps=}: must be a whole number from 1 to {MAX_STEPS}"
        )
    if ns_schedule is None:
        return (coefficients,) * ns_steps
    if isinstance(ns_schedule, str):
        return _named(ns_schedule) if ns_schedule != "standard" else (coefficients,) * ns_steps
    return _explicit(ns_schedule)


def _named(name: str) -> Schedule:
    named = {"tuned3": TUNED3, "tuned4": TUNED4}
    if name not in named:
        raise InvalidArgumentError(
            f"Invalid ns_schedule={name!r}: must be None, 'standard', 'tuned3', 'tuned4' "
            "or an iterable of (a, b, c) triples"
        )
    return named[name]


def _explicit(triples: Iterable[Iterable[float]]) -> Schedule:
    try:
        items = list(triples)
    except TypeError:
        raise InvalidArgumentError(
            f"Invalid ns_schedule={triples!r}: must be None, a name or an iterable of triples"
        ) from None
    if not 1 <= len(items) <= MAX_STEPS:
        raise InvalidArgumentError(
            f"Invalid ns_schedule={items!r}: must hold 1 to {MAX_STEPS} triples"
        )
    return tuple(_triple(f"ns_schedule[{i}]", item) for i, item in enumerate(items))


def _triple(name: str, value: Iterable[float]) -> Triple:
    try:
        numbers = [] if isinstance(value, str) else [float(v) for v in value]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != 3 or not all(map(math.isfinite, numbers)):
        raise InvalidArgumentError(f"Invalid {name}={value!r}: must be three finite numbers")
    return numbers[0], numbers[1], numbers[2]


def matrices_of(tensor: Tensor) -> list[Tensor]:
    """The matrices of a stack; a matrix is one."""
    return list(tensor) if tensor.dim() == 3 else [tensor]


def orthogonalise(u: Tensor, schedule: Schedule, eps: float, eight_bit: bool = False) -> Tensor:
    """Replace the singular values of ``u`` [m, n] or [batch, m, n] by values near 1.

    ``u`` has any floating dtype and is not changed; the result is bfloat16 of the same shape.
    Each product takes bfloat16 operands, accumulates in float32 and is rounded once. On the
    CPU these are float32 products of rounded operands, because native bfloat16 products are
    far slower on many machines there; every matrix of a batch then has the bits that it has
    alone. Zero matrices stay zero; empty ones stay empty.

    ``eight_bit``: operands of products are rounded to eight bits first, where both lengths of the
    matrix are at least :data:`gefen.fp8.LEAST`; see :mod:`gefen.fp8`.

    Source: Jordan et al. 2024 (Muon).
    """
    if u.numel() == 0:
        return torch.empty_like(u, dtype=torch.bfloat16)
    eight_bit = eight_bit and min(u.shape[-2:]) >= fp8.LEAST
    if u.dim() == 3 and (eight_bit or u.device.type == "cpu"):
        return torch.stack([orthogonalise(matrix, schedule, eps, eight_bit) for matrix in u])
    tall = u.shape[-2] > u.shape[-1]
    x = u.mT if tall else u
    x = _normalised(x.to(torch.bfloat16), eps)
    iterate = _iterate_float32 if u.device.type == "cpu" else _iterate_bfloat16
    x = (_iterate_fp8 if eight_bit else iterate)(x, schedule)
    return (x.mT if tall else x).contiguous()


def _normalised(x: Tensor, eps: float) -> Tensor:
    """``x`` (bfloat16) over its Frobenius norm.

    The norm is not rounded: schedules such as tuned3 blow up singular values above 1. Its squares
    would overflow float32 where gradients are about 1e18.
    """
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    return (x.float() / norm.float().clamp_(min=eps)).bfloat16()


def _iterate_bfloat16(x: Tensor, schedule: Schedule) -> Tensor:
    batch = x if x.dim() == 3 else x.unsqueeze(0)
    for a, b, c in schedule:
        gram = torch.bmm(batch, batch.mT)
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        batch = torch.baddbmm(batch, poly, batch, beta=a)
    return batch.view_as(x)


def _iterate_float32(x: Tensor, schedule: Schedule) -> Tensor:
    """The same iteration, each bfloat16 product done in float32 and rounded once."""
    x = x.float().contiguous()
    for a, b, c in schedule:
        gram = _rounded(x @ x.mT)
        poly = _rounded(torch.addmm(gram, gram, gram, beta=b, alpha=c))
        x = _rounded(torch.addmm(x, poly, x, beta=a))
    return x.bfloat16()


def _iterate_fp8(x: Tensor, schedule: Schedule) -> Tensor:
    """The same iteration with eight-bit operands; sums are made in float32 and rounded once."""
    for a, b, c in schedule:
        gram = fp8.product(x, x.mT)
        poly = gram.float().mul_(b).add_(fp8.product(gram, gram), alpha=c).bfloat16()
        x = x.float().mul_(a).add_(fp8.product(poly, x)).bfloat16()
    return x


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def normalise_rows(x: Tensor, ema: Tensor, beta2: float, step: Count, eps: float) -> Tensor:
    """NorMuon (arXiv 2510.05491): even out the rows of an orthogonalised matrix.

    ``x`` is [..., rows, columns] of any floating dtype; ``ema`` is float32 [..., rows], the mean
    of each row's mean square, updated in place; ``step`` is the age of ``ema`` with this update
    counted (1 at the first), a number or a tensor on the device. Returns float32 of the shape of
    ``x``, each matrix with the Frobenius norm that it had. Rows of zeros stay zero.
    """
    if x.numel() == 0:
        return x.float()
    values = x.float()
    norm = torch.linalg.vector_norm(values, dim=(-2, -1), keepdim=True)
    ema.lerp_(values.square().mean(dim=-1), 1 - beta2)
    scale = (ema / (1 - beta2 ** wide(step))).sqrt_().add_(eps)
    out = values / scale.unsqueeze(-1)
    changed = torch.linalg.vector_norm(out, dim=(-2, -1), keepdim=True)
    return out.mul_(torch.where(changed > 0, norm / changed, 0.0))


def lr_ratio(shape: Iterable[int], adjust_lr_fn: str | None) -> float:
    """Factor on the learning rate of a matrix of ``shape`` (rows, columns).

    ``None`` and ``"original"``: sqrt(max(1, rows / columns)); ``"match_rms_adamw"``:
    0.2 · sqrt(max(rows, columns)), which matches the update size of AdamW (Liu et al. 2025).
    """
    rows, columns = shape
    if adjust_lr_fn is None or adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns)) if columns else 1.0
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    raise InvalidArgumentError(
        f"Invalid {adjust_lr_fn=}: must be None, 'original' or 'match_rms_adamw'"
    )
