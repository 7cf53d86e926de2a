"""Gefen on several ranks has the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from matrices import Place, alone, layout, whole
from pool import RankPool
from sharded import Collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gefen import Gefen

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (12, 48),
    "odd": (9, 5),
    "row": (1, 16),
    "vector": (96,),
    "short": (3,),
    "stack": (5, 4, 6),
    "rare": (40, 32),
    "late": (7, 24),
}
STEPS = 6
FORMS: dict[str, dict[str, Any]] = {
    "factored": {},
    "block": {"factored_v_2d": False},
    "stochastic": {"stochastic_round": True, "factored_v_2d": False},
    "refreshed": {"codebook_refresh_every": 2, "factored_v_2d": False},
}


def gradient(name: str, step: int) -> torch.Tensor | None:
    """'late' has zeros first, 'rare' in most rows, 'odd' none in step 2, all more and more."""
    shape = SHAPES[name]
    torch.manual_seed(100 * step + len(name) + ord(name[0]))
    grad = torch.randn(shape) * (torch.randn(shape[0]).exp().view(-1, *[1] * (len(shape) - 1)))
    grad *= torch.linspace(0.1, 3, grad.numel()).view(shape).round()  # runs of one size
    if name == "rare":
        grad[step + 1 :] = 0
    if name == "late" and step < 2:
        grad.zero_()
    return None if (name, step) == ("odd", 2) else grad * (step + 1)


def trained(place: Place, dtype: torch.dtype, chosen: str) -> tuple[Any, dict[str, nn.Parameter]]:
    torch.manual_seed(7)
    params = {n: nn.Parameter(place(n, torch.randn(s).to(dtype))) for n, s in SHAPES.items()}
    optimizer = Gefen(params.items(), lr=0.02, weight_decay=0.1, **FORMS[chosen])
    for step in range(STEPS):
        for name, param in params.items():
            grad = gradient(name, step)
            param.grad = None if grad is None else place(name, grad.to(dtype))
        optimizer.step()
    return optimizer, params


def compare(rank: int, world: int, where: str, chosen: str, dtype: torch.dtype) -> None:
    """State but second moments, of which sums over ranks are rounded otherwise, in all bits."""
    single, lonely = trained(alone, dtype, chosen)
    matrices, vectors = layout(where, world), layout("rows", world)
    optimizer, params = trained(
        lambda name, full: (matrices if full.dim() > 1 else vectors)(name, full), dtype, chosen
    )
    for name, param in params.items():
        own, expected = optimizer.state[param], single.state[lonely[name]]
        assert own["period"] == expected["period"], name
        for key in ("codebook", "global_step", "index", "magnitude"):
            assert torch.equal(whole(own[key]), expected[key]), (name, key)
        for key in own.keys() & {"v", "v_row", "v_col"}:
            torch.testing.assert_close(whole(own[key]), expected[key], rtol=1e-6, atol=0)
        found, wanted = whole(param.detach()), lonely[name].detach()
        unit = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(found, wanted, rtol=unit, atol=unit)


@pytest.mark.parametrize("chosen", FORMS)
@pytest.mark.parametrize(
    ("where", "world"),
    [("rows", 2), ("rows", 4), ("columns", 3), ("hybrid", 4), ("grid", 4), ("replicated", 2)],
)
def test_the_numbers_are_those_of_one_process(
    ranks: RankPool, where: str, world: int, chosen: str
) -> None:
    ranks.run(compare, world, where, chosen, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_numbers_of_other_dtypes(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(compare, 3, "rows", "factored", dtype)


def copies(rank: int, world: int) -> dict[str, torch.Tensor]:
    """What ranks have alike: all of what is replicated, and what belongs to no row."""
    _, params = trained(layout("replicated", world), torch.float32, "factored")
    sharded, cut = trained(layout("rows", world), torch.float32, "factored")
    found = {name: param.detach().to_local() for name, param in params.items()}
    for name, param in cut.items():
        entry = {k: v for k, v in sharded.state[param].items() if isinstance(v, DTensor)}
        kept = {k: v.to_local() for k, v in entry.items() if v.placements[0].is_replicate()}
        found |= {f"{name} {key}": value for key, value in kept.items()}
    return found


def test_what_ranks_hold_alike_stays_equal_bit_for_bit(ranks: RankPool) -> None:
    first, *others = ranks.run(copies, 3)
    assert {"matrix", "matrix v_col", "row v_col", "vector index", "vector v"} <= first.keys()
    for other in others:
        assert all(torch.equal(other[key], value) for key, value in first.items())


def held(rank: int, world: int) -> tuple[list[str], dict[str, int]]:
    """Collectives of a step, and elements of the momenta of matrices on this rank."""
    optimizer, params = trained(layout("rows", world), torch.float32, "factored")
    with Collectives() as counter:
        optimizer.step()
        optimizer.state_dict()
    sizes = {n: optimizer.state[p]["index"].to_local().numel() for n, p in params.items()}
    return [name for name, _ in counter.take()], {n: sizes[n] for n in ("matrix", "odd", "stack")}


def test_state_is_spread_over_ranks_and_columns_are_added_at_once(ranks: RankPool) -> None:
    """To agree; sums of columns; the vectors; to close."""
    told = ranks.run(held, 3)
    for calls, _ in told:
        assert calls == ["allreduce", "allreduce", "allreduce", "allgather_base"]
    assert [sizes["matrix"] for _, sizes in told] == [192, 192, 192]
    assert [sizes["odd"] for _, sizes in told] == [15, 15, 15]
    assert [sizes["stack"] for _, sizes in told] == [48, 48, 24]


def shared_and_own(rank: int, world: int) -> torch.Tensor:
    """A plain parameter that ranks hold alike counts once in the codebook."""
    place = layout("rows", world)
    torch.manual_seed(1)
    grads = [torch.randn(8, 16), torch.rand(64)]
    params = [nn.Parameter(place("", torch.ones(8, 16))), nn.Parameter(torch.ones(64))]
    params[0].grad, params[1].grad = place("", grads[0]), grads[1]
    optimizer = Gefen(zip("ab", params, strict=True))
    optimizer.step()
    lonely = [nn.Parameter(torch.ones(8, 16)), nn.Parameter(torch.ones(64))]
    for param, grad in zip(lonely, grads, strict=True):
        param.grad = grad
    single = Gefen(zip("ab", lonely, strict=True))
    single.step()
    assert torch.equal(optimizer.state[params[1]]["codebook"], single.state[lonely[1]]["codebook"])
    assert torch.equal(params[1], lonely[1])
    return params[1].detach()


def test_a_plain_parameter_beside_sharded_ones_stays_equal(ranks: RankPool) -> None:
    first, second = ranks.run(shared_and_own, 2)
    assert torch.equal(first, second)


def ignored(rank: int, world: int) -> tuple[bytes, ...]:
    """FSDP2 leaves one parameter plain; each rank has its own batch."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 7, bias=False))
    mesh = DeviceMesh("cpu", list(range(world)))
    fully_shard(net, mesh=mesh, ignored_params={net[0].bias})
    optimizer = Gefen(net.named_parameters(), lr=0.01)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        net(torch.randn(16, 12)).square().mean().backward()
        dist.all_reduce(net[0].bias.grad)
        optimizer.step()
    bias = optimizer.state[net[0].bias]
    return net[0].bias.detach().numpy().tobytes(), bias["index"].numpy().tobytes()


def test_a_parameter_that_fsdp_ignores_stays_equal(ranks: RankPool) -> None:
    first, second = ranks.run(ignored, 2)
    assert first == second


def pieces_without_gradient(rank: int, world: int) -> dict[str, Any]:
    """A gradient that is zero in all rows of a rank decides nothing there alone."""
    place = layout("rows", world)
    param = nn.Parameter(place("", torch.ones(8, 48)))
    optimizer = Gefen([("w", param)], factored_v_2d=False)
    grad = torch.zeros(8, 48)
    grad[:2] = torch.logspace(0, 3, 6).repeat_interleave(16).view(2, 48)
    periods = []
    for full in (torch.zeros(8, 48), grad):
        param.grad = place("", full)
        optimizer.step()
        periods.append(optimizer.state[param]["period"])
    return {"periods": periods, "param": whole(param.detach())}


def test_blocks_are_chosen_by_the_rows_of_all_ranks(ranks: RankPool) -> None:
    for found in ranks.run(pieces_without_gradient, 4):
        assert found["periods"] == [0, 16]
        assert torch.equal(found["param"][2:], torch.ones(6, 48))
        assert (found["param"][:2] != 1).all()


def crossed(rank: int, world: int) -> tuple[bytes, ...]:
    """Rank 1 has registered what lies on two meshes the other way round."""
    found: dict[str, nn.Parameter] = {}
    for name, ranks, rows in (("pair", 2, 8), ("all", 3, 10)):
        mesh = DeviceMesh("cpu", list(range(ranks)))
        if rank < ranks:
            whole_ = torch.linspace(-1, 1, rows * 12).view(rows, 12)
            found[name] = nn.Parameter(distribute_tensor(whole_, mesh, [Shard(1)]))
    optimizer = Gefen(sorted(found.items(), reverse=rank == 1))
    for _ in range(2):
        for param in found.values():
            param.grad = param.detach().clone()
        optimizer.step()
    return tuple(whole(found[name].detach()).numpy().tobytes() for name in sorted(found))


def test_columns_on_overlapping_meshes_are_stepped_in_any_order(ranks: RankPool) -> None:
    first, second, third = ranks.run(crossed, 3)
    assert first == second
    assert third == first[:1]
