"""accelerate, in one process and as DDP on two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from pool import RankPool
from tiny import OPTIMIZERS, batch, fell, language_model, launched, same

BEFORE, AFTER = 16, 4


class Run:
    """Everything that ``save_state`` saves."""

    def __init__(self, kind: str, seed: int, wrapped_first: bool = False) -> None:
        self.accelerator = Accelerator(cpu=True)
        model = language_model(seed)
        self.model = self.accelerator.prepare(model)
        # Names begin with "module." where the wrapped one has them.
        optimizer = OPTIMIZERS[kind](self.model if wrapped_first else model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        self.optimizer, self.scheduler = self.accelerator.prepare(optimizer, scheduler)

    def train(self, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            mine = number * self.accelerator.num_processes + self.accelerator.process_index
            loss = self.model(**batch(mine)).loss
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def parameters(self) -> list[torch.Tensor]:
        return [param.detach() for param in self.model.parameters()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_resumes_from_its_state(tmp_path: Path, kind: str) -> None:
    run = Run(kind, 0)
    losses = run.train(range(BEFORE))
    run.accelerator.save_state(str(tmp_path))
    losses += run.train(range(BEFORE, BEFORE + AFTER))
    assert fell(losses)
    other = Run(kind, 1)
    other.accelerator.load_state(str(tmp_path))
    assert other.train(range(BEFORE, BEFORE + AFTER)) == losses[BEFORE:]
    assert same(other.parameters(), run.parameters())


def on_ranks(rank: int, world: int, kind: str, wrapped_first: bool, folder: str) -> list[float]:
    os.environ |= launched(rank, world)
    run = Run(kind, 0, wrapped_first)
    assert run.accelerator.num_processes == world
    losses = run.train(range(BEFORE))
    run.accelerator.save_state(folder)
    losses += run.train(range(BEFORE, BEFORE + AFTER))
    other = Run(kind, 1, not wrapped_first)
    other.accelerator.load_state(folder)
    assert other.train(range(BEFORE, BEFORE + AFTER)) == losses[BEFORE:]
    assert same(other.parameters(), run.parameters())
    return losses


@pytest.mark.parametrize("wrapped_first", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ranks_resume(ranks: RankPool, tmp_path: Path, kind: str, wrapped_first: bool) -> None:
    """Also where the optimizer that saves has the names of the wrapped model, or the one that
    loads.
    """
    found: list[Any] = ranks.run(on_ranks, 2, kind, wrapped_first, str(tmp_path), limit_s=120)
    assert all(fell(losses) for losses in found)
    single = Run(kind, 1)
    single.accelerator.load_state(str(tmp_path))
    assert fell([*found[0][:3], *single.train(range(AFTER))])
