"""What operations of torch refuse: kernels would read and write beyond tensors that do not fit.

The optimizers make their own tensors and have validated the others; callers of operations may
have done neither. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gefen.codebook import BINS, SIZE
from gefen.errors import InvalidArgumentError
from gefen.hyperparameters import at_least_zero, decay_rate, refuse
from gefen.parameters import DTYPES


def check_lists(**lists: Sequence[object]) -> None:
    """Raise unless all lists have as many items as the first."""
    (first, items), *others = lists.items()
    for name, other in others:
        if len(other) != len(items):
            raise InvalidArgumentError(
                f"Invalid {name} of {len(other)} items: {first} has {len(items)}, one for each "
                "parameter"
            )


def check_momenta(
    codebook: Tensor,
    index: Sequence[Tensor],
    magnitude: Sequence[Tensor],
    grad: Sequence[Tensor],
    period: Sequence[int],
) -> None:
    """Raise unless codebook, momenta and gradients have the forms of tasks.Momentum."""
    check_lists(grad=grad, index=index, magnitude=magnitude, period=period)
    device = codebook.device
    _check_state("codebook", codebook, torch.float32, SIZE, device)
    check_gradients(grad, period, device)
    for i, (gradient, length) in enumerate(zip(grad, period, strict=True)):
        n = gradient.numel()
        _check_state(f"index[{i}]", index[i], torch.uint8, n, device)
        _check_state(f"magnitude[{i}]", magnitude[i], torch.float32, n // length, device)


def check_gradients(grad: Sequence[Tensor], period: Sequence[int], device: torch.device) -> None:
    """Raise unless gradients hold numbers on ``device``, in blocks of their periods."""
    check_lists(grad=grad, period=period)
    for i, (gradient, length) in enumerate(zip(grad, period, strict=True)):
        _check_values(f"grad[{i}]", gradient, gradient.shape, device)
        if length < 1 or gradient.numel() % length:
            refuse(
                f"period[{i}]", length, f"a divisor of {gradient.numel()}, grad[{i}]'s elements"
            )


def check_targets(
    name: str, target: Sequence[Tensor], grad: Sequence[Tensor], contiguous: bool = False
) -> None:
    """Raise unless each target is like its gradient and no element of it lies on another's."""
    check_lists(**{"grad": grad, name: target})
    for i, (tensor, gradient) in enumerate(zip(target, grad, strict=True)):
        _check_values(f"{name}[{i}]", tensor, gradient.shape, gradient.device)
        if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
            _refuse_form(f"{name}[{i}]", tensor, "no expanded tensor")
        if contiguous and not tensor.is_contiguous():
            _refuse_form(f"{name}[{i}]", tensor, "contiguous")


def check_moments(name: str, moments: Sequence[Tensor], like: Sequence[Tensor]) -> None:
    """Raise unless each is float32 and has as many elements as its like."""
    check_lists(**{"magnitude": like, name: moments})
    for i, (tensor, other) in enumerate(zip(moments, like, strict=True)):
        _check_state(f"{name}[{i}]", tensor, torch.float32, other.numel(), other.device)


def check_factors(
    row: Sequence[Tensor], column: Sequence[Tensor], param: Sequence[Tensor]
) -> None:
    """Raise unless parameters are matrices and rows and columns have their lengths."""
    check_lists(param=param, row=row, column=column)
    for i, matrix in enumerate(param):
        if matrix.dim() != 2:
            _refuse_form(f"param[{i}]", matrix, "a matrix")
        rows, columns = matrix.shape
        _check_state(f"row[{i}]", row[i], torch.float32, rows, matrix.device)
        _check_state(f"column[{i}]", column[i], torch.float32, columns, matrix.device)


def check_seed(seed: Tensor | None, number: Sequence[int], like: Sequence[Tensor]) -> None:
    """Raise unless there is no seed, or one number and a parameter's number for each."""
    if seed is not None:
        check_lists(grad=like, number=number)
        _check_state("seed", seed, torch.int64, 1, like[0].device if like else seed.device)


def check_adam(
    lr: Tensor, step: Sequence[Tensor], param: Sequence[Tensor], **rates: float
) -> None:
    """Raise unless rate and counts are single numbers and ``rates`` lie in their ranges."""
    check_lists(param=param, step=step)
    for i, count in enumerate(step):
        if count.numel() != 1 or count.is_complex() or count.device != param[i].device:
            _refuse_form(f"step[{i}]", count, f"one real number on {param[i].device}")
    elsewhere = any(tensor.device != lr.device for tensor in param)
    if lr.numel() != 1 or not lr.is_floating_point() or elsewhere:
        _refuse_form("lr", lr, "one floating-point number on the parameters' device")
    for name, rate in rates.items():
        (decay_rate if name.startswith("beta") else at_least_zero)(name, rate)


def check_counts(counts: Tensor) -> None:
    """Raise unless ``counts`` can hold a histogram."""
    _check_state("counts", counts, torch.int64, BINS, counts.device)


def _check_state(
    name: str, tensor: Tensor, dtype: torch.dtype, elements: int, device: torch.device
) -> None:
    fits = tensor.dtype == dtype and tensor.numel() == elements and tensor.device == device
    if not (fits and tensor.layout == torch.strided and tensor.is_contiguous()):
        _refuse_form(name, tensor, f"{elements} contiguous elements of {dtype} on {device}")


def _check_values(name: str, tensor: Tensor, shape: Sequence[int], device: torch.device) -> None:
    fits = tensor.dtype in DTYPES and tensor.shape == shape and tensor.device == device
    if not (fits and tensor.layout == torch.strided):
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        _refuse_form(name, tensor, f"dense, {kinds}, of shape {tuple(shape)} on {device}")


def _refuse_form(name: str, tensor: Tensor, must: str) -> None:
    contiguous = "" if tensor.layout != torch.strided or tensor.is_contiguous() else "strided "
    raise InvalidArgumentError(
        f"Invalid {name}, {contiguous}{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: "
        f"must be {must}"
    )
