"""Training resumed from a saved state dict repeats bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from workload import OPTIMIZERS, model, snapshot, step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_round_trip(kind: str, dtype: torch.dtype, device: torch.device, tmp_path: Path) -> None:
    trained = model(dtype, device)
    optimizer = OPTIMIZERS[kind](trained)
    for number in range(4):
        step(trained, optimizer, number)
    torch.save([trained.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint.pt")

    resumed = model(dtype, device, seed=1)
    other = OPTIMIZERS[kind](resumed)
    path = tmp_path / "checkpoint.pt"
    weights, state = torch.load(path, map_location="cpu", weights_only=True)
    resumed.load_state_dict(weights)
    other.load_state_dict(state)
    assert snapshot(resumed, other) == snapshot(trained, optimizer)

    for number in range(4, 8):
        step(trained, optimizer, number)
        step(resumed, other, number)
        assert snapshot(resumed, other) == snapshot(trained, optimizer)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_bad_checkpoint_changes_nothing(kind: str, device: torch.device) -> None:
    trained = model(device=device)
    optimizer = OPTIMIZERS[kind](trained)
    for number in range(2):
        step(trained, optimizer, number)
    saved = optimizer.state_dict()
    last = max(saved["state"])
    truncated = {**saved, "state": {k: v for k, v in saved["state"].items() if k != last}}
    foreign = torch.optim.SGD(trained.parameters(), momentum=0.9, lr=0.1).state_dict()
    before = snapshot(trained, optimizer)
    for bad in (truncated, foreign, {}):
        with pytest.raises(ValueError, match="Nothing was loaded"):
            optimizer.load_state_dict(bad)
        assert snapshot(trained, optimizer) == before
