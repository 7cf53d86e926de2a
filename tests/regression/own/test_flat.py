from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen.flat import flat_slice


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_flat_slice_is_that_of_the_copy(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.arange(math.prod(shape)).view(shape).permute(order)
    start = data.draw(st.integers(0, tensor.numel() - 1))
    stop = data.draw(st.integers(start + 1, tensor.numel()))
    assert torch.equal(flat_slice(tensor, start, stop), tensor.flatten()[start:stop])
