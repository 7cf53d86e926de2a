from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gefen.distributed.consolidate import Holding, consolidate, meet
from matrices import STEPS, layout, parameters, settings_of, train
from ranks import RankPool
from sharded import contents, same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gefen import GefenMuon, GefenMuonHybrid
from gefen.distributed import consolidate as module
from gefen.distributed.mesh import mesh_channels
from gefen.errors import CheckpointError, PeerFailureError, ShardedStepError


def meet_alone_then_together(rank: int, world: int) -> list[str]:
    told = []
    ranks = list(range(world))
    dist.barrier()
    if rank != 1:
        try:
            meet("state_dict()", ranks, rank, timeout_s=4)
        except PeerFailureError as error:
            told.append(str(error))
    dist.barrier()
    for _ in range(3):
        meet("state_dict()", ranks, rank, timeout_s=60)
    return told


def test_ranks_that_wait_in_vain_name_the_missing_and_can_meet_again(ranks: RankPool) -> None:
    told = ranks.run(meet_alone_then_together, 3)
    assert told[1] == []
    for rank in (0, 2):
        assert "in vain for rank 1: state_dict()" in told[rank][0]
        assert "ranks 0-2" in told[rank][0]


def gather_entries(rank: int, world: int, lose: bool, odd: bool) -> Any:
    mesh = DeviceMesh("cpu", list(range(world)))
    holdings = [
        Holding(
            f"w{owner}",
            owner + 1 + (odd and rank == 1),
            owner,
            mesh.get_group(),
            torch.device("cpu"),
            None
            if owner != rank or (lose and owner == 1)
            else {"period": owner + 1, "index": torch.full((2, owner), owner, dtype=torch.uint8)},
        )
        for owner in range(world)
    ]
    try:
        entries = consolidate(holdings, mesh_channels(mesh)[0])
    except CheckpointError as error:
        return str(error)
    return [(e["period"], e["index"].tolist()) for e in entries]


def test_every_rank_gets_every_owners_entries(ranks: RankPool) -> None:
    expected = [(1, [[], []]), (2, [[1], [1]]), (3, [[2, 2], [2, 2]])]
    assert ranks.run(gather_entries, 3, False, False) == [expected] * 3


def test_an_entry_that_its_owner_lost_is_refused_on_every_rank(ranks: RankPool) -> None:
    told = ranks.run(gather_entries, 3, True, False)
    assert len(set(told)) == 1
    assert "'w1' (owner: rank 1) is missing" in told[0]


def test_ranks_at_different_steps_are_refused_on_every_rank(ranks: RankPool) -> None:
    told = ranks.run(gather_entries, 3, False, True)
    assert len(set(told)) == 1
    assert "'w0' after 1 step, owned by rank 0 on rank 0, 'w0' after 2 steps" in told[0]


def save(rank: int, world: int, mode: str, chosen: str) -> Any:
    """A checkpoint after two steps, the parameters then, and those after all steps."""
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), **settings_of(mode, chosen))
    middle = train(optimizer, params, place, range(2))
    saved = optimizer.state_dict()
    copied = {
        **saved,
        "state": {
            i: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in e.items()}
            for i, e in saved["state"].items()
        },
    }
    return copied, middle, train(optimizer, params, place, range(2, STEPS))


def resume(
    rank: int, world: int, mode: str, chosen: str, saved: Any, middle: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    place = layout("columns", world)
    params = {name: nn.Parameter(place(name, full)) for name, full in middle.items()}
    optimizer = GefenMuon(params.items(), **settings_of(mode, chosen))
    optimizer.load_state_dict(saved)
    assert {group["sharded_mode"] for group in optimizer.param_groups} == {mode}
    return train(optimizer, params, place, range(2, STEPS))


@pytest.mark.parametrize(
    ("saver", "runs"),
    [
        ("distributed", [(1, "exact"), (2, "distributed"), (3, "exact"), (4, "distributed")]),
        ("exact", [(1, "distributed"), (2, "exact"), (4, "distributed")]),
    ],
)
def test_checkpoints_continue_bitwise_on_other_worlds_and_in_other_modes(
    ranks: RankPool, saver: str, runs: list[tuple[int, str]]
) -> None:
    saves = ranks.run(save, 3, saver, "normuon")
    for saved, _, _ in saves:
        assert all("index" in entry for entry in saved["state"].values())
    saved, middle, expected = saves[1]
    for world, mode in runs:
        for found in ranks.run(resume, world, mode, "normuon", saved, middle):
            assert all(torch.equal(found[name], expected[name]) for name in expected), (
                world,
                mode,
            )


def save_alone(rank: int, world: int) -> str:
    module.ARRIVAL_S = 0.5
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), sharded_mode="distributed")
    train(optimizer, params, place, range(2))
    told = ""
    if rank == 0:
        try:
            optimizer.state_dict()
        except ShardedStepError as error:
            told = str(error)
    dist.barrier()
    module.ARRIVAL_S = 60
    optimizer.state_dict()
    return told


def test_a_checkpoint_on_one_rank_alone_names_the_missing_ranks(ranks: RankPool) -> None:
    assert "in vain for ranks 1-2" in ranks.run(save_alone, 3)[0]


def incomplete(rank: int, world: int) -> None:
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), sharded_mode="distributed")
    train(optimizer, params, place, range(2))
    before = contents(optimizer, params)
    broken = optimizer.state_dict()
    del broken["state"][0]["index"]
    with pytest.raises(ValueError, match=r"Nothing was loaded.*'a'"):
        optimizer.load_state_dict(broken)
    assert same(before, contents(optimizer, params))


def test_incomplete_owner_state_is_refused(ranks: RankPool) -> None:
    ranks.run(incomplete, 2)


def other_kind(rank: int, world: int, mine: str, theirs: str) -> None:
    """Slices are no part of whole matrices, nor the other way round."""
    place = layout("rows", world)
    params = parameters(place)
    saved = GefenMuon(params.items(), sharded_mode=theirs)
    train(saved, params, place, range(2))
    optimizer = GefenMuon(params.items(), sharded_mode=mine)
    before = contents(optimizer, params)
    with pytest.raises(CheckpointError, match="Nothing was loaded"):
        optimizer.load_state_dict(saved.state_dict())
    assert same(before, contents(optimizer, params))


@pytest.mark.parametrize(("mine", "theirs"), [("exact", "approx"), ("approx", "exact")])
def test_state_of_slices_and_of_whole_matrices_are_not_mixed(
    ranks: RankPool, mine: str, theirs: str
) -> None:
    ranks.run(other_kind, 2, mine, theirs)


def hybrid(params: dict[str, nn.Parameter], mode: str, backup: str) -> GefenMuonHybrid:
    pairs = list(params.items())
    return GefenMuonHybrid(
        pairs[:3], pairs[3:], lr=0.02, sharded_mode=mode, backup_optimizer=backup
    )


def everything(optimizer: GefenMuonHybrid, params: dict[str, nn.Parameter]) -> list[Any]:
    """This rank's slices and the saved state, whatever order parameters first stepped in."""
    saved = optimizer.state_dict()["state"]
    held: list[Any] = [param.detach().to_local() for param in params.values()]
    return held + [saved[number][key] for number in sorted(saved) for key in sorted(saved[number])]


def resume_hybrid(rank: int, world: int, mode: str, backup: str) -> None:
    place = layout("rows", world)
    params = parameters(place)
    optimizer = hybrid(params, mode, backup)
    train(optimizer, params, place, range(2))
    saved = optimizer.state_dict()
    assert all(len(entry) > 2 for entry in saved["state"].values())
    copied = {n: nn.Parameter(p.detach().clone()) for n, p in params.items()}
    resumed = hybrid(copied, mode, backup)
    resumed.load_state_dict(saved)
    train(optimizer, params, place, range(2, STEPS))
    train(resumed, copied, place, range(2, STEPS))
    assert same(everything(optimizer, params), everything(resumed, copied))


@pytest.mark.parametrize("backup", ["gefen", "adamw"])
@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_a_hybrids_checkpoint_continues_bitwise(ranks: RankPool, mode: str, backup: str) -> None:
    ranks.run(resume_hybrid, 2, mode, backup)


def whole_averages(rank: int, world: int) -> str:
    """AdamW's averages of sharded parameters are sharded; those of plain ones do not fit."""
    place = layout("rows", world)
    params = parameters(place)
    optimizer = hybrid(params, "exact", "adamw")
    train(optimizer, params, place, range(1, 2))
    saved = optimizer.state_dict()
    before = contents(optimizer, params)
    optimizer.load_state_dict(saved)
    assert same(before, contents(optimizer, params))
    entry = dict(saved["state"][4])
    entry["exp_avg"] = entry["exp_avg"].full_tensor()
    told = ""
    try:
        optimizer.load_state_dict({**saved, "state": {**saved["state"], 4: entry}})
    except CheckpointError as error:
        told = str(error)
    assert same(before, contents(optimizer, params))
    train(optimizer, params, place, range(2, 4))
    return told


def test_plain_averages_of_sharded_parameters_are_refused(ranks: RankPool) -> None:
    for told in ranks.run(whole_averages, 2):
        assert "exp_avg is of type Tensor, expected a DTensor" in told


def hooked_save(rank: int, world: int) -> list[list[str]]:
    """Keys of each entry that a hook sees, and that are saved."""
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), sharded_mode="distributed")
    train(optimizer, params, place, range(1, 2))
    seen: list[list[str]] = []

    def look(_: Any, saved: dict[str, Any]) -> None:
        seen.extend(sorted(entry) for entry in saved["state"].values())

    optimizer.register_state_dict_post_hook(look)
    assert [sorted(entry) for entry in optimizer.state_dict()["state"].values()] == seen
    return seen


def test_save_hooks_see_the_state_of_all_owners(ranks: RankPool) -> None:
    for seen in ranks.run(hooked_save, 2):
        assert len(seen) == 5
        assert all("index" in keys and "magnitude" in keys for keys in seen)
