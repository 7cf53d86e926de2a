"""Wrappers that spread an optimizer's parameters over ranks, or give them other names."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from gefen import Gefen
from gefen.parameters import slots

LATE = 22
"""The step whose gradients are the first of one parameter."""


class Network(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 16)
        self.last, self.late = nn.Linear(16, 4), nn.Parameter(torch.ones(16))

    def forward(self, inputs: torch.Tensor, late: bool) -> torch.Tensor:
        hidden = self.second(self.first(inputs).tanh())
        result: torch.Tensor = self.last(hidden * self.late if late else hidden)
        return result


def train(net: Any, optimizer: Any, rank: int, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number * 10 + rank)
        inputs = torch.randn(8, 12, generator=generator).to(next(net.parameters()).device)
        optimizer.zero_grad()
        loss = (net(inputs, number >= LATE) - inputs[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def redundancy(rank: int, world: int, kind: str, device: str = "cpu") -> list[float]:
    """ZeroRedundancyOptimizer: steps, gathers its state on one rank, and resumes from it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it warns of what it uses itself
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def started(seed: int) -> tuple[Any, Any]:
        net = Network(seed).to(device)
        wrapped = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
        params: Any = wrapped.parameters()
        if kind == "groups":
            weights = [p for p in wrapped.parameters() if p.dim() == 2]
            others = [p for p in wrapped.parameters() if p.dim() != 2]
            params = [{"params": weights, "weight_decay": 0.1}, {"params": others}]
        return wrapped, ZeroRedundancyOptimizer(params, optimizer_class=Gefen, lr=0.01)

    net, optimizer = started(0)
    losses = train(net, optimizer, rank, range(20))
    optimizer.consolidate_state_dict(to=0)
    carried = [copy.deepcopy(optimizer.state_dict()) if rank == 0 else None]
    weights = copy.deepcopy(net.state_dict())
    dist.broadcast_object_list(carried, device=torch.device(device))
    losses += train(net, optimizer, rank, range(20, 25))

    other_net, other = started(1)
    other_net.load_state_dict(weights)
    other.load_state_dict(carried[0])
    resumed = train(other_net, other, rank, range(20, 25))
    assert resumed == losses[20:]
    assert same(net, other_net)
    return losses


class Small(nn.Module):
    def __init__(self, seed: int, original: bool, device: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        wrap = FullyShardedDataParallel
        self.inner = wrap(
            nn.Linear(12, 24), use_orig_params=original, device_id=torch.device(device)
        )
        self.last = nn.Linear(24, 4)

    def forward(self, inputs: torch.Tensor, late: bool) -> torch.Tensor:
        result: torch.Tensor = self.last(self.inner(inputs))
        return result


def fsdp1(rank: int, world: int, original: bool, device: str = "cpu") -> list[str]:
    """FSDP1 gives each rank flat pieces; a run saves and resumes its own."""

    def started(seed: int) -> tuple[Any, Gefen]:
        net = FullyShardedDataParallel(
            Small(seed, original, device), use_orig_params=original, device_id=torch.device(device)
        )
        return net, Gefen(net.named_parameters(), lr=0.01, period_one_substrings=("last.",))

    net, optimizer = started(0)
    losses = train(net, optimizer, rank, range(20))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    saved = copy.deepcopy(optimizer.state_dict())
    other_net, other = started(1)
    with torch.no_grad():
        for mine, theirs in zip(other_net.parameters(), net.parameters(), strict=True):
            mine.copy_(theirs)
    other.load_state_dict(saved)
    expected = train(net, optimizer, rank, range(20, 24))
    assert train(other_net, other, rank, range(20, 24)) == expected
    return [slot.name for slot in slots(optimizer.param_groups)]


NAMES = {
    True: ["inner.weight", "inner.bias", "last.weight", "last.bias"],
    False: ["_flat_param", "inner._flat_param"],
}
"""Of FSDP1's parameters, by ``use_orig_params``."""
