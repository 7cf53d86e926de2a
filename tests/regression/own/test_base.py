"""What Gefen and GefenMuon have in common, tried on Gefen."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import BF16, F32, gradients, start, train
from workload import OPTIMIZERS, bytes_of, model, snapshot, step

from gefen import Gefen, codebook
from gefen.errors import (
    InvalidArgumentError,
    UnsupportedParameterError,
)


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


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_lost_setting_is_named(kind: str) -> None:
    net = model()
    optimizer = OPTIMIZERS[kind](net)
    step(net, optimizer, 0)
    before = snapshot(net, optimizer)
    for name in ("lr", "weight_decay", "eps"):
        kept = optimizer.param_groups[0].pop(name)
        with pytest.raises(InvalidArgumentError, match=f"no setting '{name}'"):
            optimizer.step()
        optimizer.param_groups[0][name] = kept
    assert snapshot(net, optimizer) == before


@pytest.mark.parametrize("zeros", [True, False])
def test_zero_gradients_move_nothing_but_decay(zeros: bool) -> None:
    """Also where they are the very first and no codebook can be learned from them."""
    matrix, vector = start((8, 8)), start((16,))
    optimizer = Gefen([matrix, vector], lr=0.1, weight_decay=0.5)
    vector.grad = torch.zeros(16) if zeros else gradients((16,), 1)[0]
    matrix.grad = torch.zeros(8, 8)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), start((8, 8)).detach() * 0.95)
    assert codebook.is_blank(optimizer.state[matrix]["codebook"]) is zeros


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


def value(state: dict[str, Any]) -> Tensor:
    """The momentum in blocks."""
    entries = state["codebook"][state["index"].long()].view(-1, state["period"])
    return entries * state["magnitude"].view(-1, 1)


def test_refresh_keeps_the_momentum() -> None:
    """Of a parameter that has no gradient in that step too."""
    a, b = start((40, 50)), start((40, 50))
    optimizer = Gefen([a, b], codebook_refresh_every=2)
    for grad in gradients((40, 50), 2):
        a.grad = b.grad = grad
        optimizer.step()

    before, book = value(optimizer.state[b]), optimizer.state[b]["codebook"]
    b.grad = None
    other = gradients((40, 50), 3)[2]
    a.grad = other.sign() * other.abs().sqrt()
    optimizer.step()
    assert not torch.equal(optimizer.state[b]["codebook"], book)
    assert optimizer.state[b]["codebook"] is optimizer.state[a]["codebook"]
    after = value(optimizer.state[b])
    torch.testing.assert_close(after, before, rtol=0, atol=0.02 * before.abs().max().item())


def test_entries_put_together_keep_their_momentum() -> None:
    """As a wrapper does when it resumes on another number of ranks than it was saved on."""
    params = [start((40, 50)), start((40, 50))]
    apart = [Gefen([param]) for param in params]
    for power, param, optimizer in zip((0.5, 3), params, apart, strict=True):
        grad = gradients((40, 50), 1)[0]
        param.grad = grad.sign() * grad.abs() ** power
        optimizer.step()
    joined = Gefen(params)
    for param, optimizer in zip(params, apart, strict=True):
        joined.state[param] = copy.deepcopy(optimizer.state[param])
    before = [value(joined.state[param]) for param in params]
    params[0].grad = None
    joined.step()
    assert joined.state[params[0]]["codebook"] is joined.state[params[1]]["codebook"]
    torch.testing.assert_close(
        value(joined.state[params[0]]), before[0], rtol=0, atol=0.05 * float(before[0].abs().max())
    )
    joined.load_state_dict(joined.state_dict())


def test_state_that_was_never_begun_begins() -> None:
    """Wrappers load each parameter's entry as it was saved, also of those without gradients."""
    param, plain = start((40, 50)), start((40, 50))
    optimizer = Gefen([param])
    optimizer.state[param] = {"step": 0}
    train(optimizer, param, gradients((40, 50), 2))
    assert torch.equal(param, train(Gefen([plain]), plain, gradients((40, 50), 2)))


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
    param = start((8, 8))
    optimizer = Gefen([param], lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, end_factor=0.0, total_iters=4)
    for grad in gradients((8, 8), 5):
        train(optimizer, param, [grad])
        schedule.step()
    assert -1e-17 < optimizer.param_groups[0]["lr"] < 0
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


def test_step_hooks_run() -> None:
    calls: list[str] = []
    param = start((8, 8))
    optimizer = Gefen([param])
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, param, gradients((8, 8), 1))
    assert calls == ["before", "after"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_repeat_under_deterministic_algorithms(kind: str) -> None:
    """None of them needs an algorithm that torch then refuses."""
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(2):
            net = model()
            optimizer = OPTIMIZERS[kind](net)
            for number in range(2):
                step(net, optimizer, number)
            found.append(snapshot(net, optimizer))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["gefen", "hybrid-adamw"])
def test_a_compiled_step_has_the_bits_of_a_plain_one(kind: str) -> None:
    found = []
    for compiled in (True, False):
        net = model()
        optimizer = OPTIMIZERS[kind](net)
        update = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for number in range(3):
            step(net, torch.optim.SGD(net.parameters(), lr=0.0), number)
            update()
        found.append(snapshot(net, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR"])
def test_schedulers_that_cycle_momentum(kind: str, scheduler: str) -> None:
    """They find what to cycle: betas of Gefen, momentum of Muon and of the hybrid."""
    net = model()
    optimizer = OPTIMIZERS[kind](net)
    own = {"total_steps": 6} if scheduler == "OneCycleLR" else {"base_lr": 1e-3, "step_size_up": 2}
    make = getattr(torch.optim.lr_scheduler, scheduler)
    schedule = make(optimizer, max_lr=0.1, **own)
    name = "betas" if kind.startswith("gefen") else "momentum"
    seen = []
    for number in range(5):
        step(net, optimizer, number)
        schedule.step()
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0][name]))
    assert len(set(seen)) >= 3
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_parameters_come_and_go() -> None:
    """Frozen for a while, with zero gradients kept in place, averaged along the way."""
    net = model()
    optimizer = OPTIMIZERS["hybrid"](net)
    average = torch.optim.swa_utils.AveragedModel(net)
    step(net, optimizer, 0)
    frozen = net[1].weight
    frozen.requires_grad_(False)
    optimizer.zero_grad(set_to_none=False)
    frozen.grad = None
    before = frozen.detach().clone()
    optimizer.step()
    assert torch.equal(frozen, before)
    frozen.requires_grad_(True)
    average.update_parameters(net)
    step(net, optimizer, 1)
    assert not torch.equal(frozen, before)
    assert optimizer.state[frozen]["step"] == 2


def test_inference_mode_is_refused() -> None:
    """State made there could never be changed again."""
    net = model()
    optimizer = OPTIMIZERS["gefen"](net)
    step(net, optimizer, 0)
    before = snapshot(net, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    with torch.inference_mode():
        for call in (optimizer.step, lambda: optimizer.load_state_dict(saved)):
            with pytest.raises(InvalidArgumentError, match="inference_mode"):
                call()
    assert snapshot(net, optimizer) == before
