"""The learned codebook: histogram of normalised gradients, exact 1-D k-means, quantiser."""

from __future__ import annotations

import functools
import hashlib
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gefen.flat import flat_slice

BINS = 4096
"""Equal bins of [-1, 1] that the normalised gradients are counted in."""

SIZE = 256
"""Entries of a codebook: what one byte can index."""

CHUNK = 1 << 20
"""Elements that :func:`accumulate_histogram` works on at a time."""

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[Any]  # int64, or float64 where that is exact too


_LARGEST_TOTAL = 1 << 38  # counted elements beyond this are scaled down: int64 sums of squares


def blank() -> Tensor:
    """The codebook, float32 [SIZE] on the CPU, of an optimizer that has learned none yet.

    Evenly spaced from -1 to 1; momenta are zero or non-finite then and do not depend on it.
    """
    steps = np.arange(SIZE, dtype=np.float64)
    return torch.from_numpy(with_zero((2 * steps - (SIZE - 1)) / (SIZE - 1))).float()


def is_blank(codebook: Tensor) -> bool:
    """Whether ``codebook`` was learned from nothing."""
    return torch.equal(codebook.cpu(), blank())


def with_zero(entries: Floats) -> Floats:
    """Ascending entries with the one nearest to 0 (of two, the lower) set to 0, ascending again.

    An element whose gradient has always been 0 then has momentum 0, however it is rounded.
    """
    found = entries.copy()
    found[np.argmin(np.abs(found))] = 0.0
    found.sort()
    return found


@functools.cache
def fixed() -> Tensor:
    """A codebook, float32 [SIZE] on the CPU, for ranks that learn none together.

    Optimal for magnitudes with the density 1 / (1 + (6 x)^4): a bell with heavy tails, as
    gradients over the largest of their row are. All numbers are whole, so every machine has it.
    """
    centres = 2 * np.arange(BINS, dtype=np.int64) + 1 - BINS
    weights = 10**9 // (1 + (6 * np.abs(centres)) ** 4 // BINS**4)
    return solve(torch.from_numpy(weights))


def digest(codebook: Tensor | None) -> str:
    """A short name of a codebook's content."""
    if codebook is None:
        return "none"
    return hashlib.blake2b(codebook.cpu().numpy().tobytes(), digest_size=6).hexdigest()


def accumulate_histogram(grad: Tensor, period: int, counts: Tensor) -> None:
    """Add a gradient's normalised elements to ``counts``, int64 [BINS], in place.

    Each block of ``period`` elements is divided by its largest magnitude; blocks of zeros
    count as zeros. ``grad`` has any shape, strides and floating dtype; arithmetic is float32
    (float64 for float64). Blocks that hold a non-finite element are left out. Temporary memory
    is a few chunks of at most ``CHUNK`` elements. ``counts`` may be on another device.
    """
    grad = grad.detach()
    n = grad.numel()
    if period > CHUNK:
        for start in range(0, n, period):
            _count_long_block(grad, start, start + period, counts)
        return
    step = CHUNK // period * period
    for start in range(0, n, step):
        block = _widened(flat_slice(grad, start, min(start + step, n))).view(-1, period)
        _count(block, block.abs().amax(dim=1, keepdim=True), counts)


def _count_long_block(grad: Tensor, start: int, stop: int, counts: Tensor) -> None:
    """Count a block longer than a chunk: once for its largest magnitude, once for the bins."""
    pieces = [(s, min(s + CHUNK, stop)) for s in range(start, stop, CHUNK)]
    tops = [_widened(flat_slice(grad, *piece)).abs().amax() for piece in pieces]
    top = torch.stack(tops).amax().view(1, 1)
    for piece in pieces:
        _count(_widened(flat_slice(grad, *piece)).view(1, -1), top, counts)


def _widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _count(block: Tensor, top: Tensor, counts: Tensor) -> None:
    """Count ``block`` [rows, period] over ``top`` [rows, 1], the rows' largest magnitudes."""
    finite = torch.isfinite(top).view(-1)
    if not finite.all():
        block, top = block[finite], top[finite]
    x = block / top.masked_fill(top == 0, 1)
    bins = x.add_(1).mul_(BINS / 2).to(torch.int32).clamp_(0, BINS - 1).view(-1)
    counts += torch.bincount(bins, minlength=BINS).to(counts.device, counts.dtype)


def solve(counts: Tensor) -> Tensor:
    """The optimal codebook, float32 [SIZE] ascending from -1 to 1, on the CPU.

    ``counts`` [BINS] holds whole numbers >= 0. The entries minimise the sum of count times
    (bin centre - nearest entry)^2, with the first entry fixed at -1 and the last at 1. With
    fewer than ``SIZE`` non-empty bins the entries are their centres, padded with the last one
    (with zero, the middle, if nothing was counted). Afterwards one is 0: :func:`with_zero`.
    """
    weights = counts.detach().to("cpu", torch.int64).numpy()
    filled = np.flatnonzero(weights)
    points = 2 * filled + 1 - BINS  # centre times BINS: whole numbers keep the sums exact
    if len(points) < SIZE:
        padding = points[-1:] if len(points) else np.zeros(1)
        centres = np.append(points, padding.repeat(SIZE - len(points))).astype(np.float64)
        centres[0], centres[-1] = -BINS, BINS
    else:
        scale = weights.sum() // _LARGEST_TOTAL + 1
        centres = optimal_centres(points, -(-weights[filled] // scale), SIZE, BINS)
    return torch.from_numpy(with_zero(np.sort(centres) / BINS)).float()


def optimal_centres(points: Numbers, weights: Numbers, size: int, edge: int) -> Floats:
    """Exact weighted 1-D k-means with the outer centres fixed at -edge and edge.

    ``points`` are ascending whole numbers inside (-edge, edge), ``weights`` whole numbers > 0,
    and there are at least ``size`` >= 3 of them. Returns the ``size`` centres, ascending.

    A clustering is a path over cut positions whose links are the clusters. Charging a price
    for each link (Aggarwal, Schieber, Tokuyama 1994: concave-Monge k-link paths) turns the
    count of clusters from a layer of the dynamic programme into a by-product: a shortest path
    at any price is optimal among the paths with as many links. A price is searched that gives
    slightly too many links, and an exchange argument on Monge costs then confines cut t of the
    wanted path between cuts t and t + surplus of the one found, which leaves little to search.
    """
    line = _Line(points, weights, edge)
    links = size - 2
    cuts = line.confined(_priced_cuts(line, links), links)
    moment, mass = line.w1[cuts[1:]] - line.w1[cuts[:-1]], line.w0[cuts[1:]] - line.w0[cuts[:-1]]
    return np.concatenate([[-edge], moment / mass, [edge]])


_SURPLUS = 8  # links too many that cost less to search through than another price does
_PRICES = 8  # tries before any surplus will do: ties can make whole ranges unreachable
_LAST_PRICE = 100  # rounding can hide what the lightest points would save


def _priced_cuts(line: _Line, links: int) -> list[int]:
    """Cuts of an optimal clustering with at least ``links`` free clusters, and few more."""
    aim = links + _SURPLUS / 2
    price, low, high = line.first_price(aim), 0.0, np.inf
    best = list(range(len(line.head)))  # every point alone: optimal, but for many links
    for tries in range(_LAST_PRICE):
        cuts = line.shortest(price)
        found = len(cuts) - 1
        if found >= links:
            low = price
            best = min(best, cuts, key=len)
        else:
            high = price
        if len(best) - 1 <= links + _SURPLUS or (tries >= _PRICES and low > 0):
            break
        # The count goes with price^(-1/3) for a smooth density.
        price *= (max(found, 1) / aim) ** 3
        if not low < price < high:
            price = (low + high) / 2 if np.isfinite(high) else 2 * low
    return best


class _Line:
    """Weighted points, their prefix sums, and the cost of clusters [i, j) of them."""

    def __init__(self, points: Numbers, weights: Numbers, edge: int) -> None:
        sums = [np.append(0, np.cumsum(weights * points**power)) for power in range(3)]
        exact = max(sums[0][-1], sums[2][-1]) < 2**53
        self.w0, self.w1, self.w2 = (s.astype(np.float64) if exact else s for s in sums)
        below, above = (weights * (points - end) ** 2.0 for end in (-edge, edge))
        self.head = np.append(0.0, np.cumsum(below))
        self.tail = np.append(np.cumsum(above[::-1])[::-1], 0.0)
        self._density = np.cbrt(weights * np.gradient(points.astype(np.float64)) ** 2).sum()

    def first_price(self, links: float) -> float:
        """What one more cluster saves, by the high-resolution law of Panter and Dite 1951."""
        return float(self._density**3 / (6 * links**3))

    def cost(self, i: Any, j: Any) -> Floats:
        """Sum of weight times squared distance to the mean over points i to j - 1, i < j."""
        moment = self.w1[i] - self.w1[j]
        out: Floats = moment / (self.w0[i] - self.w0[j])
        out *= moment
        out -= self.w2[i] - self.w2[j]
        return out

    def shortest(self, price: float) -> list[int]:
        """Cuts v[0] < ... < v[k] of the cheapest clustering: -edge takes the points below
        v[0], edge those from v[k] on, each cluster between two cuts costs ``price`` extra."""
        w0, w1, w2, head = (s.tolist() for s in (self.w0, self.w1, self.w2, self.head))
        best = np.zeros(len(head))
        parent = [-1] * len(head)
        low = 0  # Monge: the best start of the last cluster never moves back
        for j in range(1, len(head)):
            # self.cost(low to j, j) + best, spelled out: this line sets the speed of it all
            moment = self.w1[low:j] - w1[j]
            total = moment / (self.w0[low:j] - w0[j])
            total *= moment
            total -= self.w2[low:j] - w2[j]
            total += best[low:j]
            at = int(total.argmin())
            low += at
            if total[at] + price < head[j]:
                best[j], parent[j] = total[at] + price, low
            else:
                best[j] = head[j]
        cuts = [int(np.argmin(best + self.tail))]
        while parent[cuts[-1]] >= 0:
            cuts.append(parent[cuts[-1]])
        return cuts[::-1]

    def confined(self, cuts: list[int], links: int) -> list[int]:
        """Cuts of the optimal clustering with exactly ``links`` free clusters, cut t lying
        between ``cuts[t]`` and ``cuts[t + surplus]``."""
        surplus = len(cuts) - 1 - links
        if surplus == 0:
            return cuts
        windows = [np.arange(cuts[t], cuts[t + surplus] + 1) for t in range(links + 1)]
        best = self.head[windows[0]]
        parents = []
        for starts, ends in pairwise(windows):
            best, parent = self._extend(best, starts, ends)
            parents.append(parent)
        at = int(np.argmin(best + self.tail[windows[-1]]))
        out = [int(windows[-1][at])]
        for window, parent in zip(windows[-2::-1], parents[::-1], strict=True):
            at = int(parent[at])
            out.append(int(window[at]))
        return out[::-1]

    def _extend(self, best: Floats, starts: Numbers, ends: Numbers) -> tuple[Floats, Numbers]:
        """Cheapest totals up to ``ends`` over all ``starts``, and the start's position.

        The best start never moves back as the end moves on, so large tables are halved.
        """
        if best.size * ends.size > 1 << 16 and ends.size > 1:
            middle = ends.size // 2
            _, (at,) = self._extend(best, starts, ends[middle : middle + 1])
            below, p0 = self._extend(best[: at + 1], starts[: at + 1], ends[:middle])
            above, p1 = self._extend(best[at:], starts[at:], ends[middle:])
            return np.append(below, above), np.append(p0, p1 + at)
        i, j = starts[:, None], ends[None, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            total = np.where(i < j, self.cost(i, j), np.inf)
        total += best[:, None]
        parent = total.argmin(axis=0)
        return total[parent, np.arange(ends.size)], parent


class Quantizer:
    """Nearest-entry quantisation against one codebook, on that codebook's device.

    ``codebook`` is float32 [SIZE], ascending; duplicates are allowed. The index of x is the
    number of ``thresholds`` below x, and that is the whole specification: threshold t is the
    midpoint of entry t and the next larger entry, computed in float64 and rounded down to
    float32 (not rounded for float64 x; infinite if there is no larger entry). So the entry is
    the nearest one in exact arithmetic and ties take the lower index. NaN gives some legal
    index.
    """

    def __init__(self, codebook: Tensor) -> None:
        self.codebook = codebook.detach().to(torch.float32).contiguous()
        following = torch.searchsorted(self.codebook, self.codebook, right=True)
        self._following = following.clamp_(max=SIZE - 1).to(torch.uint8)
        wide = self.codebook.double()
        above = wide[self._following[:-1].long()]
        exact = (wide[:-1] + above) / 2
        self._exact = exact.masked_fill_(above <= wide[:-1], torch.inf)
        self.thresholds = _rounded_down(self._exact)
        on_cpu = self.codebook.device.type == "cpu"
        self._table = _table(self.thresholds) if on_cpu else None

    def encode(self, x: Tensor) -> Tensor:
        """Index (uint8) of the entry nearest to each element of ``x``, any shape."""
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        if x.dtype == torch.float64:
            return out.copy_(torch.bucketize(x, self._exact, out_int32=True))
        if self._table is None:
            return out.copy_(torch.bucketize(x.float(), self.thresholds, out_int32=True))
        split, below, index = self._table
        return _look_up(x.float(), split, below, index, out)

    def decode(self, index: Tensor) -> Tensor:
        """Entries (float32) of uint8 ``index``, any shape."""
        # index_select runs in parallel and vectorised; plain indexing is 4 times slower.
        return torch.index_select(self.codebook, 0, index.reshape(-1).int()).view(index.shape)

    def neighbours(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The entries on both sides of each element of ``x``, for stochastic rounding.

        Returns (lower uint8, upper uint8, probability of the upper float32), each of the shape
        of ``x``. The probability is the distance from the lower entry over the gap, so that
        the expected entry is x (clamped to the codebook's range); 0 for NaN.
        """
        nearest = self.encode(x)
        beyond = (x < self.decode(nearest)) & (nearest > 0)
        lower = nearest - beyond.to(torch.uint8)
        upper = torch.index_select(self._following, 0, lower.view(-1).int()).view_as(lower)
        below = self.decode(lower)
        gap = self.decode(upper) - below
        chance = ((x - below) / gap).to(torch.float32)
        return lower, upper, chance.nan_to_num_(nan=0.0).clamp_(0, 1)


def _rounded_down(x: Tensor) -> Tensor:
    """float64 to the largest float32 that is not above it."""
    nearest = x.float()
    below = torch.nextafter(nearest, torch.full_like(nearest, -torch.inf))
    return torch.where(nearest.double() > x, below, nearest)


_Table = tuple[Tensor, Tensor, Tensor]
_TABLE_SIZES = (1 << 12, 1 << 13, 1 << 14, 1 << 16)


def _table(thresholds: Tensor) -> _Table | None:
    """Cells that hold at most one distinct threshold each: (it or infinity, number of
    distinct ones below the cell), and the index that each number of them stands for.

    Several times faster on the CPU than a binary search. ``None`` if thresholds lie too close.
    """
    distinct = torch.unique(thresholds[torch.isfinite(thresholds)])
    index = torch.searchsorted(thresholds, distinct, right=True)
    index = torch.cat([index.new_zeros(1), index]).to(torch.uint8)
    for cells in _TABLE_SIZES:
        home = _cell(distinct, cells)
        if (torch.bincount(home, minlength=cells) <= 1).all():
            split = distinct.new_full((cells,), torch.inf)
            split[home] = distinct
            below = torch.searchsorted(
                home, torch.arange(cells, dtype=torch.int32, device=home.device)
            )
            return split, below.to(torch.uint8), index
    return None


def _cell(x: Tensor, cells: int) -> Tensor:
    """Cell (int32) of each x among ``cells`` on [-1, 1]: never decreasing in x; NaN is 0."""
    at = (x * (cells / 2)).add_(cells / 2).clamp_(0, cells - 1)
    return at.to(torch.int32).clamp_(0)


def _look_up(x: Tensor, split: Tensor, below: Tensor, index: Tensor, out: Tensor) -> Tensor:
    cell = _cell(x, len(split)).view(-1)
    over = x.view(-1) > torch.index_select(split, 0, cell)
    torch.index_select(below, 0, cell, out=out.view(-1))
    out.view(-1).add_(over.view(torch.uint8))
    if len(index) < SIZE:
        out.view(-1).copy_(torch.index_select(index, 0, out.view(-1).int()))
    return out


_MASK = 0xFFFFFFFF


def philox(
    counter: tuple[Tensor, ...], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, ...]:
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
    seed_step: int | Tensor,
    parameter: int,
    element_start: int,
    count: int,
    device: torch.device | str,
) -> Tensor:
    """Uniform float32 [count] in [0, 1) that depends on the arguments alone.

    A tensor ``seed_step``, int64 with one element, is not read by the host.

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
