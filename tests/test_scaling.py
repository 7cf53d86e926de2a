"""torch.amp.GradScaler around one process; sharded steps are in distributed/test_sharding.py."""

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
