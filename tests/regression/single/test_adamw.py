"""Where nothing is shared between elements, and so nothing is rounded, Gefen is AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gefen import Gefen

# More elements than are worked on at a time, and rows that do not end with a chunk.
SHAPES = {"vector": (300_000,), "matrix": (600, 500)}
RUN, RUNS = 2048, 200
CHOSEN = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 0.3, "weight_decay": 0.2}


def gradient(shape: tuple[int, ...], step: int, device: torch.device) -> Tensor:
    """Squares that are an outer product, which a factored second moment keeps exactly."""
    generator = torch.Generator().manual_seed(step)
    size = 1 + torch.arange(shape[0]).remainder(7) / 7
    if len(shape) == 2:
        size = size[:, None] * (1 + torch.arange(shape[1]).remainder(5) / 5)
    return (size * torch.randn(shape, generator=generator).sign() * (step + 1)).to(device)


@pytest.mark.parametrize("factored", [True, False])
@pytest.mark.parametrize("kind", SHAPES)
def test_gefen_is_adamw(kind: str, factored: bool, device: torch.device) -> None:
    shape = SHAPES[kind]
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(shape).to(device))
    theirs = nn.Parameter(ours.detach().clone())
    optimizers = [
        Gefen(
            [ours],
            factored_v_2d=factored,
            force_1d_period_one=True,
            force_2d_period_one=True,
            **CHOSEN,
        ),
        torch.optim.AdamW([theirs], **CHOSEN),
    ]
    for step in range(3):
        ours.grad = theirs.grad = gradient(shape, step, device)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_equal_blocks_are_adamw(device: torch.device) -> None:
    """Blocks of one size throughout, with signs that stay, need no rounding either."""
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(RUNS * RUN).to(device))
    theirs = nn.Parameter(ours.detach().clone())
    optimizers = [Gefen([ours], **CHOSEN), torch.optim.AdamW([theirs], **CHOSEN)]
    size = (torch.rand(RUNS, 1) + 0.5) * torch.randn(RUNS, RUN).sign()
    for step in range(3):
        ours.grad = theirs.grad = (size * (step + 1)).view(-1).to(device)
        for optimizer in optimizers:
            optimizer.step()
    assert optimizers[0].state[ours]["period"] == RUN
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_block_longer_than_a_chunk(device: torch.device) -> None:
    """Its magnitude is the largest momentum of all its parts."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.zeros(1, 900_000, device=device))
    other = nn.Parameter(torch.zeros(64, 64, device=device))
    optimizer = Gefen([param, other], betas=(0.0, 0.9))
    runs = torch.randn(3, 300_000).sign()
    for grad in (runs * torch.tensor([[1.0], [2.0], [3.0]]), runs):
        if grad is runs:
            grad[0, -1], grad[1, 100_000] = 7, -9
        param.grad = grad.view(1, -1).to(device)
        other.grad = torch.randn(64, 64).to(device)  # has values between, for the codebook
        optimizer.step()
    state = optimizer.state[param]
    magnitude = state["magnitude"].cpu().view(-1)
    torch.testing.assert_close(magnitude, torch.tensor([7.0, 9.0, 1.0]))
    entries = state["codebook"][state["index"].long()].cpu().view(3, -1)
    torch.testing.assert_close(entries * magnitude[:, None], runs, rtol=0, atol=0.1)
