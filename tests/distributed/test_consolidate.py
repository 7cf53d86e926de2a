from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks import RankPool
from torch.distributed.device_mesh import DeviceMesh

from gefen.distributed.consolidate import Holding, consolidate, meet
from gefen.distributed.mesh import mesh_channels
from gefen.errors import CheckpointError, PeerFailureError


def meet_alone_then_together(rank: int, world: int) -> list[str]:
    told = []
    ranks = list(range(world))
    if rank != 1:
        try:
            meet("state_dict()", ranks, rank, timeout_s=0.5)
        except PeerFailureError as error:
            told.append(str(error))
    dist.barrier()
    for _ in range(3):
        meet("state_dict()", ranks, rank, timeout_s=10)
    return told


def test_ranks_that_wait_in_vain_name_the_missing_and_can_meet_again(ranks: RankPool) -> None:
    told = ranks.run(meet_alone_then_together, 3)
    assert told[1] == []
    for rank in (0, 2):
        assert "in vain for rank 1: state_dict()" in told[rank][0]
        assert "ranks 0-2" in told[rank][0]


def gather_entries(rank: int, world: int, lose: bool) -> Any:
    mesh = DeviceMesh("cpu", list(range(world)))
    holdings = [
        Holding(
            f"w{owner}",
            owner,
            mesh.get_group(),
            torch.device("cpu"),
            None
            if owner != rank or (lose and owner == 1)
            else {"step": owner + 1, "index": torch.full((2, owner), owner, dtype=torch.uint8)},
        )
        for owner in range(world)
    ]
    try:
        entries = consolidate(holdings, mesh_channels(mesh), 1)
    except CheckpointError as error:
        return str(error)
    return {n: (e["step"], e["index"].tolist()) for n, e in entries.items()}


def test_every_rank_gets_every_owners_entries(ranks: RankPool) -> None:
    expected = {"w0": (1, [[], []]), "w1": (2, [[1], [1]]), "w2": (3, [[2, 2], [2, 2]])}
    assert ranks.run(gather_entries, 3, False) == [expected] * 3


def test_an_entry_that_its_owner_lost_is_refused_on_every_rank(ranks: RankPool) -> None:
    told = ranks.run(gather_entries, 3, True)
    assert len(set(told)) == 1
    assert "'w1' (owner: rank 1) is missing" in told[0]
