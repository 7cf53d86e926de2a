"""What torch has to spread a model over ranks, on one of transformers; distributed checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from pool import RankPool
from tiny import OPTIMIZERS, batch, fell, language_model, same
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gefen import prepare_load

BEFORE, AFTER = 16, 4


def sharded(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


WRAPPED: dict[str, Any] = {"ddp": DistributedDataParallel, "fsdp2": sharded}


def train(model: Any, optimizer: Any, rank: int, world: int, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = model(**batch(number * world + rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(rank: int, world: int, way: str, kind: str, folder: str) -> list[float]:
    """Saves on the way and resumes from it."""
    model = WRAPPED[way](language_model())
    optimizer = OPTIMIZERS[kind](model)
    losses = train(model, optimizer, rank, world, range(BEFORE))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
    losses += train(model, optimizer, rank, world, range(BEFORE, BEFORE + AFTER))

    resumed = WRAPPED[way](language_model(seed=1))
    other = OPTIMIZERS[kind](resumed)
    load(resumed, other, folder)
    assert train(resumed, other, rank, world, range(BEFORE, BEFORE + AFTER)) == losses[BEFORE:]
    assert same(local(resumed), local(model))
    return losses


def local(model: Any) -> list[Any]:
    return [getattr(param, "_local_tensor", param) for param in model.parameters()]


def load(model: Any, optimizer: Any, folder: str) -> None:
    prepare_load(model, optimizer, folder)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def on_others(rank: int, world: int, way: str, kind: str, folder: str) -> list[float]:
    """Resumes what other ranks, wrapped in another way, have saved."""
    model = WRAPPED[way](language_model(seed=1))
    optimizer = OPTIMIZERS[kind](model)
    load(model, optimizer, folder)
    return train(model, optimizer, rank, world, range(AFTER))


@pytest.mark.parametrize("way", WRAPPED)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_resumes(ranks: RankPool, way: str, kind: str, tmp_path: Path) -> None:
    found = ranks.run(trained, 2, way, kind, str(tmp_path), limit_s=120)
    assert all(fell(losses) for losses in found)
    for other in WRAPPED:
        resumed = ranks.run(on_others, 3, other, kind, str(tmp_path), limit_s=120)
        assert all(fell([*found[0][:3], *losses]) for losses in resumed)
