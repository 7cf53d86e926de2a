"""Parity with recorded results of gefen-x 0.5.0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from trajectories import CASES, Case, assert_follows, recorded, replay

from gefen import Gefen


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_trajectory(case: Case, device: torch.device) -> None:
    assert_follows(case, replay(case, device))


def test_periods(device: torch.device) -> None:
    """Those of vectors; of matrices, gefen-x has blocks that cross rows."""
    values = recorded("periods")
    vectors = [key for key, v in values.items() if key.endswith(".grad") and v.dim() == 1]
    assert vectors
    for key in vectors:
        grad = values[key].to(device)
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad
        optimizer = Gefen([param])
        optimizer.step()
        period = grad.numel() // optimizer.state[param]["magnitude"].numel()
        assert period == values[key.removesuffix("grad") + "period"].item(), key


def test_codebooks() -> None:
    """The recorded ones, but for the entry nearest to 0 (of two, the lower), which is 0."""
    # Here, so that another package's lack of it fails this test alone.
    from gefen.codebook import solve

    values = recorded("codebooks")
    cases = [name.removesuffix(".counts") for name in values if name.endswith(".counts")]
    assert cases
    for case in cases:
        wanted = values[f"{case}.codebook"].clone()
        wanted[int(np.argmin(np.abs(wanted.numpy())))] = 0
        torch.testing.assert_close(solve(values[f"{case}.counts"]), wanted, rtol=0, atol=0)
