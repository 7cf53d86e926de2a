from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from cases import QUANTIZER
from torch import Tensor

from gefen.codebook import SIZE, Quantizer
from gefen.kernels import packing
from gefen.kernels.packing import Geometry, Task
from gefen.kernels.plan import Plan


@pytest.mark.parametrize(
    "period", [*range(1, 70), 511, 512, 4095, 4096, 4097, 32768, 32769, 10**9]
)
def test_items_cover_their_blocks(period: int) -> None:
    geometry = Geometry()
    span, chunks = geometry.cut(period)
    if chunks > 1:
        assert span % geometry.tile == 0
        assert (chunks - 1) * span < period <= chunks * span
        assert chunks <= 4 * geometry.threads
    else:
        assert span % period == 0
        # What is counted in cells and outcomes has room in shared memory.
        assert span == period or span <= geometry.tile
        assert span // period <= 4 * geometry.threads
        assert period >= 8 or span <= 4 * geometry.threads
        start = span % packing.WIDTH
        assert not start or span + packing.WIDTH - 1 <= geometry.tile or span == period
        blocks = Task(packing.NO_VIEW, 3 * span + period, period, span, 1)
        assert blocks.items == 4


def elements(tensor: Tensor, view: packing.View) -> list[float]:
    """What a kernel reads through a view of ``tensor``."""
    at, inner, outer, stride, _, _ = view
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // 4,), (1,), 0)
    first = (at - flat.data_ptr()) // 4
    places = (
        first + (i // inner * outer + i % inner * stride if inner else i)
        for i in range(tensor.numel())
    )
    return [float(flat[place]) for place in places]


def test_views() -> None:
    base = torch.arange(240.0)
    tensors = [
        base,
        base[3:],
        base[::3],
        base.view(12, 20).t(),
        base.view(12, 20)[2:7, ::4],
        base.view(2, 6, 20)[:, :, :7],
        base.view(4, 3, 20).permute(2, 0, 1),
        base[:1].expand(6, 5),
        base[7],
        base.view(1, 240, 1).transpose(0, 1),
    ]
    for tensor in tensors:
        view = packing.view(tensor)
        assert view is not None
        assert elements(tensor, view) == tensor.flatten().tolist()
        assert not view[5] or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0)
    assert packing.view(base.view(4, 3, 20).permute(2, 1, 0)) is None


def nearest(book: bytes, x: float) -> int:
    """What Codebook::nearest does."""
    thresholds = struct.unpack(f"<{SIZE}f", book[4 * SIZE : 8 * SIZE])
    bounds = book[8 * SIZE : 8 * SIZE + 2 * packing.SECTORS]
    half = packing.SECTORS // 2
    at = half + round(x * (half - 1))
    low, count = bounds[2 * at], bounds[2 * at + 1]
    return low + sum(x > threshold for threshold in thresholds[low : low + count])


@pytest.mark.parametrize(
    "entries",
    [
        QUANTIZER.codebook,
        torch.linspace(-1, 1, SIZE),
        torch.tensor([-1.0] * 100 + [0.0] * 56 + [1.0] * 100),
        torch.linspace(-1e-6, 1e-6, SIZE),
    ],
    ids=["learned", "even", "duplicates", "close"],
)
def test_codebook(entries: Tensor) -> None:
    quantizer = Quantizer(entries)
    book = bytes(packing.codebook(quantizer).tolist())
    thresholds = quantizer.thresholds.clamp(-1, 1)
    above = torch.nextafter(thresholds, torch.tensor(2.0)).clamp(max=1)
    xs = torch.cat([entries, thresholds, above, torch.linspace(-1, 1, 9001)])
    expected = quantizer.encode(xs).tolist()
    assert [nearest(book, x) for x in xs.tolist()] == expected
    assert packing.codebook(quantizer) is packing.codebook(quantizer)


def test_scalars_that_single_precision_cannot_hold() -> None:
    entry = Task(packing.NO_VIEW, 1, 1, 1, 1)
    plan = Plan([("momentum", [0], [entry], [1])], [], 0, np.array([0]))
    values = {"rate": 1e300, "eps": -1e300, "keep": math.nan}
    plan.write({name: np.array([value]) for name, value in values.items()})
    (row,) = plan.parts[0].rows
    assert (row["rate"], row["eps"]) == (math.inf, -math.inf)
    assert math.isnan(row["keep"])
