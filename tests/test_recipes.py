"""The recipes of docs/training.md that need one process and torch alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipes import INTEGRATIONS, RANKS, SINGLE, recipes, run


def test_every_recipe_is_run_somewhere() -> None:
    assert set(recipes()) == SINGLE | RANKS | INTEGRATIONS
    assert all(recipes().values())


@pytest.mark.parametrize("heading", sorted(SINGLE))
def test_recipe(heading: str, tmp_path: Path) -> None:
    left = run(heading, tmp_path)
    if heading == "Activation checkpointing":
        inner = left["model"].blocks[0]._checkpoint_wrapped_module
        assert left["optimizer"].state[inner.weight]["period"] == 1
        assert left["optimizer"].state[left["model"].head.weight]["period"] > 1


def test_a_recipe_that_does_not_train_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the loss went from"):
        run("One process", tmp_path, loss_of=lambda model, batch: 1 + 0 * model(batch).sum())
