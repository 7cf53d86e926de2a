"""Sharded steps of the optimizers, beside the same steps in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gefen import Gefen, GefenMuon, GefenMuonHybrid
from gefen.distributed import consolidate
from gefen.errors import ShardedStepError

SHAPES = {"a": (12, 8), "b": (1, 16), "c": (3, 8), "d": (9, 5), "e": (8, 24)}
STEPS = 4

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normuon": {"normuon": True, "ns_schedule": "tuned3", "adjust_lr_fn": "match_rms_adamw"},
    "cautious": {"cautious": True, "nesterov": False},
    "stochastic": {"stochastic_round": True, "batched_ns": True},
}


def initial(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def gradient(name: str, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
    """Gradients come and go: 'c' has none in step 0, 'd' none in step 2."""
    if (name, step) in {("c", 0), ("d", 2)}:
        return None
    torch.manual_seed(100 * step + ord(name))
    return torch.randn(SHAPES[name]).to(dtype)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


Place = Callable[[str, torch.Tensor], torch.Tensor]


def train(
    optimizer: torch.optim.Optimizer,
    params: dict[str, nn.Parameter],
    place: Place,
    steps: range = range(STEPS),
) -> dict[str, torch.Tensor]:
    for step in steps:
        for name, param in params.items():
            grad = gradient(name, step, param.dtype)
            param.grad = None if grad is None else place(name, grad)
        optimizer.step()
    return {name: whole(param.detach()).clone() for name, param in params.items()}


def parameters(place: Place, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(place(name, full)) for name, full in initial(dtype).items()}


def alone(name: str, full: torch.Tensor) -> torch.Tensor:
    return full


def over(mesh: DeviceMesh, *placements: Any) -> Place:
    return lambda name, full: distribute_tensor(full, mesh, placements, src_data_rank=None)


def layout(name: str, world: int) -> Place:
    line = DeviceMesh("cpu", list(range(world)))
    if name in ("rows", "columns", "replicated"):
        return over(line, {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}[name])
    if name == "two meshes":
        second = DeviceMesh("cpu", torch.arange(world).view(1, -1))
        places = [over(line, Shard(0)), over(second, Replicate(), Shard(1))]
        return lambda name, full: places[ord(name) % 2](name, full)
    grid = DeviceMesh("cpu", torch.arange(world).view(2, -1))
    pairs = {"hybrid": (Replicate(), Shard(0)), "grid": (Shard(0), Shard(1))}
    return over(grid, *pairs[name])


def settings_of(mode: str, chosen: str) -> dict[str, Any]:
    return {"lr": 0.02, "sharded_mode": mode, **SETTINGS[chosen]}


def compare(rank: int, world: int, where: str, mode: str, chosen: str) -> None:
    dtype = torch.bfloat16 if chosen == "normuon" else torch.float32
    lonely = parameters(alone, dtype)
    settings = settings_of(mode, chosen)
    expected = train(GefenMuon(lonely.items(), **settings), lonely, alone)
    place = layout(where, world)
    params = parameters(place, dtype)
    optimizer = GefenMuon(params.items(), **settings)
    found = train(optimizer, params, place)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("mode", ["exact", "distributed"])
@pytest.mark.parametrize(
    ("where", "world", "chosen"),
    [
        ("rows", 2, "plain"),
        ("rows", 4, "normuon"),
        ("columns", 3, "normuon"),
        ("two meshes", 2, "stochastic"),
        ("hybrid", 4, "plain"),
        ("replicated", 2, "plain"),
    ],
)
def test_a_sharded_step_has_the_bits_of_one_process(
    ranks: RankPool, where: str, world: int, chosen: str, mode: str
) -> None:
    ranks.run(compare, world, where, mode, chosen)


def test_a_cautious_exact_step_has_the_bits_of_one_process(ranks: RankPool) -> None:
    ranks.run(compare, 2, "rows", "exact", "cautious")


def mode_equality(rank: int, world: int) -> None:
    """A layout that no parcel serves: 'distributed' warns and steps it as 'exact' does."""
    place = layout("grid", world)
    expected = parameters(alone)
    train(GefenMuon(expected.items(), lr=0.02), expected, alone)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), lr=0.02, sharded_mode="distributed")
    with pytest.warns(UserWarning, match=r"placements .*Shard.*'a', 'b', 'c', 'd' and 1 more are"):
        found = train(optimizer, params, place)
    for name, value in expected.items():
        assert torch.equal(found[name], value.detach()), name


def test_an_unserved_layout_warns_and_is_stepped_exactly(ranks: RankPool) -> None:
    ranks.run(mode_equality, 4)


def local_slices(rank: int, world: int, kind: str) -> list[str]:
    """Each rank's slices step as plain tensors do, and no collective is entered."""
    place = layout("rows", world)
    params, calls = parameters(place), count_collectives()
    if kind == "gefen":
        make: Any = lambda named, **own: Gefen(named, lr=0.02, **own)  # noqa: E731
        own = {"factored_v_2d": False}
    else:
        make = lambda named, **own: GefenMuon(named, lr=0.02, sharded_mode="approx")  # noqa: E731
        own = {}
    slices = {n: nn.Parameter(p.detach().to_local().clone()) for n, p in params.items()}
    optimizer, plain = make(params.items()), make(slices.items(), **own)
    for step in range(STEPS):
        for name in SHAPES:
            grad = gradient(name, step)
            shard = None if grad is None else place(name, grad)
            params[name].grad = shard
            slices[name].grad = None if shard is None else shard.to_local()
        calls.clear()
        optimizer.step()
        assert calls == []
        plain.step()
    for name, param in params.items():
        assert torch.equal(param.detach().to_local(), slices[name]), name
    fresh = make(params.items())
    fresh.load_state_dict(optimizer.state_dict())
    assert calls == []
    return list(params)


@pytest.mark.parametrize("kind", ["gefen", "approx"])
def test_each_rank_steps_its_slices_without_a_collective(ranks: RankPool, kind: str) -> None:
    ranks.run(local_slices, 4, kind)


def count_collectives() -> list[str]:
    calls: list[str] = []
    for name in ("all_reduce", "all_gather_single", "all_to_all_single", "broadcast"):
        real = getattr(dist, name)
        setattr(dist, name, lambda *a, n=name, f=real, **k: (calls.append(n), f(*a, **k))[1])
    return calls


def collectives_of_a_step(rank: int, world: int, mode: str) -> tuple[list[str], int, int]:
    """Collectives of the last step, momentum bytes held, elements of all matrices."""
    place = layout("rows", world)
    params, calls = parameters(place), count_collectives()
    optimizer = GefenMuon(params.items(), sharded_mode=mode)
    train(optimizer, params, place, range(3))
    train(optimizer, params, place, range(3, 4))
    calls.clear()
    optimizer.step()
    state = optimizer.state_dict if mode == "exact" else None
    held = sum(e["index"].numel() for e in optimizer.state.values() if "index" in e)
    assert state is None or len(state()["state"]) == len(SHAPES)
    return list(calls), held, sum(p.numel() for p in params.values())


def test_distributed_momentum_exists_on_owners_alone(ranks: RankPool) -> None:
    told = ranks.run(collectives_of_a_step, 3, "distributed")
    assert sum(held for _, held, _ in told) == told[0][2]
    assert all(calls.count("all_reduce") == 1 for calls, _, _ in told)
    assert all(calls.count("all_to_all_single") == 2 for calls, _, _ in told)


def test_exact_momentum_exists_everywhere(ranks: RankPool) -> None:
    told = ranks.run(collectives_of_a_step, 2, "exact")
    assert all(held == elements for _, held, elements in told)
    assert all(calls.count("all_reduce") == 1 for calls, _, _ in told)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(11, 12), nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 7), nn.LayerNorm(7)
    )


def learn_alphabet(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        loss = net(torch.randint(11, (16,))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fully_sharded(rank: int, world: int, mode: str, backup: str) -> None:
    """FSDP2 over a real module; every rank has the same batch, so gradients are those of one."""
    from torch.distributed.fsdp import fully_shard

    settings: dict[str, Any] = {"lr": 0.01, "normuon": False, "backup_optimizer": backup}
    lonely, net = model(), model()
    learn_alphabet(lonely, GefenMuonHybrid(lonely, **settings), 3)
    mesh = DeviceMesh("cpu", list(range(world)))
    for layer in (net[1], net[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = GefenMuonHybrid(net, **settings, sharded_mode=mode)
    learn_alphabet(net, optimizer, 3)
    # Gefen learns blocks and codebook from each rank's slices, so its path is another one.
    share = 1e-5 if backup == "adamw" else 0.5
    pairs = zip(net.parameters(), lonely.parameters(), model().parameters(), strict=True)
    for param, expected, start in pairs:
        assert isinstance(param, DTensor)
        moved, off = expected - start, whole(param.detach()) - expected
        assert off.square().mean().sqrt() <= share * moved.square().mean().sqrt()


@pytest.mark.parametrize(
    ("mode", "backup"), [("exact", "gefen"), ("exact", "adamw"), ("distributed", "adamw")]
)
def test_a_fully_sharded_module_trains_like_the_plain_one(
    ranks: RankPool, mode: str, backup: str
) -> None:
    ranks.run(fully_sharded, 2, mode, backup)


def hybrid_union(rank: int, world: int, only_backup: bool) -> tuple[str, str]:
    """The fault is in the backup half; Muon's matrices are plain where ``only_backup``."""
    place = layout("rows", world)
    hidden = nn.Parameter(
        alone("a", initial()["a"]) if only_backup else place("a", initial()["a"])
    )
    bias = nn.Parameter(place("e", initial()["e"]))
    optimizer = GefenMuonHybrid([("a", hidden)], [("e", bias)], lr=0.01)
    for param in (hidden, bias):
        param.grad = param.detach().clone()
    optimizer.step()
    before = [whole(p.detach()).clone() for p in (hidden, bias)]
    saved = {i: dict(e) for i, e in optimizer.state_dict()["state"].items()}
    kept, bias.grad = bias.grad, bias.grad if rank else None
    told = refused(optimizer)
    after = optimizer.state_dict()["state"]
    assert all(
        torch.equal(whole(p.detach()), b) for p, b in zip((hidden, bias), before, strict=True)
    )
    assert all(after[i]["step"] == saved[i]["step"] == 1 for i in saved)
    bias.grad = kept
    optimizer.step()
    return told


def refused(optimizer: torch.optim.Optimizer, **arguments: Any) -> tuple[str, str]:
    try:
        optimizer.step(**arguments)
    except ShardedStepError as error:
        return type(error).__name__, str(error)
    return "", "no error"


@pytest.mark.parametrize("only_backup", [False, True])
def test_the_hybrid_agrees_over_both_halves(ranks: RankPool, only_backup: bool) -> None:
    told = ranks.run(hybrid_union, 2, only_backup)
    assert told[0] == told[1]
    assert told[0][0] == "GradientPresenceError"
    assert "'e' has a gradient on rank 1 but none on rank 0" in told[0][1]


def snapshot(optimizer: torch.optim.Optimizer, params: dict[str, nn.Parameter]) -> list[Any]:
    held: list[Any] = [p.detach().to_local().clone() for p in params.values()]
    held += [None if p.grad is None else p.grad.to_local().clone() for p in params.values()]
    for entry in optimizer.state.values():
        held += [v.clone() if isinstance(v, torch.Tensor) else v for v in entry.values()]
    return held


def same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(first, second, strict=True)
    )


def refused_closure(rank: int, world: int, mode: str, good_steps: int) -> tuple[str, str]:
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), sharded_mode=mode)
    train(optimizer, params, place, range(1, 1 + good_steps))
    before = snapshot(optimizer, params)

    def closure() -> None:
        if rank == 1:
            raise OSError("data ran out")

    told = refused(optimizer, closure=closure)
    assert same(before, snapshot(optimizer, params))
    train(optimizer, params, place, range(1, 2))
    return told


@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_a_closure_that_raises_on_one_rank_changes_nothing(ranks: RankPool, mode: str) -> None:
    for good_steps in (0, 2):
        told = ranks.run(refused_closure, 3, mode, good_steps)
        assert len(set(told)) == 1
        assert told[0][0] == "PeerFailureError"
        assert "rank 1 failed with OSError: data ran out" in told[0][1]


def failing_owner(rank: int, world: int, mode: str, how: str) -> list[tuple[str, str]]:
    """Rank 2's orthogonalisation fails; ranks 0 and 2 share no mesh."""
    from gefen import gefen_muon

    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    params = {
        f"w{i}{j}": nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
        for i, mesh in enumerate(meshes)
        if mesh.get_coordinate() is not None
        for j in range(2)
    }
    optimizer = GefenMuon(params.items(), sharded_mode=mode)
    for param in params.values():
        param.grad = torch.ones_like(param.detach())
    optimizer.step()
    saved = optimizer.state_dict()
    real = gefen_muon.orthogonalise
    if rank == 2:
        gefen_muon.orthogonalise = raising if how == "raise" else lambda u, *_: u * torch.nan
    told = [refused(optimizer), refused(optimizer)]
    gefen_muon.orthogonalise = real
    optimizer.load_state_dict(saved)
    optimizer.step()
    return told


def raising(*_: Any) -> None:
    raise MemoryError("no room")


@pytest.mark.parametrize("mode", ["exact", "distributed"])
@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_failing_owner_reaches_every_rank_and_a_load_mends(
    ranks: RankPool, mode: str, how: str
) -> None:
    told = ranks.run(failing_owner, 3, mode, how)
    assert len({repr(each) for each in told}) == 1
    for kind, message in told[0]:
        assert kind == "PeerFailureError"
        assert "load a checkpoint" in message
        assert ("no room" if how == "raise" else "is not finite") in message


def non_finite_gradient(rank: int, world: int, mode: str) -> None:
    """As in one process: what it touches becomes non-finite, without an error."""
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), sharded_mode=mode)
    train(optimizer, params, place, range(1, 2))
    spoiled = initial()["a"]
    spoiled[0, 0] = torch.inf
    params["a"].grad = place("a", spoiled)
    optimizer.step()
    assert not whole(params["a"].detach()).isfinite().all()
    assert whole(params["e"].detach()).isfinite().all()


@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_non_finite_gradients_propagate(ranks: RankPool, mode: str) -> None:
    ranks.run(non_finite_gradient, 2, mode)


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
    optimizer.load_state_dict({**saved, "param_groups": regrouped(saved, mode)})
    return train(optimizer, params, place, range(2, STEPS))


def regrouped(saved: Any, mode: str) -> list[dict[str, Any]]:
    return [{**group, "sharded_mode": mode} for group in saved["param_groups"]]


def test_checkpoints_continue_bitwise_on_other_worlds_and_in_other_modes(
    ranks: RankPool,
) -> None:
    saves = ranks.run(save, 3, "distributed", "normuon")
    for saved, _, _ in saves:
        assert all("index" in entry for entry in saved["state"].values())
    saved, middle, expected = saves[1]
    for world, mode in ((1, "exact"), (2, "distributed"), (3, "exact"), (4, "distributed")):
        for found in ranks.run(resume, world, mode, "normuon", saved, middle):
            assert all(torch.equal(found[name], expected[name]) for name in expected), (
                world,
                mode,
            )


def save_alone(rank: int, world: int) -> str:
    consolidate.ARRIVAL_S = 0.5
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
    consolidate.ARRIVAL_S = 10
    optimizer.state_dict()
    return told


def test_a_checkpoint_on_one_rank_alone_names_the_missing_ranks(ranks: RankPool) -> None:
    assert "in vain for ranks 1-2" in ranks.run(save_alone, 3)[0]


def incomplete(rank: int, world: int) -> None:
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), sharded_mode="distributed")
    train(optimizer, params, place, range(2))
    before = snapshot(optimizer, params)
    broken = optimizer.state_dict()
    del broken["state"][0]["index"]
    with pytest.raises(ValueError, match=r"Nothing was loaded.*'a'"):
        optimizer.load_state_dict(broken)
    assert same(before, snapshot(optimizer, params))


def test_incomplete_owner_state_is_refused(ranks: RankPool) -> None:
    ranks.run(incomplete, 2)


def scaled(rank: int, world: int, mode: str) -> None:
    """An infinity on rank 0 alone: nobody steps. Then the unscaled step is the plain one."""
    place = layout("rows", world)
    params, plain = parameters(place), parameters(place)
    optimizer = GefenMuon(params.items(), sharded_mode=mode)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for name, param in params.items():
        spoiled = torch.full(SHAPES[name], 8.0)
        if rank == 0 and name == "a":
            spoiled[0, 0] = torch.inf
        param.grad = place(name, spoiled)
    before = snapshot(optimizer, params)
    scaler.step(optimizer)
    assert same(before, snapshot(optimizer, params))
    for name in SHAPES:
        full = gradient(name, 1)
        assert full is not None
        params[name].grad, plain[name].grad = place(name, full * 8), place(name, full)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    GefenMuon(plain.items(), sharded_mode=mode).step()
    for name, param in params.items():
        assert torch.equal(whole(param.detach()), whole(plain[name].detach()))
        assert torch.equal(whole(param.grad), whole(plain[name].grad))


@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_an_overflow_on_one_rank_skips_the_step_everywhere(ranks: RankPool, mode: str) -> None:
    ranks.run(scaled, 2, mode)


def scale_without_verdict(rank: int, world: int) -> tuple[str, str]:
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items())
    for name, param in params.items():
        param.grad = place(name, torch.ones(SHAPES[name]))
    if rank == 1:
        optimizer.grad_scale = torch.tensor(2.0)
    return refused(optimizer)


def test_a_missing_amp_control_is_one_error_on_all(ranks: RankPool) -> None:
    told = ranks.run(scale_without_verdict, 2)
    assert told[0] == told[1]
    assert told[0][0] == "PeerFailureError"
    assert "grad_scale is set without found_inf" in told[0][1]
