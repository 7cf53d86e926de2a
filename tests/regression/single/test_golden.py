"""Parity with recorded results of gefen-x 0.5.0."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trajectories import CASES, Case, assert_follows, recorded, replay

from gefen import Gefen


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_trajectory(case: Case, device: torch.device) -> None:
    assert_follows(case, replay(case, device))


def test_periods(device: torch.device) -> None:
    values = recorded("periods")
    shapes = [name.removesuffix(".grad") for name in values if name.endswith(".grad")]
    assert shapes
    for shape in shapes:
        grad = values[f"{shape}.grad"].to(device)
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad
        optimizer = Gefen([param])
        optimizer.step()
        assert optimizer.state[param]["period"] == values[f"{shape}.period"].item(), shape


def test_codebooks() -> None:
    # Here, so that another package's lack of it fails this test alone.
    from gefen.codebook import solve

    values = recorded("codebooks")
    cases = [name.removesuffix(".counts") for name in values if name.endswith(".counts")]
    assert cases
    for case in cases:
        torch.testing.assert_close(
            solve(values[f"{case}.counts"]), values[f"{case}.codebook"], rtol=0, atol=0
        )
