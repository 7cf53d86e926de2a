"""Products of matrices that are rounded to eight bits first (``fp8_ns``).

Each operand is divided by a scale of its own, so that its largest magnitude becomes 448, the
largest number of float8_e4m3fn, and rounded to that. Products of the rounded operands are summed
in float32, multiplied by both scales, and rounded once to bfloat16. Source of the format:
Micikevicius et al. 2022 (arXiv 2209.05433).

Newton-Schulz iteration amplifies errors of singular values near 1, and only among many do those of
eight bits even out: in trials the largest singular value was 1.5 for matrices of 512², 8 for 256²
and thousands for 24². So smaller matrices keep bfloat16.

Where the device multiplies eight-bit floats (CUDA, sm_89 and later), :func:`torch._scaled_mm`
does it, and raises rather than falls back where it cannot; the same arithmetic in float32 runs
everywhere else. The device's half has not been run on a GPU yet.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

LEAST = 512
"""The smaller length of a matrix from which on ``fp8_ns`` applies."""

LARGEST = 448.0
ALIGNMENT = 16
"""What a device wants the lengths of its operands to be multiples of."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a`` [m, k] times ``b`` [k, n] of any floating dtype, bfloat16 [m, n], as described above.

    Zero matrices stay zero; what is not finite makes all that it meets NaN.
    """
    left, left_scale = quantised(a)
    right, right_scale = quantised(b)
    if a.is_cuda and _multiplies(a.get_device()):
        return _on_device(left, right, left_scale, right_scale)
    wide = left.float() @ right.float()
    return wide.mul_(left_scale * right_scale).bfloat16()


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` over its scale in float8_e4m3fn, and the scale, float32 without dimensions."""
    values = x.float()
    top = values.abs().amax()
    scale = torch.where(top == 0, 1.0, top / LARGEST)
    # A scale that rounding made too small would make the largest element NaN. NaN stays.
    return (values / scale).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


@cache
def _multiplies(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _on_device(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor) -> Tensor:
    """The product by :func:`torch._scaled_mm`, its operands filled up with zeros."""
    rows, columns = left.shape[0], right.shape[1]
    # The right operand is column-major there.
    out = torch._scaled_mm(
        _aligned(left),
        _aligned(right.t()).t(),
        scale_a=left_scale,
        scale_b=right_scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return out[:rows, :columns]


def _aligned(x: Tensor) -> Tensor:
    """``x``, row-major, with zeros up to multiples of :data:`ALIGNMENT`."""
    rows, columns = (-(-size // ALIGNMENT) * ALIGNMENT for size in x.shape)
    if (rows, columns) == tuple(x.shape):
        return x.contiguous()
    out = torch.zeros(rows, columns, dtype=torch.uint8, device=x.device)
    out[: x.shape[0], : x.shape[1]] = x.view(torch.uint8)
    return out.view(torch.float8_e4m3fn)
