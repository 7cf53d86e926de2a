"""State dicts of parameters that ranks share: saved by each alone, loaded by all or none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matrices import SHAPES, STEPS, layout, parameters, settings_of, train, whole
from pool import RankPool
from sharded import Collectives, contents, same
from torch import nn
from torch.distributed.tensor import DTensor

from gefen import Gefen, GefenMuon, GefenMuonHybrid
from gefen.distributed import meeting
from gefen.errors import CheckpointError, PeerFailureError

MAKE: dict[str, Callable[..., Any]] = {
    "gefen": lambda pairs: Gefen(pairs, lr=0.02),
    "muon": lambda pairs: GefenMuon(pairs, lr=0.02, sharded_mode="distributed", normuon=True),
    "hybrid": lambda pairs: GefenMuonHybrid(pairs[:3], pairs[3:], lr=0.02),
    "adamw": lambda pairs: GefenMuonHybrid(
        pairs[:3], pairs[3:], lr=0.02, sharded_mode="distributed", backup_optimizer="adamw"
    ),
}

every_kind = pytest.mark.parametrize("kind", MAKE)


def made(kind: str, params: dict[str, nn.Parameter]) -> Any:
    return MAKE[kind](list(params.items()))


def complete(saved: dict[str, Any]) -> dict[str, Any]:
    """As with all of each tensor in one file."""
    entries = {i: {k: whole(v) for k, v in e.items()} for i, e in saved["state"].items()}
    return copy.deepcopy({**saved, "state": entries})


def continued(rank: int, world: int, kind: str, how: str) -> None:
    """In every form that a state dict comes in, what was saved goes on bitwise."""
    place = layout("rows", world)
    params = parameters(place)
    optimizer = made(kind, params)
    train(optimizer, params, place, range(2))
    with Collectives() as counter:
        saved = optimizer.state_dict()
    assert counter.take() == []
    assert all(len(entry) > 2 for entry in saved["state"].values())
    copied = {n: nn.Parameter(p.detach().clone()) for n, p in params.items()}
    resumed = made(kind, copied)
    resumed.load_state_dict(complete(saved) if how == "complete" else copy.deepcopy(saved))
    for number, entry in resumed.state_dict()["state"].items():
        for key, value in entry.items():
            assert isinstance(value, DTensor) is isinstance(saved["state"][number][key], DTensor)
    train(optimizer, params, place, range(2, STEPS))
    train(resumed, copied, place, range(2, STEPS))
    mine, own = resumed.state_dict()["state"], optimizer.state_dict()["state"]
    for number, param in enumerate(zip(copied.values(), params.values(), strict=True)):
        assert torch.equal(*(p.detach().to_local() for p in param))
        for key, value in own[number].items():
            assert same([whole(mine[number][key])], [whole(value)]), (number, key)


@pytest.mark.parametrize("how", ["as it was", "complete"])
@every_kind
def test_a_state_dict_continues_bitwise(ranks: RankPool, kind: str, how: str) -> None:
    ranks.run(continued, 3, kind, how)


def saved_by(rank: int, world: int, mode: str) -> Any:
    """A complete state dict after two steps, the parameters then, and those after all steps."""
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), **settings_of(mode, "normuon"))
    middle = train(optimizer, params, place, range(2))
    saved = complete(optimizer.state_dict())
    return saved, middle, train(optimizer, params, place, range(2, STEPS))


def continued_in(rank: int, world: int, where: str, mode: str, saved: Any, middle: Any) -> Any:
    place = layout(where, world)
    params = {name: nn.Parameter(place(name, full)) for name, full in middle.items()}
    optimizer = GefenMuon(params.items(), **settings_of(mode, "normuon"))
    optimizer.load_state_dict(saved)
    assert {group["sharded_mode"] for group in optimizer.param_groups} == {mode}
    return train(optimizer, params, place, range(2, STEPS))


@pytest.mark.parametrize("saver", ["distributed", "exact"])
def test_matrices_continue_bitwise_on_other_ranks_in_other_modes(
    ranks: RankPool, saver: str
) -> None:
    saves = ranks.run(saved_by, 3, saver)
    saved, middle, expected = saves[1]
    assert all(torch.equal(saves[0][1][name], middle[name]) for name in SHAPES)
    for world, where, mode in [
        (1, "rows", "exact"),
        (2, "rows", "distributed"),
        (3, "columns", "exact"),
        (4, "hybrid", "distributed"),
        (4, "grid", "exact"),
    ]:
        for found in ranks.run(continued_in, world, where, mode, saved, middle):
            for name, value in expected.items():
                assert torch.equal(found[name], value), (world, where, mode, name)


def slices_made_whole(rank: int, world: int) -> None:
    """State of approximate steps is state of rows like any other."""
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), sharded_mode="approx")
    train(optimizer, params, place, range(2))
    exact = GefenMuon(params.items(), sharded_mode="exact")
    exact.load_state_dict(optimizer.state_dict())
    train(exact, params, place, range(2, STEPS))
    back = GefenMuon(params.items(), sharded_mode="approx")
    with Collectives() as counter:
        back.load_state_dict(exact.state_dict())
    assert counter.take() == []
    train(back, params, place, range(2, STEPS))
    assert all(whole(param.detach()).isfinite().all() for param in params.values())


def test_approximate_steps_and_exact_ones_take_over_from_each_other(ranks: RankPool) -> None:
    ranks.run(slices_made_whole, 3)


def lose_a_key(optimizer: Any, saved: dict[str, Any]) -> None:
    """In the second matrix, so that another one has been read already."""
    del saved["state"][1]["index"]


def raise_in_a_hook(optimizer: Any, saved: dict[str, Any]) -> None:
    def full_disk(_: Any) -> None:
        raise OSError("disk full")

    handle = optimizer.register_load_state_dict_post_hook(full_disk)
    optimizer._handle = handle


FAULTS: dict[str, tuple[Any, str]] = {
    "incomplete": (lose_a_key, "state of parameter 'b' does not fit: it lacks ['index']"),
    "hook": (raise_in_a_hook, "disk full"),
}


def refused(rank: int, world: int, kind: str, fault: str, everywhere: bool) -> str:
    place = layout("rows", world)
    params = parameters(place)
    optimizer = made(kind, params)
    train(optimizer, params, place, range(1, 2))
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, params, place, range(2, 4))
    before = contents(optimizer, params)
    rates = [group["lr"] for group in optimizer.param_groups]
    broken = copy.deepcopy(saved)
    for group in broken["param_groups"]:
        group["lr"] = 0.5
    if everywhere or rank == 1:
        FAULTS[fault][0](optimizer, broken)
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(broken)
    assert same(before, contents(optimizer, params))
    assert [group["lr"] for group in optimizer.param_groups] == rates
    if hasattr(optimizer, "_handle"):
        optimizer._handle.remove()
    optimizer.load_state_dict(saved)
    train(optimizer, params, place, range(1, 2))
    return str(caught.value)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@every_kind
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(
    ranks: RankPool, kind: str, fault: str, everywhere: bool
) -> None:
    told = ranks.run(refused, 3, kind, fault, everywhere)
    assert len(set(told)) == 1
    assert "changed nothing on any rank" in told[0]
    assert f"on rank{'s 0-2' if everywhere else ' 1'}: " in told[0]
    assert FAULTS[fault][1] in told[0]


def alone(rank: int, world: int) -> str:
    place = layout("rows", world)
    params = parameters(place)
    optimizer = made("muon", params)
    train(optimizer, params, place, range(1, 3))
    saved, told = copy.deepcopy(optimizer.state_dict()), ""
    train(optimizer, params, place, range(3, 4))
    before = contents(optimizer, params)
    if rank == 0:
        meeting.ARRIVAL_S = 0.5
        with pytest.raises(PeerFailureError) as caught:
            optimizer.load_state_dict(saved)
        told, meeting.ARRIVAL_S = str(caught.value), 60
        assert same(before, contents(optimizer, params))
    dist.barrier()
    optimizer.load_state_dict(saved)
    train(optimizer, params, place, range(3, 4))
    return told


def test_a_load_on_one_rank_alone_names_the_missing_ranks(ranks: RankPool) -> None:
    assert "in vain for ranks 1-2: load_state_dict()" in ranks.run(alone, 3)[0]


def sliced(rank: int, world: int) -> str:
    place = layout("rows", world)
    params = parameters(place)
    optimizer = made("muon", params)
    train(optimizer, params, place, range(1, 2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["index"] = saved["state"][0]["index"].to_local()
    before = contents(optimizer, params)
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(saved)
    assert same(before, contents(optimizer, params))
    return str(caught.value)


def test_a_slice_is_not_taken_for_the_whole(ranks: RankPool) -> None:
    for told in ranks.run(sliced, 2):
        assert "state of parameter 'a' does not fit: index" in told
