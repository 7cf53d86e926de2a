from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from allocations import Allocations
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from training import BF16, F16, F32, F64, gradients, start, train
from workload import bytes_of

from gefen import Gefen, blocks, codebook, momentum
from gefen.kernels import reference


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
    grads = [gradients((50,), 1)[0].double()]  # float32 holds the magnitudes exactly
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


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("shape", [(100, 200), (1, 20000), (20000, 1), (20000,)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_temporary_memory_is_bounded_by_chunks(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reference, blocks, codebook, momentum):
        monkeypatch.setattr(module, "CHUNK", 512)
    torch.manual_seed(0)
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
            total += (entries * state["magnitude"].view(-1, 1)).view(-1)
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
