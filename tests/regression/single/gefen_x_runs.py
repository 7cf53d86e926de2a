"""What gefen-x was trained on for the recordings in golden/gefen-x, and what resumes them.

Names of both packages are the same, so this file runs under either.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gefen

DATA = Path(__file__).parent.parent / "golden" / "gefen-x"
SHAPES = {
    "Block.Embed.weight": (8, 12),
    "Block.Linear.weight": (24, 16),
    "Block.Tall.weight": (40, 9),
    "Block.Conv.weight": (4, 3, 2, 2),
    "Block.Norm.weight": (48,),
    "Block.Norm.bias": (5,),
    "Block.scale": (),
    "Block.Frozen.weight": (4, 4),
}
BEFORE, AFTER = 5, 20
"""Steps until the checkpoint, and from there on."""


def _names(kind: str) -> dict[str, tuple[int, ...]]:
    return {n: s for n, s in SHAPES.items() if "muon" not in kind or len(s) == 2}


def start(kind: str, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(11)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in _names(kind).items()
    }


def gradients(kind: str, number: int) -> dict[str, Tensor]:
    """Of rows of uneven size. The frozen weight has none; one has its first in step 3."""
    generator = torch.Generator().manual_seed(100 + number)
    found = {}
    for name, shape in _names(kind).items():
        rows = torch.rand(shape[:1] or (1,), generator=generator).view(-1, *[1] * (len(shape) - 1))
        grad = torch.randn(shape, generator=generator) * (rows + 0.1).view(rows.shape)
        late = name == "Block.Tall.weight" and number < 3
        if "Frozen" not in name and not late:
            found[name] = grad.reshape(shape)
    return found


def _two_groups(pairs: list[Any], **chosen: Any) -> Any:
    first, second = {"params": pairs[:3], "lr": 3e-3}, {"params": pairs[3:], "betas": (0.8, 0.97)}
    return gefen.Gefen([first, second], lr=1e-2, weight_decay=0.1, fused=False, **chosen)


MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "gefen": lambda pairs: _two_groups(pairs),
    "gefen-block": lambda pairs: _two_groups(pairs, factored_v_2d=False),
    "gefen-deterministic": lambda pairs: gefen.Gefen(pairs, fused=False, deterministic=True),
    "muon": lambda pairs: gefen.GefenMuon(pairs, lr=1e-2, fused=False, ns_schedule="tuned4"),
    "muon-normuon": lambda pairs: gefen.GefenMuon(
        pairs, lr=1e-2, fused=False, normuon=True, momentum=0.9
    ),
    "hybrid": lambda pairs: gefen.GefenMuonHybrid(
        pairs[1:3], pairs[:1] + pairs[3:], lr=1e-2, fused=False, weight_decay=0.1,
        no_decay_substrings=("bias", "norm"),
    ),
    "hybrid-adamw": lambda pairs: gefen.GefenMuonHybrid(
        pairs[1:3], pairs[:1] + pairs[3:], lr=1e-2, fused=False, backup_optimizer="adamw"
    ),
}  # fmt: skip


def make(kind: str, params: dict[str, nn.Parameter]) -> Any:
    return MAKERS[kind](list(params.items()))


def train(optimizer: Any, kind: str, params: dict[str, nn.Parameter], steps: range) -> None:
    for number in steps:
        found = gradients(kind, number)
        for name, param in params.items():
            param.grad = found[name].to(param.dtype) if name in found else None
        optimizer.step()


def recorded(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(DATA / f"{kind}.pt", weights_only=True)
    return found


def rebuilt(kind: str) -> tuple[dict[str, nn.Parameter], Any, dict[str, Any]]:
    """Parameters as recorded, a new optimizer for them, and the recording."""
    found = recorded(kind)
    params = {name: nn.Parameter(value.clone()) for name, value in found["before"].items()}
    return params, make(kind, params), found
