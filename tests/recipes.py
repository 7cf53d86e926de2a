"""Runs the recipes of docs/training.md as they stand, on a small model of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FILE = Path(__file__).parent.parent / "docs" / "training.md"

SINGLE = {
    "One process",
    "Activation checkpointing",
    "float16 and GradScaler",
    "A moving average of the weights",
}
RANKS = {"DDP", "ZeroRedundancyOptimizer", "FSDP2 and distributed checkpoints"}
INTEGRATIONS = {"torch.compile", "transformers", "accelerate", "Lightning", "DeepSpeed"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 24)
        self.blocks = nn.ModuleList([nn.Linear(24, 24) for _ in range(2)])
        self.head = nn.Linear(24, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        result: Tensor = self.head(hidden)
        return result


def loss_of(model: Any, batch: Tensor) -> Tensor:
    """Of telling each token's successor."""
    return nn.functional.cross_entropy(model(batch), (batch + 1) % 16)


def batches(rank: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(16, (32,), generator=generator) for _ in range(20)]


def recipes() -> dict[str, str]:
    """The code of each section, by its heading."""
    sections = re.split(r"^## (.+)$", FILE.read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for heading, text in zip(sections[::2], sections[1::2], strict=True):
        found[heading] = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M))
    return found


def run(heading: str, folder: Path, rank: int = 0, **names: Any) -> dict[str, Any]:
    """What the recipe leaves behind, once its model has learned something from it."""
    own = {"model": Net(), "batches": batches(rank), "loss_of": loss_of, "folder": folder}
    own |= {"__name__": "recipe", **names}
    net, measured = own["model"], own["loss_of"]
    example = own["batches"][0]
    before = float(measured(net, example).detach())
    exec(compile(recipes()[heading], f"{FILE.name}: {heading}", "exec"), own)
    after = float(measured(own["model"], example).detach())
    assert after < 0.8 * before, f"the loss went from {before} to {after}"
    return own
