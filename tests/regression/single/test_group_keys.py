"""What training code puts into parameter groups for torch's optimizers or for gefen-x."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from training import gradients, start, train

from gefen import Gefen, GefenMuon, GefenMuonHybrid
from gefen.errors import CheckpointError, InvalidArgumentError

SHAPE = (8, 12)


def adamw(params: list[Any], **chosen: Any) -> GefenMuonHybrid:
    """A hybrid whose one parameter goes to AdamW, taken as other optimizers take it."""
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    named = [{**group, "params": [("p", *group["params"])]} for group in groups]
    chosen = {"lr": 1e-3, "backup_optimizer": "adamw", "sides": {"p": "backup"}, **chosen}
    return GefenMuonHybrid(named, **chosen)


MAKERS: dict[str, Callable[..., Any]] = {"gefen": Gefen, "muon": GefenMuon, "adamw": adamw}


def run(make: Any, group: dict[str, Any], **chosen: Any) -> torch.Tensor:
    param = start(SHAPE)
    return train(make([{"params": [param], **group}], **chosen), param, gradients(SHAPE, 4))


@pytest.mark.parametrize("kind", ["gefen", "adamw"])
def test_beta1_and_beta2_of_gefen_x_take_effect(kind: str) -> None:
    make = MAKERS[kind]
    wanted = run(make, {}, betas=(0.5, 0.8))
    assert torch.equal(run(make, {"beta1": 0.5, "beta2": 0.8}), wanted)
    assert torch.equal(run(make, {"beta1": 0.5}, betas=(0.9, 0.8)), wanted)
    assert torch.equal(run(make, {"beta2": 0.8}, betas=(0.5, 0.999)), wanted)
    with pytest.raises(InvalidArgumentError, match="pass one of the two"):
        run(make, {"beta1": 0.5, "betas": (0.9, 0.8)})
    with pytest.raises(InvalidArgumentError, match=r"betas\[0\]=1"):
        run(make, {"beta1": 1})


@pytest.mark.parametrize(("kind", "own"), [("gefen", "betas"), ("muon", "momentum")])
def test_beta1_written_later_is_not_ignored(kind: str, own: str) -> None:
    param = start(SHAPE)
    optimizer = MAKERS[kind]([param])
    optimizer.param_groups[0]["beta1"] = 0.5
    param.grad = torch.ones(SHAPE)
    with pytest.raises(InvalidArgumentError, match=rf"beta1=0\.5.*set group\['{own}"):
        optimizer.step()


@pytest.mark.parametrize("backup", ["gefen", "adamw"])
def test_groups_of_a_hybrid(backup: str) -> None:
    pairs = [("a.weight", start(SHAPE)), ("a.LayerNorm", start((4,)))]
    chosen = {"lr": 0.1, "weight_decay": 0.3, "no_decay_substrings": ("layernorm",)}
    optimizer = GefenMuonHybrid(pairs, backup_optimizer=backup, maximize=True, **chosen)
    assert (optimizer.backup_optimizer, optimizer.capturable) == (backup, False)
    assert GefenMuonHybrid(pairs, fused=False, **chosen).fused is False
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert all(group["maximize"] for group in optimizer.param_groups)
    optimizer.add_param_group({"params": [("b.bias", start((3,)))], "beta1": 0.5})
    assert optimizer.param_groups[2]["betas"] == (0.5, 0.999)
    with pytest.raises(InvalidArgumentError, match="beta2"):
        optimizer.add_param_group({"params": [("b.weight", start(SHAPE))], "beta2": 0.5})
    optimizer.param_groups[1]["beta1"] = 0.5
    pairs[0][1].grad = torch.ones(SHAPE)
    before = pairs[0][1].detach().clone()
    with pytest.raises(InvalidArgumentError, match=r"beta1=0\.5.*group\['betas'\]"):
        optimizer.step()
    assert torch.equal(pairs[0][1], before)


@pytest.mark.parametrize("key", ["beta1", "betas"])
def test_muon_has_no_betas(key: str) -> None:
    with pytest.raises(InvalidArgumentError, match=key):
        run(GefenMuon, {key: 0.5})


def torchs_settings() -> set[str]:
    """What the optimizers of torch have that these stand in for."""
    kinds: list[Any] = [torch.optim.AdamW, torch.optim.SGD]
    if hasattr(torch.optim, "Muon"):
        kinds.append(torch.optim.Muon)
    return {key for kind in kinds for key in kind([start(SHAPE)], lr=0.1).defaults}


@pytest.mark.parametrize("kind", ["gefen", "muon"])
def test_no_setting_of_an_optimizer_of_torch_is_ignored(kind: str) -> None:
    own = MAKERS[kind]([start(SHAPE)])
    for key in torchs_settings() - own.defaults.keys():
        with pytest.raises(InvalidArgumentError, match=key):
            run(MAKERS[kind], {key: object()})


@pytest.mark.parametrize(("kind", "other"), [("gefen", GefenMuon), ("muon", Gefen)])
def test_no_setting_of_the_other_optimizer_is_ignored(kind: str, other: Any) -> None:
    own, theirs = MAKERS[kind]([start(SHAPE)]), other([start(SHAPE)])
    takes = inspect.signature(type(theirs)).parameters.keys() - {"params"}
    for key in takes - own.defaults.keys():
        with pytest.raises(InvalidArgumentError, match=key):
            run(MAKERS[kind], {key: object()})


NEUTRAL = {
    "amsgrad": False,
    "differentiable": False,
    "foreach": None,
    "decoupled_weight_decay": True,
    "capturable": False,
    "fused": None,
    "maximize": False,
}


@pytest.mark.parametrize("kind", ["gefen", "muon"])
def test_groups_of_adamw_that_ask_for_nothing_pass(kind: str) -> None:
    assert torch.equal(run(MAKERS[kind], NEUTRAL), run(MAKERS[kind], {}))


@pytest.mark.parametrize("kind", ["gefen", "muon"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("amsgrad", True), ("differentiable", True), ("foreach", True), ("amsgrad", None)],
)
def test_what_cannot_be_had_is_refused_at_once_and_later(kind: str, key: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"Invalid {key}={value}"):
        run(MAKERS[kind], {key: value})
    param = start(SHAPE)
    optimizer = MAKERS[kind]([param])
    optimizer.param_groups[0][key] = value
    param.grad = torch.ones(SHAPE)
    with pytest.raises(InvalidArgumentError, match=f"Invalid {key}={value}"):
        optimizer.step()


def test_adamw_refuses_what_it_cannot_do_when_made() -> None:
    for key in ("amsgrad", "differentiable"):
        with pytest.raises(NotImplementedError, match=key):
            run(adamw, {key: True})


@pytest.mark.parametrize("kind", ["gefen", "muon"])
def test_keys_of_users_and_schedulers_pass(kind: str) -> None:
    mine = {"initial_lr": 1.0, "name": "head", "lr_scale": 0.5, "rho": 0.05, "adaptive": False}
    assert torch.equal(run(MAKERS[kind], mine), run(MAKERS[kind], {}))
    param = start(SHAPE)
    optimizer = MAKERS[kind]([param])
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    param.grad = torch.ones(SHAPE)
    optimizer.step()


@pytest.mark.parametrize("kind", ["gefen", "muon", "adamw"])
@pytest.mark.parametrize("where", ["group", "constructor", "later"])
def test_maximize(kind: str, where: str, device: torch.device) -> None:
    """It goes up exactly as far as without it down; weights still decay towards zero."""
    param = start(SHAPE, device=device)
    group = {"maximize": True} if where == "group" else {}
    chosen: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5}
    if where == "constructor":
        chosen["maximize"] = True
    optimizer = MAKERS[kind]([{"params": [param], **group}], **chosen)
    if where == "later":
        optimizer.param_groups[0]["maximize"] = True
    middle = start(SHAPE, device=device).detach() * 0.95**3
    up = train(optimizer, param, gradients(SHAPE, 3)) - middle
    chosen.pop("maximize", None)
    param = start(SHAPE, device=device)
    down = train(MAKERS[kind]([param], **chosen), param, gradients(SHAPE, 3)) - middle
    torch.testing.assert_close(up, -down, rtol=0, atol=1e-6)
    assert up.abs().max() > 0.1
    assert optimizer.state_dict()["param_groups"][0]["maximize"] is True


@pytest.mark.parametrize("kind", ["gefen", "muon"])
def test_options_are_attributes(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    param = start(SHAPE)
    optimizer: Any = MAKERS[kind]([param], fused=False, deterministic=True)
    assert (optimizer.fused, optimizer.deterministic) == (False, True)
    assert (optimizer.capturable, optimizer.verbose) == (False, False)
    optimizer.verbose = True
    with caplog.at_level("INFO", logger="gefen"):
        train(optimizer, param, gradients(SHAPE, 1))
    assert "learned a codebook" in caplog.text
    optimizer.fused = True
    assert optimizer.fused is True
    with pytest.raises(InvalidArgumentError, match="fused='no'"):
        optimizer.fused = "no"
    for key in ("capturable", "deterministic"):
        with pytest.raises(AttributeError, match=key):
            setattr(optimizer, key, True)


@pytest.mark.parametrize("kind", ["gefen", "muon"])
def test_deterministic_is_in_the_checkpoint(kind: str) -> None:
    """And a run with the other value is told, as by gefen-x."""
    saved = MAKERS[kind]([start(SHAPE)], deterministic=True).state_dict()
    other = MAKERS[kind]([start(SHAPE)])
    before = other.state_dict()
    with pytest.raises(CheckpointError, match=r"deterministic=True.*deterministic=False"):
        other.load_state_dict(saved)
    with pytest.raises(CheckpointError, match=r"deterministic=False.*deterministic=True"):
        MAKERS[kind]([start(SHAPE)], deterministic=True).load_state_dict(before)
    assert other.state_dict() == before
    MAKERS[kind]([start(SHAPE)], deterministic=True).load_state_dict(saved)
    del saved["param_groups"][0]["deterministic"]
    other.load_state_dict(saved)
    assert other.param_groups[0]["deterministic"] is False


def test_period_one_substrings_match_in_any_case() -> None:
    for part, name in [("NORM", "layer_norm.weight"), ("norm", "LayerNorm.weight")]:
        param = start(SHAPE)
        optimizer = Gefen([(name, param)], period_one_substrings=(part,))
        train(optimizer, param, gradients(SHAPE, 1))
        assert optimizer.state[param]["period"] == 1


HYBRIDS = (
    *("muon_lr", "backup_lr", "muon_weight_decay", "backup_weight_decay"),
    *("no_decay_substrings", "backup_1d_period_one", "backup_2d_period_one"),
    *("backup_factored_v_2d", "backup_substrings", "backup_optimizer", "sides"),
)


def hybrid(params: list[Any], **chosen: Any) -> GefenMuonHybrid:
    pairs = [("w", start(SHAPE)), ("b", start((4,)))]
    group = {key: value for key, value in params[0].items() if key != "params"}
    return GefenMuonHybrid([{"params": pairs, **group}], lr=1e-3, **chosen)


@pytest.mark.parametrize("make", [*MAKERS.values(), hybrid])
@pytest.mark.parametrize("key", HYBRIDS)
def test_arguments_of_the_hybrid_alone_are_no_settings_of_a_group(make: Any, key: str) -> None:
    of_its_groups = make in (hybrid, adamw) and key in HYBRIDS[:4]
    if not of_its_groups:
        with pytest.raises(InvalidArgumentError, match=f"Invalid {key}=0.5 in a parameter group"):
            make([{"params": [start(SHAPE)], key: 0.5}])
    optimizer = make([{"params": [start(SHAPE)]}])
    optimizer.param_groups[0][key] = 0.5
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.ones(SHAPE)
    with pytest.raises(InvalidArgumentError, match=f"Invalid {key}=0.5 in a parameter group"):
        optimizer.step()


OPTIONS = [("fused", False), ("verbose", True), ("capturable", True)]


@pytest.mark.parametrize(
    ("make", "key", "value"),
    [(make, *option) for make in (Gefen, GefenMuon) for option in OPTIONS]
    + [(Gefen, "codebook_refresh_every", 2)],
)
def test_options_in_a_group_are_refused_at_once_and_later(make: Any, key: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"Invalid {key}.*constructor"):
        make([{"params": [start(SHAPE)], key: value}])
    param = start(SHAPE)
    optimizer = make([param])
    optimizer.param_groups[0][key] = value
    param.grad = torch.ones(SHAPE)
    with pytest.raises(InvalidArgumentError, match=f"Invalid {key}.*constructor"):
        optimizer.step()


@pytest.mark.parametrize("backup", ["gefen", "adamw"])
def test_options_of_a_hybrid_change_in_both_halves(
    backup: str, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = [("a.weight", start(SHAPE)), ("a.bias", start((4,)))]
    optimizer = GefenMuonHybrid(pairs, lr=1e-3, backup_optimizer=backup)
    optimizer.fused, optimizer.verbose = False, True
    assert (optimizer.fused, optimizer.verbose) == (False, True)
    assert optimizer.muon is not None
    assert optimizer.muon.fused is False
    if isinstance(optimizer.backup, Gefen):
        assert optimizer.backup.fused is False
    for _, param in pairs:
        param.grad = torch.ones_like(param)
    with caplog.at_level("INFO", "gefen"):
        optimizer.step()
    assert "a.weight" in caplog.text
    with pytest.raises(InvalidArgumentError, match="verbose=1"):
        optimizer.verbose = 1  # type: ignore[assignment]


def test_capturable_of_another_type_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="capturable"):
        Gefen([start(SHAPE)], capturable=torch.ones(2))  # type: ignore[arg-type]
