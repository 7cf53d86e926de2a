"""DeepSpeed's ZeRO, which keeps a flat partition of each group on each rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool
from tiny import batch, fell, language_model, launched, same

from gefen import Gefen

BEFORE, AFTER = 16, 4


pytestmark = pytest.mark.usefixtures("compiled")


def engine(seed: int, stage: int, offload: bool) -> Any:
    import deepspeed

    model = language_model(seed)
    decayed = [pair for pair in model.named_parameters() if pair[1].dim() == 2]
    others = [pair for pair in model.named_parameters() if pair[1].dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = Gefen(groups, lr=1e-2)
    wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return wrapped


def train(wrapped: Any, rank: int, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = wrapped(**batch(2 * number + rank)).loss
        wrapped.backward(loss)
        wrapped.step()
        losses.append(loss.item())
    return losses


def on_ranks(rank: int, world: int, stage: int, offload: bool, folder: str) -> list[float]:
    os.environ |= launched(rank, world)
    wrapped = engine(0, stage, offload)
    losses = train(wrapped, rank, range(BEFORE))
    wrapped.save_checkpoint(folder)
    losses += train(wrapped, rank, range(BEFORE, BEFORE + AFTER))
    other = engine(1, stage, offload)
    other.load_checkpoint(folder)
    assert train(other, rank, range(BEFORE, BEFORE + AFTER)) == losses[BEFORE:]
    assert same(other.parameters(), wrapped.parameters())
    return losses


@pytest.mark.parametrize(
    ("stage", "offload"),
    [*((stage, False) for stage in range(4)), *((stage, True) for stage in range(1, 4))],
)
def test_zero(ranks: RankPool, tmp_path: Path, stage: int, offload: bool) -> None:
    for losses in ranks.run(on_ranks, 2, stage, offload, str(tmp_path), limit_s=60):
        assert fell(losses)
