"""The recipes of docs/training.md that need more than torch, or a compiler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool
from recipes import INTEGRATIONS, run
from tiny import batch, language_model, launched, texts


def language_loss(model: Any, rows: Any) -> Any:
    return model(**rows).loss


@pytest.mark.parametrize("heading", sorted(INTEGRATIONS - {"DeepSpeed", "transformers"}))
def test_recipe(heading: str, tmp_path: Path) -> None:
    run(heading, tmp_path)


def test_transformers(tmp_path: Path) -> None:
    rows, batches = texts(64), [batch(0)]
    names = {"model": language_model(), "rows": rows, "batches": batches, "loss_of": language_loss}
    run("transformers", tmp_path, **names)


def on_ranks(rank: int, world: int, folder: str) -> None:
    os.environ |= launched(rank, world)
    run("DeepSpeed", Path(folder), rank)


def test_deepspeed(ranks: RankPool, compiled: None, tmp_path: Path) -> None:
    ranks.run(on_ranks, 2, str(tmp_path), limit_s=120)
