"""A small language model learns a real text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gefen import Gefen, GefenMuon, GefenMuonHybrid, split_params_for_muon

# The opening of "A Tale of Two Cities" (Dickens, 1859).
TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the "
    "age of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the "
    "season of Light, it was the season of Darkness, it was the spring of hope, it was the winter "
    "of despair, we had everything before us, we had nothing before us, we were all going direct "
    "to Heaven, we were all going direct the other way"
)
WINDOW = 8
STEPS = 40


class NextCharacter(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, 16)
        self.inner = nn.Linear(WINDOW * 16, 96)
        self.norm = nn.LayerNorm(96)
        self.outer = nn.Linear(96, 96, bias=False)
        self.lm_head = nn.Linear(96, letters)

    def forward(self, windows: Tensor) -> Tensor:
        hidden = self.norm(torch.relu(self.inner(self.embed(windows).flatten(1))))
        return self.lm_head(hidden + torch.relu(self.outer(hidden)))


def only_muon(model: nn.Module) -> GefenMuon:
    """GefenMuon on the hidden matrices; the rest of the model stays as it was drawn."""
    matrices, others = split_params_for_muon(model)
    for _, param in others:
        param.requires_grad_(False)
    return GefenMuon(matrices, lr=0.02, weight_decay=0.01)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "gefen": lambda model: Gefen(model.named_parameters(), lr=3e-3, weight_decay=0.01),
    "gefen-block": lambda model: Gefen(model.named_parameters(), lr=3e-3, factored_v_2d=False),
    "muon": only_muon,
    "hybrid": lambda model: GefenMuonHybrid(model, lr=3e-3),
    "hybrid-adamw": lambda model: GefenMuonHybrid(model, lr=3e-3, backup_optimizer="adamw"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_loss_falls(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    codes = torch.tensor([letters.index(letter) for letter in TEXT])
    windows = codes.unfold(0, WINDOW + 1, 1).to(device)
    model = NextCharacter(len(letters)).to(device, dtype)
    optimizer = OPTIMIZERS[kind](model)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # Guessing by letter frequency alone costs about 2.7; the text's structure must be learned.
    assert losses[0] > 3
    assert sum(losses[-5:]) / 5 < 1, losses
