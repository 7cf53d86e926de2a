from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen import codebook
from gefen.codebook import (
    BINS,
    SIZE,
    Quantizer,
    accumulate_histogram,
    counter_uniform,
    optimal_centres,
    philox,
    solve,
    with_zero,
)

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "codebooks.npz")
CASES = sorted(key.removesuffix(".counts") for key in GOLDEN.files if key.endswith(".counts"))
U8 = torch.uint8


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# The histogram


def defined_counts(grad: np.ndarray, period: int) -> np.ndarray:
    blocks = grad.reshape(-1, period)
    top = np.abs(blocks).max(axis=1, keepdims=True)
    x = np.where(top > 0, blocks / np.where(top > 0, top, 1), 0)
    return np.histogram(x, bins=BINS, range=(-1, 1))[0]


def counted(grad: torch.Tensor, period: int) -> np.ndarray:
    counts = torch.zeros(BINS, dtype=torch.int64)
    accumulate_histogram(grad, period, counts)
    return counts.numpy()


@pytest.mark.parametrize("chunk", [1, 7, 12, 40, 1 << 20])
@pytest.mark.parametrize("period", [1, 4, 30, 120])
def test_histogram(monkeypatch: pytest.MonkeyPatch, period: int, chunk: int) -> None:
    monkeypatch.setattr(codebook, "CHUNK", chunk)
    grad = (noise(24, 10) * 64).round() / 64
    grad[2] = 0
    # Largest magnitudes that are powers of two, so that both arithmetics divide exactly.
    grad = grad.clamp(-2, 2)
    grad.view(-1, period)[:, -1] = 2
    grad.view(-1, period)[::3] = 0
    assert (counted(grad, period) == defined_counts(grad.numpy(), period)).all()


def test_histograms_add_up() -> None:
    counts = torch.zeros(BINS, dtype=torch.int64)
    accumulate_histogram(noise(64), 8, counts)
    accumulate_histogram(noise(5, 6).t(), 1, counts)
    assert counts.sum() == 94
    assert counts[0] + counts[-1] >= 38
    only = counted(noise(5, 6), 1)
    assert only[0] + only[-1] == 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_histogram_of_other_dtypes(dtype: torch.dtype) -> None:
    grad = noise(16, 16).to(dtype)
    assert (counted(grad, 16) == counted(grad.float(), 16)).all()


def test_tiny_float64_gradients_keep_their_shape() -> None:
    grad = noise(16, 16).double()
    assert (counted(grad * 2.0**-900, 16) == counted(grad, 16)).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_blocks_that_are_not_finite_are_left_out(
    monkeypatch: pytest.MonkeyPatch, bad: float, chunk: int
) -> None:
    monkeypatch.setattr(codebook, "CHUNK", chunk)
    grad = noise(4, 20)
    grad[1, 3] = bad
    assert (counted(grad, 20) == counted(grad[[0, 2, 3]], 20)).all()


def test_an_empty_gradient_counts_nothing() -> None:
    assert counted(torch.empty(0, 4), 1).sum() == 0


# The solver


def cost(points: np.ndarray, weights: np.ndarray, centres: np.ndarray) -> float:
    return float((weights * ((points[:, None] - centres) ** 2).min(axis=1)).sum())


def best_by_trying_all(points: np.ndarray, weights: np.ndarray, size: int, edge: int) -> float:
    """Least cost over every way to cut the points into ``size`` runs, the outer ones optional."""
    n = len(points)
    lowest = np.inf
    for cuts in combinations(range(n + 1), size - 1):
        runs = [slice(a, b) for a, b in pairwise(cuts)]
        means = [np.average(points[run], weights=weights[run]) for run in runs]
        lowest = min(lowest, cost(points, weights, np.array([-edge, *means, edge])))
    return lowest


def best_by_layers(points: np.ndarray, weights: np.ndarray, size: int, edge: int) -> float:
    """The plain dynamic programme: every start for every end in every layer."""
    w0, w1, w2 = (np.append(0.0, np.cumsum(weights * points**p)) for p in (0.0, 1.0, 2.0))
    i, j = np.triu_indices(len(w0), 1)
    table = np.full((len(w0), len(w0)), np.inf)
    table[i, j] = w2[j] - w2[i] - (w1[j] - w1[i]) ** 2 / (w0[j] - w0[i])
    best = w2 + 2 * edge * w1 + edge**2 * w0
    for _ in range(size - 2):
        best = (best[:, None] + table).min(axis=0)
    tail = w2 - 2 * edge * w1 + edge**2 * w0
    return float((best + tail[-1] - tail).min())


@settings(deadline=None, max_examples=150)
@given(
    st.dictionaries(st.integers(-15, 15), st.integers(1, 50), min_size=3, max_size=9), st.data()
)
def test_no_clustering_is_cheaper(counts: dict[int, int], data: st.DataObject) -> None:
    points = np.array(sorted(counts))
    weights = np.array([counts[p] for p in points])
    size = data.draw(st.integers(3, len(points)))
    centres = optimal_centres(points, weights, size, 16)
    assert len(centres) == size
    assert (centres[0], centres[-1]) == (-16, 16)
    assert cost(points, weights, centres) == pytest.approx(
        best_by_trying_all(points, weights, size, 16), rel=1e-12, abs=1e-9
    )


def spread(name: str) -> tuple[np.ndarray, np.ndarray]:
    n = 1200
    at = np.arange(n)
    rng = np.random.default_rng(5)
    weights = {
        "even": np.full(n, 3),
        "pairs": np.where(at % 8 < 2, 5, 0),
        "groups": np.where(at % 40 < 10, 5, 0),
        "heavy tenth": np.where(at < 120, 10**4, 1),
        "wild": np.floor(10 ** (rng.random(n) * 6)).astype(int),
        "one peak": np.where(at == 600, 10**6, at % 3),
        "bell": np.floor(3e4 * np.exp(-(((at - 600) / 150.0) ** 2))).astype(int),
    }[name]
    filled = np.flatnonzero(weights)
    return 2 * filled + 1 - n, weights[filled]


@pytest.mark.parametrize("size", [3, 40, 130])
@pytest.mark.parametrize(
    "name", ["even", "pairs", "groups", "heavy tenth", "wild", "one peak", "bell"]
)
def test_optimal_where_many_clusterings_tie_or_clusters_are_long(name: str, size: int) -> None:
    points, weights = spread(name)
    found = cost(points, weights, optimal_centres(points, weights, size, 1200))
    assert found == pytest.approx(best_by_layers(points, weights, size, 1200), rel=1e-9)


def test_optimal_even_where_no_price_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codebook, "_LAST_PRICE", 0)
    points, weights = spread("groups")
    found = cost(points, weights, optimal_centres(points, weights, 40, 1200))
    assert found == pytest.approx(best_by_layers(points, weights, 40, 1200), rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_recorded_codebooks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from before one entry was 0, which is all that has changed."""
    counts = torch.from_numpy(GOLDEN[f"{case}.counts"])
    recorded = torch.from_numpy(GOLDEN[f"{case}.codebook"])
    book = solve(counts)
    assert torch.equal(book, torch.from_numpy(with_zero(recorded.numpy())))
    assert (book != recorded).sum() <= 1
    monkeypatch.setattr(codebook, "with_zero", lambda entries: entries)
    assert torch.equal(solve(counts), recorded)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([-1, -0.5, 0.2, 1], [-1, -0.5, 0, 1]),
        ([-1, -0.25, 0.25, 1], [-1, 0, 0.25, 1]),
        ([-1, 0.1, 0.1, 1], [-1, 0, 0.1, 1]),
        ([-1, 0, 0.5, 1], [-1, 0, 0.5, 1]),
    ],
)
def test_the_entry_nearest_to_zero_becomes_zero(
    entries: list[float], expected: list[float]
) -> None:
    before = np.array(entries)
    assert with_zero(before).tolist() == expected
    assert before.tolist() == entries


def test_the_fixed_codebook_is_the_same_everywhere() -> None:
    """Ranks that learn none together all have it, whatever their machines."""
    book = codebook.fixed()
    assert codebook.digest(book) == "fa8d922f1f63"
    assert (book[0], book[-1]) == (-1, 1)
    assert (book.diff() > 0).all()
    assert (book == 0).sum() == 1
    assert not codebook.is_blank(book)
    # Finest in the middle, where most of a gradient lies.
    assert book.diff()[118:138].max() < 0.2 * book.diff()[[0, -1]].min()


@pytest.mark.parametrize("filled", [0, 1, 2, 17, 254, 255, 256, 257, 300, BINS])
@pytest.mark.parametrize("weight", [1, 10**9, 10**14])
def test_every_histogram_gives_a_legal_codebook(filled: int, weight: int) -> None:
    counts = torch.zeros(BINS, dtype=torch.int64)
    counts[torch.linspace(0, BINS - 1, filled).long()] = weight
    book = solve(counts)
    assert book.shape == (SIZE,)
    assert book.dtype == torch.float32
    assert (book[0], book[-1]) == (-1, 1)
    assert (book.diff() >= 0).all()
    assert (book == 0).any()


@pytest.mark.parametrize("filled", [256, 258, 300])
def test_light_points_beside_heavy_ones(filled: int) -> None:
    """What a light point saves can vanish in the rounding of a heavy neighbour's squares."""
    counts = torch.zeros(BINS, dtype=torch.int64)
    counts[:filled:2], counts[1:filled:2] = 1 << 30, 1
    centres = (torch.arange(BINS) + 0.5) / 2048 - 1
    book = solve(counts)
    # But for the last of them all, which is the entry nearest to 0.
    heavy = (centres[2 : filled - 2 : 2].unsqueeze(1) - book).abs().amin(dim=1)
    assert heavy.max() < 1e-6


def test_few_bins_become_the_entries() -> None:
    counts = torch.zeros(BINS, dtype=torch.int64)
    counts[[5, 1000, 3000]] = torch.tensor([3, 1, 2])
    centre = torch.tensor([1000.5, 3000.5]) / 2048 - 1
    book = solve(counts)
    assert torch.equal(book[:3], torch.tensor([-1.0, float(centre[0]), 0.0]))
    assert torch.equal(book[3:-1], centre[1].expand(252))


def test_of_two_entries_equally_near_the_lower_becomes_zero() -> None:
    counts = torch.zeros(BINS, dtype=torch.int64)
    counts[[0, BINS // 2 - 1, BINS // 2, BINS - 1]] = 1
    assert solve(counts)[1:3].tolist() == [0.0, 1 / BINS]


def test_entries_stay_sorted_where_many_are_nearest_to_zero() -> None:
    counts = torch.zeros(BINS, dtype=torch.int64)
    counts[[5, 1000]] = 1
    book = solve(counts)
    assert (book.diff() >= 0).all()
    assert (book == 0).sum() == 1


def test_zero_gradients_keep_a_codebook_with_zero() -> None:
    book = solve(torch.zeros(BINS, dtype=torch.int64))
    assert set(book.tolist()) == {-1.0, 0.0, 1.0}


# The quantiser


def exact_books() -> st.SearchStrategy[list[int]]:
    """Entries in units of 2^-20, so that float64 comparisons are exact; duplicates included."""
    near = st.builds(lambda a, b: [min(a + i, 1 << 20) for i in b], number(), st.just(range(40)))
    inner = st.one_of(st.lists(number(), min_size=1, max_size=254), near)
    return inner.map(lambda x: sorted([-(1 << 20), *x, *[x[-1]] * (254 - len(x)), 1 << 20]))


def number() -> st.SearchStrategy[int]:
    return st.integers(-(1 << 20), 1 << 20)


def probes(book: torch.Tensor) -> torch.Tensor:
    """Entries, midpoints, and the floats next to them, as long as float64 can tell them apart
    after a subtraction."""
    middle = (book[1:] + book[:-1]) / 2
    x = torch.cat([book, middle, torch.linspace(-1.5, 1.5, 301), torch.tensor([torch.inf])])
    x = torch.cat([x, -x])
    up = torch.nextafter(x, torch.full_like(x, torch.inf))
    x = torch.cat([x, up, torch.nextafter(x, torch.full_like(x, -torch.inf))])
    return x[(x == 0) | (x.abs() > 1e-7)]


@settings(deadline=None, max_examples=100)
@given(exact_books(), st.sampled_from([torch.float32, torch.float64]))
def test_encode_finds_the_nearest_and_the_lower_of_two(
    entries: list[int], dtype: torch.dtype
) -> None:
    book = torch.tensor(entries, dtype=torch.float32) / (1 << 20)
    quantizer = Quantizer(book)
    x = probes(book).to(dtype)
    nearest = (x.double().clamp(-2, 2).unsqueeze(1) - book.double()).abs().argmin(dim=1)
    assert torch.equal(quantizer.encode(x), nearest.to(U8))
    assert torch.equal(quantizer.decode(quantizer.encode(x)), book[nearest])


@settings(deadline=None, max_examples=50)
@given(exact_books())
def test_the_index_is_the_number_of_thresholds_below(entries: list[int]) -> None:
    book = torch.tensor(entries, dtype=torch.float32) / (1 << 20)
    quantizer = Quantizer(book)
    assert quantizer.thresholds.dtype == torch.float32
    x = probes(book)
    assert torch.equal(quantizer.encode(x), (x.unsqueeze(1) > quantizer.thresholds).sum(1).to(U8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounded_thresholds_never_pick_the_farther_entry(dtype: torch.dtype) -> None:
    book = torch.linspace(-1, 1, SIZE)
    x = probes(book.to(dtype))
    found = Quantizer(book).encode(x).long()
    distance = (x.double().clamp(-2, 2).unsqueeze(1) - book.double()).abs()
    chosen = distance.gather(1, found.unsqueeze(1)).squeeze(1)
    assert torch.equal(chosen, distance.amin(dim=1))


@pytest.mark.parametrize("case", CASES)
def test_the_table_and_the_search_agree(case: str) -> None:
    quantizer = Quantizer(torch.from_numpy(GOLDEN[f"{case}.codebook"]))
    x = noise(100_000) / 3
    assert quantizer._table is not None
    fast = quantizer.encode(x)
    quantizer._table = None
    assert torch.equal(fast, quantizer.encode(x))


@pytest.mark.parametrize("gap", [1e-3, 1e-7])
def test_nan_gets_a_legal_index(gap: float) -> None:
    book = torch.cat([torch.tensor([-1.0]), torch.arange(254) * gap, torch.tensor([1.0])])
    quantizer = Quantizer(book)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.tensor([torch.nan, 0.0, torch.nan], dtype=dtype)
        assert quantizer.encode(x)[1] == 1
        lower, upper, chance = quantizer.neighbours(x)
        assert (lower <= upper).all()
        assert (chance >= 0).all()


def test_strides_do_not_matter() -> None:
    quantizer = Quantizer(torch.linspace(-1, 1, SIZE))
    x = noise(3, 4).t()
    index = quantizer.encode(x)
    assert torch.equal(index, quantizer.encode(x.contiguous()))
    values = quantizer.decode(index)
    assert torch.equal(values, quantizer.codebook[index.long()])
    assert torch.equal(quantizer.decode(index.t()), values.t())


@settings(deadline=None, max_examples=50)
@given(exact_books())
def test_neighbours_enclose_and_average_to_x(entries: list[int]) -> None:
    book = torch.tensor(entries, dtype=torch.float32) / (1 << 20)
    x = probes(book)
    x = x[: len(x) // 2 * 2].view(2, -1).t()
    lower, upper, chance = Quantizer(book).neighbours(x)
    below, above = book[lower.long()].double(), book[upper.long()].double()
    clamped = x.double().clamp(-1, 1)
    assert ((below <= clamped) & (clamped <= above)).all()
    assert not ((book > below.unsqueeze(-1)) & (book < above.unsqueeze(-1))).any()
    assert chance.dtype == torch.float32
    mean = below + chance.double() * (above - below)
    torch.testing.assert_close(mean, clamped, rtol=0, atol=1e-6)


# The counter-based generator

KNOWN = {  # Random123's kat_vectors: counter and key to output
    ("00000000 " * 4, "00000000 " * 2): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ("ffffffff " * 4, "ffffffff " * 2): "408f276d 41c83b0e a20bc7c6 6d5451fd",
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
    ): "d16cfe09 94fdcceb 5001e420 24126ea1",
}


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("given_words", KNOWN)
def test_philox_known_answers(given_words: tuple[str, str]) -> None:
    counter = tuple(torch.tensor([word]) for word in words(given_words[0]))
    key = words(given_words[1])
    out = philox(counter, (key[0], key[1]))
    assert [int(word) for word in out] == words(KNOWN[given_words])


@given(st.integers(0, 1 << 40), st.integers(0, 64), st.integers(0, 64))
def test_uniforms_do_not_depend_on_the_cut(start: int, left: int, right: int) -> None:
    whole = counter_uniform(7, 3, start, left + right, "cpu")
    parts = [
        counter_uniform(7, 3, start, left, "cpu"),
        counter_uniform(7, 3, start + left, right, "cpu"),
    ]
    assert torch.equal(whole, torch.cat(parts))


def test_uniforms_are_uniform_and_differ_by_every_key() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    draws = [
        counter_uniform(step, parameter, start, 1 << 16, "cpu")
        for step, parameter, start in [
            (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1 << 16), (1 << 32, 0, 0), (0, 1 << 32, 0),
            (0, 0, 1 << 34),
        ]
    ]  # fmt: skip
    for u in draws:
        assert u.dtype == torch.float32
        assert 0 <= u.min() < 0.001 < 0.999 < u.max() < 1
        assert abs(u.mean() - 0.5) < 0.01
        assert abs(u.var() - 1 / 12) < 0.005
    correlations = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert correlations.abs().max() < 0.02
    assert torch.equal(torch.get_rng_state(), state)


def test_blank_codebook_is_even_and_no_learned_one() -> None:
    book = codebook.blank()
    assert (book[0], book[-1]) == (-1, 1)
    even = torch.linspace(-1, 1, SIZE)
    even[127] = 0
    torch.testing.assert_close(book, even)
    assert codebook.is_blank(book.clone())
    counts = torch.ones(codebook.BINS, dtype=torch.int64)
    assert not codebook.is_blank(codebook.solve(counts))
