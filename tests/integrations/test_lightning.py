"""Lightning's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import OPTIMIZERS, batch, fell, language_model, same

STEPS, SAVED = 20, 12


class Module(lightning.LightningModule):
    def __init__(self, kind: str, seed: int = 0) -> None:
        super().__init__()
        self.model, self.kind = language_model(seed), kind
        self.losses: list[float] = []

    def training_step(self, rows: Any, number: int) -> Any:
        loss = self.model(**rows).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.kind](self)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def trainer(folder: Path) -> lightning.Trainer:
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    return lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        callbacks=[saving],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def loader() -> Any:
    return torch.utils.data.DataLoader([batch(n) for n in range(4)], batch_size=None)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_resumes_from_its_checkpoint(tmp_path: Path, kind: str) -> None:
    whole = Module(kind)
    trainer(tmp_path).fit(whole, loader())
    assert fell(whole.losses)
    resumed = Module(kind, seed=1)
    trainer(tmp_path / "other").fit(
        resumed, loader(), ckpt_path=tmp_path / f"step={SAVED}.ckpt", weights_only=True
    )
    assert resumed.losses == whole.losses[SAVED:]
    assert same(resumed.parameters(), whole.parameters())
