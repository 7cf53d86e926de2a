"""What ranks agree on before a step of an optimizer, and what they do after it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from matrices import (
    SHAPES,
    STEPS,
    alone,
    give,
    gradient,
    initial,
    layout,
    parameters,
    settings_of,
    train,
    whole,
)
from pool import RankPool
from sharded import Collectives, contents, refusal, same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gefen import Gefen, GefenMuon, GefenMuonHybrid
from gefen.blocks import row_period
from gefen.codebook import fixed
from gefen.errors import ShardedStepError, UnsupportedParameterError
from gefen.parameters import local


def local_slices(rank: int, world: int, chosen: str) -> None:
    """From the same state on, each rank's slices step as plain tensors do."""
    place, settings = layout("rows", world), settings_of("approx", chosen)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), **settings)
    give(params, place, 1)
    with Collectives() as counter:
        optimizer.step()
        saved = optimizer.state_dict()
        GefenMuon(parameters(place).items(), **settings).load_state_dict(saved)
    assert counter.take() == []
    for name, param in params.items():
        assert optimizer.state[param]["period"] == row_period(SHAPES[name])
        assert torch.equal(optimizer.state[param]["codebook"], fixed())
    slices = {n: nn.Parameter(p.detach().to_local().clone()) for n, p in params.items()}
    plain = GefenMuon(slices.items(), **settings)
    entries = {i: {k: local(v) for k, v in e.items()} for i, e in saved["state"].items()}
    plain.load_state_dict({**saved, "state": entries})
    for step in range(2, STEPS):
        give(params, place, step)
        for name, param in params.items():
            slices[name].grad = local(param.grad)
        with Collectives() as counter:
            optimizer.step()
        assert counter.take() == []
        plain.step()
    for name, param in params.items():
        assert torch.equal(param.detach().to_local(), slices[name]), name


@pytest.mark.parametrize("chosen", ["plain", "normuon", "cautious"])
def test_each_rank_steps_its_slices_without_a_collective(ranks: RankPool, chosen: str) -> None:
    ranks.run(local_slices, 4, chosen)


def cut_rows(rank: int, world: int) -> str:
    params = parameters(layout("columns", world))
    with pytest.raises(UnsupportedParameterError) as caught:
        GefenMuon(params.items(), sharded_mode="approx")
    return str(caught.value)


def test_slices_of_rows_are_refused_by_name(ranks: RankPool) -> None:
    for told in ranks.run(cut_rows, 2):
        assert "Parameter 'a' has placements (Shard(dim=1),)" in told
        assert "pass 'exact'" in told


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
    # Column sums may differ in their last bits, which rounding of momenta then magnifies.
    settings["backup_factored_v_2d"] = False
    lonely, net = model(), model()
    learn_alphabet(lonely, GefenMuonHybrid(lonely, **settings), 3)
    mesh = DeviceMesh("cpu", list(range(world)))
    for layer in (net[1], net[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = GefenMuonHybrid(net, **settings, sharded_mode=mode)
    learn_alphabet(net, optimizer, 3)
    pairs = zip(net.parameters(), lonely.parameters(), model().parameters(), strict=True)
    for param, expected, start in pairs:
        assert isinstance(param, DTensor)
        moved, off = expected - start, whole(param.detach()) - expected
        assert off.square().mean().sqrt() <= 1e-5 * moved.square().mean().sqrt()


@pytest.mark.parametrize(
    ("mode", "backup"), [("exact", "gefen"), ("exact", "adamw"), ("distributed", "gefen")]
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
    told = refusal(optimizer)
    after = optimizer.state_dict()["state"]
    assert all(
        torch.equal(whole(p.detach()), b) for p, b in zip((hidden, bias), before, strict=True)
    )
    assert all(after[i]["step"] == saved[i]["step"] == 1 for i in saved)
    bias.grad = kept
    optimizer.step()
    return told


@pytest.mark.parametrize("only_backup", [False, True])
def test_the_hybrid_agrees_over_both_halves(ranks: RankPool, only_backup: bool) -> None:
    told = ranks.run(hybrid_union, 2, only_backup)
    assert told[0] == told[1]
    assert told[0][0] == "GradientPresenceError"
    assert "'e' has a gradient on rank 1 but none on rank 0" in told[0][1]


def refused_closure(rank: int, world: int, mode: str, good_steps: int) -> tuple[str, str]:
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), sharded_mode=mode)
    train(optimizer, params, place, range(1, 1 + good_steps))
    before = contents(optimizer, params)

    def closure() -> None:
        if rank == 1:
            raise OSError("data ran out")

    told = refusal(optimizer, closure=closure)
    assert same(before, contents(optimizer, params))
    train(optimizer, params, place, range(1, 2))
    return told


@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_a_closure_that_raises_on_one_rank_changes_nothing(ranks: RankPool, mode: str) -> None:
    for good_steps in (0, 2):
        told = ranks.run(refused_closure, 3, mode, good_steps)
        assert len(set(told)) == 1
        assert told[0][0] == "PeerFailureError"
        assert "rank 1 failed with OSError: data ran out" in told[0][1]


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
    before = contents(optimizer, params)
    scaler.step(optimizer)
    assert same(before, contents(optimizer, params))
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
    return refusal(optimizer)


def test_a_missing_amp_control_is_one_error_on_all(ranks: RankPool) -> None:
    told = ranks.run(scale_without_verdict, 2)
    assert told[0] == told[1]
    assert told[0][0] == "PeerFailureError"
    assert "grad_scale is set without found_inf" in told[0][1]


def failing_unscaled(rank: int, world: int, mode: str, good_steps: int) -> list[tuple[str, str]]:
    """Rank 1 fails once the gradients are unscaled, when all have agreed to step."""
    place = layout("rows", world)
    params = parameters(place)
    optimizer = GefenMuon(params.items(), sharded_mode=mode)
    train(optimizer, params, place, range(1, 1 + good_steps))
    saved = copy.deepcopy(optimizer.state_dict())
    real, calls = optimizer._prepare, []

    def prepare(works: Any) -> Any:
        calls.append(works)
        if rank == 1 and len(calls) == 2:
            raise MemoryError("no room")
        return real(works)

    optimizer._prepare = prepare  # type: ignore[method-assign]
    for name, param in params.items():
        param.grad = place(name, torch.ones(SHAPES[name]))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    told = [refusal(optimizer)]
    optimizer._prepare = real  # type: ignore[method-assign]
    optimizer.load_state_dict(saved)
    train(optimizer, params, place, range(1, 2))
    return told


@pytest.mark.parametrize("good_steps", [0, 2])
@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_a_failure_after_unscaling_is_one_error_on_all(
    ranks: RankPool, mode: str, good_steps: int
) -> None:
    told = ranks.run(failing_unscaled, 3, mode, good_steps)
    assert told[0] == told[1] == told[2]
    [(kind, message)] = told[0]
    assert kind == "PeerFailureError"
    assert "rank 1 failed with MemoryError: no room" in message


def mode_of_groups(
    rank: int, world: int, made: str, meant: str, added: bool
) -> tuple[list[list[str]], list[Any]]:
    """Collectives of each step and the end, where a hybrid's groups say otherwise than it did."""
    place = layout("rows", world)
    params = parameters(place)
    muon = [(name, params[name]) for name in "acd"]
    backup = [(name, params[name]) for name in "be"]
    # Its averages need no other rank, those of Gefen do.
    settings: dict[str, Any] = {"lr": 0.02, "backup_optimizer": "adamw"}
    if added:
        optimizer = GefenMuonHybrid([], backup, **settings, sharded_mode=made)
        for pair in muon:
            optimizer.add_param_group({"params": [pair], "sharded_mode": meant})
    else:
        optimizer = GefenMuonHybrid(muon, backup, **settings, sharded_mode=made)
        if made != meant:
            optimizer.param_groups[0]["sharded_mode"] = meant
    counted = []
    for step in range(1, STEPS):
        give(params, place, step)
        with Collectives() as counter:
            optimizer.step()
        counted.append([name for name, _ in counter.take()])
    return counted, [param.detach().to_local().clone() for param in params.values()]


@pytest.mark.parametrize("added", [False, True])
def test_the_mode_of_a_hybrids_groups_decides(ranks: RankPool, added: bool) -> None:
    for made, meant in (("exact", "approx"), ("approx", "exact")):
        told = ranks.run(mode_of_groups, 2, made, meant, added)
        expected = ranks.run(mode_of_groups, 2, meant, meant, False)
        for (calls, found), (wanted_calls, wanted) in zip(told, expected, strict=True):
            assert same(found, wanted)
            assert len(calls) == STEPS - 1
            for step, wanted_step in zip(calls, wanted_calls, strict=True):
                assert step.count("allreduce") == wanted_step.count("allreduce")
                assert bool(step) is (meant == "exact")


def given(params: dict[str, nn.Parameter], place: Any, scale: float) -> None:
    for name, param in params.items():
        full = gradient(name, 1)
        assert full is not None
        param.grad = place(name, full * scale)


def attempt(scaler: torch.amp.GradScaler, optimizer: Any) -> str:
    try:
        scaler.step(optimizer)
    except ShardedStepError as error:
        return type(error).__name__
    return "no error"


def refused_under_a_scaler(rank: int, world: int, mode: str, fault: str) -> list[str]:
    """A scaled step is refused, corrected and taken; a plain optimizer takes it alone.

    The scale is no power of two, so that dividing by it rounds.
    """
    place = layout("rows", world)
    params, plain = parameters(place), parameters(place)
    matrices, rest = list(params.items())[:3], list(params.items())[3:]
    optimizer = GefenMuonHybrid(matrices, rest, lr=0.02, sharded_mode=mode)
    other = GefenMuonHybrid(
        list(plain.items())[:3], list(plain.items())[3:], lr=0.02, sharded_mode=mode
    )
    scaler, alone_scaler = (torch.amp.GradScaler("cpu", init_scale=6.0) for _ in range(2))
    for each in (scaler, alone_scaler):
        each.scale(torch.ones(()))
    told = []
    given(params, place, 6.0)
    before = contents(optimizer, params)
    if fault == "gradient":
        kept, params["a"].grad = params["a"].grad, params["a"].grad if rank else None
        told.append(attempt(scaler, optimizer))
        params["a"].grad = kept
    elif fault == "setting":
        optimizer.param_groups[0]["lr"] = 0.02 + rank
        told.append(attempt(scaler, optimizer))
        optimizer.param_groups[0]["lr"] = 0.02
    else:
        assert optimizer.muon is not None
        real = optimizer.muon._survey
        if rank == 1:
            optimizer.muon._survey = failing_survey(real)  # type: ignore[method-assign]
        told.append(attempt(scaler, optimizer))
        optimizer.muon._survey = real  # type: ignore[method-assign]
    assert same(before, contents(optimizer, params))
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    told.append(attempt(scaler, optimizer))
    given(plain, place, 6.0)
    told.append(attempt(alone_scaler, other))
    assert same(contents(optimizer, params), contents(other, plain))
    return told


def failing_survey(real: Any) -> Any:
    def survey(plan: Any, failure: Any, first: bool) -> Any:
        failure.keep(raising, None)
        return real(plan, failure, first)

    return survey


def raising() -> None:
    raise MemoryError("no room")


@pytest.mark.parametrize("mode", ["exact", "distributed"])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("gradient", "GradientPresenceError"),
        ("setting", "HyperparameterMismatchError"),
        ("survey", "PeerFailureError"),
    ],
)
def test_a_refused_scaled_step_leaves_nothing_behind(
    ranks: RankPool, mode: str, fault: str, kind: str
) -> None:
    for told in ranks.run(refused_under_a_scaler, 2, mode, fault):
        assert told == [kind, "no error", "no error"]


def unscaled_bits(rank: int, world: int) -> None:
    """A scaled step has the bits that a scaler gives one process."""
    place = layout("rows", world)
    params, lonely = parameters(place), parameters(alone)
    for mine, where in ((params, place), (lonely, alone)):
        given(mine, where, 7.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=7.0)
        scaler.scale(torch.ones(()))
        scaler.step(GefenMuon(mine.items(), lr=0.02))
    for name, param in params.items():
        assert torch.equal(whole(param.grad), lonely[name].grad), name
        assert torch.equal(whole(param.detach()), lonely[name]), name


def test_scaled_steps_have_the_bits_of_one_process(ranks: RankPool) -> None:
    ranks.run(unscaled_bits, 2)


def unscaled_float16(rank: int, world: int, where: str, kind: str) -> None:
    """Gradients that float16 loses without their scale count as in one process."""
    place = layout(where, world)
    params, lonely = (parameters(how, torch.float16) for how in (place, alone))
    for mine, how in ((params, place), (lonely, alone)):
        for name, param in mine.items():
            full = gradient(name, 1)
            assert full is not None
            param.grad = how(name, (full * 1e-3).half())
        make = {"gefen": Gefen, "muon": GefenMuon}[kind]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scaler.scale(torch.ones(()))
        scaler.step(make(mine.items(), lr=0.02, eps=1e-12))
    for name, param in params.items():
        found, expected = whole(param.detach()), lonely[name].detach()
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("where", ["rows", "columns"])
@pytest.mark.parametrize("kind", ["gefen", "muon"])
def test_float16_is_unscaled_as_in_one_process(ranks: RankPool, where: str, kind: str) -> None:
    ranks.run(unscaled_float16, 2, where, kind)


def scaled_adamw(rank: int, world: int) -> tuple[str, str]:
    """torch's AdamW has no wider copy to unscale."""
    place = layout("rows", world)
    net = nn.Linear(8, 8)
    for name in ("weight", "bias"):
        param = nn.Parameter(place(name, torch.ones(8, 8)[0 if name == "bias" else ...].half()))
        param.grad = param.detach().clone()
        setattr(net, name, param)
    optimizer: Any = GefenMuonHybrid(net, lr=0.02, backup_optimizer="adamw")
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    told = refusal(optimizer)
    assert (whole(net.weight.detach()) == 1).all()
    return told


def test_adamw_beside_float16_is_refused_under_a_scaler(ranks: RankPool) -> None:
    for _, text in ranks.run(scaled_adamw, 2):
        assert "torch's AdamW cannot unscale beside float16 parameters" in text
