"""Steps that repeat the one before notice everything that has changed since."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import gradients, train

from gefen import Gefen, GefenMuon, GefenMuonHybrid
from gefen.errors import GefenError

SHAPES = ((8, 16), (24,), (4, 4))


def trained(make: Any, change: Callable[[Any], None] | None, remembers: bool) -> list[Tensor]:
    """Parameters after four steps, with a change before the third."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = make(params)
    for step in range(4):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        if step == 2 and change is not None:
            change(optimizer)
        if not remembers:
            optimizer._steady = None
        optimizer.step()
    return [param.detach() for param in params]


def first(optimizer: Any) -> Any:
    return optimizer.param_groups[0]["params"][0]


def move(optimizer: Any) -> None:
    first(optimizer).data = first(optimizer).data.clone()


def transpose_gradient(optimizer: Any) -> None:
    first(optimizer).grad = first(optimizer).grad.t().contiguous().t()


def drop_gradient(optimizer: Any) -> None:
    first(optimizer).grad = None


def replace_state(optimizer: Any) -> None:
    entry = optimizer.state[first(optimizer)]
    entry["magnitude"] = entry["magnitude"] * 2


def move_state(optimizer: Any) -> None:
    entry = optimizer.state[first(optimizer)]
    entry["index"].data = entry["index"].data.flip(0)


def forget(optimizer: Any) -> None:
    del optimizer.state[first(optimizer)]


def rewind(optimizer: Any) -> None:
    optimizer.state[first(optimizer)]["step"] = 1


def raise_rate(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 3


def change_beta(optimizer: Any) -> None:
    optimizer.param_groups[0]["betas"] = [0.5, 0.9]


def reload(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def reorder(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


@pytest.mark.parametrize(
    "change",
    [
        *(None, move, transpose_gradient, drop_gradient, replace_state, move_state, forget),
        *(rewind, raise_rate, change_beta, reload, reorder),
    ],
)
@pytest.mark.parametrize("options", [{}, {"factored_v_2d": False}, {"stochastic_round": True}])
def test_changes_take_effect(options: dict[str, Any], change: Any) -> None:
    def make(params: Any) -> Any:
        return Gefen(params, lr=0.1, **options)

    expected = trained(make, change, remembers=False)
    for actual, other in zip(trained(make, change, remembers=True), expected, strict=True):
        assert torch.equal(actual, other)


def test_a_row_statistic_that_is_wanted_later() -> None:
    def make(params: Any) -> Any:
        return GefenMuon([param for param in params if param.dim() == 2])

    def change(optimizer: Any) -> None:
        optimizer.param_groups[0]["normuon"] = True

    expected = trained(make, change, remembers=False)
    for actual, other in zip(trained(make, change, remembers=True), expected, strict=True):
        assert torch.equal(actual, other)


def resize(optimizer: Any) -> None:
    param = first(optimizer)
    grad, param.grad = param.grad[:4].clone(), None
    param.data = param.data[:4].clone()
    param.grad = grad


def spoil_state(optimizer: Any) -> None:
    entry = optimizer.state[first(optimizer)]
    entry["magnitude"].data = entry["magnitude"].data[:-1].clone()


def spoil_count(optimizer: Any) -> None:
    optimizer.state[first(optimizer)]["step"] = 0


def spoil_gradient(optimizer: Any) -> None:
    first(optimizer).grad = first(optimizer).grad.to_sparse()


@pytest.mark.parametrize("spoil", [resize, spoil_state, spoil_count, spoil_gradient])
def test_what_cannot_be_stepped_is_refused(spoil: Any) -> None:
    with pytest.raises(GefenError):
        trained(Gefen, spoil, remembers=True)


def test_gradients_are_not_kept_alive() -> None:
    param = nn.Parameter(torch.randn(8, 8))
    optimizer = Gefen([param])
    for _ in range(3):
        param.grad = torch.randn(8, 8)
        kept = weakref.ref(param.grad)
        optimizer.step()
        param.grad = None
        gc.collect()
        assert kept() is None


@pytest.mark.parametrize("half", ["backup", "muon"])
def test_a_failing_step_keeps_no_gradients(half: str) -> None:
    matrix, vector = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
    optimizer = GefenMuonHybrid([("matrix", matrix)], [("vector", vector)], lr=0.1)
    for _ in range(2):
        matrix.grad, vector.grad = torch.randn(8, 8), torch.randn(8)
        optimizer.step()
    good, bad = (matrix, vector) if half == "backup" else (vector, matrix)
    good.grad, bad.grad = torch.randn_like(good), torch.randn_like(bad).to_sparse()
    kept = weakref.ref(good.grad)
    with pytest.raises(GefenError, match="sparse"):
        optimizer.step()
    good.grad = None
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("whole", [False, True])
def test_state_that_is_moved_away_is_freed(whole: bool) -> None:
    param = nn.Parameter(torch.randn(8, 8))
    optimizer = Gefen([param])
    train(optimizer, param, gradients((8, 8), 3))
    entry = optimizer.state[param]
    kept = {key: weakref.ref(value) for key, value in entry.items() if key.startswith(("i", "v"))}
    assert len(kept) == 3
    for key in kept:
        entry[key] = entry[key].clone()
    if whole:
        optimizer.state.clear()
        kept |= {"magnitude": weakref.ref(entry["magnitude"])}
        del entry
    gc.collect()
    assert [key for key, value in kept.items() if value() is not None] == []


def test_steps_do_repeat() -> None:
    """The tests above would pass without anything being remembered."""
    param = nn.Parameter(torch.randn(8, 8))
    optimizer = Gefen([param])
    works = []
    for _ in range(3):
        param.grad = torch.randn(8, 8)
        optimizer.step()
        assert optimizer._steady is not None
        works.append(optimizer._steady.works)
    assert works[0] is works[1] is works[2]
