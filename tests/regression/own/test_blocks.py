from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from allocations import Allocations
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen import Gefen, GefenMuon, blocks
from gefen.blocks import (
    UNDECIDED,
    block_sums,
    candidates,
    choose_period,
    divisors,
    find_period,
    row_period,
)

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "periods.npz")
VECTORS = sorted(
    key.removesuffix(".grad")
    for key in GOLDEN.files
    if key.endswith(".grad") and GOLDEN[key].ndim < 2
)


def defined_period(grad: np.ndarray) -> int:
    """The period by its definition: the variance of every block of every divisor of a row."""
    if not grad.any():
        return UNDECIDED
    squares = grad.astype(np.float64).reshape(-1) ** 2
    length = squares.size if grad.ndim < 2 else squares.size // len(grad)
    candidates = [d for d in range(1, length + 1) if length % d == 0]
    if grad.ndim < 2 and length > 1:
        candidates.pop()
    errors = [np.sqrt(squares.reshape(-1, d).var(axis=1).mean()) for d in candidates]
    period = candidates[int(np.argmin([1e-12, *np.diff(errors)]))]
    if period >= 8:
        return period
    if grad.ndim >= 2:
        return length
    longest = max(d for d in range(1, length + 1) if length % d == 0 and d <= 2048)
    return longest if longest >= 8 else 1


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", VECTORS)
def test_recorded_periods_of_vectors(shape: str) -> None:
    """gefen-x cuts other parameters regardless of their rows."""
    assert find_period(torch.from_numpy(GOLDEN[f"{shape}.grad"])) == GOLDEN[f"{shape}.period"]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 24), min_size=1, max_size=3),
    st.integers(0, 2**31),
    st.integers(1, 40),
)
def test_the_period_is_the_defined_one(shape: list[int], seed: int, chunk: int) -> None:
    grad = noise(*shape, seed=seed)
    scale = noise(*shape[:-1], 1, seed=seed + 1).exp()
    for g in (grad, grad * scale):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "CHUNK", chunk)
            assert find_period(g) == defined_period(g.numpy())


@pytest.mark.parametrize("shape", [(6, 48), (35, 96), (4, 8, 12), (1, 96)], ids=str)
def test_runs_of_different_size_become_the_blocks(shape: tuple[int, ...]) -> None:
    """Within rows: rows of different size alone are one block each."""
    sizes = torch.logspace(0, 3, math.prod(shape) // 16).repeat_interleave(16)
    assert find_period(sizes.view(shape) * noise(*shape).sign()) == 16
    rows = torch.logspace(0, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))
    assert find_period(rows * torch.ones(shape)) == math.prod(shape[1:])


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=3), st.integers(1, 11), st.integers(0, 99)
)
def test_parts_of_whole_rows_add_up(shape: list[int], first: int, seed: int) -> None:
    """What ranks that each have some rows choose together is what one with all of them does."""
    grad = noise(*shape, seed=seed)
    parts = [block_sums(part, candidates(shape)) for part in (grad[:first], grad[first:])]
    total = [a + b for a, b in zip(*parts, strict=True)]
    assert choose_period(total, grad.shape) == find_period(grad)


@pytest.mark.parametrize(
    ("shape", "period"),
    [
        ((64, 48), 48),
        ((1 << 12,), 2048),
        ((3, 4096), 4096),
        ((3, 5), 5),
        ((7, 1), 1),
        ((2, 3, 4), 12),
        ((2, 1 << 15), 1 << 14),
    ],
)
def test_without_structure_a_block_is_a_row_or_the_longest_run(
    shape: tuple[int, ...], period: int
) -> None:
    assert find_period(torch.full(shape, 0.1)) == row_period(shape) == period


@pytest.mark.parametrize("shape", [(121,), (64, 48), (1,), (), (3, 4, 5)], ids=str)
def test_zeros_decide_nothing(shape: tuple[int, ...]) -> None:
    assert find_period(torch.zeros(shape)) == UNDECIDED
    grad = torch.zeros(shape).view(-1)
    grad[-1:] = 1e-40
    assert find_period(grad.view(shape)) != UNDECIDED


def test_a_prime_count_beyond_the_longest_run_stays_in_single_elements() -> None:
    assert find_period(noise(2053)) == 1
    assert find_period(noise(2053, 1)) == 1
    assert find_period(noise(1, 2053)) == 2053
    assert find_period(noise(2039)) == 2039


@pytest.mark.parametrize("n", range(8))
def test_fewer_than_eight_elements_are_not_cut(n: int) -> None:
    assert find_period(noise(n)) == 1


def test_a_scalar_is_one_element() -> None:
    assert find_period(torch.tensor(3.0)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_count_as_their_values(dtype: torch.dtype) -> None:
    grad = (noise(24, 30) * torch.linspace(1, 9, 24).unsqueeze(1)).to(dtype)
    assert find_period(grad) == defined_period(grad.double().numpy())


def test_strides_do_not_matter() -> None:
    grad = noise(6, 10, 16)
    for view in (grad.permute(2, 0, 1), grad.transpose(0, 1), grad[:, ::2, 3:], grad[..., :1]):
        assert find_period(view) == find_period(view.contiguous())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_gradient_counts_as_without_structure(bad: float) -> None:
    grad = noise(16, 33)
    grad[3, 5] = bad
    assert find_period(grad) == 33
    assert find_period(torch.full((121,), bad)) == 121


def test_extreme_values_give_a_legal_period() -> None:
    for scale in (1e-45, 1e-30, 1e30, 3e38):
        assert 360 % find_period(noise(12, 30).sign() * scale) == 0
    assert 360 % find_period(noise(12, 30).double() * 1e200) == 0


@pytest.mark.parametrize("transposed", [False, True])
def test_temporary_memory_does_not_grow_with_the_tensor(
    monkeypatch: pytest.MonkeyPatch, transposed: bool
) -> None:
    monkeypatch.setattr(blocks, "CHUNK", 512)
    grad = noise(48, 125)
    with Allocations() as seen:
        find_period(grad.t() if transposed else grad)
    assert seen.largest({grad.untyped_storage().data_ptr()}) <= 8 * 512


@given(st.integers(1, 3000))
def test_divisors(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize(("asked", "everywhere"), [(True, False), (False, True), (False, False)])
def test_deterministic_sums_are_made_on_the_cpu(
    asked: bool, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands in for a CUDA gradient: only where it lies matters."""
    grad = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: everywhere)
    device = blocks._sum_device(grad, asked)
    assert device.type == ("cpu" if asked or everywhere else "cuda")


@pytest.mark.parametrize("make", [Gefen, GefenMuon])
@pytest.mark.parametrize("chosen", [False, True])
def test_optimizers_pass_deterministic_on(
    make: Any, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    monkeypatch.setattr(
        blocks, "_sum_device", lambda grad, asked: told.append(asked) or torch.device("cpu")
    )
    param = torch.nn.Parameter(noise(8, 16))
    param.grad = noise(8, 16)
    make([param], deterministic=chosen).step()
    assert told == [chosen]
