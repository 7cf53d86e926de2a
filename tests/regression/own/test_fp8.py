from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gefen import fp8
from gefen.newton_schulz import STANDARD, TUNED3, TUNED4, orthogonalise

FIVE = (STANDARD,) * 5
SHAPES = [(16, 16), (32, 48), (7, 3), (1, 40), (33, 17)]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: Tensor) -> Tensor:
    """To a sign, 4 bits of exponent and 3 of fraction, in double; the scale is undone."""
    scale = float((x.float().abs().max() / 448).float())
    values = (x.float() / scale).double()
    exponent = values.abs().clamp(min=2.0**-6).log2().floor()
    unit = 2.0 ** (exponent - 3)
    return (values / unit).round() * unit * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_is_what_is_documented(shape: tuple[int, int], dtype: torch.dtype) -> None:
    a, b = noise(*shape).to(dtype), noise(shape[1], 12, seed=1).to(dtype) * 1e-3
    want = rounded(a) @ rounded(b)
    out = fp8.product(a, b)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_devices_half_computes_the_same(shape: tuple[int, int]) -> None:
    """torch multiplies eight-bit floats on the CPU too: with layouts and lengths as on a GPU."""
    a, b = noise(*shape), noise(*shape, seed=1).mT
    (left, left_scale), (right, right_scale) = fp8.quantised(a), fp8.quantised(b)
    out = fp8._on_device(left, right, left_scale, right_scale)
    assert out.shape == (shape[0], shape[0])
    torch.testing.assert_close(out, fp8.product(a, b), rtol=2**-7, atol=1e-6)
    for operand in (left, right.t()):
        filled = fp8._aligned(operand)
        assert filled.is_contiguous()
        assert all(size % 16 == 0 for size in filled.shape)
        assert not filled.float()[operand.shape[0] :].any()


def test_zeros_and_what_is_not_finite() -> None:
    assert not fp8.product(torch.zeros(4, 4), noise(4, 4)).any()
    for bad in (math.nan, math.inf):
        x = noise(512, 512)
        x[1, 2] = bad
        assert fp8.product(x, noise(512, 4))[1].isnan().all()
        assert orthogonalise(x, TUNED3, 1e-7, True).isnan().all()
    assert not orthogonalise(torch.zeros(512, 512), FIVE, 1e-7, True).any()


@pytest.mark.parametrize("schedule", [FIVE, TUNED3, TUNED4])
@pytest.mark.parametrize("shape", [(512, 512), (512, 600), (600, 512)])
def test_singular_values_still_come_near_one(shape: tuple[int, int], schedule: Any) -> None:
    u = noise(*shape)
    out, usual = orthogonalise(u, schedule, 1e-7, True), orthogonalise(u, schedule, 1e-7)
    assert (out.dtype, out.shape) == (torch.bfloat16, u.shape)
    assert torch.linalg.svdvals(out.float()).max() < 1.7
    off = (out.float() - usual.float()).norm() / usual.float().norm()
    assert 0.02 < off < 0.4


def test_small_matrices_are_spared() -> None:
    u = noise(511, 600)
    assert torch.equal(orthogonalise(u, FIVE, 1e-7, True), orthogonalise(u, FIVE, 1e-7))


def test_matrices_of_a_batch_are_those_alone() -> None:
    u = noise(3, 512, 520) * torch.tensor([1.0, 1e3, 1e-3])[:, None, None]
    alone = torch.stack([orthogonalise(matrix, TUNED3, 1e-7, True) for matrix in u])
    assert torch.equal(orthogonalise(u, TUNED3, 1e-7, True), alone)
