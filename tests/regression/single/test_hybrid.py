from __future__ import annotations

import collections
import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workload import bytes_of

from gefen import Gefen, GefenMuon, GefenMuonHybrid, routing_table, split_params_for_muon
from gefen.errors import (
    CheckpointError,
    InvalidArgumentError,
    UnsupportedParameterError,
)

BACKUPS = pytest.mark.parametrize("backup", ["gefen", "adamw"])


def net(device: torch.device | str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.embed = nn.Embedding(24, 16)
    model.inner = nn.Linear(16, 40)
    model.outer = nn.Linear(40, 16, bias=False)
    model.norm = nn.LayerNorm(16)
    return model.to(device)


def give_gradients(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param)


def names(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


MUON = ["inner.weight", "outer.weight"]
BACKUP = ["embed.weight", "inner.bias", "norm.weight", "norm.bias"]


def test_routes_models_and_lists() -> None:
    model = net()
    for optimizer in (
        GefenMuonHybrid(model, lr=0.1),
        GefenMuonHybrid.from_model(model, lr=0.1),
        GefenMuonHybrid(model.named_parameters(), lr=0.1),
        GefenMuonHybrid(*split_params_for_muon(model), lr=0.1),
    ):
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert names(optimizer) == [MUON, BACKUP]
    # Pairs say nothing of modules, so only the name gives an embedding away.
    table = [("table", model.embed.weight), ("bias", model.inner.bias)]
    assert names(GefenMuonHybrid(table, lr=0.1)) == [["table"], ["bias"]]
    optimizer = GefenMuonHybrid(model, lr=0.1, backup_substrings=["inner"])
    assert names(optimizer) == [["outer.weight"], ["embed.weight", "inner.weight", *BACKUP[1:]]]
    optimizer = GefenMuonHybrid.from_model(model, lr=0.1, backup_substrings=())
    assert names(optimizer) == [MUON, BACKUP]  # embeddings are found by module all the same


@BACKUPS
def test_equals_its_two_halves(backup: str, device: torch.device) -> None:
    chosen = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
    model, apart = net(device), net(device)
    hybrid = GefenMuonHybrid(model, backup_optimizer=backup, momentum=0.9, **chosen)
    matrices, others = split_params_for_muon(apart)
    muon = GefenMuon(
        matrices,
        lr=0.02,
        weight_decay=0.1,
        momentum=0.9,
        ns_schedule="standard",
        normuon=True,
        adjust_lr_fn="match_rms_adamw",
    )
    if backup == "gefen":
        second: torch.optim.Optimizer = Gefen(others, **chosen)
    else:
        second = torch.optim.AdamW(others, **chosen)
    for number in range(4):
        give_gradients(model, number)
        give_gradients(apart, number)
        hybrid.step()
        muon.step()
        second.step()
    assert bytes_of(model.state_dict()) == bytes_of(apart.state_dict())


def test_settings_of_each_half() -> None:
    hybrid = GefenMuonHybrid(
        net(),
        lr=0.1,
        muon_lr=0.2,
        weight_decay=0.3,
        backup_weight_decay=0.4,
        no_decay_substrings=("bias", "norm"),
        eps=1e-5,
    )
    assert names(hybrid) == [MUON, ["embed.weight"], BACKUP[1:]]
    assert [(g["lr"], g["weight_decay"]) for g in hybrid.param_groups] == [
        (0.2, 0.3),
        (0.1, 0.4),
        (0.1, 0.0),
    ]
    assert [group["eps"] for group in hybrid.param_groups] == [1e-7, 1e-5, 1e-5]
    other = GefenMuonHybrid(net(), lr=0.1, backup_lr=0.2, muon_weight_decay=0.5)
    assert [(g["lr"], g["weight_decay"]) for g in other.param_groups] == [(0.1, 0.5), (0.2, 0.0)]


@pytest.mark.parametrize(("one", "expected"), [("1d", {"1d"}), ("2d", {"2d"})])
def test_periods_of_the_backup(one: str, expected: set[str]) -> None:
    model = net()
    hybrid = GefenMuonHybrid(model, lr=0.1, **{f"backup_{one}_period_one": True})
    give_gradients(model, 0)
    hybrid.step()
    vector, table = hybrid.state[model.inner.bias], hybrid.state[model.embed.weight]
    forced = {"1d": vector["period"] == 1, "2d": table["period"] == 1}
    assert {key for key, value in forced.items() if value} == expected
    assert hybrid.state[model.inner.weight]["period"] > 1


def test_groups_and_state_are_those_of_the_halves() -> None:
    model = net()
    hybrid = GefenMuonHybrid(model, lr=0.1)
    give_gradients(model, 0)
    hybrid.step()
    assert set(hybrid.state) == set(model.parameters())
    assert "normuon_v" in hybrid.state[model.inner.weight]
    before = model.outer.weight.detach().clone()
    for group in hybrid.param_groups:
        group["lr"] = 0.0
    give_gradients(model, 1)
    hybrid.step()
    assert torch.equal(model.outer.weight, before)
    hybrid.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@BACKUPS
def test_schedulers_move_both_halves(backup: str) -> None:
    model = net()
    hybrid = GefenMuonHybrid(model, lr=0.1, muon_lr=1.0, backup_optimizer=backup)
    schedule = torch.optim.lr_scheduler.StepLR(hybrid, 1, gamma=0.5)
    give_gradients(model, 0)
    hybrid.step()
    schedule.step()
    assert [group["lr"] for group in hybrid.param_groups] == [0.5, 0.05]
    cycle = torch.optim.lr_scheduler.OneCycleLR(hybrid, max_lr=1.0, total_steps=5)
    give_gradients(model, 1)
    hybrid.step()
    cycle.step()
    assert hybrid.param_groups[0]["momentum"] != 0.95
    saved = copy.deepcopy(hybrid.state_dict())
    hybrid.load_state_dict(saved)
    assert bytes_of(hybrid.state_dict()) == bytes_of(saved)


def test_one_tensor_lr_for_both_halves() -> None:
    model, rate = net(), torch.tensor(0.1)
    hybrid = GefenMuonHybrid(model, lr=rate)
    assert all(group["lr"] is rate for group in hybrid.param_groups)
    rate.fill_(0.0)
    before = bytes_of(model.state_dict())
    give_gradients(model, 0)
    hybrid.step()
    assert bytes_of(model.state_dict()) == before
    hybrid.load_state_dict(copy.deepcopy(hybrid.state_dict()))
    assert all(group["lr"] is rate for group in hybrid.param_groups)


def test_hooks_and_closure() -> None:
    model, calls = net(), []
    hybrid = GefenMuonHybrid(model, lr=0.1)
    hybrid.register_step_pre_hook(lambda *_: calls.append("before"))
    hybrid.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        hybrid.zero_grad()
        loss = model.outer(model.inner(model.norm(model.embed(torch.arange(4))))).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        first, second = hybrid.step(closure), hybrid.step(closure)
    assert second < first
    assert calls == ["before", "after"] * 2


def break_shape(param: nn.Parameter) -> None:
    param.grad = torch.zeros(param.shape)
    param.data = torch.zeros(3, 3)


def break_layout(param: nn.Parameter) -> None:
    param.grad = torch.zeros(param.shape).to_sparse()


@BACKUPS
@pytest.mark.parametrize("spoil", [break_shape, break_layout])
@pytest.mark.parametrize("where", ["inner.weight", "norm.bias"])
def test_failing_step_changes_neither_half(spoil: Any, where: str, backup: str) -> None:
    model = net()
    hybrid = GefenMuonHybrid(model, lr=0.1, weight_decay=0.1, backup_optimizer=backup)
    give_gradients(model, 0)
    hybrid.step()
    give_gradients(model, 1)
    spoil(model.get_parameter(where))
    before = bytes_of([list(model.parameters()), hybrid.state_dict()])
    with pytest.raises(UnsupportedParameterError, match=where):
        hybrid.step()
    assert bytes_of([list(model.parameters()), hybrid.state_dict()]) == before


def test_adamw_takes_equal_dtypes_only() -> None:
    """torch's AdamW would fail halfway through its parameters."""
    model = net()
    hybrid = GefenMuonHybrid(model, lr=0.1, backup_optimizer="adamw")
    give_gradients(model, 0)
    model.norm.bias.data = model.norm.bias.data.bfloat16()
    before = bytes_of([list(model.parameters()), hybrid.state_dict()])
    with pytest.raises(UnsupportedParameterError, match=r"'norm\.bias' is torch\.float32"):
        hybrid.step()
    assert bytes_of([list(model.parameters()), hybrid.state_dict()]) == before


@BACKUPS
def test_damaged_half_changes_neither(backup: str) -> None:
    model = net()
    hybrid = GefenMuonHybrid(model, lr=0.1, backup_optimizer=backup)
    for number in range(2):
        give_gradients(model, number)
        hybrid.step()
    key = "exp_avg" if backup == "adamw" else "v"
    for number in range(6):
        saved = copy.deepcopy(hybrid.state_dict())
        entry = saved["state"][number]
        tensor = "index" if "index" in entry else key
        entry[tensor] = entry[tensor].view(-1)[:-1]
        before = bytes_of(hybrid.state_dict())
        with pytest.raises(CheckpointError, match="does not fit"):
            hybrid.load_state_dict(saved)
        assert bytes_of(hybrid.state_dict()) == before


@BACKUPS
def test_half_of_a_model(backup: str) -> None:
    """A model of matrices only, or of none."""
    for half in (["inner.weight", "outer.weight"], ["inner.bias", "norm.weight"]):
        model = net()
        pairs = [(name, param) for name, param in model.named_parameters() if name in half]
        hybrid = GefenMuonHybrid(pairs, lr=0.1, backup_optimizer=backup)
        assert names(hybrid) == [half]
        give_gradients(model, 0)
        hybrid.step()
        hybrid.load_state_dict(copy.deepcopy(hybrid.state_dict()))
        assert len(hybrid.state) == 2


@BACKUPS
def test_added_groups_are_routed(backup: str) -> None:
    model, more = net(), net()
    pairs = [pair for pair in model.named_parameters() if pair[0].startswith("norm")]
    hybrid = GefenMuonHybrid(pairs, lr=0.1, backup_optimizer=backup)
    hybrid.add_param_group({"params": [("new.weight", more.outer.weight)], "lr": 0.3})
    hybrid.add_param_group({"params": [("new.bias", more.inner.bias)], "weight_decay": 0.2})
    assert [group["lr"] for group in hybrid.param_groups] == [0.1, 0.3, 0.1]
    assert hybrid.param_groups[1]["ns_schedule"] == "standard"
    assert hybrid.param_groups[2]["weight_decay"] == 0.2
    for module in (model, more):
        give_gradients(module, 0)
    hybrid.step()
    assert len(hybrid.state) == 4
    saved = copy.deepcopy(hybrid.state_dict())
    hybrid.load_state_dict(saved)
    assert bytes_of(hybrid.state_dict()) == bytes_of(saved)
    with pytest.raises(InvalidArgumentError, match="no parameter in it"):
        hybrid.add_param_group({"params": []})
    with pytest.raises(InvalidArgumentError, match="Duplicate parameter 'again'"):
        hybrid.add_param_group({"params": [("again", more.outer.weight)]})
    with pytest.raises(InvalidArgumentError, match="pairs"):
        hybrid.add_param_group({"params": [more.inner.weight]})
    with pytest.raises(InvalidArgumentError, match="weight_decay=-1"):
        hybrid.add_param_group({"params": [("c", more.norm.bias)], "weight_decay": -1})
    with pytest.raises(InvalidArgumentError, match="param_group"):
        hybrid.add_param_group([("c", more.norm.bias)])
    assert len(hybrid.param_groups) == 3


BAD_SETTINGS = [
    ("lr", [-1, math.nan, True, None]),
    ("muon_lr", [-1, "x"]),
    ("backup_lr", [-1, math.inf]),
    ("weight_decay", [-1, None]),
    ("muon_weight_decay", [-1, "x"]),
    ("backup_weight_decay", [math.nan]),
    ("backup_optimizer", ["sgd", None, 1]),
    ("no_decay_substrings", ["bias", 3, None]),
    ("backup_substrings", ["bias", 3]),
    ("backup_1d_period_one", [1, None]),
    ("backup_2d_period_one", ["x"]),
    ("betas[0]", [(1.0, 0.9)]),
    ("eps", [-1, None]),
    ("momentum", [1.0]),
    ("ns_steps", [0]),
    ("ns_schedule", ["tuned5"]),
    ("sharded_mode", ["none"]),
    ("verbose", [1]),
]


@BACKUPS
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_SETTINGS for value in values]
)
@pytest.mark.parametrize("part", ["whole", "no matrices"])
def test_bad_settings_are_named(name: str, value: Any, part: str, backup: str) -> None:
    """Also those of a half that has no parameters."""
    model = net()
    pairs = [p for p in model.named_parameters() if part == "whole" or p[1].dim() == 1]
    arguments = {"lr": 0.1, "backup_optimizer": backup, name.partition("[")[0]: value}
    with pytest.raises(InvalidArgumentError) as caught:
        GefenMuonHybrid(pairs, **arguments)
    assert str(caught.value).startswith(f"Invalid {name}")


def test_bad_parameters_are_named() -> None:
    model = net()
    muon, backup = split_params_for_muon(model)
    with pytest.raises(InvalidArgumentError, match=r"'inner\.weight' is in both halves"):
        GefenMuonHybrid(muon, [*backup, muon[0]], lr=0.1)
    with pytest.raises(InvalidArgumentError, match="Duplicate parameter name 'norm"):
        GefenMuonHybrid(muon, [*backup, ("norm.bias", nn.Parameter(torch.zeros(2)))], lr=0.1)
    with pytest.raises(UnsupportedParameterError, match="'vector' has shape"):
        GefenMuonHybrid([*muon, ("vector", nn.Parameter(torch.zeros(2)))], backup, lr=0.1)
    for bad, message in (
        (torch.zeros(2, dtype=torch.complex64), "dtype torch.complex64"),
        (torch.zeros(2).to_sparse(), "is sparse"),
    ):
        with pytest.raises(UnsupportedParameterError, match=f"'bad'.*{message}"):
            GefenMuonHybrid(muon, [*backup, ("bad", nn.Parameter(bad))], lr=0.1)
    with pytest.raises(InvalidArgumentError, match="pairs"):
        GefenMuonHybrid(model.parameters(), lr=0.1)
    for nothing in ([], [{"params": []}], nn.Identity()):
        with pytest.raises(InvalidArgumentError, match="there is no parameter to optimize"):
            GefenMuonHybrid(nothing, lr=0.1)
    with pytest.raises(InvalidArgumentError, match="there is no parameter to optimize"):
        GefenMuonHybrid([], [], lr=0.1)
    with pytest.raises(InvalidArgumentError, match="backup_substrings"):
        GefenMuonHybrid(muon, backup, lr=0.1, backup_substrings=("x",))
    with pytest.raises(InvalidArgumentError, match="sides decides"):
        GefenMuonHybrid(muon, backup, lr=0.1, sides={"norm.bias": "backup"})
    with pytest.raises(InvalidArgumentError, match="pairs"):
        GefenMuonHybrid(model, backup, lr=0.1)
    with pytest.raises(TypeError, match="lr"):
        GefenMuonHybrid(model)  # type: ignore[call-arg]


@BACKUPS
def test_state_that_is_replaced_is_forgotten(backup: str) -> None:
    """A way to start over that works with torch's optimizers."""
    model = net()
    hybrid = GefenMuonHybrid(model, lr=0.1, backup_optimizer=backup)
    give_gradients(model, 0)
    hybrid.step()
    hybrid.state = collections.defaultdict(dict)
    hybrid.step()
    assert {int(entry["step"]) for entry in hybrid.state.values()} == {1}
    assert len(hybrid.state) == 6
    assert all(entry["step"] == 1 for entry in hybrid.state_dict()["state"].values())


@BACKUPS
def test_groups_that_are_replaced_are_refused(backup: str) -> None:
    """Their settings would have no effect."""
    model = net()
    hybrid = GefenMuonHybrid(model, lr=0.1, backup_optimizer=backup)
    give_gradients(model, 0)
    kept = hybrid.param_groups
    hybrid.param_groups = [dict(group) for group in kept]
    before = bytes_of(model.state_dict())
    for call in (hybrid.step, hybrid.state_dict, lambda: hybrid.load_state_dict({})):
        with pytest.raises(InvalidArgumentError, match="param_groups"):
            call()
    assert bytes_of(model.state_dict()) == before
    hybrid.param_groups = kept
    hybrid.step()


@BACKUPS
def test_layers_unfrozen_later_are_stepped(backup: str) -> None:
    model = net()
    model.inner.requires_grad_(False)
    model.norm.requires_grad_(False)
    hybrid = GefenMuonHybrid(model, lr=0.1, weight_decay=0.1, backup_optimizer=backup)
    assert names(hybrid) == [MUON, BACKUP]
    frozen = [*model.inner.parameters(), *model.norm.parameters()]
    before = bytes_of(frozen)
    give_gradients(model, 0)
    for param in frozen:
        param.grad = None
    hybrid.step()
    assert bytes_of(frozen) == before
    hybrid.load_state_dict(copy.deepcopy(hybrid.state_dict()))
    model.requires_grad_(True)
    give_gradients(model, 1)
    hybrid.step()
    assert all(a != b for a, b in zip(bytes_of(frozen), before, strict=True))


def test_a_frozen_model_is_taken() -> None:
    assert names(GefenMuonHybrid(net().requires_grad_(False), lr=0.1)) == [MUON, BACKUP]


def test_shows_its_halves() -> None:
    text = repr(GefenMuonHybrid(net(), lr=0.25, backup_lr=0.5, no_decay_substrings=("bias",)))
    assert text.splitlines()[:5] == [
        "GefenMuonHybrid (",
        "Muon: 2 parameters, 1280 elements",
        "Backup, Gefen: 4 parameters, 456 elements",
        "Parameter Group 0 (Muon)",
        "    adjust_lr_fn: match_rms_adamw",
    ]
    assert "Parameter Group 2 (Backup)\n    betas" in text
    assert "    lr: 0.25\n" in text
    assert "inner" not in text
    assert "    lr: 0.5\n" in text
    vectors = [("norm.bias", net().norm.bias)]
    text = repr(GefenMuonHybrid(vectors, lr=0.1, backup_optimizer="adamw"))
    assert "Muon: 0 parameters, 0 elements\nBackup, AdamW: 1 parameters, 16 elements\n" in text


def test_verbose_logs_the_table(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="gefen")
    model = net()
    GefenMuonHybrid(model, lr=0.1)
    assert not caplog.records
    hybrid = GefenMuonHybrid.from_model(model, lr=0.1, verbose=True)
    assert str(routing_table(model)) in caplog.text
    hybrid.add_param_group({"params": [("later.weight", nn.Parameter(torch.zeros(4, 4)))]})
    assert "muon  later.weight  (4, 4)" in caplog.text
    GefenMuonHybrid(*split_params_for_muon(model), lr=0.1, verbose=True)
    assert "given as Muon's" in caplog.text


def test_caller_chooses_sides() -> None:
    hybrid = GefenMuonHybrid.from_model(net(), lr=0.1, sides={"outer.*": "backup"})
    assert names(hybrid)[0] == ["inner.weight"]
    hybrid.add_param_group({"params": [("outer.more", nn.Parameter(torch.zeros(4, 4)))]})
    assert names(hybrid)[2:] == [["outer.more"]]
    with pytest.raises(UnsupportedParameterError, match=r"'norm\.bias' has shape \(16,\)"):
        GefenMuonHybrid(net(), lr=0.1, sides={"norm.bias": "muon"})
