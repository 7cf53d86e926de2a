"""Groups with settings of their own, as every torch optimizer takes, in a hybrid."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from workload import bytes_of

from gefen import Gefen, GefenMuon, GefenMuonHybrid
from gefen.errors import InvalidArgumentError

BACKUPS = pytest.mark.parametrize("backup", ["gefen", "adamw"])


def net(device: torch.device | str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.first = nn.Linear(8, 12)
    model.second = nn.Linear(12, 8)
    model.norm = nn.LayerNorm(8)
    return model.to(device)


def part(model: nn.Module, *names: str) -> list[tuple[str, nn.Parameter]]:
    return [pair for pair in model.named_parameters() if pair[0].startswith(names)]


def give_gradients(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.device)


def rates(hybrid: GefenMuonHybrid) -> list[tuple[Any, ...]]:
    return [
        (group["param_names"], group["lr"], group["weight_decay"]) for group in hybrid.param_groups
    ]


@BACKUPS
def test_each_group_is_routed_with_its_settings(backup: str) -> None:
    model = net()
    groups = [
        {"params": iter(part(model, "first")), "weight_decay": 0.1},
        {"params": part(model, "second", "norm"), "lr": 0.5},
    ]
    given = copy.copy(groups[1])
    hybrid = GefenMuonHybrid(groups, lr=0.2, weight_decay=0.3, backup_optimizer=backup)
    assert rates(hybrid) == [
        (["first.weight"], 0.2, 0.1),
        (["second.weight"], 0.5, 0.3),
        (["first.bias"], 0.2, 0.1),
        (["second.bias", "norm.weight", "norm.bias"], 0.5, 0.3),
    ]
    assert groups[1] == given
    give_gradients(model, 0)
    hybrid.step()
    saved = copy.deepcopy(hybrid.state_dict())
    hybrid.load_state_dict(saved)
    assert bytes_of(hybrid.state_dict()) == bytes_of(saved)


def test_settings_of_one_half_stay_there() -> None:
    model = net()
    group = {
        "params": model.named_parameters(),
        "momentum": 0.5,
        "eps": 1e-3,
        "betas": (0.5, 0.6),
        "muon_lr": 0.4,
        "backup_weight_decay": 0.7,
        "backup_lr": None,
        "stochastic_round": True,
        "initial_lr": 0.9,
    }
    hybrid = GefenMuonHybrid([group], lr=0.2, muon_lr=0.3)
    muon, backup = hybrid.param_groups
    assert (muon["lr"], muon["weight_decay"], muon["momentum"]) == (0.4, 0.0, 0.5)
    assert muon["eps"] == 1e-7
    assert "betas" not in muon
    assert (backup["lr"], backup["weight_decay"], backup["betas"]) == (0.2, 0.7, (0.5, 0.6))
    assert backup["eps"] == 1e-3
    assert "momentum" not in backup
    assert muon["stochastic_round"] is backup["stochastic_round"] is True
    assert muon["initial_lr"] == backup["initial_lr"] == 0.9


def test_group_rates_go_before_those_of_the_halves() -> None:
    groups = [{"params": net().named_parameters(), "lr": 0.4}]
    hybrid = GefenMuonHybrid(groups, lr=0.1, muon_lr=0.2, backup_lr=0.3)
    assert [group["lr"] for group in hybrid.param_groups] == [0.4, 0.4]


def test_names_without_decay_in_any_case() -> None:
    groups = [{"params": net().named_parameters(), "weight_decay": 0.1}]
    hybrid = GefenMuonHybrid(groups, lr=0.2, no_decay_substrings=("BIAS",))
    assert rates(hybrid) == [
        (["first.weight", "second.weight"], 0.2, 0.1),
        (["norm.weight"], 0.2, 0.1),
        (["first.bias", "second.bias", "norm.bias"], 0.2, 0.0),
    ]
    more = [
        ("New.Bias", nn.Parameter(torch.zeros(3))),
        ("new.weight", nn.Parameter(torch.zeros(3))),
    ]
    hybrid.add_param_group({"params": more, "weight_decay": 0.5})
    assert rates(hybrid)[3:] == [(["new.weight"], 0.2, 0.5), (["New.Bias"], 0.2, 0.0)]


@BACKUPS
def test_one_added_group_goes_to_both_halves(backup: str) -> None:
    model = net()
    hybrid = GefenMuonHybrid(part(model, "first"), lr=0.2, backup_optimizer=backup)
    hybrid.add_param_group({"params": part(model, "second"), "lr": 0.3, "momentum": 0.1})
    assert [names for names, _, _ in rates(hybrid)] == [
        ["first.weight"],
        ["first.bias"],
        ["second.weight"],
        ["second.bias"],
    ]
    assert [group["lr"] for group in hybrid.param_groups] == [0.2, 0.2, 0.3, 0.3]
    give_gradients(model, 0)
    hybrid.step()
    assert len(hybrid.state) == 4


@BACKUPS
def test_a_group_that_is_refused_leaves_nothing(backup: str) -> None:
    model, integers = net(), nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    hybrid = GefenMuonHybrid(part(model, "first"), lr=0.2, backup_optimizer=backup)
    for bad in (
        {"params": part(model, "second"), "eps": -1},
        {"params": part(model, "second"), "momentum": 2},
        {"params": part(model, "norm"), "momentum": 2},
        {"params": part(model, "second"), "muon_lr": -1},
        {"params": [*part(model, "second"), ("first.bias", nn.Parameter(torch.zeros(2)))]},
        {"params": [("integers", integers)]},
        {"params": part(model, "second"), "amsgrad": True},
        {"params": part(model, "second"), "deterministic": True},
    ):
        with pytest.raises(InvalidArgumentError):
            hybrid.add_param_group(bad)
    assert [group["param_names"] for group in hybrid.param_groups] == [
        ["first.weight"],
        ["first.bias"],
    ]


def test_settings_that_no_group_has_are_named() -> None:
    for key in ("deterministic", "capturable", "param_names"):
        with pytest.raises(InvalidArgumentError, match=f"Invalid {key} in a parameter group"):
            GefenMuonHybrid([{"params": net().named_parameters(), key: True}], lr=0.1)
    own = {"params": net().named_parameters(), "lr_scale": 0.5}
    groups = GefenMuonHybrid([own], lr=0.1).param_groups
    assert [group["lr_scale"] for group in groups] == [0.5, 0.5]
    # Each half has its own: torch's AdamW has no blocks.
    group = {"params": list(net().named_parameters()), "force_1d_period_one": True}
    GefenMuonHybrid([group], lr=0.1)
    with pytest.raises(InvalidArgumentError, match="force_1d_period_one"):
        GefenMuonHybrid([group], lr=0.1, backup_optimizer="adamw")


def test_bare_parameters_say_what_to_pass_instead() -> None:
    """As transformers.Trainer makes them for optimizer_cls_and_kwargs."""
    params = list(net().parameters())
    bare = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}]
    for given in (bare, params, net().parameters(), params[0], [{"params": params[0]}]):
        with pytest.raises(InvalidArgumentError) as caught:
            GefenMuonHybrid(given, lr=0.1)
        assert "optimizers=(GefenMuonHybrid.from_model(model), None)" in str(caught.value)


def test_bad_groups_are_refused() -> None:
    model = net()
    group = {"params": part(model, "first")}
    for bad, message in (
        ([group, ("x", model.norm.bias)], "either all or none must be groups.*tuple"),
        ([group, {"parameters": []}], "dict"),
        ([group, {"params": part(model, "first.bias")}], "Duplicate parameter 'first.bias'"),
        ([group, {"params": [("bias", model.first.weight)]}], "'bias' is in both halves"),
        ([{"params": model.first}], "not Linear"),
        (group, "not str"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            GefenMuonHybrid(bad, lr=0.1)
    with pytest.raises(InvalidArgumentError, match="pairs"):
        GefenMuonHybrid([group], [], lr=0.1)


def test_equals_optimizers_of_its_own(device: torch.device) -> None:
    model, apart = net(device), net(device)
    groups = [
        {"params": part(model, "first"), "lr": 0.05, "weight_decay": 0.2},
        {"params": part(model, "second", "norm"), "momentum": 0.8},
    ]
    hybrid = GefenMuonHybrid(groups, lr=0.02)
    muon = GefenMuon(
        [
            {"params": part(apart, "first.weight"), "lr": 0.05, "weight_decay": 0.2},
            {"params": part(apart, "second.weight"), "momentum": 0.8},
        ],
        lr=0.02,
        weight_decay=0.0,
        ns_schedule="standard",
        normuon=True,
        adjust_lr_fn="match_rms_adamw",
    )
    backup = Gefen(
        [
            {"params": part(apart, "first.bias"), "lr": 0.05, "weight_decay": 0.2},
            {"params": part(apart, "second.bias", "norm")},
        ],
        lr=0.02,
        factored_v_2d=True,
    )
    for number in range(3):
        give_gradients(model, number)
        give_gradients(apart, number)
        hybrid.step()
        muon.step()
        backup.step()
    assert bytes_of(model.state_dict()) == bytes_of(apart.state_dict())
