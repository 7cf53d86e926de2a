from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Momentum
from torch import Tensor, nn
from training import BF16, F16, F32, F64, start, train
from workload import bytes_of

from gefen import GefenMuon
from gefen.errors import (
    InvalidArgumentError,
    UnsupportedParameterError,
)
from gefen.kernels import reference
from gefen.newton_schulz import normalise_rows, orthogonalise, resolve_schedule


def gradients(shape: tuple[int, ...], steps: int, dtype: torch.dtype = F32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(steps)]


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "plain momentum": {"nesterov": False},
    "tuned4": {"ns_schedule": "tuned4", "adjust_lr_fn": "match_rms_adamw"},
    "explicit": {"ns_schedule": [(3.0, -3.2, 1.2), (2.0, -1.5, 0.5)]},
    "three steps": {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
    "normuon": {"normuon": True, "normuon_beta2": 0.8, "normuon_eps": 1e-4},
    "cautious": {"cautious": True},
    "all": {"normuon": True, "cautious": True, "adjust_lr_fn": "original"},
}


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("shape", [(16, 24), (30, 8)], ids=str)
@pytest.mark.parametrize("chosen", SETTINGS)
def test_update_is_what_is_documented(
    chosen: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """The direction and what surrounds orthogonalisation; that itself is tested elsewhere."""
    own = SETTINGS[chosen]
    param = start(shape, dtype)
    p = param.detach().double().clone()
    optimizer = GefenMuon([param], lr=0.02, weight_decay=0.3, momentum=0.9, **own)
    keys = ("ns_schedule", "ns_coefficients", "ns_steps")
    schedule = resolve_schedule(*(optimizer.param_groups[0][key] for key in keys))
    ratio = math.sqrt(max(1.0, shape[0] / shape[1]))
    if own.get("adjust_lr_fn") == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(shape))
    mean, ema = None, torch.zeros(shape[0])
    for t, grad in enumerate(gradients(shape, 5, dtype), start=1):
        param.grad = grad
        optimizer.step()
        state = optimizer.state[param]
        mean = mean or Momentum(p.numel(), state["period"], state["codebook"], 0.9)
        g = grad.double().numpy().reshape(-1)
        direction = mean.advance(g)
        if own.get("nesterov", True):
            direction = 0.9 * direction + 0.1 * g
        x = orthogonalise(torch.from_numpy(direction.reshape(shape)).float(), schedule, 1e-7)
        if own.get("normuon"):
            x = normalise_rows(
                x, ema, own.get("normuon_beta2", 0.95), t, own.get("normuon_eps", 1e-8)
            )
        x = x.double()
        if own.get("cautious"):
            mask = (x * grad.double() > 0).double()
            x = x * mask / mask.mean()
        p = p * (1 - 0.02 * 0.3) - 0.02 * ratio * x
        # Where the direction is on the border of two bfloat16 numbers, it may take either one.
        off = ((param.detach() - p).square().mean() / (p - start(shape)).square().mean()).sqrt()
        assert off < 2e-3
    assert ("normuon_v" in optimizer.state[param]) is bool(own.get("normuon"))


STACK = (3, 6, 48)
"""Matrices and their shape."""


def first_of_a_stack(blocks: int) -> Tensor:
    """A gradient that makes blocks of 16 elements, or of whole matrices."""
    signs = gradients(STACK, 1)[0].sign()
    runs = torch.logspace(0, 1, 54).repeat_interleave(16).view(STACK)
    return signs * runs if blocks == 16 else signs


@pytest.mark.parametrize("blocks", [16, 6 * 48])
@pytest.mark.parametrize("chosen", ["defaults", "tuned4", "normuon", "cautious", "all", "batched"])
def test_each_matrix_of_a_stack_is_stepped_as_it_would_be_alone(chosen: str, blocks: int) -> None:
    """From the same state on, which those alone would have had in blocks within their rows."""
    own = {**SETTINGS["all"], "batched_ns": True} if chosen == "batched" else SETTINGS[chosen]
    stack = start(STACK)
    together = GefenMuon([stack], lr=0.02, **own)
    train(together, stack, [first_of_a_stack(blocks)])
    alone = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    single = GefenMuon(alone, lr=0.02, **own)
    saved = single.state_dict()
    whole = together.state[stack]
    assert whole["period"] == blocks
    for i in range(len(alone)):
        rows = {k: whole[k][i] for k in ("index", "magnitude", "normuon_v") if k in whole}
        if blocks == 16:
            rows["magnitude"] = rows["magnitude"].view(6, 3)
        saved["state"][i] = {**whole, **rows}
    single.load_state_dict(saved)
    for grad in gradients(STACK, 4)[1:]:
        train(together, stack, [grad])
        for matrix, part in zip(alone, grad, strict=True):
            matrix.grad = part
        single.step()
    assert torch.equal(stack, torch.stack(alone))
    for i, matrix in enumerate(alone):
        for key in ("index", "magnitude", "normuon_v"):
            if key in whole:
                found = single.state[matrix][key].reshape(-1)
                assert torch.equal(whole[key][i].reshape(-1), found), key


def test_one_matrix_of_a_stack_without_gradient_only_decays() -> None:
    stack = start(STACK)
    grads = gradients(STACK, 3)
    for grad in grads:
        grad[1] = 0
    train(GefenMuon([stack], lr=0.1, weight_decay=0.5, normuon=True), stack, grads)
    torch.testing.assert_close(stack.detach()[1], start(STACK).detach()[1] * 0.95**3)
    assert not torch.isclose(stack[0], start(STACK)[0] * 0.95**3).any()


def test_constant_gradient_moves_along_its_orthogonal_factor() -> None:
    """Known answer: the update of a matrix with equal singular values is that matrix."""
    q = torch.linalg.qr(gradients((16, 16), 1)[0])[0]
    param = nn.Parameter(torch.zeros(16, 16))
    moved = train(GefenMuon([param], lr=1.0, weight_decay=0.0), param, [q])
    singular = torch.linalg.svdvals(-moved)
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    assert torch.nn.functional.cosine_similarity(-moved.flatten(), q.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_low_precision_parameters(dtype: torch.dtype) -> None:
    narrow, wide = start((16, 24), dtype), start((16, 24))
    grads = gradients((16, 24), 3, dtype)
    a, b = GefenMuon([narrow]), GefenMuon([wide])
    train(a, narrow, grads)
    train(b, wide, [grad.float() for grad in grads])
    assert bytes_of(a.state_dict()["state"]) == bytes_of(b.state_dict()["state"])
    torch.testing.assert_close(narrow.float(), wide.detach(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("limit", [0, 1, 20_000, 1 << 28])
def test_batched_iteration_gives_the_same_bytes(limit: int) -> None:
    shapes = [(16, 24), (16, 24), (24, 16), (3, 16, 24), (8, 8), (16, 24), (3, 16, 24)]
    results = []
    for chosen in ({}, {"batched_ns": True, "batched_ns_workspace_bytes": limit}):
        params = [start(shape) for shape in shapes]
        optimizer = GefenMuon(params, normuon=True, cautious=True, **chosen)
        for step in range(3):
            for i, param in enumerate(params):
                param.grad = gradients(shapes[i], step + 1 + i)[-1]
            optimizer.step()
        results.append(bytes_of([params, optimizer.state_dict()["state"]]))
    assert results[0] == results[1]


def test_batches_are_as_large_as_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def recording(u: Tensor, *rest: Any) -> Tensor:
        seen.append(tuple(u.shape))
        return orthogonalise(u, *rest)

    monkeypatch.setattr("gefen.gefen_muon.orthogonalise", recording)
    params = [start((16, 24)) for _ in range(5)]
    workspace = 2 * 4 * (16 * 24 + 16 * 16)
    groups = [
        {"params": params[:3]},
        {"params": params[3:4], "ns_steps": 2},
        {"params": params[4:], "nesterov": False},
    ]
    optimizer = GefenMuon(groups, batched_ns=True, batched_ns_workspace_bytes=workspace)
    for param in params:
        param.grad = gradients((16, 24), 1)[0]
    optimizer.step()
    assert seen == [(2, 16, 24), (2, 16, 24), (1, 16, 24)]


def test_cautious_update_follows_the_gradient() -> None:
    """Where it turned around, nothing moves until the momentum has turned too."""
    param = start((8, 8))
    optimizer = GefenMuon([param], weight_decay=0.0, nesterov=False, cautious=True)
    grad = gradients((8, 8), 1)[0]
    train(optimizer, param, [grad])
    before = param.detach().clone()
    train(optimizer, param, [-0.5 * grad])
    moved = param.detach() - before
    assert (moved * grad >= 0).all()
    assert 0 < (moved != 0).sum() < 32


def test_cautious_update_without_any_agreement() -> None:
    param = start((1, 1))
    optimizer = GefenMuon([param], weight_decay=0.0, nesterov=False, cautious=True)
    train(optimizer, param, [torch.ones(1, 1)])
    before = param.detach().clone()
    train(optimizer, param, [-0.5 * torch.ones(1, 1)])
    assert torch.equal(param, before)


def test_normuon_switched_on_later() -> None:
    param, fresh = start((8, 8)), start((8, 8))
    optimizer = GefenMuon([param])
    grads = gradients((8, 8), 3)
    train(optimizer, param, grads[:2])
    optimizer.param_groups[0]["normuon"] = True
    train(optimizer, param, grads[2:])
    state = optimizer.state[param]
    assert (state["step"], state["normuon_step"]) == (3, 1)
    other = GefenMuon([fresh])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert bytes_of(other.state_dict()["state"]) == bytes_of(optimizer.state_dict()["state"])


@pytest.mark.parametrize(
    "shape",
    [(0, 4), (4, 0), (1, 1), (1, 30), (30, 1), (0, 4, 4), (2, 0, 3), (1, 1, 1), (5, 4, 1)],
    ids=str,
)
def test_degenerate_matrices(shape: tuple[int, ...]) -> None:
    param = start(shape)
    optimizer = GefenMuon([param], normuon=True, cautious=True)
    train(optimizer, param, gradients(shape, 3))
    assert torch.isfinite(param).all()
    assert optimizer.state[param]["step"] == 3
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_zero_gradients_move_nothing_but_decay() -> None:
    param = start((8, 8))
    train(GefenMuon([param], lr=0.1, weight_decay=0.5), param, [torch.zeros(8, 8)])
    torch.testing.assert_close(param.detach(), start((8, 8)).detach() * 0.95)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize("chosen", ["defaults", "all"])
def test_non_finite_gradients_reach_their_matrix_alone(chosen: str, when: int, bad: float) -> None:
    touched, other, alone = start((12, 8)), start((8, 8)), start((8, 8))
    pair = GefenMuon([touched, other], batched_ns=True, **SETTINGS[chosen])
    single = GefenMuon([alone], **SETTINGS[chosen])
    for i, grad in enumerate(gradients((8, 8), 3)):
        other.grad = alone.grad = grad
        touched.grad = torch.full((12, 8), bad) if i == when else gradients((12, 8), 1)[0]
        pair.step()
        single.step()
    assert not torch.isfinite(touched).any()
    assert torch.isfinite(other).all()
    if when == 0:  # the codebook has been learned without the touched one
        assert torch.equal(other, alone)


def test_stochastic_rounding_repeats() -> None:
    runs = []
    for stochastic in (True, True, False):
        param = start((16, 24))
        optimizer = GefenMuon([param], stochastic_round=stochastic)
        train(optimizer, param, gradients((16, 24), 3))
        runs.append(bytes_of([param, optimizer.state_dict()["state"]]))
    assert runs[0] == runs[1] != runs[2]


def test_sharded_modes_are_one_for_plain_tensors() -> None:
    results = []
    for mode in ("exact", "distributed", "approx"):
        param = start((16, 24))
        results.append(train(GefenMuon([param], sharded_mode=mode), param, gradients((16, 24), 2)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_temporary_memory_is_chunks_and_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The momentum of many matrices is never dense for more than one at a time."""
    dense: list[int] = []

    def recording(tasks: Any, fused: bool) -> None:
        dense.append(sum(task.out.numel() for task in tasks))
        reference.momentum_update(tasks)

    monkeypatch.setattr("gefen.kernels.momentum_update", recording)
    params = [start((16, 24)) for _ in range(4)]
    for param in params:
        param.grad = gradients((16, 24), 1)[0]
    GefenMuon(params).step()
    assert dense == [16 * 24] * 4


BAD_SETTINGS = [
    ("lr", [-1, math.nan, True, "0.2", "0.1"]),
    ("weight_decay", [-0.1, math.inf, None]),
    ("momentum", [1.0, -0.1, math.nan, True, None]),
    ("eps", [0, 0.0, -1, math.nan, "x"]),
    ("ns_steps", [0, -1, 100, 2.5, True, None]),
    ("ns_coefficients", [(1, 2), None, "abc", (1, 2, math.nan)]),
    ("ns_schedule", ["tuned5", 3, [], [(1, 2)]]),
    ("adjust_lr_fn", ["adam", 1, True]),
    ("sharded_mode", ["replicate", None, 1]),
    ("batched_ns_workspace_bytes", [-1, 0.5, None]),
    ("normuon_beta2", [1.0, -1, math.nan]),
    ("normuon_eps", [-1, math.nan]),
    *[
        (name, [0, 1, None, "yes"])
        for name in (
            "nesterov",
            "fused",
            "fp8_ns",
            "fp8_ns_compile",
            "batched_ns",
            "stochastic_round",
            "deterministic",
            "normuon",
            "cautious",
            "capturable",
            "verbose",
        )
    ],
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_SETTINGS for value in values]
)
def test_bad_settings_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"Invalid {name}.*must"):
        GefenMuon([("w", start((3, 3)))], **{name: value})
    if name not in {"fused", "deterministic", "capturable", "verbose"}:
        optimizer = GefenMuon([start((3, 3))])
        with pytest.raises(InvalidArgumentError, match=rf"Invalid {name}"):
            optimizer.add_param_group({"params": [start((3, 3))], name: value})
        optimizer.param_groups[0][name] = value
        if value != -1 or name != "lr":  # finite: schedulers may end below zero
            optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 3)
            with pytest.raises(InvalidArgumentError, match=rf"Invalid {name}"):
                optimizer.step()
            assert not optimizer.state


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4, 5)], ids=str)
def test_only_matrices_and_stacks_of_them(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedParameterError, match="'bad' has shape"):
        GefenMuon([("good", start((3, 3))), ("bad", start(shape))])


def test_generators_of_coefficients_are_kept() -> None:
    triples = [(3.0, -3.2, 1.2), (2.0, -1.5, 0.5)]
    optimizer = GefenMuon([start((3, 3))], ns_schedule=(iter(t) for t in triples))
    assert optimizer.param_groups[0]["ns_schedule"] == tuple(triples)
    pair = [start((16, 24)), start((16, 24))]
    for param, schedule in zip(pair, (iter(triples), np.array(triples)), strict=True):
        train(GefenMuon([param], ns_schedule=schedule), param, gradients((16, 24), 2))
    assert torch.equal(*pair)


def test_momentum_is_cycled_by_schedulers() -> None:
    param = start((8, 8))
    optimizer = GefenMuon([param])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=6)
    seen = set()
    for grad in gradients((8, 8), 5):
        train(optimizer, param, [grad])
        schedule.step()
        seen.add(optimizer.param_groups[0]["momentum"])
    assert len(seen) > 3
