"""Checkpoints of sharded runs: whichever way they go, training goes on with one process's numbers.

Parameters are sharded as fully_shard does it, which needs a GPU in some versions of torch.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded import contents, on_every_rank, placed, same, whole_mesh
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from gefen import Gefen, GefenMuon, GefenMuonHybrid, prepare_load
from gefen.errors import CheckpointError

MIDDLE, END = 2, 4
Run = tuple[nn.Module, Any]


class Net(nn.Module):
    """Rows that no number of ranks divides, vectors, and a row that most ranks have nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 16)
        self.up = nn.Linear(16, 19)
        self.down = nn.Linear(19, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.thin = nn.Linear(24, 1, bias=False)


def gefen(net: nn.Module, **chosen: Any) -> Gefen:
    return Gefen(net.named_parameters(), lr=0.01, weight_decay=0.1, **chosen)


def muon(net: nn.Module, mode: str) -> GefenMuon:
    matrices = [pair for pair in net.named_parameters() if pair[1].dim() == 2]
    return GefenMuon(matrices, lr=0.02, normuon=True, sharded_mode=mode)


def hybrid(net: nn.Module, **chosen: Any) -> GefenMuonHybrid:
    return GefenMuonHybrid(net, lr=0.02, **chosen)


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "gefen": gefen,
    "gefen-block": lambda net: gefen(net, factored_v_2d=False),
    "muon-exact": lambda net: muon(net, "exact"),
    "muon-distributed": lambda net: muon(net, "distributed"),
    "muon-approx": lambda net: muon(net, "approx"),
    "hybrid": hybrid,
    "hybrid-adamw": lambda net: hybrid(net, backup_optimizer="adamw", sharded_mode="distributed"),
}


EXACT = [kind for kind in KINDS if "approx" not in kind]


def plain(kind: str, device: torch.device) -> Run:
    torch.manual_seed(3)
    net = Net()
    for param in net.parameters():
        param.data.normal_()
    return net.to(device), KINDS[kind](net.to(device))


def sharded(kind: str, mesh: DeviceMesh, device: torch.device, *placements: Placement) -> Run:
    net, _ = plain(kind, device)
    for module in net.modules():
        for name, param in [*module.named_parameters(recurse=False)]:
            held = placed(param.detach(), mesh, placements or [Shard(0)])
            setattr(module, name, nn.Parameter(held))
    return net, KINDS[kind](net)


def train(run: Run, steps: range) -> None:
    net, optimizer = run
    for step in steps:
        for name, param in net.named_parameters():
            generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
            grad = torch.randn(param.shape, generator=generator).to(param.device)
            if name == "thin.weight" and not step:
                grad.zero_()  # has no blocks yet
            if isinstance(param, DTensor):
                grad = placed(grad, param.device_mesh, param.placements)
            param.grad = grad
        optimizer.step()


def values(run: Run) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in run[0].named_parameters()
    }


@functools.cache
def expected(kind: str, device: torch.device) -> dict[str, torch.Tensor]:
    """What one process comes to; where ranks have directions of their own, what they come to."""
    run = plain(kind, device)
    if "approx" in kind:
        run = sharded(kind, whole_mesh(device), device)
    train(run, range(END))
    return values(run)


def assert_continues(run: Run, kind: str, device: torch.device) -> None:
    train(run, range(MIDDLE, END))
    assert_ended(run, kind, device)


def assert_ended(run: Run, kind: str, device: torch.device) -> None:
    """Ranks add sums in another order; on a GPU, products of bfloat16 are summed so as well."""
    found, atol = values(run), 1e-6 if device.type == "cpu" else 2e-3
    for name, value in expected(kind, device).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=atol, msg=name)


def states(run: Run, **options: bool) -> dict[str, Any]:
    chosen = StateDictOptions(**options)
    return {
        "model": get_model_state_dict(run[0], options=chosen),
        "optim": get_optimizer_state_dict(*run, options=chosen),
    }


def load(run: Run, state: dict[str, Any], **options: bool) -> None:
    chosen = StateDictOptions(**options)
    set_model_state_dict(run[0], state["model"], options=chosen)
    set_optimizer_state_dict(*run, state["optim"], options=chosen)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that all ranks share."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(on_every_rank(own)[0])
        dist.barrier()


@pytest.fixture
def mesh(device: torch.device) -> DeviceMesh:
    return whole_mesh(device)


@pytest.mark.parametrize("kind", KINDS)
def test_a_distributed_checkpoint(
    kind: str, mesh: DeviceMesh, device: torch.device, folder: Path
) -> None:
    run = sharded(kind, mesh, device)
    train(run, range(MIDDLE))
    dcp.save(states(run), checkpoint_id=folder)
    other = sharded(kind, mesh, device)
    prepare_load(*other, folder)
    state = states(other)
    dcp.load(state, checkpoint_id=folder)
    load(other, state)
    assert_continues(other, kind, device)


@pytest.mark.parametrize("kind", EXACT)
def test_from_ranks_to_one_process_and_back(
    kind: str, mesh: DeviceMesh, device: torch.device
) -> None:
    run = sharded(kind, mesh, device)
    train(run, range(MIDDLE))
    alone = plain(kind, device)
    load(alone, states(run, full_state_dict=True))
    back = sharded(kind, mesh, device)
    load(back, states(alone), full_state_dict=True)
    assert_continues(alone, kind, device)
    assert_continues(back, kind, device)


@pytest.mark.parametrize("kind", KINDS)
def test_what_rank_0_has_is_sent_to_all(kind: str, mesh: DeviceMesh, device: torch.device) -> None:
    run = sharded(kind, mesh, device)
    train(run, range(MIDDLE))
    state = states(run, full_state_dict=True, cpu_offload=True)
    if dist.get_rank():
        state = {"model": {}, "optim": {}}
    other = sharded(kind, mesh, device)
    load(other, state, full_state_dict=True, broadcast_from_rank0=True)
    assert_continues(other, kind, device)


@pytest.mark.parametrize("kind", EXACT)
def test_the_file_of_one_rank_is_refused_on_all(
    kind: str, mesh: DeviceMesh, device: torch.device, folder: Path
) -> None:
    net, optimizer = run = sharded(kind, mesh, device)
    train(run, range(MIDDLE))
    if dist.get_rank() == 0:
        torch.save(optimizer.state_dict(), folder / "0.pt")
    dist.barrier()
    before = contents(optimizer, dict(net.named_parameters()))
    told = ""
    try:
        optimizer.load_state_dict(torch.load(folder / "0.pt", weights_only=False))
    except CheckpointError as error:
        told = str(error)
    for one in on_every_rank(told):
        assert "holds the part of the rank at" in one
        assert "changed nothing on any rank" in one
    assert same(before, contents(optimizer, dict(net.named_parameters())))
    assert_continues(run, kind, device)


def codebooks(run: Run) -> set[tuple[float, ...]]:
    found = [entry["codebook"] for entry in run[1].state.values() if "codebook" in entry]
    local = [book.to_local() if isinstance(book, DTensor) else book for book in found]
    return {tuple(book.tolist()) for book in local}


@pytest.mark.parametrize("kind", EXACT)
def test_all_ranks_hold_one_codebook(kind: str, mesh: DeviceMesh, device: torch.device) -> None:
    """For each half of a hybrid that has one."""
    run = sharded(kind, mesh, device)
    train(run, range(MIDDLE))
    own = codebooks(run)
    assert all(own == theirs for theirs in on_every_rank(own))
    assert len(own) == (2 if kind == "hybrid" else 1)


def on_the_cpu(found: list[Any]) -> list[Any]:
    return [value.cpu() if isinstance(value, torch.Tensor) else value for value in found]


@pytest.mark.parametrize("layout", ["replicated", "hybrid"])
@pytest.mark.parametrize("kind", ["gefen", "muon-exact", "muon-distributed", "hybrid"])
def test_replicas_stay_equal_in_every_bit(kind: str, layout: str, device: torch.device) -> None:
    ranks = torch.arange(dist.get_world_size())
    if layout == "replicated":
        run = sharded(kind, whole_mesh(device), device, Replicate())
    else:
        grid = DeviceMesh(device.type, ranks.view(-1, 1))
        run = sharded(kind, grid, device, Replicate(), Shard(0))
    train(run, range(END))
    found = on_the_cpu(contents(run[1], dict(run[0].named_parameters())))
    assert all(same(found, theirs) for theirs in on_every_rank(found))
    assert_ended(run, kind, device)
