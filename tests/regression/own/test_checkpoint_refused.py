"""Checkpoints that are refused, whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import own_copy, trained
from workload import OPTIMIZERS, model, snapshot, step

from gefen import Gefen
from gefen.codebook import blank
from gefen.errors import CheckpointError


def place(saved: Any, path: str) -> tuple[Any, Any]:
    """The container that ``path`` ends in, and the last key."""
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        saved = saved[part]
    return saved, last


def set_at(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(saved: dict[str, Any]) -> None:
        container, key = place(saved, path)
        container[key] = value(container[key]) if callable(value) else value

    return change


def drop(path: str) -> Callable[[dict[str, Any]], None]:
    def change(saved: dict[str, Any]) -> None:
        container, key = place(saved, path)
        del container[key]

    return change


def damage_moments(entry: dict[str, Any]) -> None:
    for key in ("v", "v_row", "normuon_v"):
        if key in entry:
            entry[key] = entry[key] - 1e9


# State entry 1 is the first matrix of a linear layer, in all kinds.
DAMAGE: dict[str, Callable[[dict[str, Any]], None]] = {
    "no state": drop("state"),
    "no groups": drop("param_groups"),
    "state is no dict": set_at("state", [1]),
    "groups are no list": set_at("param_groups", None),
    "group without params": drop("param_groups.0.params"),
    "empty state": set_at("state", {}),
    "parameter lost": drop("state.1"),
    "parameter in excess": set_at("state", lambda state: state | {99: {"step": 0}}),
    "group lost": drop("param_groups.0"),
    "parameter lost from group": set_at("param_groups.0.params", lambda params: params[:-1]),
    "parameter twice in group": set_at(
        "param_groups.0.params", lambda params: [*params[:-1], params[0]]
    ),
    "key lost": drop("state.1.index"),
    "key in excess": set_at("state.1.exp_avg", torch.zeros(3)),
    "entry is no dict": set_at("state.1", 3),
    "truncated index": set_at("state.1.index", lambda index: index[:-1]),
    "index in another dtype": set_at("state.1.index", lambda index: index.to(torch.int16)),
    "index is no tensor": set_at("state.1.index", lambda index: index.tolist()),
    "truncated magnitude": set_at("state.1.magnitude", lambda magnitude: magnitude[:-1]),
    "magnitude in another dtype": set_at("state.1.magnitude", lambda m: m.bfloat16()),
    "period that does not divide": set_at("state.1.period", 7),
    "period zero": set_at("state.1.period", 0),
    "period as a float": set_at("state.1.period", float),
    "negative step": set_at("state.1.step", -1),
    "step is nan": set_at("state.1.step", float("nan")),
    "step is true": set_at("state.1.step", True),
    "step is a vector": set_at("state.1.step", torch.tensor([1.0, 2.0])),
    "step alone is a vector": set_at("state.1", {"step": torch.tensor([0, 0])}),
    "step is huge": set_at("state.1.step", 10**400),
    "period is huge": set_at("state.1.period", 10**400),
    "negative magnitude": set_at("state.1.magnitude", lambda m: m.neg() - 1),
    "negative second moment": lambda saved: damage_moments(saved["state"][1]),
    "meta index": set_at("state.1.index", lambda index: index.to("meta")),
    "meta global step": set_at("state.1.global_step", lambda count: count.to("meta")),
    "meta codebook": set_at("state.1.codebook", lambda book: book.to("meta")),
    "sparse magnitude": set_at("state.1.magnitude", lambda m: m.to_sparse()),
    "nested magnitude": set_at(
        "state.1.magnitude", lambda m: torch.nested.nested_tensor([m], layout=torch.jagged)
    ),
    "global step behind": lambda saved: [
        entry.update(global_step=torch.tensor(1)) for entry in saved["state"].values()
    ],
    "nested parameter number": set_at("param_groups.0.params.0", [0]),
    "parameter numbers are a tuple of lists": set_at("param_groups.0.params", [[0]]),
    "names are a number": set_at("param_groups.0.param_names", 5),
    "too few names": set_at("param_groups.0.param_names", ["0.weight"]),
    "group is a list": set_at("param_groups.0", [1]),
    "group key is no string": set_at("param_groups.0", lambda group: {**group, 3: 4}),
    "state key is no string": set_at("state.1", lambda entry: {**entry, 3: 4}),
    "state dict is a list": set_at("state", []),
    "setting that cannot be copied": lambda saved: saved["param_groups"][0].update(
        tag=(each for each in ())
    ),
    "step after the last": set_at("state.1.step", 9),
    "global step of one parameter": set_at("state.1.global_step", torch.tensor(7)),
    "descending codebook": set_at("state.1.codebook", lambda book: book.flip(0)),
    "codebook of one parameter": set_at("state.1.codebook", lambda b: b.sign() * b.abs().sqrt()),
    "codebook lost in one parameter": drop("state.1.codebook"),
    "codebook too short": set_at("state.1.codebook", lambda book: book[1:]),
    "setting lost": drop("param_groups.0.weight_decay"),
    "bad setting": set_at("param_groups.0.weight_decay", -1.0),
    "lr is nan": set_at("param_groups.0.lr", float("nan")),
    "lr is huge": set_at("param_groups.0.lr", 10**400),
    "lr is on the meta device": set_at("param_groups.0.lr", torch.tensor(0.1, device="meta")),
    "lr is sparse": set_at("param_groups.0.lr", torch.tensor([0.1]).to_sparse()),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["gefen", "muon", "hybrid"])
def test_damaged_checkpoint_changes_nothing(kind: str, damage: str) -> None:
    net, optimizer = trained(kind)
    saved = own_copy(optimizer.state_dict())
    DAMAGE[damage](saved)
    step(net, optimizer, 3)
    before = snapshot(net, optimizer)
    hypers = copy.deepcopy([{**g, "params": None} for g in optimizer.param_groups])
    with pytest.raises(CheckpointError, match="Nothing was loaded"):
        optimizer.load_state_dict(saved)
    assert snapshot(net, optimizer) == before
    assert [{**g, "params": None} for g in optimizer.param_groups] == hypers


SAVERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = OPTIMIZERS | {
    "adamw": lambda net: torch.optim.AdamW(net.parameters()),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), momentum=0.9),
}
SAME_STATE = {"gefen", "gefen-stochastic"}


@pytest.mark.parametrize(
    ("kind", "saver"),
    [
        (kind, saver)
        for kind in OPTIMIZERS
        for saver in SAVERS
        if kind != saver and not {kind, saver} <= SAME_STATE
    ],
)
def test_foreign_checkpoint_changes_nothing(kind: str, saver: str) -> None:
    saved_net = model()
    other = SAVERS[saver](saved_net)
    step(saved_net, other, 0)
    net, optimizer = trained(kind)
    before = snapshot(net, optimizer)
    with pytest.raises(CheckpointError, match="Nothing was loaded"):
        optimizer.load_state_dict(other.state_dict())
    assert snapshot(net, optimizer) == before


def test_codebook_that_does_not_ascend_is_refused() -> None:
    _, optimizer = trained("gefen")
    saved = own_copy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["codebook"] = entry["codebook"].flip(0)
    with pytest.raises(CheckpointError, match="does not ascend"):
        optimizer.load_state_dict(saved)


def test_momentum_without_its_codebook_is_refused() -> None:
    """A codebook that was replaced by an untrained optimizer's would turn it into noise."""
    net, optimizer = trained("gefen")
    saved = own_copy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["codebook"] = blank()
    before = snapshot(net, optimizer)
    with pytest.raises(CheckpointError, match="codebook was never learned"):
        optimizer.load_state_dict(saved)
    assert snapshot(net, optimizer) == before


def test_names_must_agree_where_both_have_them() -> None:
    net, optimizer = trained("gefen")
    renamed = Gefen([(f"net.{name}", param) for name, param in net.named_parameters()])
    with pytest.raises(CheckpointError, match=r"parameter '0.weight'.*'net.0.weight'"):
        renamed.load_state_dict(optimizer.state_dict())
    bare = Gefen(net.parameters())
    bare.load_state_dict(optimizer.state_dict())
    assert "param_names" not in bare.param_groups[0]
    optimizer.load_state_dict(bare.state_dict())
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"


def test_tensor_subclasses_are_refused() -> None:
    class Elsewhere(Tensor):
        pass

    _, optimizer = trained("gefen")
    saved = own_copy(optimizer.state_dict())
    saved["state"][1]["index"] = saved["state"][1]["index"].as_subclass(Elsewhere)
    with pytest.raises(CheckpointError, match="index is of type Elsewhere"):
        optimizer.load_state_dict(saved)
