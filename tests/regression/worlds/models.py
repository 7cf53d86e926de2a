"""A small model under FSDP2 with given gradients, for the tests of checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from gefen import Gefen, GefenMuon, GefenMuonHybrid

STEPS = 3


class Net(nn.Module):
    """Rows that no number of ranks divides, a vector, a stack of matrices, a scalar row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        self.up = nn.Linear(16, 19)
        self.down = nn.Linear(19, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.thin = nn.Linear(24, 1, bias=False)


def made() -> Net:
    torch.manual_seed(3)
    net = Net()
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape))
    return net


def sharded(world: int, kind: str) -> Net:
    """``kind``: "fsdp" or "hsdp" (replicated twice)."""
    net = made()
    if world == 1 and kind == "plain":
        return net
    grid = torch.arange(world).view(2, -1) if kind == "hsdp" else torch.arange(world)
    names = ("replicate", "shard") if kind == "hsdp" else ("shard",)
    mesh = DeviceMesh("cpu", grid, mesh_dim_names=names)
    fully_shard(net.up, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def gradient(name: str, shape: Any, step: int) -> torch.Tensor:
    torch.manual_seed(1000 * step + sum(map(ord, name)))
    grad = torch.randn(shape)
    if name == "embed.weight":
        grad[step::3] = 0  # rare rows
    if name == "thin.weight" and step < 1:
        grad.zero_()  # decides no period
    return grad


def give(net: nn.Module, step: int, only: Any = None) -> None:
    for name, param in net.named_parameters():
        grad = gradient(name, param.shape, step)
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            whole = DTensor.from_local(grad, mesh, [Replicate()] * mesh.ndim, run_check=False)
            grad = whole.redistribute(placements=param.placements)
        param.grad = grad


KINDS = ("gefen", "block", "muon", "hybrid", "adamw")


def optimizer_of(kind: str, net: nn.Module, mode: str = "exact") -> Any:
    named = list(net.named_parameters())
    if kind in ("gefen", "block"):
        return Gefen(named, lr=0.01, weight_decay=0.1, factored_v_2d=kind == "gefen")
    if kind == "muon":
        matrices = [pair for pair in named if pair[1].dim() == 2]
        return GefenMuon(matrices, lr=0.02, normuon=True, sharded_mode=mode)
    backup = "adamw" if kind == "adamw" else "gefen"
    return GefenMuonHybrid(net, lr=0.02, sharded_mode=mode, backup_optimizer=backup)


def train(net: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        give(net, step)
        optimizer.step()


def values(net: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in net.named_parameters()
    }
