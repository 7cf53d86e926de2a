"""The learned codebook: histogram of normalised gradients, exact 1-D k-means, quantiser."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gefen.blocks import flat_slice

BINS = 4096
SIZE = 256
CHUNK = 1 << 20

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def accumulate_histogram(grad: Tensor, period: int, counts: Tensor) -> None:
    """Add a gradient's normalised elements to ``counts``, int64 [BINS], in place.

    Each block of ``period`` elements is divided by its largest magnitude; blocks of zeros
    count as zeros. ``grad`` has any shape and floating dtype; arithmetic is float32 (float64
    for float64). Blocks that hold a non-finite element are left out. Temporary memory is a
    few chunks of at most ``CHUNK`` elements.
    """
    n = grad.numel()
    grad = grad.detach()
    step = max(CHUNK // period, 1) * period
    for start in range(0, n, step):
        stop = min(start + step, n)
        if period <= CHUNK:
            block = _wide(flat_slice(grad, start, stop)).view(-1, period)
            _count(block, block.abs().amax(dim=1, keepdim=True), counts)
        else:
            _count_long_block(grad, start, stop, counts)


def _count_long_block(grad: Tensor, start: int, stop: int, counts: Tensor) -> None:
    pieces = [(s, min(s + CHUNK, stop)) for s in range(start, stop, CHUNK)]
    tops = [_wide(flat_slice(grad, *piece)).abs().amax() for piece in pieces]
    top = torch.stack(tops).amax().view(1, 1)
    for piece in pieces:
        _count(_wide(flat_slice(grad, *piece)).view(1, -1), top, counts)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _count(block: Tensor, top: Tensor, counts: Tensor) -> None:
    finite = torch.isfinite(top).view(-1)
    if not finite.all():
        block, top = block[finite], top[finite]
    x = block / top.masked_fill(top == 0, 1)
    bins = x.add_(1).mul_(BINS / 2).to(torch.int32).clamp_(0, BINS - 1).view(-1)
    counts += torch.bincount(bins, minlength=BINS).to(counts)


def solve(counts: Tensor) -> Tensor:
    """The optimal codebook, float32 [SIZE] ascending from −1 to 1, on the CPU.

    ``counts`` [BINS] holds whole numbers ≥ 0. The entries minimise Σ count · (centre −
    nearest entry)² over the bin centres, with the first entry fixed at −1 and the last at 1.
    Fewer than ``SIZE`` non-empty bins: their centres, padded with the last. No counts at all:
    zeros between −1 and 1.
    """
    weights = counts.detach().to("cpu", torch.float64).numpy()
    filled = np.flatnonzero(weights)
    weights = weights[filled]
    # Centres as odd whole numbers, centre · BINS: prefix sums stay exact.
    points = 2.0 * filled + 1 - BINS
    if len(points) < SIZE:
        centres = np.full(SIZE, points[-1] if len(points) else 0.0)
        centres[: len(points)] = points
    else:
        centres = _kmeans(points, weights)
    centres[0], centres[-1] = -BINS, BINS
    return torch.from_numpy(np.sort(centres) / BINS).float()


def _kmeans(points: Floats, weights: Floats) -> Floats:
    n = len(points)
    w0, w1, w2 = (np.append(0.0, np.cumsum(weights * points**e)) for e in (0, 1, 2))

    def cost(i: Ints, j: Ints) -> Floats:
        mass = w0[j] - w0[i]
        return (w2[j] - w2[i]) - (w1[j] - w1[i]) ** 2 / np.where(mass > 0, mass, 1)

    best = w2 + 2 * BINS * w1 + BINS**2 * w0
    parents = []
    for _ in range(SIZE - 2):
        best, parent = _layer(best, cost)
        parents.append(parent)
    last = w2[-1] - w2 - 2 * BINS * (w1[-1] - w1) + BINS**2 * (w0[-1] - w0)
    ends = [int(np.argmin(best + last))]
    for parent in reversed(parents):
        ends.append(int(parent[ends[-1]]))
    v = np.array(ends[::-1])
    centres = np.zeros(SIZE)
    mass = w0[v[1:]] - w0[v[:-1]]
    centres[1:-1] = (w1[v[1:]] - w1[v[:-1]]) / np.where(mass > 0, mass, 1)
    return centres


def _layer(best, cost):
    n = len(best)
    out = np.empty(n)
    parent = np.zeros(n, dtype=np.int64)
    rows = np.array([0, n - 1])
    stride = 1
    while stride < n:
        stride *= 2
    done = np.zeros(0, dtype=np.int64)
    lo_all = np.zeros(0, dtype=np.int64)
    while stride >= 1:
        rows = np.arange(0 if not len(done) else stride, n, stride if not len(done) else 2 * stride)
        if len(done):
            k = np.searchsorted(done, rows)
            lo = parent[done[k - 1]]
            hi = np.where(k < len(done), parent[done[np.minimum(k, len(done) - 1)]], n)
            hi = np.minimum(hi, rows)
        else:
            lo, hi = np.zeros(len(rows), dtype=np.int64), rows
        width = np.maximum(hi - lo + 1, 1)
        start = np.append(0, np.cumsum(width)[:-1])
        cand = np.arange(width.sum()) - np.repeat(start - lo, width)
        vals = best[cand] + cost(cand, np.repeat(rows, width))
        m = np.minimum.reduceat(vals, start)
        out[rows] = m
        hit = np.flatnonzero(vals == np.repeat(m, width))
        parent[rows] = cand[hit[np.searchsorted(hit, start)]]
        done = np.sort(np.append(done, rows))
        stride //= 2
    return out, parent


class Quantizer:
    """Nearest-entry quantisation against one codebook, on that codebook's device."""

    def __init__(self, codebook: Tensor) -> None:
        self.codebook = codebook.float()
        wide = self.codebook.double()
        self._exact = (wide[:-1] + wide[1:]) / 2
        self._thresholds = _rounded_down(self._exact)
        self._first = torch.searchsorted(self.codebook, self.codebook).to(torch.uint8)

    def encode(self, x: Tensor) -> Tensor:
        """Index (uint8, shape of ``x``) of the nearest entry; ties take the lower index."""
        thresholds = self._exact if x.dtype == torch.float64 else self._thresholds
        index = torch.bucketize(x, thresholds, out_int32=True)
        return self._first[index]

    def decode(self, index: Tensor) -> Tensor:
        """Entries, float32, of uint8 ``index``."""
        return self.codebook[index.int()]

    def neighbours(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The entries around ``x`` (uint8, uint8) and the probability (float32) of the upper."""
        lower = torch.bucketize(x, self.codebook.to(x.dtype), right=True) - 1
        lower = lower.clamp_(0, SIZE - 2)
        below, above = self.codebook[lower], self.codebook[lower + 1]
        chance = ((x - below) / (above - below)).nan_to_num_(nan=0.0).clamp_(0, 1).float()
        return lower.to(torch.uint8), (lower + 1).to(torch.uint8), chance


def _rounded_down(x: Tensor) -> Tensor:
    nearest = x.float()
    below = torch.nextafter(nearest, torch.full_like(nearest, -2))
    return torch.where(nearest.double() > x, below, nearest)


_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox-4x32-10 (Salmon et al. 2011): four words per counter, as int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def counter_uniform(
    seed_step: int, parameter: int, element_start: int, count: int, device: torch.device | str
) -> Tensor:
    """Uniform float32 [count] in [0, 1) that depends on the arguments alone.

    Element e of (seed_step, parameter) is always the same number, on every device and however
    the range is cut. Philox-4x32-10 with key = ``seed_step`` and counter = (e // 4,
    ``parameter``), each as two 32-bit words; word e % 4 gives the top 24 bits.
    """
    first, last = element_start // 4, -(-(element_start + count) // 4)
    block = torch.arange(first, last, dtype=torch.int64, device=device)
    lane = torch.zeros_like(block)
    words = philox(
        (
            block & _MASK,
            (block >> 32) & _MASK,
            lane + (parameter & _MASK),
            lane + ((parameter >> 32) & _MASK),
        ),
        (seed_step & _MASK, (seed_step >> 32) & _MASK),
    )
    skip = element_start - 4 * first
    bits = torch.stack(words, dim=1).view(-1)[skip : skip + count]
    return (bits >> 8).float() * 2.0**-24
