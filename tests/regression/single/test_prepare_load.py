"""torch.distributed.checkpoint in one process: a fresh optimizer resumes with every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from workload import OPTIMIZERS, bytes_of, model, snapshot, step

from gefen import prepare_load
from gefen.errors import CheckpointError, InvalidArgumentError

# That there is one process only, which is meant.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is .* a single process:UserWarning"
)


def states(net: nn.Module, optimizer: Any) -> dict[str, Any]:
    """As the utilities of torch name it; they step an optimizer that has no state."""
    state = get_model_state_dict(net)
    return {"model": state, "optim": get_optimizer_state_dict(net, optimizer)}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resumes_with_every_bit(kind: str, device: torch.device, tmp_path: Path) -> None:
    trained = model(device=device)
    optimizer = OPTIMIZERS[kind](trained)
    for number in range(3):
        step(trained, optimizer, number)
    dcp.save(states(trained, optimizer), checkpoint_id=tmp_path)

    resumed = model(device=device, seed=1)
    other = OPTIMIZERS[kind](resumed)
    prepare_load(resumed, other, tmp_path)
    loaded = states(resumed, other)
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_model_state_dict(resumed, loaded["model"])
    set_optimizer_state_dict(resumed, other, loaded["optim"])
    for number in range(3, 6):
        step(trained, optimizer, number)
        step(resumed, other, number)
        assert snapshot(resumed, other) == snapshot(trained, optimizer)


def test_what_cannot_be_prepared_is_refused(device: torch.device, tmp_path: Path) -> None:
    net = model(device=device)
    optimizer = OPTIMIZERS["gefen"](net)
    dcp.save({"model": get_model_state_dict(net)}, checkpoint_id=tmp_path)
    before = bytes_of(optimizer.state_dict())
    with pytest.raises(CheckpointError, match="Nothing was prepared"):
        prepare_load(net, optimizer, tmp_path)
    assert bytes_of(optimizer.state_dict()) == before
    with pytest.raises(InvalidArgumentError, match="AdamW"):
        prepare_load(net, torch.optim.AdamW(net.parameters()), tmp_path)
