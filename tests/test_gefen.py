from __future__ import annotations

import copy
import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Momentum, block_roots, factored_roots
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from workload import bytes_of

from gefen import Gefen, blocks, codebook, momentum
from gefen.errors import (
    GefenError,
    InvalidArgumentError,
    UnsupportedFeatureError,
    UnsupportedParameterError,
)
from gefen.kernels import reference

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def gradients(shape: tuple[int, ...], steps: int, dtype: torch.dtype = F32) -> list[Tensor]:
    """Of uneven size, so that block magnitudes and rows differ."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    scale = torch.rand(shape, generator=generator) ** 3
    return [
        (torch.randn(shape, generator=generator) * scale * (i + 1)).to(dtype) for i in range(steps)
    ]


def train(optimizer: Any, param: Tensor, grads: list[Tensor]) -> Tensor:
    for grad in grads:
        param.grad = grad
        optimizer.step()
    return param.detach()


def start(shape: tuple[int, ...], dtype: torch.dtype = F32) -> nn.Parameter:
    generator = torch.Generator().manual_seed(7)
    return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))


SHAPES = [(), (1,), (5,), (40,), (6, 8), (1, 24), (24, 1), (12, 20), (2, 3, 4, 2)]


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("factored", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_update_is_what_is_documented(
    shape: tuple[int, ...], factored: bool, dtype: torch.dtype
) -> None:
    chosen = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    param = start(shape, dtype)
    p = param.detach().double().numpy().reshape(-1).copy()
    optimizer = Gefen([param], factored_v_2d=factored, **chosen)
    history: list[Any] = []
    mean = None
    for t, grad in enumerate(gradients(shape, 6, dtype), start=1):
        param.grad = grad
        optimizer.step()
        state = optimizer.state[param]
        mean = mean or Momentum(p.size, state["period"], state["codebook"], 0.8)
        history.append(grad.double().numpy().reshape(-1))
        if factored and len(shape) == 2:
            root = factored_roots(history, shape, 0.95)
        else:
            root = block_roots(history, state["period"], 0.95)
        step = mean.advance(history[-1]) / (1 - 0.8**t) / (root + 1e-6)
        p = p * (1 - 0.02 * 0.3) - 0.02 * step
        np.testing.assert_allclose(
            param.detach().double().numpy().reshape(-1), p, rtol=3e-5, atol=3e-6
        )


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
def test_period_one_is_adamw(dtype: torch.dtype) -> None:
    """With a block for every element nothing is rounded: the momentum is ±1 times magnitude."""
    chosen = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.2}
    ours, theirs = start((50,), dtype), start((50,), dtype)
    grads = gradients((50,), 10, dtype)
    a = train(Gefen([ours], force_1d_period_one=True, **chosen), ours, grads)
    b = train(torch.optim.AdamW([theirs], **chosen), theirs, grads)
    if dtype == BF16:
        assert ((a - b).abs() <= 0.02 * a.abs() + 0.01).all()
    else:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_float64_is_computed_in_float64() -> None:
    """Arithmetic in float32 would be off by 1e-7 after one step already."""
    ours, theirs = start((50,), F64), start((50,), F64)
    grads = [torch.randn(50).double().float().double() for _ in range(1)]  # exact magnitudes
    chosen = {"lr": 0.01, "betas": (0.0, 0.0), "eps": 0.5}
    a = train(Gefen([ours], force_1d_period_one=True, **chosen), ours, grads)
    b = theirs.detach() - 0.01 * grads[0] / (grads[0].square().float().double().sqrt() + 0.5)
    torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


def test_low_precision_is_computed_in_float32() -> None:
    """State equals that of float32 parameters with the same gradients, bit for bit."""
    for dtype in (BF16, F16):
        grads = gradients((12, 20), 4, dtype)
        narrow, wide = start((12, 20), dtype), start((12, 20))
        a, b = Gefen([narrow]), Gefen([wide])
        train(a, narrow, grads)
        train(b, wide, [grad.float() for grad in grads])
        assert bytes_of(a.state_dict()["state"]) == bytes_of(b.state_dict()["state"])
        assert narrow.dtype == dtype
        # At most half a unit in the last place lost in each step.
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(narrow.float(), wide.detach(), rtol=4 * unit, atol=4 * unit)


def test_gradient_of_another_dtype() -> None:
    grads = gradients((12, 20), 3)
    narrow, wide = start((12, 20), BF16), start((12, 20))
    narrow.data, wide.data = narrow.data.float(), wide.data
    a, b = Gefen([narrow]), Gefen([wide])
    for grad in grads:
        narrow.data = narrow.data.float()
        narrow.grad = grad.clone()
        narrow.data = narrow.data.bfloat16()
        assert (narrow.dtype, narrow.grad.dtype) == (BF16, F32)
        a.step()
        wide.grad = grad
        b.step()
    assert bytes_of(a.state_dict()["state"]) == bytes_of(b.state_dict()["state"])


@settings(deadline=None, max_examples=40)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    chunk=st.integers(1, 40),
    factored=st.booleans(),
)
def test_chunks_do_not_matter(shape: tuple[int, ...], chunk: int, factored: bool) -> None:
    results = []
    for size in (chunk, 1 << 17):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "CHUNK", size)
            param = start(shape)
            optimizer = Gefen([param], factored_v_2d=factored, lr=0.1)
            train(optimizer, param, gradients(shape, 3))
            results.append((param.detach(), optimizer.state[param]))
    (a, one), (b, other) = results
    assert torch.equal(one["index"], other["index"])
    assert torch.equal(one["magnitude"], other["magnitude"])
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Allocations(TorchDispatchMode):
    """Bytes of the largest new storage, apart from those in ``known``."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.sizes[storage.data_ptr()] = storage.nbytes()
                self.kept.append(storage)  # so that no address is used twice
        return out

    def largest(self, known: set[int]) -> int:
        return max(size for address, size in self.sizes.items() if address not in known)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("shape", [(100, 200), (1, 20000), (20000, 1), (20000,)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_temporary_memory_is_bounded_by_chunks(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reference, blocks, codebook, momentum):
        monkeypatch.setattr(module, "CHUNK", 512)
    values = torch.randn(shape[::-1]).to(dtype)
    values = values.mT if layout == "transposed" and len(shape) == 2 else values.view(shape)
    param = nn.Parameter(values)
    param.grad = torch.randn_like(values)
    optimizer = Gefen([param], codebook_refresh_every=1)
    for _ in range(2):
        with Allocations() as made:
            optimizer.step()
        entries = [v for v in optimizer.state[param].values() if isinstance(v, Tensor)]
        known = {t.untyped_storage().data_ptr() for t in (*entries, param, param.grad)}
        # A chunk of float64, or the codebook's histogram and the tables made from it, which
        # have fixed sizes; the parameter has 20000 elements.
        assert made.largest(known) <= 8 * 4100


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)], ids=str)
def test_empty_parameters(shape: tuple[int, ...]) -> None:
    empty, other = start(shape), start((12, 20))
    optimizer = Gefen([empty, other])
    for grad in gradients((12, 20), 2):
        empty.grad, other.grad = torch.zeros(shape), grad
        optimizer.step()
    alone = start((12, 20))
    train(Gefen([alone]), alone, gradients((12, 20), 2))
    assert torch.equal(other, alone)
    assert optimizer.state[empty]["step"] == 2
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_only_an_empty_parameter() -> None:
    param = start((0, 4))
    param.grad = torch.zeros(0, 4)
    optimizer = Gefen([param])
    optimizer.step()
    assert not optimizer.state[param]["v_col"].any()


def test_parameters_without_gradient_stay() -> None:
    used, unused, frozen = start((8, 8)), start((8, 8)), start((8,)).requires_grad_(False)
    optimizer = Gefen([used, unused, frozen], weight_decay=0.1)
    train(optimizer, used, gradients((8, 8), 2))
    assert torch.equal(unused, start((8, 8)))
    assert torch.equal(frozen, start((8,)))
    assert list(optimizer.state) == [used]


def test_no_gradient_at_all_is_no_step() -> None:
    param = start((8, 8))
    optimizer = Gefen([param], weight_decay=0.1)
    assert optimizer.step() is None
    assert not optimizer.state
    train(optimizer, param, gradients((8, 8), 1))
    param.grad = None
    before = bytes_of(optimizer.state_dict())
    optimizer.step()
    assert bytes_of(optimizer.state_dict()) == before


def test_gradient_that_comes_later() -> None:
    """Its bias correction starts at its own first step, with the codebook that is there."""
    first, late = start((8, 8)), start((16,))
    optimizer = Gefen([first, late], lr=0.1)
    train(optimizer, first, gradients((8, 8), 3))
    book = optimizer.state[first]["codebook"]
    late.grad = gradients((16,), 1)[0]
    optimizer.step()
    state = optimizer.state[late]
    assert (state["step"], optimizer.state[first]["step"]) == (1, 4)
    assert state["codebook"] is book
    assert state["global_step"] is optimizer.state[first]["global_step"]
    largest = (late.detach() - start((16,))).abs().max().item()
    assert 0.1 <= largest < 0.5  # lr · |m| / sqrt(block mean of g²) with both corrected


def test_group_added_after_steps() -> None:
    param, added = start((8, 8)), start((16,))
    optimizer = Gefen([("w", param)], lr=0.1, weight_decay=0.5)
    train(optimizer, param, gradients((8, 8), 2))
    settings = {"params": [("b", added)], "lr": 0.01, "tag": "new"}
    optimizer.add_param_group(settings)
    assert settings == {"params": [("b", added)], "lr": 0.01, "tag": "new"}
    group = optimizer.param_groups[1]
    assert (group["lr"], group["weight_decay"], group["tag"]) == (0.01, 0.5, "new")
    assert group["param_names"] == ["b"]
    added.grad = gradients((16,), 1)[0]
    optimizer.step()
    assert optimizer.state[added]["step"] == 1


def test_groups_have_their_own_settings() -> None:
    a, b = start((8, 8)), start((8, 8))
    grads = gradients((8, 8), 3)
    groups = [
        {"params": [a], "lr": 0.2, "factored_v_2d": False},
        {"params": [b], "betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 0.4},
    ]
    optimizer = Gefen(groups, lr=0.1)
    for grad in grads:
        a.grad = b.grad = grad
        optimizer.step()
    alone = start((8, 8))
    train(Gefen([alone], lr=0.2, factored_v_2d=False), alone, grads)
    assert torch.equal(a, alone)
    alone = start((8, 8))
    train(Gefen([alone], lr=0.1, betas=(0.5, 0.6), eps=0.1, weight_decay=0.4), alone, grads)
    assert torch.equal(b, alone)


def test_settings_may_change_between_steps() -> None:
    param = start((8, 8))
    optimizer = Gefen([param], lr=0.1)
    grads = gradients((8, 8), 2)
    train(optimizer, param, grads[:1])
    before = param.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, param, grads[1:])
    assert torch.equal(param, before)
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(InvalidArgumentError, match="lr=nan"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.param_groups[0]["betas"] = (0.9, 1.5)
    with pytest.raises(InvalidArgumentError, match=r"betas\[1\]=1.5"):
        optimizer.step()


def test_periods_can_be_forced() -> None:
    shapes = {"vector": (16,), "matrix": (16, 8), "kernel": (4, 3, 2, 2)}

    def periods(**chosen: Any) -> dict[str, int]:
        params = {name: start(shape) for name, shape in shapes.items()}
        optimizer = Gefen(params.items(), **chosen)
        for name, param in params.items():
            param.grad = gradients(shapes[name], 1)[0]
        optimizer.step()
        return {name: optimizer.state[param]["period"] for name, param in params.items()}

    free = periods()
    assert 1 not in free.values()
    assert periods(force_1d_period_one=True) == free | {"vector": 1}
    assert periods(force_2d_period_one=True) == free | {"matrix": 1}
    assert periods(period_one_substrings=("ern", "x")) == free | {"kernel": 1, "matrix": 1}


@pytest.mark.parametrize("zeros", [True, False])
def test_zero_gradients_move_nothing_but_decay(zeros: bool) -> None:
    """Also where they are the very first and no codebook can be learned from them."""
    matrix, vector = start((8, 8)), start((16,))
    optimizer = Gefen([matrix, vector], lr=0.1, weight_decay=0.5)
    vector.grad = torch.zeros(16) if zeros else gradients((16,), 1)[0]
    matrix.grad = torch.zeros(8, 8)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), start((8, 8)).detach() * 0.95)
    assert ("codebook" in optimizer.state[matrix]) is not zeros


def test_codebook_waits_for_a_gradient_that_is_not_zero() -> None:
    param, resumed = start((12, 20)), start((12, 20))
    optimizer = Gefen([param])
    train(optimizer, param, [torch.zeros(12, 20)])
    other = Gefen([resumed])
    other.load_state_dict(optimizer.state_dict())
    grads = gradients((12, 20), 3)
    train(optimizer, param, grads)
    train(other, resumed, grads)
    state = optimizer.state[param]
    counts = torch.zeros(codebook.BINS, dtype=torch.int64)
    codebook.accumulate_histogram(grads[0], state["period"], counts)
    assert torch.equal(state["codebook"], codebook.solve(counts))
    assert bytes_of(optimizer.state_dict()) == bytes_of(other.state_dict())
    assert state["step"] == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("shape", [(12, 20), (60,)], ids=str)
def test_non_finite_gradients_reach_their_parameter_alone(
    shape: tuple[int, ...], when: int, bad: float
) -> None:
    touched, other, alone = start(shape), start((8, 8)), start((8, 8))
    pair, single = Gefen([touched, other]), Gefen([alone])
    for i, (grad, mine) in enumerate(zip(gradients((8, 8), 4), gradients(shape, 4), strict=True)):
        other.grad, alone.grad = grad, grad
        touched.grad = mine
        if i == when:
            touched.grad.view(-1)[3] = bad
        if when == 0 and i == 0:
            touched.grad.fill_(bad)
        pair.step()
        single.step()
    assert not torch.isfinite(touched).any() if when == 0 else not torch.isfinite(touched).all()
    assert torch.isfinite(other).all()
    if when == 0:  # the codebook has been learned without the touched one
        assert torch.equal(other, alone)


def test_one_nan_spoils_its_block_not_the_codebook() -> None:
    grads = gradients((64, 8), 2)
    clean, touched = start((64, 8)), start((64, 8))
    a = Gefen([clean], factored_v_2d=False)
    train(a, clean, grads)
    spoiled = [grads[0].clone(), grads[1]]
    spoiled[0][5, 2] = math.nan
    b = Gefen([touched], factored_v_2d=False)
    train(b, touched, spoiled)
    state = b.state[touched]
    assert torch.isfinite(state["codebook"]).all()
    assert (state["codebook"].diff() >= 0).all()
    block = (5 * 8 + 2) // state["period"]
    hurt = torch.zeros(512, dtype=torch.bool)
    hurt[block * state["period"] : (block + 1) * state["period"]] = True
    assert torch.isnan(touched.detach().view(-1)[hurt]).all()
    assert torch.isfinite(touched.detach().view(-1)[~hurt]).all()


def test_stochastic_rounding_is_unbiased_and_repeats() -> None:
    """Averages of many steps are closer to the true momentum than nearest rounding gets."""
    grad = gradients((40, 50), 1)[0]
    means = []
    for stochastic in (True, False):
        param = start((40, 50))
        optimizer = Gefen([param], betas=(0.0, 0.99), stochastic_round=stochastic)
        total = torch.zeros(2000)
        for _ in range(60):
            param.grad = grad
            optimizer.step()
            state = optimizer.state[param]
            entries = state["codebook"][state["index"].long()].view(-1, state["period"])
            total += (entries * state["magnitude"][:, None]).view(-1)
        means.append((total / 60 - grad.view(-1)).abs().mean().item())
    assert means[0] < 0.4 * means[1]

    runs = []
    for _ in range(2):
        a, b = start((40, 50)), start((40, 50))
        optimizer = Gefen([a, b], stochastic_round=True)
        for grad in gradients((40, 50), 3):
            a.grad = b.grad = grad
            optimizer.step()
        runs.append(bytes_of(optimizer.state_dict()))
        assert not torch.equal(optimizer.state[a]["index"], optimizer.state[b]["index"])
    assert runs[0] == runs[1]


def test_codebook_is_refreshed_on_time() -> None:
    param = start((40, 50))
    optimizer = Gefen([param], codebook_refresh_every=3)
    books, changes = [], []
    for i, grad in enumerate(gradients((40, 50), 8)):
        param.grad = grad.abs().pow(1 + i / 4) * grad.sign()
        before = copy.deepcopy(optimizer.state.get(param))
        optimizer.step()
        books.append(optimizer.state[param]["codebook"])
        if before is not None and not torch.equal(before["codebook"], books[-1]):
            changes.append(i)
            counts = torch.zeros(codebook.BINS, dtype=torch.int64)
            codebook.accumulate_histogram(param.grad, before["period"], counts)
            assert torch.equal(books[-1], codebook.solve(counts))
    assert changes == [3, 6]


def test_refresh_keeps_the_momentum() -> None:
    """Of a parameter that has no gradient in that step too."""
    a, b = start((40, 50)), start((40, 50))
    optimizer = Gefen([a, b], codebook_refresh_every=2)
    for grad in gradients((40, 50), 2):
        a.grad = b.grad = grad
        optimizer.step()

    def value(state: dict[str, Any]) -> Tensor:
        entries = state["codebook"][state["index"].long()].view(-1, state["period"])
        return entries * state["magnitude"][:, None]

    before, book = value(optimizer.state[b]), optimizer.state[b]["codebook"]
    b.grad = None
    a.grad = gradients((40, 50), 3)[2].sign() * torch.rand(40, 50)
    optimizer.step()
    assert not torch.equal(optimizer.state[b]["codebook"], book)
    assert optimizer.state[b]["codebook"] is optimizer.state[a]["codebook"]
    after = value(optimizer.state[b])
    torch.testing.assert_close(after, before, rtol=0, atol=0.02 * before.abs().max().item())


def test_tensor_lr() -> None:
    rate = torch.tensor(0.1)
    param, plain = start((8, 8)), start((8, 8))
    optimizer, other = Gefen([param], lr=rate), Gefen([plain], lr=rate.item())
    grads = gradients((8, 8), 2)
    train(optimizer, param, grads[:1])
    train(other, plain, grads[:1])
    assert optimizer.param_groups[0]["lr"] is rate
    rate.fill_(0.01)
    other.param_groups[0]["lr"] = rate.item()
    train(optimizer, param, grads[1:])
    train(other, plain, grads[1:])
    assert torch.equal(param, plain)


def test_schedulers() -> None:
    param = start((8, 8))
    optimizer = Gefen([param], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=8)
    seen = []
    for grad in gradients((8, 8), 7):
        train(optimizer, param, [grad])
        schedule.step()
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
    assert len(set(seen)) == 7
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_rounding_errors_of_schedulers_are_no_error() -> None:
    """LinearLR ends a hair below zero here."""
    param = start((8, 8))
    optimizer = Gefen([param], lr=0.1)
    optimizer.param_groups[0]["lr"] = -1e-18
    train(optimizer, param, gradients((8, 8), 1))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_closure() -> None:
    param = start((8, 8))
    optimizer = Gefen([param])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss is not None
    assert torch.equal(loss, start((8, 8)).square().sum())
    assert not torch.equal(param, start((8, 8)))
    before = bytes_of([param, optimizer.state_dict()])

    def failing() -> Tensor:
        raise RuntimeError("the data ended")

    with pytest.raises(RuntimeError, match="the data ended"):
        optimizer.step(failing)
    assert bytes_of([param, optimizer.state_dict()]) == before


def broken_shape(param: nn.Parameter) -> None:
    param.grad = torch.zeros(4, 2)
    param.data = torch.zeros(2, 4)


def sparse(param: nn.Parameter) -> None:
    param.grad = torch.zeros(4, 2).to_sparse()


def complex_numbers(param: nn.Parameter) -> None:
    param.grad = None
    param.data = torch.zeros(4, 2, dtype=torch.complex64)
    param.grad = torch.zeros(4, 2, dtype=torch.complex64)


def expanded(param: nn.Parameter) -> None:
    param.grad = torch.zeros(4, 2)
    param.data = torch.zeros(1, 2).expand(4, 2)


BREAKAGES = {
    "shape": (broken_shape, r"Gradient of parameter 'second' has shape \(4, 2\)"),
    "sparse": (sparse, "Gradient of parameter 'second' is sparse"),
    "complex": (complex_numbers, "'second' has dtype torch.complex64"),
    "expanded": (expanded, "'second' is an expanded tensor"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
@pytest.mark.parametrize("steps", [0, 2])
def test_failing_step_changes_nothing(breakage: str, steps: int) -> None:
    spoil, message = BREAKAGES[breakage]
    first, second, third = start((8, 8)), start((4, 2)), start((16,))
    params = {"first": first, "second": second, "third": third}
    optimizer = Gefen(params.items(), weight_decay=0.1, codebook_refresh_every=1)
    for i in range(steps):
        for param in params.values():
            param.grad = gradients(tuple(param.shape), steps)[i]
        optimizer.step()
    for param in params.values():
        param.grad = gradients(tuple(param.shape), 1)[0]
    spoil(second)
    before = bytes_of([first, third, optimizer.state_dict()])
    with pytest.raises(UnsupportedParameterError, match=message):
        optimizer.step()
    assert bytes_of([first, third, optimizer.state_dict()]) == before
    second.grad = None
    second.data = torch.zeros(4, 2)
    second.grad = torch.ones(4, 2)
    optimizer.step()
    assert optimizer.state[second]["step"] == steps + 1


def test_meta_gradients_are_refused() -> None:
    param = nn.Parameter(torch.zeros(3, device="meta"))
    param.grad = torch.zeros(3, device="meta")
    with pytest.raises(UnsupportedParameterError, match="'w' is on the meta device"):
        Gefen([("w", param)]).step()


def test_parameter_resized_after_steps() -> None:
    param = start((12, 20))
    optimizer = Gefen([("w", param)])
    train(optimizer, param, gradients((12, 20), 1))
    param.grad = None
    param.data = torch.zeros(20, 12)
    param.grad = torch.ones(20, 12)
    before = bytes_of(optimizer.state_dict())
    with pytest.raises(UnsupportedParameterError, match="'w' has changed since"):
        optimizer.step()
    assert bytes_of(optimizer.state_dict()) == before


def test_model_cast_after_construction() -> None:
    param = start((12, 20))
    optimizer = Gefen([param])
    train(optimizer, param, gradients((12, 20), 1))
    param.grad = None
    param.data = param.data.bfloat16()
    train(optimizer, param, gradients((12, 20), 2, BF16))
    assert optimizer.state[param]["magnitude"].dtype == F32


BAD_SETTINGS = [
    (
        "lr",
        [
            -1,
            -1e-9,
            math.nan,
            math.inf,
            True,
            "0.1",
            None,
            torch.tensor([0.1, 0.2]),
            torch.tensor(1),
            torch.tensor(-0.1),
            1j,
        ],
    ),
    ("betas", [(0.9,), (0.9, 0.99, 0.999), 0.9, None, "ab"]),
    ("betas[0]", [(1.0, 0.9), (-0.1, 0.9), (math.nan, 0.9), (True, 0.9), ("0.9", 0.9)]),
    ("betas[1]", [(0.9, 1.0), (0.9, math.inf), (0.9, None)]),
    ("eps", [-1e-8, math.nan, math.inf, False, None, "x"]),
    ("weight_decay", [-0.1, math.nan, math.inf, True, None]),
    ("codebook_refresh_every", [-1, 1.5, True, None, math.nan]),
    ("period_one_substrings", ["bias", None, (1,), 3]),
    *[
        (name, [0, 1, None, "yes"])
        for name in (
            "fused",
            "force_1d_period_one",
            "force_2d_period_one",
            "factored_v_2d",
            "stochastic_round",
            "deterministic",
            "capturable",
            "verbose",
        )
    ],
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_SETTINGS for value in values]
)
def test_bad_settings_are_named(name: str, value: Any) -> None:
    argument = name.partition("[")[0]
    with pytest.raises(InvalidArgumentError) as caught:
        Gefen([("w", start((3,)))], **{argument: value})
    assert str(caught.value).startswith(f"Invalid {name}=")
    assert "must be" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_bad_settings_in_groups() -> None:
    optimizer = Gefen([start((3,))])
    for bad in (
        {"params": [start((3,))], "lr": -1},
        {"params": [start((3,))], "betas": (2, 3)},
        {"params": [start((3,))], "fused": False},
        {"params": [start((3,))], "codebook_refresh_every": 3},
        {"params": [start((3,))], "period_one_substrings": ("x",)},
        {"params": "w"},
        {"params": {start((3,))}},
        {"lr": 1},
        [start((3,))],
    ):
        with pytest.raises(InvalidArgumentError):
            optimizer.add_param_group(bad)
        assert len(optimizer.param_groups) == 1


def test_numpy_numbers_become_plain() -> None:
    optimizer = Gefen([start((3,))], lr=np.float32(0.5), eps=np.float64(1e-8), weight_decay=1)
    group = optimizer.param_groups[0]
    assert (type(group["lr"]), type(group["eps"]), type(group["weight_decay"])) == (float,) * 3


def test_refused_parameters_are_named() -> None:
    good = ("good", start((3,)))
    bad: dict[str, Any] = {
        "is sparse": nn.Parameter(torch.zeros(3).to_sparse()),
        "has dtype torch.complex64": nn.Parameter(torch.zeros(3, dtype=torch.complex64)),
        "has dtype torch.int64": torch.arange(3),
        "is not a leaf": start((3,)) * 2,
        "is an expanded tensor": nn.Parameter(torch.zeros(1).expand(3)),
        "is of type float": 3.0,
    }
    for message, param in bad.items():
        with pytest.raises(UnsupportedParameterError, match=f"Parameter 'bad' {message}"):
            Gefen([good, ("bad", param)])
        with pytest.raises(UnsupportedParameterError, match=f"Parameter 'param_1' {message}"):
            Gefen([good[1], param])


def test_duplicates_are_named() -> None:
    a, b = start((3,)), start((3,))
    with pytest.raises(InvalidArgumentError, match=r"Duplicate parameter 'again'.*'w'"):
        Gefen([("w", a), ("again", a)])
    with pytest.raises(InvalidArgumentError, match="Duplicate parameter name 'w'"):
        Gefen([("w", a), ("w", b)])
    with pytest.raises(InvalidArgumentError, match=r"Duplicate parameter 'param_1'.*'param_0'"):
        Gefen([a, a])
    optimizer = Gefen([("w", a)])
    for pair in (("other", a), ("w", b)):
        with pytest.raises(InvalidArgumentError, match="Duplicate"):
            optimizer.add_param_group({"params": [pair]})
    assert len(optimizer.param_groups) == 1


def test_other_bad_arguments() -> None:
    for params in (start((3,)), [], {}, None, 3, [[start((3,))]], ["w"]):
        with pytest.raises(GefenError):
            Gefen(params)
    with pytest.raises(InvalidArgumentError, match="not a mix"):
        Gefen([("w", start((3,))), start((3,))])
    with pytest.raises(UnsupportedFeatureError, match="capturable=True"):
        Gefen([start((3,))], capturable=True)
    assert issubclass(UnsupportedFeatureError, NotImplementedError)


def test_a_dtensor_of_one_rank_steps_like_a_plain_tensor() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_tensor

    plain, grads = start((12,)), gradients((12,), 3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = nn.Parameter(distribute_tensor(plain.detach().clone(), mesh))
        train(Gefen([("w", sharded)]), sharded, [distribute_tensor(g, mesh) for g in grads])
        train(Gefen([("w", plain)]), plain, grads)
        assert isinstance(sharded, DTensor)
        assert torch.equal(sharded.to_local(), plain)
    finally:
        dist.destroy_process_group()


def test_verbose_logs_and_silence_does_not(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    for verbose in (False, True):
        caplog.clear()
        param = start((12, 20))
        train(Gefen([("w", param)], verbose=verbose), param, gradients((12, 20), 2))
        assert ("w (12, 20): period" in caplog.text) is verbose
        assert ("codebook" in caplog.text) is verbose
        assert {record.name for record in caplog.records} <= {"gefen"}
    assert capsys.readouterr().out == ""


def test_mixed_dtypes_and_settings_in_one_optimizer() -> None:
    params = [start((12, 20), dtype) for dtype in (F32, BF16, F16, F64)]
    optimizer = Gefen(params, lr=0.01)
    for param in params:
        param.grad = gradients((12, 20), 1)[0].to(param.dtype)
    optimizer.step()
    wanted = params[3].detach().float()
    for param in params:
        torch.testing.assert_close(param.detach().float(), wanted, rtol=0.02, atol=0.02)
    assert len({id(optimizer.state[param]["codebook"]) for param in params}) == 1


def test_step_hooks_run() -> None:
    calls: list[str] = []
    param = start((8, 8))
    optimizer = Gefen([param])
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, param, gradients((8, 8), 1))
    assert calls == ["before", "after"]
