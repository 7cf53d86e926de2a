"""The codebook that all quantised momenta of one optimizer share: learning and replacing it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gefen import kernels
from gefen.codebook import BINS, Quantizer, solve
from gefen.parameters import held
from gefen.state import CODEBOOK, INDEX, Entry

CHUNK = 1 << 20

ZERO_BIN = BINS // 2


def learn_from(total: Tensor) -> Tensor | None:
    """The codebook, float32 [256] on the CPU, of a histogram on the CPU.

    None where every finite gradient is zero: that says nothing about the distribution, and a
    codebook learned from it would hold a single value for the rest of the training.
    """
    return None if total.sum() == total[ZERO_BIN] else solve(total)


def histogram(gradients: Iterable[tuple[Tensor, int]], fused: bool = False) -> Tensor:
    """Counts, int64 [4096] on the CPU, of gradients and their periods, to learn a codebook from.

    Blocks that hold a non-finite element are left out, so they cannot spoil it for the others.
    """
    parts: dict[torch.device, list[tuple[Tensor, int]]] = {}
    for grad, period in gradients:
        parts.setdefault(grad.device, []).append((grad, period))
    total = torch.zeros(BINS, dtype=torch.int64, device="cpu")
    for device, part in parts.items():
        counts = torch.zeros(BINS, dtype=torch.int64, device=device)
        kernels.histogram(part, counts, fused)
        total += counts.cpu()
    return total


def reencode(index: Tensor, old: Tensor, new: Tensor) -> None:
    """Replace each uint8 index into ``old`` by that of the nearest entry of ``new``, in place.

    Magnitudes stay: every codebook ends in −1 and 1, so a block's largest entry keeps its value.
    """
    table, index = Quantizer(new).encode(old), index.view(-1)
    for start in range(0, index.numel(), CHUNK):
        part = index[start : start + CHUNK]
        part.copy_(table[part.int()])


def adapt(entry: Entry, codebook: Tensor) -> None:
    """Re-encode momentum of another codebook than ``codebook``.

    A wrapper may put together entries of several optimizers, each of which learned its own.
    """
    known = entry.get(CODEBOOK)
    if INDEX not in entry or known is None or known is codebook:
        return
    index = held(entry[INDEX])
    old, new = known.to(index.device), codebook.to(index.device)
    if not torch.equal(old, new):
        reencode(index, old, new)
