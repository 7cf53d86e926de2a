"""torch.amp.GradScaler around one process; sharded steps are in worlds/test_sharding.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from workload import OPTIMIZERS, bytes_of, model, snapshot, step

from gefen.errors import InvalidArgumentError, UnsupportedParameterError


def scaled_gradients(net: torch.nn.Module, number: int, scale: float) -> None:
    step(net, torch.optim.SGD(net.parameters(), lr=0.0), number)
    for param in net.parameters():
        assert param.grad is not None
        param.grad.mul_(scale)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_refused_scaled_step_is_unscaled_once_when_corrected(kind: str) -> None:
    net, plain = model(), model()
    optimizer, other = OPTIMIZERS[kind](net), OPTIMIZERS[kind](plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for number in range(3):
        scaled_gradients(net, number, 4.0)
        before = snapshot(net, optimizer)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = "much"
        with pytest.raises(InvalidArgumentError, match="lr='much'"):
            scaler.step(optimizer)
        optimizer.param_groups[0]["lr"] = rate
        assert snapshot(net, optimizer) == before
        scaler.step(optimizer)
        scaler.update()
        step(plain, other, number)
        assert snapshot(net, optimizer) == snapshot(plain, other)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_scaled_gradients_are_never_taken_for_unscaled_ones(kind: str, name: str) -> None:
    net = model()
    optimizer: Any = OPTIMIZERS[kind](net)
    scaled_gradients(net, 0, 1.0)
    before = bytes_of([list(net.parameters()), optimizer.state_dict()])
    setattr(optimizer, name, torch.tensor(2.0))
    with pytest.raises(InvalidArgumentError, match=name):
        optimizer.step()
    assert bytes_of([list(net.parameters()), optimizer.state_dict()]) == before
    optimizer.step()


def test_the_hybrid_refuses_a_bad_gradient_under_a_scaler() -> None:
    net = model()
    optimizer = OPTIMIZERS["hybrid-adamw"](net)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaled_gradients(net, 0, 4.0)
    bias = net[1].bias
    bias.grad, kept = None, bias.grad
    bias.data = bias.data.bfloat16()
    bias.grad = kept.bfloat16()
    bias.data = bias.data.float()
    before = snapshot(net, optimizer)
    with pytest.raises(UnsupportedParameterError, match=r"1\.bias"):
        scaler.step(optimizer)
    assert snapshot(net, optimizer) == before


KINDS = ["gefen", "gefen-stochastic", "muon", "hybrid"]


@pytest.mark.parametrize("kind", KINDS)
def test_float16_parameters(kind: str) -> None:
    """An overflow changes nothing; small gradients count, which float16 would lose unscaled."""
    net, plain = model(torch.float16), model(torch.float16)
    optimizer, other = OPTIMIZERS[kind](net), OPTIMIZERS[kind](plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    scaler.scale(torch.ones(()))
    for number in range(6):
        scaled_gradients(net, number, 1e-4)
        overflow = number in (0, 3)
        if overflow:
            net[1].weight.grad[2, 3] = torch.inf
        before, scale = snapshot(net, optimizer), scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert snapshot(net, optimizer) == before
            assert scaler.get_scale() == scale / 2
            continue
        for param, its in zip(net.parameters(), plain.parameters(), strict=True):
            assert param.grad is not None
            its.grad = (param.grad.float() / scale).half()
        # Float16 holds these gradients to no more than 3 bits: the scaled run has them whole.
        other.step()
    weight, without = net[1].weight.detach(), plain[1].weight.detach()
    assert weight.isfinite().all()
    assert not torch.equal(weight, without)
    assert (weight - model(torch.float16)[1].weight).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_float16_steps_are_those_of_gradients_unscaled_in_float32(kind: str) -> None:
    """A power of two scales without rounding, so the same step without a scaler is exact."""
    net, plain = model(torch.float16), model(torch.float16)
    optimizer, other = OPTIMIZERS[kind](net), OPTIMIZERS[kind](plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.ones(()))
    for number in range(4):
        step(plain, other, number)
        scaled_gradients(net, number, 16.0)
        kept = [param.grad.clone() for param in net.parameters()]
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, kept, [param.grad for param in net.parameters()]))
    for param, its in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, its, rtol=2e-3, atol=2e-3)
    step(net, optimizer, 9)  # without a scaler again
    step(plain, other, 9)


def test_a_failing_float16_step_can_be_repeated() -> None:
    net = model(torch.float16)
    optimizer = OPTIMIZERS["hybrid"](net)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaled_gradients(net, 0, 4.0)
    optimizer.param_groups[0]["lr"] = "much"
    before = snapshot(net, optimizer)
    with pytest.raises(InvalidArgumentError, match="lr='much'"):
        scaler.step(optimizer)
    assert snapshot(net, optimizer) == before
    optimizer.param_groups[0]["lr"] = 1e-2
    scaler.step(optimizer)
    scaler.update()
    assert snapshot(net, optimizer) != before


def test_adamw_cannot_unscale_float16() -> None:
    net = model(torch.float16)
    optimizer = OPTIMIZERS["hybrid-adamw"](net)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaled_gradients(net, 0, 4.0)
    before = snapshot(net, optimizer)
    with pytest.raises(InvalidArgumentError, match="backup_optimizer='gefen'"):
        scaler.step(optimizer)
    assert snapshot(net, optimizer) == before


def test_clipping_float16_gradients_is_left_to_torchs_error() -> None:
    net = model(torch.float16)
    optimizer = OPTIMIZERS["gefen"](net)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaled_gradients(net, 0, 4.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
