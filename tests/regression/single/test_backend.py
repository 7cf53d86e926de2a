"""On a GPU the kernels run, and do what the reference does there; a fallback is a failure."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gefen import Gefen, GefenMuon
from gefen.kernels import active_backend

# Periods of one, of few and of many elements; rows that end inside of a vector; a small tensor.
SHAPES = [(3, 5), (64, 96), (257, 130), (1024,), (100_003,)]
STEPS = 4
# RMS difference over RMS movement: sums are taken in another order, and so a momentum on the
# border between two entries of the codebook may fall to either side.
CLOSE = {torch.float32: 0.01, torch.bfloat16: 0.05}

OPTIMIZERS = {
    "block": lambda params, fused: Gefen(
        params, lr=1e-2, weight_decay=0.1, factored_v_2d=False, fused=fused
    ),
    "factored": lambda params, fused: Gefen(params, lr=1e-2, weight_decay=0.1, fused=fused),
    "muon": lambda params, fused: GefenMuon(
        [p for p in params if p.ndim == 2], lr=1e-2, fused=fused
    ),
}


def test_the_kernels_run(device: torch.device) -> None:
    assert active_backend(device) == ("cuda" if device.type == "cuda" else "reference")


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_kernels_do_what_the_reference_does(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    results = []
    for fused in (True, False):
        generator = torch.Generator().manual_seed(0)
        params = [
            nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
            for shape in SHAPES
        ]
        start = [param.detach().clone().float() for param in params]
        optimizer = OPTIMIZERS[kind](params, fused)
        for _ in range(STEPS):
            for param in params:
                grad = torch.randn(param.shape, generator=generator)
                param.grad = grad.to(device, dtype)
            optimizer.step()
        results.append([param.float() - a for param, a in zip(params, start, strict=True)])
    for shape, ours, expected in zip(SHAPES, *results, strict=True):
        assert (ours - expected).norm() <= CLOSE[dtype] * expected.norm(), shape
