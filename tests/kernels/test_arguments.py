"""Operations refuse what does not fit: kernels would read and write beyond it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_ops import arguments
from torch import Tensor

from gefen.errors import InvalidArgumentError
from gefen.kernels import ops

OPS = torch.ops.gefen
STEPS = ("block_step", "factored_step")
MOMENTA = ("momentum_update", *STEPS)
ALL = (*MOMENTA, "histogram")

Spoil = Callable[[Any], Any]


def second(change: Spoil) -> Spoil:
    return lambda items: [items[0], change(items[1])]


def short(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:-1].clone()


def strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


CASES: list[tuple[tuple[str, ...], str, Spoil, str]] = [
    *((ALL, "period", second(lambda _, p=p: p), r"period\[1\]") for p in (0, -8, 7, 1 << 40)),
    (ALL, "period", lambda periods: periods[:1], "period of 1 items"),
    (ALL, "grad", second(lambda grad: grad.to(torch.int64)), r"grad\[1\]"),
    (MOMENTA, "grad", second(lambda grad: grad.repeat(10, 1)), r"\[1\]"),
    (MOMENTA, "grad", second(lambda grad: grad[:2]), r"\[1\]"),
    (MOMENTA, "index", second(short), r"index\[1\]"),
    (MOMENTA, "index", second(strided), r"index\[1\], strided"),
    (MOMENTA, "index", second(Tensor.int), r"index\[1\]"),
    (MOMENTA, "magnitude", second(short), r"magnitude\[1\]"),
    (MOMENTA, "magnitude", second(Tensor.double), r"magnitude\[1\]"),
    (MOMENTA, "codebook", short, "codebook"),
    (MOMENTA, "codebook", Tensor.double, "codebook"),
    (MOMENTA, "seed", lambda _: torch.tensor([1, 2]), "seed"),
    (MOMENTA, "seed", lambda _: torch.tensor(1.0), "seed"),
    (MOMENTA, "number", lambda numbers: numbers[:1], "number of 1 items"),
    (("momentum_update",), "out", second(lambda out: out.t().contiguous().t()), "contiguous"),
    (("momentum_update",), "beta", lambda _: 1.0, "beta"),
    (STEPS, "param", second(short), r"param\[1\]"),
    (STEPS, "param", second(lambda p: p[:1].expand_as(p)), "expanded"),
    (STEPS, "param", second(Tensor.int), r"param\[1\]"),
    (STEPS, "step", second(lambda _: torch.ones(2)), r"step\[1\]"),
    (STEPS, "step", lambda counts: counts[:1], "step of 1 items"),
    (STEPS, "lr", lambda _: torch.ones(2), "lr"),
    (STEPS, "lr", lambda _: torch.tensor(1), "lr"),
    (STEPS, "beta2", lambda _: float("nan"), "beta2"),
    (STEPS, "eps", lambda _: -1.0, "eps"),
    (STEPS, "weight_decay", lambda _: float("inf"), "weight_decay"),
    (("block_step",), "v", second(short), r"v\[1\]"),
    (("factored_step",), "row", second(short), r"row\[1\]"),
    (("factored_step",), "column", second(short), r"column\[1\]"),
    (("histogram",), "counts", short, "counts"),
    (("histogram",), "counts", Tensor.float, "counts"),
]


@pytest.mark.parametrize(
    ("operation", "name", "spoil", "words"),
    [(operation, *rest) for operations, *rest in CASES for operation in operations],
)
def test_what_does_not_fit_is_named(operation: str, name: str, spoil: Spoil, words: str) -> None:
    given = inspect.signature(getattr(ops, operation)).bind(*arguments(operation, random=True))
    given.arguments[name] = spoil(given.arguments[name])
    held = [x for x in torch.utils._pytree.tree_leaves(given.args) if isinstance(x, Tensor)]
    before = [tensor.clone() for tensor in held]
    with pytest.raises(InvalidArgumentError, match=words):
        getattr(OPS, operation)(*given.args)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


@pytest.mark.parametrize("operation", MOMENTA)
def test_no_parameters_at_all(operation: str) -> None:
    given = inspect.signature(getattr(ops, operation)).bind(*arguments(operation, random=True))
    empty = {name: [] for name, value in given.arguments.items() if isinstance(value, list)}
    getattr(OPS, operation)(**{**given.arguments, **empty})
