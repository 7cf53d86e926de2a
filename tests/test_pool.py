from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from pool import RankError, RankPool


def add_ranks(rank: int, world: int, extra: int) -> int:
    total = torch.tensor([rank + extra])
    dist.all_reduce(total)
    return int(total)


def leave_rank_zero_waiting(rank: int, world: int) -> None:
    dist.barrier()
    if rank == 0:
        dist.barrier()
    else:
        dist.recv(torch.zeros(1), src=0)


def die_on_rank_one(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)


def raise_on_rank_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("on purpose")


def test_returns_each_ranks_value(ranks: RankPool) -> None:
    assert ranks.run(add_ranks, 3, 10) == [33, 33, 33]


def test_a_hang_fails_and_shows_every_ranks_stack(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0: hung.*barrier.*rank 1: hung.*recv"):
        ranks.run(leave_rank_zero_waiting, 2, limit_s=3.0)
    assert ranks.run(add_ranks, 2, 0) == [1, 1]


def test_a_dead_rank_fails(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1: died"):
        ranks.run(die_on_rank_one, 2)


def test_an_exception_fails_with_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="ValueError: on purpose"):
        ranks.run(raise_on_rank_one, 2)
