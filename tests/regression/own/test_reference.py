"""The recorded trajectories again, along paths that the recorder did not take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from trajectories import CASES, Case, assert_follows, replay

from gefen.kernels import reference


@pytest.mark.parametrize("chunk", [50, 500])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_small_chunks(case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks longer than a chunk are read twice; chunks end within rows."""
    monkeypatch.setattr(reference, "CHUNK", chunk)
    assert_follows(case, replay(case))


def transposed(tensor: Tensor) -> Tensor:
    """The same values in column-major order, with gaps."""
    gaps = tensor.new_zeros(*tensor.shape[::-1], 2)
    view = gaps[..., 0].permute(*reversed(range(tensor.dim())))
    return view.copy_(tensor).detach()


@pytest.mark.parametrize("chunk", [100, 1 << 17])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_strides_do_not_matter(case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK", chunk)
    plain, strided = replay(case), replay(case, layout=transposed)
    assert not strided.params["w"].is_contiguous()
    assert not strided.params["w"].grad.is_contiguous()
    for key, value in plain.after.items():
        assert torch.equal(strided.after[key], value), key


@pytest.mark.parametrize("case", [c for c in CASES if c.is_muon], ids=lambda case: case.file)
def test_batched(case: Case) -> None:
    assert_follows(case, replay(case, batched_ns=True))
