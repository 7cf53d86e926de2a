"""The oracle is right: with version 1's rules it follows what gefen-x 0.5.0 was recorded to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from trajectories import CASES, EQUAL_INDICES, FLOAT32, RECORDED, STEPS, Case, recorded

# RMS differences in relation to the RMS movement. The recorder rounded codebook values of
# bfloat16 parameters to bfloat16, and iterated in bfloat16.
CLOSE = {"gefen torch.bfloat16": 0.05, "muon torch.float32": 0.02, "muon torch.bfloat16": 0.15}
# What moving one entry to 0 changes. Most for rows that are small beside others of their block,
# which the factored form enlarges again.
ZERO_ENTRY = 0.01


def arrays(file: str) -> dict[str, Any]:
    return {key: value.double().numpy() for key, value in recorded(file).items()}


def names(values: dict[str, Any]) -> list[str]:
    return [key.removesuffix(".init") for key in values if key.endswith(".init")]


def followed(case: Case, **chosen: Any) -> tuple[oracle.Optimizer, dict[tuple[str, int], Any]]:
    """The oracle after all recorded gradients, and the parameters after each of them."""
    values = arrays(case.file)
    make: Any = oracle.GefenMuon if case.is_muon else oracle.Gefen
    judge: oracle.Optimizer = make(
        {name: values[f"{name}.init"] for name in names(values)},
        periods={name: int(values[f"{name}.period"]) for name in names(values)},
        dtype=str(case.dtype).removeprefix("torch."),
        **case.settings,
        **chosen,
    )
    after = {}
    for step in range(STEPS):
        judge.step({name: values[f"{name}.grad{step}"] for name in names(values)})
        after |= {(name, step): judge.params[name] for name in names(values)}
    return judge, after


def off(values: dict[str, Any], name: str, step: int, got: Any) -> float:
    wanted = values[f"{name}.after{step}"]
    moved = np.linalg.norm(wanted - values[f"{name}.init"])
    return float(np.linalg.norm(got - wanted) / moved)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_recorded_trajectories(case: Case) -> None:
    values = arrays(case.file)
    judge, after = followed(case, zero_entry=False)
    np.testing.assert_array_equal(judge.codebook, values["codebook"])
    kind = f"{'muon' if case.is_muon else 'gefen'} {case.dtype}"
    for name in names(values):
        for step in RECORDED:
            got, wanted = after[name, step], values[f"{name}.after{step}"]
            if kind in CLOSE:
                assert off(values, name, step, got) < CLOSE[kind]
            else:
                np.testing.assert_allclose(got, wanted, **FLOAT32)
        if "float32" in kind:
            equal = judge.momenta[name].index == values[f"{name}.index"]
            assert equal.mean() >= EQUAL_INDICES


@pytest.mark.parametrize(
    "case", [c for c in CASES if not c.is_muon and "fp32" in c.file], ids=lambda case: case.file
)
def test_the_zero_entry_changes_little(case: Case) -> None:
    values = arrays(case.file)
    judge, after = followed(case)
    assert (judge.codebook == 0).sum() == 1
    for name in names(values):
        assert off(values, name, 7, after[name, 7]) < ZERO_ENTRY


def test_recorded_periods_of_vectors() -> None:
    values = arrays("periods")
    vectors = [key for key, grad in values.items() if key.endswith(".grad") and grad.ndim == 1]
    assert vectors
    for key in vectors:
        wanted = values[key.removesuffix("grad") + "period"]
        assert oracle.find_period(values[key]) == wanted


def test_recorded_codebooks() -> None:
    values = arrays("codebooks")
    cases = [key.removesuffix(".counts") for key in values if key.endswith(".counts")]
    assert cases
    for case in cases:
        counts, wanted = values[f"{case}.counts"], values[f"{case}.codebook"]
        np.testing.assert_array_equal(oracle.learn_codebook(counts, zero_entry=False), wanted)
        # Of two that are equally near to 0, the lower one; all others stay.
        learned = oracle.learn_codebook(counts)
        (moved,) = np.flatnonzero(learned != wanted)
        assert moved == abs(wanted).argmin()
        assert learned[moved] == 0


def test_excess_is_what_worse_codebooks_cost() -> None:
    counts = arrays("codebooks")["sparse.counts"]
    best = oracle.learn_codebook(counts)
    assert abs(oracle.excess(best, counts)) < 1e-9
    for entry in (40, 200):
        worse = best.copy()
        worse[entry] += (worse[entry + 1] - worse[entry]) / 4
        assert oracle.excess(worse, counts) > 1e-5


def cheapest(points: list[int], clusters: int, head: bool = True) -> float:
    """By trying everything: −1 takes some points, then come the clusters, 1 takes the rest."""
    best = np.inf
    if head:
        for cut in range(len(points) + 1):
            own = sum((p + oracle.BINS) ** 2 for p in points[:cut])
            best = min(best, own + cheapest(points[cut:], clusters, head=False))
        return best
    if not clusters:
        return float(sum((p - oracle.BINS) ** 2 for p in points))
    for cut in range(1, len(points) + 1):
        own = np.var(points[:cut]) * cut
        best = min(best, own + cheapest(points[cut:], clusters - 1, head=False))
    return best


def test_clusters_are_the_cheapest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "SIZE", 5)
    generator = np.random.default_rng(0)
    for _ in range(10):
        points = np.sort(generator.choice(np.arange(-4095, 4096, 2), 8, replace=False))
        line = oracle.Line(points.astype(float), np.ones(8))
        assert line.solution()[0] == pytest.approx(cheapest(points.tolist(), 3), rel=1e-9)
