from __future__ import annotations

import torch.distributed as dist
from pool import RankPool

from gefen.distributed.meeting import meet
from gefen.errors import PeerFailureError


def meet_alone_then_together(rank: int, world: int) -> list[str]:
    told = []
    ranks = list(range(world))
    dist.barrier()
    if rank != 1:
        try:
            meet("load_state_dict()", ranks, rank, timeout_s=4)
        except PeerFailureError as error:
            told.append(str(error))
    dist.barrier()
    for _ in range(3):
        meet("load_state_dict()", ranks, rank, timeout_s=60)
    return told


def test_ranks_that_wait_in_vain_name_the_missing_and_can_meet_again(ranks: RankPool) -> None:
    told = ranks.run(meet_alone_then_together, 3)
    assert told[1] == []
    for rank in (0, 2):
        assert "in vain for rank 1: load_state_dict()" in told[rank][0]
        assert "ranks 0-2" in told[rank][0]
