from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen import newton_schulz
from gefen.errors import InvalidArgumentError
from gefen.newton_schulz import (
    STANDARD,
    TUNED3,
    TUNED4,
    lr_ratio,
    normalise_rows,
    orthogonalise,
    resolve_schedule,
)

FIVE = (STANDARD,) * 5


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Schedules


def test_named_schedules() -> None:
    assert resolve_schedule(None) == resolve_schedule("standard") == FIVE
    assert resolve_schedule("standard", (1, 2, 3), 2) == ((1.0, 2.0, 3.0),) * 2
    assert resolve_schedule("tuned3") == TUNED3
    assert resolve_schedule("tuned4") == TUNED4


def test_an_explicit_schedule_is_taken_as_given() -> None:
    triples = [(1, 2, 3), [4.0, 5.0, 6.0], torch.tensor([7.0, 8.0, 9.0])]
    assert resolve_schedule(iter(triples)) == ((1, 2, 3), (4, 5, 6), (7, 8, 9))


@pytest.mark.parametrize(
    "schedule", ["tuned5", "", 3, [], [(1, 2)], [(1, 2, 3), None], [(1, 2, math.nan)],
    [(1, 2, 3, 4)], ["abc"], ((1, 2, 3),) * 100, [("x", 1, 2)], (1.0, 2.0, 3.0)],
)  # fmt: skip
def test_other_schedules_are_refused(schedule: object) -> None:
    with pytest.raises(InvalidArgumentError, match="ns_schedule"):
        resolve_schedule(schedule)


@pytest.mark.parametrize("steps", [0, -1, 100, 2.0, True, "5", None])
@pytest.mark.parametrize("schedule", [None, "tuned3"])
def test_other_step_counts_are_refused(steps: object, schedule: str | None) -> None:
    with pytest.raises(InvalidArgumentError, match="ns_steps"):
        resolve_schedule(schedule, STANDARD, steps)


@pytest.mark.parametrize("coefficients", [(1, 2), (1, 2, math.inf), None, "abc", 4.0])
def test_other_coefficients_are_refused(coefficients: object) -> None:
    with pytest.raises(InvalidArgumentError, match="ns_coefficients"):
        resolve_schedule(None, coefficients, 5)


# Orthogonalisation


@pytest.mark.parametrize("shape", [(24, 24), (10, 40), (40, 10), (1, 30), (30, 1), (1, 1)])
@pytest.mark.parametrize("schedule", [FIVE, TUNED3, TUNED4])
def test_singular_values_come_near_one(shape: tuple[int, int], schedule: tuple) -> None:
    u = noise(*shape)
    u += 0.5 * u.norm() * torch.eye(*shape)  # none of them close to zero
    out = orthogonalise(u, schedule, 1e-7)
    assert out.dtype == torch.bfloat16
    assert out.shape == u.shape
    values = torch.linalg.svdvals(out.float())
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_singular_vectors_stay() -> None:
    left, _ = torch.linalg.qr(noise(20, 20))
    right, _ = torch.linalg.qr(noise(30, 20, seed=1))
    u = left * torch.linspace(1, 2, 20) @ right.T
    core = left.T @ orthogonalise(u, FIVE, 1e-7).float() @ right
    assert (core - torch.diag(core.diag())).abs().max() < 0.03


def exact(u: torch.Tensor, schedule: tuple) -> torch.Tensor:
    x = u.double()
    x = x / x.norm()
    for a, b, c in schedule:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(12, 12), (8, 31), (31, 8)])
@pytest.mark.parametrize("schedule", [FIVE, TUNED3, TUNED4])
def test_close_to_the_iteration_in_double(shape: tuple[int, int], schedule: tuple) -> None:
    u = noise(*shape)
    out = orthogonalise(u, schedule, 1e-7).double()
    want = exact(u.double(), schedule)
    # 8 bits of precision, amplified by the polynomials' slopes of 3 to 5.
    assert (out - want).norm() / want.norm() < 0.03


@pytest.mark.parametrize("shape", [(6, 6), (5, 17)])
def test_float32_products_stand_in_for_bfloat16_ones(shape: tuple[int, int]) -> None:
    x = newton_schulz._normalised(noise(*shape).bfloat16(), 1e-7)
    native = newton_schulz._iterate_bfloat16(x, TUNED3[:1])
    stand_in = newton_schulz._iterate_float32(x, TUNED3[:1])
    # The order of sums may differ, which can move a rounding by one unit in the last place.
    torch.testing.assert_close(stand_in, native, rtol=2**-7, atol=2**-10)


def test_the_transpose_gives_the_transpose() -> None:
    u = noise(9, 20)
    out = orthogonalise(u.T, FIVE, 1e-7)
    assert out.is_contiguous()
    assert torch.equal(out, orthogonalise(u, FIVE, 1e-7).T)


@pytest.mark.parametrize("shape", [(3, 7, 12), (4, 12, 7), (1, 5, 5)])
def test_a_batch_gives_each_matrix_the_bits_it_has_alone(shape: tuple[int, ...]) -> None:
    u = noise(*shape)
    alone = torch.stack([orthogonalise(matrix, TUNED3, 1e-7) for matrix in u])
    assert torch.equal(orthogonalise(u, TUNED3, 1e-7), alone)


@settings(deadline=None, max_examples=30)
@given(st.integers(-60, 60))
def test_the_scale_of_the_input_does_not_matter(power: int) -> None:
    u = noise(6, 8)
    assert torch.equal(orthogonalise(u * 2.0**power, FIVE, 0.0), orthogonalise(u, FIVE, 0.0))


def test_eps_bounds_the_divisor() -> None:
    u = noise(6, 8)
    small = orthogonalise(u * 1e-6 / u.norm(), ((1.0, 0.0, 0.0),), 1e-3)
    assert small.float().norm() == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize(
    "shape", [(5, 5), (1, 9), (9, 1), (0, 4), (4, 0), (2, 3, 4), (2, 0, 4), (0, 3, 4)]
)
def test_zero_and_empty_matrices(shape: tuple[int, ...]) -> None:
    out = orthogonalise(torch.zeros(shape), FIVE, 1e-7)
    assert torch.equal(out, torch.zeros(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_dtype_and_strides(dtype: torch.dtype) -> None:
    u = noise(14, 9).bfloat16()
    before = u.clone()
    want = orthogonalise(u.float(), FIVE, 1e-7)
    assert torch.equal(orthogonalise(u.to(dtype), FIVE, 1e-7), want)
    wide = torch.zeros(14, 18, dtype=dtype)
    wide[:, ::2] = u.to(dtype)
    assert torch.equal(orthogonalise(wide[:, ::2], FIVE, 1e-7), want)
    assert torch.equal(u, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_are_not_hidden(bad: float) -> None:
    u = noise(4, 6)
    u[1, 2] = bad
    assert not torch.isfinite(orthogonalise(u, FIVE, 1e-7)).all()


# Row normalisation and the learning-rate ratio


def test_the_first_step_gives_every_row_the_same_norm() -> None:
    x = noise(6, 10) * torch.linspace(1, 5, 6).unsqueeze(1)
    out = normalise_rows(x, torch.zeros(6), 0.95, 1, 1e-8)
    norms = torch.linalg.vector_norm(out, dim=1)
    torch.testing.assert_close(norms, norms[:1].expand(6))
    torch.testing.assert_close(out.norm(), x.norm())


def test_rows_are_divided_by_the_corrected_average() -> None:
    ema = torch.zeros(4)
    mean = torch.zeros(4, dtype=torch.float64)
    for step in (1, 2, 3):
        x = noise(4, 7, seed=step).bfloat16()
        out = normalise_rows(x, ema, 0.9, step, 0.3)
        wide = x.double()
        mean = 0.9 * mean + 0.1 * wide.square().mean(dim=1)
        want = wide / ((mean / (1 - 0.9**step)).sqrt() + 0.3).unsqueeze(1)
        want *= wide.norm() / want.norm()
        torch.testing.assert_close(out, want.float())
        torch.testing.assert_close(ema, mean.float())


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
def test_zero_rows_stay_zero(shape: tuple[int, int]) -> None:
    ema = torch.zeros(shape[0])
    out = normalise_rows(torch.zeros(shape, dtype=torch.bfloat16), ema, 0.95, 1, 1e-8)
    assert torch.equal(out, torch.zeros(shape))
    assert torch.equal(ema, torch.zeros(shape[0]))


def test_lr_ratio() -> None:
    for original in (None, "original"):
        assert lr_ratio((64, 16), original) == 2
        assert lr_ratio(torch.Size([16, 64]), original) == 1
    assert lr_ratio((400, 100), "match_rms_adamw") == pytest.approx(4)
    assert lr_ratio((100, 400), "match_rms_adamw") == pytest.approx(4)
    assert lr_ratio((0, 5), None) == lr_ratio((5, 0), None) == 1


@pytest.mark.parametrize("name", ["rms", "", 0.2, True])
def test_other_ratios_are_refused(name: object) -> None:
    with pytest.raises(InvalidArgumentError, match="adjust_lr_fn"):
        lr_ratio((2, 2), name)
