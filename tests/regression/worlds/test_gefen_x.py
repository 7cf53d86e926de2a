"""State dicts of gefen-x where ranks share parameters: blocks that cuts may cross are divided."""

from __future__ import annotations

from typing import Any

import gefen_x_runs as cases
import pytest
import torch
from pool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def momentum(index: Tensor, magnitude: Tensor, codebook: Tensor) -> Tensor:
    flat, top = index.flatten(), magnitude.flatten()
    return codebook[flat.long()] * top.repeat_interleave(len(flat) // len(top))


def goes_on(rank: int, world: int, kind: str) -> dict[str, float]:
    """How far parameters end from where gefen-x got to, as a share of their movement."""
    found = cases.recorded(kind)
    mesh = init_device_mesh("cpu", (world,))
    params = {
        name: nn.Parameter(
            distribute_tensor(value.clone(), mesh, [Shard(0) if value.dim() else Replicate()])
        )
        for name, value in found["before"].items()
    }
    optimizer = cases.make(kind, params)
    optimizer.load_state_dict(found["state_dict"])
    saved = found["state_dict"]
    for entry, param in zip(saved["state"].values(), params.values(), strict=True):
        state = optimizer.state.get(param)
        if not state:
            continue
        own = [whole(state[key]) for key in ("index", "magnitude", "codebook")]
        theirs = [entry["m_codebook"], entry["m_magnitude"], saved["gefen_codebook"]]
        assert torch.equal(momentum(*own), momentum(*theirs))
    for number in range(cases.BEFORE, cases.BEFORE + cases.AFTER):
        grads = cases.gradients(kind, number)
        for name, param in params.items():
            grad = grads.get(name)
            param.grad = None if grad is None else distribute_tensor(grad, mesh, param.placements)
        optimizer.step()
    shares = {}
    for name, param in params.items():
        after, before = found["after"][name], found["before"][name]
        moved = float((after - before).norm())
        if moved:
            shares[name] = float((whole(param.detach()) - after).norm()) / moved
    return shares


@pytest.mark.parametrize("kind", ["gefen", "gefen-block", "muon-normuon"])
def test_a_run_goes_on_sharded(ranks: RankPool, kind: str) -> None:
    """Divided blocks have magnitudes and second moments of their own, so it is not exact."""
    told = ranks.run(goes_on, 2, kind)
    assert told[0] == told[1]
    assert max(told[0].values()) < 0.25, told[0]
