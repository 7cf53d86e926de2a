"""State dicts that gefen-x 0.5.0 saved: what becomes of them, and runs that go on from them."""

from __future__ import annotations

import copy
from typing import Any

import gefen_x_runs as cases
import pytest
import torch
from gefen_x_runs import rebuilt, recorded
from torch import nn
from workload import bytes_of

from gefen import Gefen, GefenMuonHybrid
from gefen.errors import CheckpointError

AFTER = range(cases.BEFORE, cases.BEFORE + cases.AFTER)


@pytest.mark.parametrize("kind", cases.MAKERS)
def test_a_run_goes_on_as_gefen_x_would(kind: str) -> None:
    """20 steps on, against gefen-x itself.

    Muon multiplies in bfloat16 in another order.
    """
    params, optimizer, found = rebuilt(kind)
    optimizer.load_state_dict(found["state_dict"])
    cases.train(optimizer, kind, params, AFTER)
    groups = [group for group in optimizer.param_groups if "momentum" in group]
    by_muon = {id(param) for group in groups for param in group["params"]}
    for name, param in params.items():
        moved = (found["after"][name] - found["before"][name]).square().mean().sqrt()
        off = (param.detach() - found["after"][name]).abs()
        if id(param) in by_muon:
            assert off.square().mean().sqrt() <= 0.01 * moved, name
        else:
            assert off.max() <= 1e-6, name
        assert ("Frozen" in name) == (float(moved) == 0.0), name


def test_without_the_checkpoint_it_would_not() -> None:
    params, optimizer, found = rebuilt("gefen")
    cases.train(optimizer, "gefen", params, AFTER)
    off = [(p.detach() - found["after"][name]).abs().max() for name, p in params.items()]
    assert max(off) > 1e-3


def test_layout_of_blocks() -> None:
    params, optimizer, found = rebuilt("gefen-block")
    saved = found["state_dict"]
    before = bytes_of(saved)
    optimizer.load_state_dict(saved)
    assert bytes_of(saved) == before
    crossing = 0
    for number, (name, param) in enumerate(params.items()):
        entry, theirs = optimizer.state[param], saved["state"][number]
        if "Frozen" in name:
            assert not entry
            continue
        period, rows = theirs["automatic_period"], param.shape[0] if param.dim() > 1 else 1
        length = param.numel() // rows
        divided = length % period == 0
        crossing += not divided
        matrix = (rows, length // period)
        blocks = matrix if param.dim() > 1 and divided else (param.numel() // period,)
        assert (entry["step"], entry["period"]) == (theirs["step"], period)
        assert entry["index"].shape == param.shape
        assert entry["magnitude"].shape == entry["v"].shape == blocks
        for key, their in (("index", "m_codebook"), ("magnitude", "m_magnitude"), ("v", "vmean")):
            assert torch.equal(entry[key].flatten(), theirs[their].flatten())
        assert int(entry["global_step"]) == cases.BEFORE
        assert torch.equal(entry["codebook"], saved["gefen_codebook"])
    assert 0 < crossing < len(params) - 1


def test_layout_of_factored_and_normuon() -> None:
    for kind, keys in (("gefen", {"v_row", "v_col"}), ("muon-normuon", {"normuon_v"})):
        params, optimizer, found = rebuilt(kind)
        optimizer.load_state_dict(found["state_dict"])
        for param in params.values():
            entry = optimizer.state[param]
            if param.dim() == 2 and entry:
                assert keys <= entry.keys()
                rows, columns = param.shape
                shapes = {"v_row": (rows,), "v_col": (columns,), "normuon_v": (rows,)}
                assert all(tuple(entry[key].shape) == shapes[key] for key in keys)


def test_settings_and_names() -> None:
    _, optimizer, found = rebuilt("gefen")
    optimizer.load_state_dict(found["state_dict"])
    first, second = optimizer.param_groups
    assert (first["lr"], first["betas"], second["betas"]) == (3e-3, (0.9, 0.999), (0.8, 0.97))
    assert first["param_names"][0] == "Block.Embed.weight"
    assert not {key for key in first if "gefen" in key or key in ("beta1", "name")}
    _, muon, found = rebuilt("muon")
    muon.param_groups[0].update(ns_schedule=None, momentum=0.5)
    muon.load_state_dict(found["state_dict"])
    group = muon.param_groups[0]
    assert (len(group["ns_schedule"]), group["momentum"], group["lr"]) == (4, 0.95, 1e-2)


def test_what_gefen_x_does_not_save_stays() -> None:
    params, _, found = rebuilt("gefen")
    pairs = list(params.items())
    groups = [{"params": pairs[:3]}, {"params": pairs[3:]}]
    optimizer = Gefen(groups, stochastic_round=True, force_1d_period_one=True)
    optimizer.load_state_dict(found["state_dict"])
    group = optimizer.param_groups[0]
    assert (group["stochastic_round"], group["force_1d_period_one"]) == (True, True)


def test_deterministic_is_compared() -> None:
    params, _, found = rebuilt("gefen-deterministic")
    with pytest.raises(CheckpointError, match=r"deterministic=True.*deterministic=False"):
        Gefen(params.items()).load_state_dict(found["state_dict"])


def test_a_younger_second_moment() -> None:
    """Its bias-corrected value stays: gefen-x divides by 1 − β2^3, here it is 1 − β2^5."""
    found = recorded("migrated")
    params = {name: nn.Parameter(value.clone()) for name, value in found["before"].items()}
    optimizer = cases.make("gefen-block", params)
    optimizer.load_state_dict(found["state_dict"])
    theirs = found["state_dict"]["state"][0]
    ages = [theirs[key] for key in ("factored_step", "vmean_step", "step")]
    assert ages == [2, 3, 5]
    moment = optimizer.state[next(iter(params.values()))]["v"] / (1 - 0.999**5)
    torch.testing.assert_close(moment.flatten(), theirs["vmean"].flatten() / (1 - 0.999**3))


def test_tensors_that_count_become_numbers() -> None:
    """As ``capturable`` saves them."""
    _, optimizer, found = rebuilt("gefen")
    optimizer.load_state_dict(found["state_dict"])
    wanted = bytes_of(optimizer.state_dict())
    saved = copy.deepcopy(found["state_dict"])
    for entry in saved["state"].values():
        for key in entry.keys() & {"step", "vmean_step", "factored_step"}:
            entry[key] = torch.tensor(float(entry[key]))
    _, other, _ = rebuilt("gefen")
    other.load_state_dict(saved)
    assert bytes_of(other.state_dict()) == wanted


def test_before_the_first_step() -> None:
    _, optimizer, found = rebuilt("gefen")
    saved = copy.deepcopy(found["state_dict"])
    saved |= {"gefen_codebook": None, "gefen_global_step": 0}
    saved["state"] = {key: {"name": "x"} for key in saved["state"]}
    optimizer.load_state_dict(saved)
    assert not optimizer.state


def shards(saved: dict[str, Any]) -> None:
    """As gefen-x leaves the state of parameters that FSDP2 has cut on two ranks."""
    payload = torch.zeros(8, dtype=torch.uint8)
    saved["state"][0] = {"name": 0, "_gefen_rank_local_payload_0": payload}
    saved["state"][1] = {"name": 0, "_gefen_rank_local_member": True}


def fewer_groups(saved: dict[str, Any]) -> None:
    saved["param_groups"].pop()


def short(saved: dict[str, Any]) -> None:
    saved["state"][0]["m_codebook"] = saved["state"][0]["m_codebook"][:, :-1]


def no_codebook(saved: dict[str, Any]) -> None:
    saved["gefen_codebook"] = None


def unknown(saved: dict[str, Any]) -> None:
    saved["state"][0]["future"] = 1


def no_tensor(saved: dict[str, Any]) -> None:
    saved["state"][0]["m_magnitude"] = None


def no_groups(saved: dict[str, Any]) -> None:
    saved["param_groups"] = "none"


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (shards, r"parameter 0 has \['_gefen_rank_local_payload_0'\].*new optimizer"),
        (fewer_groups, "groups of"),
        (short, r"parameter 0 of group 0 has a value of form .* where \(8, 12\) fits"),
        (no_codebook, "codebook"),
        (unknown, "future"),
        (no_tensor, "form NoneType"),
        (no_groups, "no list of groups"),
    ],
)
def test_what_cannot_be_taken_names_gefen_x(harm: Any, said: str) -> None:
    _, optimizer, found = rebuilt("gefen")
    saved = copy.deepcopy(found["state_dict"])
    harm(saved)
    with pytest.raises(CheckpointError, match=f"state dict of gefen-x, but .*{said}"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state


def test_another_backup() -> None:
    params, _, found = rebuilt("hybrid-adamw")
    pairs = list(params.items())
    halves = pairs[1:3], pairs[:1] + pairs[3:]
    other = GefenMuonHybrid(*halves, lr=1e-2)
    with pytest.raises(CheckpointError, match="saved by AdamW, this optimizer has Gefen there"):
        other.load_state_dict(found["state_dict"])


def test_fused_adamw_of_a_hybrid_goes_on_unfused() -> None:
    """gefen-x saves ``fused=True``, its default, in AdamW's groups; torch's choice runs here."""
    ends = []
    for fused in (False, True):
        params, optimizer, found = rebuilt("hybrid-adamw")
        saved = copy.deepcopy(found["state_dict"])
        for group in saved["backup"]["param_groups"]:
            group["fused"] = fused
        optimizer.load_state_dict(saved)
        cases.train(optimizer, "hybrid-adamw", params, AFTER)
        ends.append([param.detach().clone() for param in params.values()])
    assert all(map(torch.equal, *ends))
