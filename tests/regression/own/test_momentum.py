from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from gefen.codebook import Quantizer
from gefen.momentum import histogram, learn_from, reencode


def learn(gradients: Iterable[tuple[Tensor, int]]) -> Tensor | None:
    return learn_from(histogram(gradients))


def test_learn_adds_up_all_gradients() -> None:
    torch.manual_seed(0)
    gradients = [(torch.randn(40, 16), 16), (torch.rand(64), 8)]
    together = learn(gradients)
    assert together is not None
    assert not torch.equal(together, learn(gradients[:1]))
    assert not torch.equal(together, learn(gradients[1:]))
    assert torch.equal(together, learn(reversed(gradients)))
    assert (together[0], together[-1], len(together)) == (-1, 1, 256)


def test_learn_from_zeros_is_nothing() -> None:
    zero = (torch.zeros(64), 8)
    assert learn([zero]) is None
    assert learn([zero, (torch.full((16,), torch.nan), 8)]) is None
    assert learn([zero, (torch.eye(8), 8)]) is not None


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_learn_leaves_non_finite_blocks_out(bad: float) -> None:
    torch.manual_seed(0)
    grad = torch.randn(100, 8)
    spoiled = grad.clone()
    spoiled[7, 3] = bad
    rest = torch.cat([grad[:7], grad[8:]])
    assert torch.equal(learn([(spoiled, 8)]), learn([(rest, 8)]))


def test_reencode_keeps_nearest_values() -> None:
    torch.manual_seed(0)
    old = learn([(torch.randn(1000, 8), 8)])
    new = learn([(torch.rand(1000, 8) - 0.5, 8)])
    index = torch.randint(0, 256, (3000,), dtype=torch.uint8)
    before = old[index.long()]
    wanted = Quantizer(new).encode(before)
    reencode(index, old, new)
    assert torch.equal(index, wanted)
    distance = (new[index.long()] - before).abs()
    assert torch.equal(distance, (new - before[:, None]).abs().amin(dim=1))
