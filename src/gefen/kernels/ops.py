"""The updates as operations of torch, ``torch.ops.gefen``: for code that torch compiles.

Each takes lists, one item for each parameter, on one device, and returns nothing; what it changes
is marked in its schema. Learning rate and step counts are tensors that the host does not read, so
a compiled function need not be compiled anew for other values. Parameters must not require
gradients, or the call be made under ``torch.no_grad()``. Arguments that do not fit together are
refused with :class:`~gefen.errors.InvalidArgumentError`, and nothing is changed.

The optimizers call :mod:`gefen.kernels` directly: one launch of theirs takes parameters of all
groups and counts, whose scalars the host knows, where an operation takes those of one group.
Profilers see both under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gefen import kernels
from gefen.codebook import Quantizer
from gefen.hyperparameters import decay_rate
from gefen.kernels import arguments
from gefen.kernels.tasks import Adam, BlockStep, DenseMomentum, FactoredStep, Momentum

_library = torch.library.Library("gefen", "DEF")  # type: ignore[no-untyped-call]

_MOMENTA = "Tensor(b!)[] index, Tensor(c!)[] magnitude, Tensor[] grad, int[] period"
_RANDOM = "Tensor? seed, int[] number, bool fused=True"
_ADAM = (
    "Tensor lr, Tensor[] step, float weight_decay, float eps, float beta1, float beta2, " + _RANDOM
)


def momentum_update(
    out: Sequence[Tensor],
    index: Sequence[Tensor],
    magnitude: Sequence[Tensor],
    grad: Sequence[Tensor],
    period: Sequence[int],
    codebook: Tensor,
    beta: float,
    nesterov: bool,
    seed: Tensor | None,
    number: Sequence[int],
    fused: bool = True,
) -> None:
    """Advance quantised momenta; write the dense directions to ``out``.

    Shapes and dtypes are those of :class:`gefen.kernels.tasks.DenseMomentum`; ``codebook`` is
    float32 [256]. ``seed``, int64 with one element, and a ``number`` for each parameter choose
    the random numbers of stochastic rounding; None rounds to the nearest.
    """
    momenta = _momenta(index, magnitude, grad, period, codebook, beta, seed, number, out)
    arguments.check_targets("out", out, grad, contiguous=True)
    decay_rate("beta", beta)
    tasks = [DenseMomentum(m, nesterov, o) for m, o in zip(momenta, out, strict=True)]
    kernels.momentum_update(tasks, fused)


def block_step(
    param: Sequence[Tensor],
    index: Sequence[Tensor],
    magnitude: Sequence[Tensor],
    grad: Sequence[Tensor],
    period: Sequence[int],
    v: Sequence[Tensor],
    codebook: Tensor,
    lr: Tensor,
    step: Sequence[Tensor],
    weight_decay: float,
    eps: float,
    beta1: float,
    beta2: float,
    seed: Tensor | None,
    number: Sequence[int],
    fused: bool = True,
) -> None:
    """Step parameters whose second moments are shared by blocks.

    Shapes and dtypes are those of :class:`gefen.kernels.tasks.BlockStep`; ``lr`` and each of
    ``step``, which counts this one, have one element. ``seed`` as in :func:`momentum_update`.
    """
    momenta = _momenta(index, magnitude, grad, period, codebook, beta1, seed, number, param)
    arguments.check_targets("param", param, grad)
    arguments.check_moments("v", v, magnitude)
    adams = _adams(param, lr, step, weight_decay, eps, beta1, beta2)
    columns = zip(param, momenta, v, adams, strict=True)
    kernels.block_step([BlockStep(*task) for task in columns], fused)


def factored_step(
    param: Sequence[Tensor],
    index: Sequence[Tensor],
    magnitude: Sequence[Tensor],
    grad: Sequence[Tensor],
    period: Sequence[int],
    row: Sequence[Tensor],
    column: Sequence[Tensor],
    codebook: Tensor,
    lr: Tensor,
    step: Sequence[Tensor],
    weight_decay: float,
    eps: float,
    beta1: float,
    beta2: float,
    seed: Tensor | None,
    number: Sequence[int],
    fused: bool = True,
) -> None:
    """Step matrices whose second moments are outer products; the rest as in block_step."""
    momenta = _momenta(index, magnitude, grad, period, codebook, beta1, seed, number, param)
    arguments.check_targets("param", param, grad)
    arguments.check_factors(row, column, param)
    adams = _adams(param, lr, step, weight_decay, eps, beta1, beta2)
    columns = zip(param, momenta, row, column, adams, strict=True)
    kernels.factored_step([FactoredStep(*task) for task in columns], fused)


def histogram(
    grad: Sequence[Tensor], period: Sequence[int], counts: Tensor, fused: bool = True
) -> None:
    """Add normalised gradients to ``counts``, int64 [4096], to learn a codebook from."""
    arguments.check_counts(counts)
    arguments.check_gradients(grad, period, counts.device)
    kernels.histogram(list(zip(grad, period, strict=True)), counts, fused)


_quantizers = WeakTensorKeyDictionary()


def _quantizer(codebook: Tensor) -> Quantizer:
    if codebook.is_inference():  # nothing tells whether it has changed
        return Quantizer(codebook.clone())
    known = _quantizers.get(codebook)  # type: ignore[no-untyped-call]
    if known is None or known[0] != codebook._version:
        known = codebook._version, Quantizer(codebook.clone())
        _quantizers[codebook] = known
    found: Quantizer = known[1]
    return found


def _momenta(
    index: Sequence[Tensor],
    magnitude: Sequence[Tensor],
    grad: Sequence[Tensor],
    period: Sequence[int],
    codebook: Tensor,
    beta: float,
    seed: Tensor | None,
    number: Sequence[int],
    target: Sequence[Tensor],
) -> list[Momentum]:
    arguments.check_momenta(codebook, index, magnitude, grad, period)
    arguments.check_seed(seed, number, grad)
    quantizer = _quantizer(codebook)
    seeds = [None] * len(grad) if seed is None else [(seed, n) for n in number]
    dtypes = [torch.float64 if t.dtype == torch.float64 else torch.float32 for t in target]
    columns = zip(grad, index, magnitude, period, dtypes, seeds, strict=True)
    return [Momentum(g, i, m, p, beta, quantizer, d, s) for g, i, m, p, d, s in columns]


def _adams(
    param: Sequence[Tensor],
    lr: Tensor,
    step: Sequence[Tensor],
    weight_decay: float,
    eps: float,
    beta1: float,
    beta2: float,
) -> list[Adam]:
    rates = {"weight_decay": weight_decay, "eps": eps, "beta1": beta1, "beta2": beta2}
    arguments.check_adam(lr, step, param, **rates)
    return [Adam(lr, weight_decay, eps, beta1, beta2, count) for count in step]


def _nothing(*_: object, **__: object) -> None:
    """What an operation makes of tensors that hold no numbers."""


def _register(operation: Callable[..., None], schema: str) -> None:
    name = operation.__name__
    _library.define(  # type: ignore[no-untyped-call]
        f"{name}({schema}) -> ()"
    )
    for key in ("CPU", "CUDA"):
        _library.impl(  # type: ignore[no-untyped-call]
            name, torch.no_grad()(operation), key
        )
    torch.library.register_fake(f"gefen::{name}", _nothing, lib=_library)


_register(
    momentum_update,
    f"Tensor(a!)[] out, {_MOMENTA}, Tensor codebook, float beta, bool nesterov, {_RANDOM}",
)
_register(block_step, f"Tensor(a!)[] param, {_MOMENTA}, Tensor(d!)[] v, Tensor codebook, {_ADAM}")
_register(
    factored_step,
    f"Tensor(a!)[] param, {_MOMENTA}, Tensor(d!)[] row, Tensor(e!)[] column, Tensor codebook, "
    + _ADAM,
)
_register(histogram, "Tensor[] grad, int[] period, Tensor(a!) counts, bool fused=True")
