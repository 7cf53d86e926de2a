"""What tasks ask for beyond the mathematics: shards, rounding at random, maximising."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import ADAM, QUANTIZER, close
from torch import Tensor

from gefen.codebook import philox
from gefen.kernels import reference
from gefen.kernels.reference import column_means
from gefen.kernels.tasks import BlockStep, FactoredStep, Momentum

ROWS, COLUMNS, PERIOD = 6, 30, 15
CUTS = ((0, 3), (3, 3), (3, 4), (4, 6))
"""Rows of shards; the third begins at element 90, no multiple of 4."""

SEED = (11, 5)

Step = BlockStep | FactoredStep


def state(dtype: torch.dtype = torch.float32, random: bool = True) -> dict[str, Tensor]:
    """Of one matrix; rows as the parameter's, so that it can be cut between them."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    return {
        "param": torch.randn(ROWS, COLUMNS, generator=generator).to(dtype),
        "grad": torch.randn(ROWS, COLUMNS, generator=generator).to(dtype),
        "index": torch.randint(0, 256, (ROWS, COLUMNS), generator=generator, dtype=torch.uint8),
        "magnitude": numbers(ROWS, COLUMNS // PERIOD),
        "v": numbers(ROWS, COLUMNS // PERIOD),
        "row": numbers(ROWS),
        "column": numbers(COLUMNS),
    }


def cut(whole: dict[str, Tensor], top: int, bottom: int) -> dict[str, Tensor]:
    """A copy of some rows, and of what all ranks hold."""
    return {
        name: (value if name == "column" else value[top:bottom]).clone()
        for name, value in whole.items()
    }


def momentum(part: dict[str, Tensor], top: int, **changes: Any) -> Momentum:
    task = Momentum(
        *(part[name] for name in ("grad", "index", "magnitude")),
        *(PERIOD, 0.9, QUANTIZER, torch.float32, SEED),
        offset=top * COLUMNS,
    )
    return replace(task, **changes)


def block(part: dict[str, Tensor], top: int = 0, **changes: Any) -> BlockStep:
    return BlockStep(part["param"], momentum(part, top), part["v"], ADAM, **changes)


def factored(part: dict[str, Tensor], top: int = 0, **changes: Any) -> FactoredStep:
    moments = part["row"], part["column"]
    return FactoredStep(part["param"], momentum(part, top), *moments, ADAM, **changes)


def run(task: Step) -> None:
    if isinstance(task, BlockStep):
        reference.block_step([task])
    else:
        reference.factored_step([task])


@pytest.mark.parametrize("make", [block, factored])
def test_state_has_any_shape(make: Callable[..., Step]) -> None:
    whole, flat = state(), state()
    for name in ("index", "magnitude", "v"):
        flat[name] = flat[name].view(-1)
    run(make(whole))
    run(make(flat))
    for name, value in whole.items():
        assert torch.equal(value.view(-1), flat[name].view(-1)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [block, factored])
def test_shards_step_as_the_whole(make: Callable[..., Step], dtype: torch.dtype) -> None:
    """Momentum and parameters are rounded by the random numbers of their place in the whole."""
    whole = state(dtype)
    parts = [cut(whole, *rows) for rows in CUTS]
    changes: dict[str, Any] = {"rounding": SEED}
    run(make(whole, **changes))
    if make is factored:
        means = [column_means(part["grad"], ROWS) for part in parts]
        changes["column_mean"] = torch.stack(means).sum(dim=0)
    for part, (top, _) in zip(parts, CUTS, strict=True):
        run(make(part, top, **changes))
        close(part["column"], whole["column"], rtol=1e-6)
    for name in set(whole) - {"column"}:
        joined = torch.cat([part[name] for part in parts])
        if make is block or name in ("index", "magnitude"):
            assert torch.equal(joined, whole[name]), name
        else:
            close(joined, whole[name], rtol=1e-6 if dtype == torch.float32 else 1e-2)


def test_a_shard_without_rows_keeps_its_columns() -> None:
    part = cut(state(), 3, 3)
    before = part["column"].clone()
    run(factored(part))
    assert torch.equal(part["column"], before)
    run(factored(part, column_mean=torch.ones(COLUMNS)))
    close(part["column"], 0.99 * before + 0.01, rtol=1e-6)


def test_column_means() -> None:
    grad = state()["grad"]
    means = column_means(grad.t().contiguous().t()[1:4], ROWS)
    assert means.dtype == torch.float32
    close(means, grad[1:4].square().sum(dim=0) / ROWS, rtol=1e-6)
    wide = column_means(grad.double(), ROWS)
    close(wide, grad.square().mean(dim=0), rtol=1e-6)


@pytest.mark.parametrize("make", [block, factored])
def test_maximize_adds_what_would_be_subtracted(make: Callable[..., Step]) -> None:
    start = state()["param"]
    moves = []
    for maximize in (False, True):
        values = state()
        adam = replace(ADAM, maximize=maximize, weight_decay=0.5)
        run(replace(make(values), adam=adam))
        moves.append(values["param"] - start * (1 - adam.lr * 0.5))
    close(moves[0], -moves[1], rtol=1e-4, atol=1e-6)
    assert moves[0].abs().max() > 1e-3


WRITERS: dict[str, Callable[..., None]] = {
    "block": lambda values, rounding: run(block(values, rounding=rounding)),
    "factored": lambda values, rounding: run(factored(values, rounding=rounding)),
    "matrix": lambda values, rounding: reference.matrix_step(
        values["param"], values["grad"], 1e-2, 1e-3, None, rounding=rounding
    ),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_rounding_at_random_keeps_the_mean(kind: str) -> None:
    """Decay and update are far below half a unit in the last place of most parameters."""
    exact = state(torch.bfloat16)
    exact["param"] = exact["param"].float()
    expected = exact["param"].clone()
    write = WRITERS[kind]
    write(exact, None)
    moved = exact["param"] - expected
    drawn = []
    for step in range(400):
        values = state(torch.bfloat16)
        write(values, (step, 5))
        drawn.append(values["param"].float() - expected)
    mean = torch.stack(drawn).mean(dim=0)
    unit = expected.abs() * 2.0**-7
    assert ((mean - moved).abs() <= 0.2 * unit + 1e-6).all()
    again = state(torch.bfloat16)
    write(again, (399, 5))
    assert torch.equal(again["param"].float() - expected, drawn[-1])


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_rounded_to_the_nearest(kind: str, dtype: torch.dtype) -> None:
    mine, theirs = state(dtype), state(dtype)
    WRITERS[kind](mine, SEED)
    WRITERS[kind](theirs, None)
    assert torch.equal(mine["param"], theirs["param"])


@pytest.mark.parametrize("kind", WRITERS)
def test_rounding_is_as_defined(kind: str) -> None:
    exact, mine = state(torch.bfloat16), state(torch.bfloat16)
    exact["param"] = exact["param"].float()
    WRITERS[kind](exact, None)
    WRITERS[kind](mine, SEED)
    element = torch.arange(ROWS * COLUMNS)
    words = torch.stack(
        philox((element // 4, element * 0, element * 0 + 5, element * 0 + (1 << 30)), (11, 0))
    )
    random = words[element % 4, element] >> 16
    sums = exact["param"].view(-1).view(torch.int32).long() + random
    expected = (sums & ~0xFFFF).int().view(torch.float32)
    # Decay is not rounded on its own, but sums may have another order.
    assert (mine["param"].view(-1).float() == expected).float().mean() > 0.98


def rounded(value: float, count: int = 4000) -> Tensor:
    """What a bfloat16 zero becomes when so much is added."""
    param = torch.zeros(1, count, dtype=torch.bfloat16)
    update = torch.full((1, count), -value)
    reference.matrix_step(param, update, 1.0, 0.0, None, rounding=SEED, offset=1)
    return param.float()


@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_between_two_numbers(sign: int) -> None:
    between = rounded(sign * (1 + 2.0**-9))
    assert between.unique().tolist() == sorted([sign, sign * (1 + 2.0**-7)])
    assert abs((between != sign).float().mean() - 0.25) < 0.03
    assert rounded(sign * 1.5).unique().tolist() == [sign * 1.5]


LARGEST = torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize(
    ("value", "becomes"),
    [
        (torch.inf, {torch.inf}),
        (-torch.inf, {-torch.inf}),
        (LARGEST * (1 + 2.0**-10), {LARGEST}),
        (-LARGEST * (1 + 2.0**-10), {-LARGEST}),
        (torch.finfo(torch.float32).max, {LARGEST, torch.inf}),
        (0.0, {0.0}),
    ],
)
def test_rounding_at_the_ends(value: float, becomes: set[float]) -> None:
    assert set(rounded(value).unique().tolist()) <= becomes


def test_rounding_keeps_nan() -> None:
    for bits in (0x7FC00000, 0x7FFFFFFF, -1):
        nan = torch.tensor(bits, dtype=torch.int64).int().view(torch.float32)
        param = torch.zeros(1, 64, dtype=torch.bfloat16)
        reference.matrix_step(param, nan.expand(1, 64).clone(), 1.0, 0.0, None, rounding=SEED)
        assert param.isnan().all()
