"""transformers.Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import OPTIMIZERS, fell, language_model, same, texts
from transformers import Trainer, TrainingArguments

from gefen import Gefen, GefenMuonHybrid

STEPS, SAVED = 20, 12


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_steps=SAVED,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        weight_decay=0.1,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )


def given(model: Any, folder: Path, kind: str) -> Trainer:
    optimizer = OPTIMIZERS[kind](model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    return Trainer(
        model, arguments(folder), train_dataset=texts(64), optimizers=(optimizer, scheduler)
    )


def made(model: Any, folder: Path, kind: str) -> Trainer:
    """The trainer makes it: Gefen from its groups, by weight decay; the hybrid from the model."""
    chosen: dict[str, tuple[Any, dict[str, Any]]] = {
        "gefen": (Gefen, {"lr": 1e-2}),
        "hybrid": (GefenMuonHybrid, {"model": model, "lr": 1e-2}),
    }
    return Trainer(
        model,
        arguments(folder),
        train_dataset=texts(64),
        optimizer_cls_and_kwargs=chosen[kind],
    )


@pytest.mark.parametrize("start", [given, made])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_resumes_from_its_checkpoint(tmp_path: Path, start: Any, kind: str) -> None:
    model = language_model()
    trainer = start(model, tmp_path, kind)
    trainer.train()
    assert fell([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    resumed = language_model(seed=1)
    other = start(resumed, tmp_path / "other", kind)
    other.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))
    assert other.state.global_step == STEPS
    assert same(resumed.parameters(), model.parameters())
