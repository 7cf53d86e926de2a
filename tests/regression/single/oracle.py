"""The algorithm written once more, from its definition, in numpy and float64.

It shares no code with the package. Where the definition leaves no choice of precision it follows
suit: histograms are counted in the arithmetic of the parameter, magnitudes are float32, and
parameters are rounded to their dtype after weight decay and after the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BINS, SIZE = 4096, 256
LARGEST_MOVE = 10.0
BORDER = 1e-6
"""Distance from a threshold, relative to a block's magnitude, within which float32 may decide."""

STANDARD = (3.4445, -4.7750, 2.0315)
TUNED3 = [(5.0067, -14.4125, 10.6001), (3.7534, -6.8083, 3.3840), (3.2080, -4.3501, 2.0330)]
TUNED4 = [
    (5.4261, -15.5285, 11.2657),
    (3.0766, -4.9701, 2.1297),
    (3.0008, -6.4486, 4.3696),
    (2.8386, -4.1421, 2.5758),
]


def as_bfloat16(x: Array) -> Array:
    """The nearest bfloat16 numbers; of two, the even one."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


ROUNDED: dict[str, Callable[[Array], Array]] = {
    "float64": lambda x: x,
    "float32": lambda x: x.astype(np.float32).astype(np.float64),
    "bfloat16": as_bfloat16,
}


# Blocks


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def block_error(grad: Array, period: int) -> float:
    """E(P): root of the mean over blocks of the variance of g² in the block."""
    if period == 1:
        return 0.0
    return float(np.sqrt((grad.reshape(-1, period) ** 2).var(axis=1).mean()))


def find_period(grad: Array) -> int:
    """The block length that ``grad`` chooses; 0, none yet, where all of it is zero."""
    if not grad.any():
        return 0
    is_vector = grad.ndim < 2
    length = grad.size if is_vector else grad[0].size
    candidates = divisors(length)
    if is_vector and length > 1:
        candidates.pop()
    errors = [block_error(grad.astype(np.float64), d) for d in candidates]
    period = candidates[int(np.argmin([1e-12, *np.diff(errors)]))]
    if period >= 8:
        return period
    if not is_vector:
        return length
    longest = max(d for d in divisors(length) if d <= 2048)
    return longest if longest >= 8 else 1


# Codebook


def histogram(grads: Iterable[tuple[Array, int]]) -> Array:
    """Counts of the gradients' elements, relative to the largest magnitude of their block.

    In the gradients' own arithmetic: what lies on the border of two bins depends on it.
    """
    counts = np.zeros(BINS, np.int64)
    for grad, period in grads:
        blocks = grad.reshape(-1, period)
        top = np.abs(blocks).max(axis=1, keepdims=True)
        x = blocks / np.where(top == 0, top.dtype.type(1), top)
        bins = np.floor((x + x.dtype.type(1)) * x.dtype.type(BINS / 2)).astype(np.int64)
        counts += np.bincount(np.clip(bins, 0, BINS - 1).ravel(), minlength=BINS)
    return counts


def learn_codebook(counts: Array, zero_entry: bool = True) -> Array:
    """The entries, float32 values in float64; without ``zero_entry`` as version 1 had them."""
    filled = np.flatnonzero(counts)
    points = (2 * filled + 1 - BINS).astype(np.float64)
    if len(points) < SIZE:
        entries = np.append(points, np.repeat(points[-1], SIZE - len(points)))
        entries[0], entries[-1] = -BINS, BINS
    else:
        entries = Line(points, counts[filled]).centres()
    entries = np.sort((entries / BINS).astype(np.float32).astype(np.float64))
    if zero_entry:
        entries[np.argmin(np.abs(entries))] = 0
    return np.sort(entries)


class Line:
    """Weighted points, ascending, in units of 1 / BINS, and the clusters that cost least."""

    def __init__(self, points: Array, weights: Array) -> None:
        self.points, self.weights = points, weights.astype(np.float64)
        self.sums = [np.append(0, np.cumsum(self.weights * points**p)) for p in range(3)]
        self.head = np.append(0, np.cumsum(self.weights * (points + BINS) ** 2))
        below_end = self.weights * (points - BINS) ** 2
        self.tail = np.append(np.cumsum(below_end[::-1])[::-1], 0)

    def cost(self, i: Array, j: Array) -> Array:
        """Of the points i to j − 1 as one cluster, around their mean."""
        mass, moment, square = (s[j] - s[i] for s in self.sums)
        return square - moment**2 / mass

    def centres(self) -> Array:
        """The ends, and the SIZE − 2 means between them that make the total cost smallest."""
        cuts = self.solution()[1]
        mass, moment = (np.diff(s[cuts]) for s in self.sums[:2])
        return np.concatenate([[-BINS], moment / mass, [BINS]])

    def solution(self) -> tuple[float, list[int]]:
        """The smallest cost, and where its clusters start and end."""
        best, starts = self.head, []
        for first in range(SIZE - 2):
            best, start = self._one_more(best, first)
            starts.append(start)
        total = best + self.tail
        cuts = [int(np.argmin(total))]
        for start in starts[::-1]:
            cuts.append(int(start[cuts[-1]]))
        return float(total.min()), cuts[::-1]

    def _one_more(self, best: Array, first: int) -> tuple[Array, Array]:
        """min and argmin of best[i] + cost(i, j), first ≤ i < j, for each j.

        The best i never falls as j grows, so what is known for every second j confines the
        others: rounds of half the distance, each for all its j at once.
        """
        n = len(self.points)
        out, start = np.full(n + 1, np.inf), np.full(n + 2, n)
        start[first] = first
        step = 1 << n.bit_length()
        while step := step // 2:
            j = np.arange(first + step, n + 1, 2 * step)
            if not j.size:
                continue
            low, high = start[j - step], np.minimum(start[np.minimum(j + step, n + 1)], j - 1)
            lengths = high - low + 1
            at = np.cumsum(lengths) - lengths
            i = np.arange(lengths.sum()) + np.repeat(low - at, lengths)
            total = best[i] + self.cost(i, np.repeat(j, lengths))
            out[j] = np.minimum.reduceat(total, at)
            hits = np.flatnonzero(total == np.repeat(out[j], lengths))
            start[j] = i[hits[np.searchsorted(hits, at)]]
        return out, start


def excess(codebook: Array, counts: Array) -> float:
    """How much more ``codebook`` costs than the best one, as a share of the best's cost.

    Its zero entry stands for the mean of some run of the points between its neighbours: the
    cheapest run is taken, as what it was before it became 0 is not known.
    """
    filled = np.flatnonzero(counts)
    line = Line((2 * filled + 1 - BINS).astype(np.float64), counts[filled])
    entries = np.asarray(codebook, np.float64) * BINS
    (zero,) = np.flatnonzero(entries == 0)
    others = np.delete(entries, zero)
    each = line.weights * np.abs(line.points[:, None] - others).min(axis=1) ** 2
    inside = np.flatnonzero((line.points > others[zero - 1]) & (line.points < others[zero]))
    saved = [
        each[a : b + 1].sum() - line.cost(np.array(a), np.array(b + 1))
        for a in inside
        for b in inside
        if a <= b
    ]
    best = line.solution()[0]
    return float((each.sum() - max(saved) - best) / best)


# Momentum and second moments


class Momentum:
    """Quantised EMA of ``n`` elements in blocks of ``period``."""

    def __init__(self, n: int, period: int, codebook: Any, beta: float) -> None:
        self.codebook = np.asarray(codebook, dtype=np.float64)
        self.period, self.beta = period, beta
        self.value = np.zeros(n)
        self.near = np.zeros(n, bool)
        """Elements that have been so close to a threshold that rounding decides."""

    def advance(self, grad: Array) -> Array:
        mean = self.value + (1 - self.beta) * (grad - self.value)
        blocks = mean.reshape(-1, self.period)
        magnitude = np.abs(blocks).max(axis=1, keepdims=True)
        x = blocks / np.where(magnitude == 0, 1, magnitude)
        self.index = self._nearest(x).ravel()
        # float32, as the state keeps it
        self.magnitude = magnitude.astype(np.float32).astype(np.float64)
        self.value = self.codebook[self.index] * np.repeat(self.magnitude, self.period)
        return self.value

    def _nearest(self, x: Array) -> Array:
        """Of two equally near, the lower: the thresholds below x are counted."""
        distinct, first = np.unique(self.codebook, return_index=True)
        thresholds = (distinct[1:] + distinct[:-1]) / 2
        low, high = (np.searchsorted(thresholds, x + d) for d in (-BORDER, BORDER))
        self.near |= (low != high).ravel()
        return first[np.searchsorted(thresholds, x)]


def block_roots(history: list[Array], period: int, beta2: float) -> Array:
    """sqrt of the bias-corrected EMA of the block means of g², one for each element."""
    v = 0.0
    for grad in history:
        v = beta2 * v + (1 - beta2) * (grad**2).reshape(-1, period).mean(axis=1)
    return np.repeat(np.sqrt(v / (1 - beta2 ** len(history))), period)


def factored_roots(history: list[Array], shape: tuple[int, ...], beta2: float) -> Array:
    """Likewise, where rows and columns of a matrix have EMAs."""
    r, c = np.zeros(shape[0]), np.zeros(shape[1])
    for grad in history:
        squares = (grad**2).reshape(shape)
        r = beta2 * r + (1 - beta2) * squares.mean(axis=1)
        c = beta2 * c + (1 - beta2) * squares.mean(axis=0)
    v = np.outer(r, c) / (r.mean() or 1.0)
    return np.sqrt(v / (1 - beta2 ** len(history))).reshape(-1)


# Optimizers


class Optimizer:
    """What Gefen and GefenMuon share: dtypes, periods and the codebook.

    ``params`` are float64 arrays by name, of values that ``dtype`` has; they are replaced at
    each step. ``periods``, ``codebook`` and ``zero_entry=False`` stand in for what version 2
    would choose: recordings of version 1 have others.
    """

    def __init__(
        self,
        params: Mapping[str, Array],
        *,
        lr: float,
        weight_decay: float,
        beta: float,
        dtype: str = "float32",
        periods: Mapping[str, int] | None = None,
        codebook: Array | None = None,
        zero_entry: bool = True,
    ) -> None:
        self.params = {name: np.array(p, np.float64) for name, p in params.items()}
        self.lr, self.weight_decay, self.beta = lr, weight_decay, beta
        self.dtype, self.codebook, self.zero_entry = dtype, codebook, zero_entry
        self.periods = dict(periods or {})
        self.counts: Array | None = None
        self.history: dict[str, list[Array]] = {name: [] for name in params}
        self.momenta: dict[str, Momentum] = {}

    def step(self, grads: Mapping[str, Array]) -> None:
        """``grads`` are float64 arrays by name; parameters without one stay as they are."""
        self._choose(grads)
        for name, grad in grads.items():
            self.history[name].append(grad.ravel())
            rounded = ROUNDED[self.dtype]
            p = self.params[name]
            if self.weight_decay:
                p = rounded(p * (1 - self.lr * self.weight_decay))
            update = self.update(name, grad).reshape(p.shape)
            self.params[name] = rounded(p - self.lr * update)

    def near(self, name: str) -> Array:
        """Elements whose rounding float32 may decide otherwise, of the parameter's shape."""
        shape = self.params[name].shape
        if name not in self.momenta:
            return np.zeros(shape, bool)
        return self.momenta[name].near.reshape(shape)

    def _choose(self, grads: Mapping[str, Array]) -> None:
        for name, grad in grads.items():
            self.periods[name] = self.periods.get(name) or find_period(grad)
        known = [(g, self.periods[name]) for name, g in grads.items() if self.periods[name]]
        if known and self.counts is None:
            own = np.float64 if self.dtype == "float64" else np.float32
            self.counts = histogram((grad.astype(own), period) for grad, period in known)
            if self.codebook is None:
                self.codebook = learn_codebook(self.counts, self.zero_entry)

    def momentum(self, name: str, grad: Array) -> Array:
        """The quantised momentum after ``grad``: 0 until there is a period."""
        if not self.periods[name]:
            return np.zeros(grad.size)
        if name not in self.momenta:
            period = self.periods[name]
            self.momenta[name] = Momentum(grad.size, period, self.codebook, self.beta)
        return self.momenta[name].advance(grad.ravel())

    def update(self, name: str, grad: Array) -> Array:
        raise NotImplementedError


class Gefen(Optimizer):
    def __init__(
        self,
        params: Mapping[str, Array],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        factored_v_2d: bool = True,
        largest_move: float = LARGEST_MOVE,
        **chosen: Any,
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, beta=betas[0], **chosen)
        self.betas, self.eps, self.factored = betas, eps, factored_v_2d
        self.largest_move = largest_move

    def update(self, name: str, grad: Array) -> Array:
        mean, history = self.momentum(name, grad), self.history[name]
        beta1, beta2 = self.betas
        if not self.periods[name]:
            return mean
        if self.factored and grad.ndim == 2:
            roots = factored_roots(history, grad.shape, beta2)
        else:
            roots = block_roots(history, self.periods[name], beta2)
        move = mean / (1 - beta1 ** len(history)) / (roots + self.eps)
        return np.clip(move, -self.largest_move, self.largest_move)


def orthogonalise(u: Array, schedule: Iterable[tuple[float, float, float]], eps: float) -> Array:
    """Newton-Schulz in float64, of the bfloat16 values of ``u``."""
    x = as_bfloat16(u)
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / max(float(np.sqrt((x**2).sum())), eps)
    for a, b, c in schedule:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def even_rows(x: Array, ema: Array, correction: float, eps: float) -> Array:
    """NorMuon: rows over the root of their mean squares' EMA, at the norm they had together."""
    out = x / (np.sqrt(ema / correction) + eps)[:, None]
    norm = np.sqrt((out**2).sum())
    return out * (np.sqrt((x**2).sum()) / norm) if norm else out


def lr_ratio(shape: tuple[int, ...], adjust_lr_fn: str | None) -> float:
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * float(np.sqrt(max(rows, columns)))
    return float(np.sqrt(max(1, rows / columns)))


class GefenMuon(Optimizer):
    def __init__(
        self,
        params: Mapping[str, Array],
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        eps: float = 1e-7,
        ns_coefficients: tuple[float, float, float] = STANDARD,
        ns_steps: int = 5,
        ns_schedule: Any = None,
        adjust_lr_fn: str | None = None,
        normuon: bool = False,
        normuon_beta2: float = 0.95,
        normuon_eps: float = 1e-8,
        cautious: bool = False,
        **chosen: Any,
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, beta=momentum, **chosen)
        named = {None: [ns_coefficients] * ns_steps, "tuned3": TUNED3, "tuned4": TUNED4}
        is_named = ns_schedule is None or isinstance(ns_schedule, str)
        self.schedule = named[ns_schedule] if is_named else ns_schedule
        self.nesterov, self.eps, self.adjust_lr_fn = nesterov, eps, adjust_lr_fn
        self.cautious = cautious
        self.normuon, self.normuon_beta2, self.normuon_eps = normuon, normuon_beta2, normuon_eps
        self.emas = {name: np.zeros(len(p)) for name, p in params.items()}

    def update(self, name: str, grad: Array) -> Array:
        u = self.momentum(name, grad)
        if self.nesterov:
            u = self.beta * u + (1 - self.beta) * grad.ravel()
        x = orthogonalise(u.reshape(grad.shape), self.schedule, self.eps)
        if self.normuon:
            beta2, age = self.normuon_beta2, len(self.history[name])
            self.emas[name] = beta2 * self.emas[name] + (1 - beta2) * (x**2).mean(axis=1)
            x = even_rows(x, self.emas[name], 1 - beta2**age, self.normuon_eps)
        if self.cautious:  # arXiv 2411.16085
            agrees = x * grad > 0
            x = x * agrees / max(agrees.mean(), 1e-3)
        return lr_ratio(grad.shape, self.adjust_lr_fn) * x
