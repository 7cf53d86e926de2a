"""Checkpoints: what is saved, what is refused, what survives."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workload import OPTIMIZERS, bytes_of, model, snapshot, step

from gefen import Gefen, GefenMuon, GefenMuonHybrid
from gefen.codebook import blank
from gefen.errors import CheckpointError

KINDS = pytest.mark.parametrize("kind", OPTIMIZERS)


def trained(kind: str, steps: int = 3) -> tuple[nn.Module, Any]:
    pair: tuple[nn.Module, Any] = copy.deepcopy(trained_once(kind, steps))
    return pair


@functools.cache
def trained_once(kind: str, steps: int) -> tuple[nn.Module, Any]:
    net = model()
    optimizer = OPTIMIZERS[kind](net)
    for number in range(steps):
        step(net, optimizer, number)
    return net, optimizer


def fresh(kind: str) -> tuple[nn.Module, Any]:
    net = model(seed=1)
    return net, OPTIMIZERS[kind](net)


def own_copy(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Through torch.save, as a user would get it."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@KINDS
def test_every_parameter_has_an_entry(kind: str) -> None:
    net, optimizer = fresh(kind)
    saved = optimizer.state_dict()
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    assert saved["state"] == {number: {"step": 0} for number in numbers}
    assert not optimizer.state
    optimizer.load_state_dict(saved)
    assert not optimizer.state
    step(net, optimizer, 0)
    assert all(entry["step"] == 1 for entry in optimizer.state_dict()["state"].values())


@KINDS
def test_load_is_bitwise_and_does_not_alias(kind: str) -> None:
    net, optimizer = trained(kind)
    saved = own_copy(optimizer.state_dict())
    other_net, other = fresh(kind)
    other_net.load_state_dict(net.state_dict())
    other.load_state_dict(state_dict=saved)
    untouched = bytes_of(saved)
    for number in range(3, 6):
        step(net, optimizer, number)
        step(other_net, other, number)
    assert snapshot(net, optimizer) == snapshot(other_net, other)
    assert bytes_of(saved) == untouched


@KINDS
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
def test_copies_are_independent(kind: str, duplicate: Callable[[Any], Any]) -> None:
    net, optimizer = trained(kind)
    before = snapshot(net, optimizer)
    other_net, other = duplicate((net, optimizer))
    assert snapshot(other_net, other) == before
    step(other_net, other, 3)
    assert snapshot(net, optimizer) == before
    step(net, optimizer, 3)
    assert snapshot(net, optimizer) == snapshot(other_net, other)
    assert type(other) is type(optimizer)
    assert repr(other) == repr(optimizer)


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if "adamw" not in kind])
def test_checkpoint_of_another_dtype(kind: str) -> None:
    """State of float32 parameters continues bfloat16 ones, in the state's own dtypes."""
    _, optimizer = trained(kind)
    narrow = model(torch.bfloat16)
    other = OPTIMIZERS[kind](narrow)
    other.load_state_dict(optimizer.state_dict())
    assert bytes_of(other.state_dict()) == bytes_of(optimizer.state_dict())
    step(narrow, other, 3)
    dtypes = {value.dtype for entry in other.state.values() for value in tensors(entry)}
    assert dtypes == {torch.uint8, torch.float32, torch.int64}


def tensors(entry: dict[str, Any]) -> list[Tensor]:
    return [value for value in entry.values() if isinstance(value, Tensor)]


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


def test_names_must_agree_where_both_have_them() -> None:
    net, optimizer = trained("gefen")
    renamed = Gefen([(f"module.{name}", param) for name, param in net.named_parameters()])
    with pytest.raises(CheckpointError, match=r"parameter '0.weight'.*'module.0.weight'"):
        renamed.load_state_dict(optimizer.state_dict())
    bare = Gefen(net.parameters())
    bare.load_state_dict(optimizer.state_dict())
    assert "param_names" not in bare.param_groups[0]
    optimizer.load_state_dict(bare.state_dict())
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"


def test_names_are_needed_for_new_periods_only() -> None:
    net = model()
    optimizer = Gefen(net.named_parameters(), period_one_substrings=("bias",))
    step(net, optimizer, 0)
    other = Gefen(net.parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.state[net[1].bias]["period"] == 1
    step(net, other, 1)


def test_settings_are_restored() -> None:
    net, optimizer = trained("gefen")
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[0]["initial_lr"] = 0.7
    other = Gefen(net.parameters(), lr=1e-5, eps=1e-3, betas=(0.1, 0.2))
    params = other.param_groups[0]["params"]
    other.load_state_dict(optimizer.state_dict())
    group = other.param_groups[0]
    assert (group["lr"], group["initial_lr"], group["betas"]) == (0.5, 0.7, (0.9, 0.999))
    assert group["params"] is params


def test_tensor_lr_keeps_its_identity() -> None:
    net = model()
    rate = torch.tensor(0.1)
    optimizer = Gefen(net.parameters(), lr=rate)
    saved = copy.deepcopy(optimizer.state_dict())
    rate.fill_(0.3)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)
    optimizer.load_state_dict(Gefen(net.parameters(), lr=0.25).state_dict())
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_shared_tensor_lr_is_not_overwritten_twice() -> None:
    first, second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    groups = [{"params": [first]}, {"params": [second]}]
    saved = Gefen([groups[0] | {"lr": 0.1}, groups[1] | {"lr": 0.2}]).state_dict()
    optimizer = Gefen(groups, lr=torch.tensor(1.0))
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_hooks() -> None:
    _net, optimizer = trained("hybrid")
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda opt, saved: {**saved, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda opt, saved: {**saved["wrapped"]})
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("loaded"))
    saved = optimizer.state_dict()
    assert saved["note"] == 1
    optimizer.load_state_dict({"wrapped": saved})
    assert calls == ["save", "loaded"]


def test_save_hooks_see_what_is_saved() -> None:
    net, optimizer = fresh("gefen")
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append(step(net, opt, 0)))
    optimizer.register_state_dict_post_hook(lambda opt, saved: seen.append(bytes_of(saved)))
    saved = optimizer.state_dict()
    assert seen[1] == bytes_of(saved)
    assert saved["state"][0]["step"] == 1
    _, other = fresh("hybrid")
    other.register_state_dict_post_hook(lambda opt, saved: seen.append(bytes_of(saved)))
    assert bytes_of(other.state_dict()) == seen[2]


def spoiling_hook(optimizer: Any, saved: dict[str, Any]) -> None:
    saved["note"] = 1
    saved["param_groups"][0]["lr"] = 0.5
    saved["param_groups"].append({})
    saved["state"][0]["step"] = 99
    del saved["state"][1]


def test_load_hooks_get_a_copy() -> None:
    net, optimizer = trained("gefen")
    saved = own_copy(optimizer.state_dict())
    untouched, before = bytes_of(saved), snapshot(net, optimizer)
    handle = optimizer.register_load_state_dict_pre_hook(spoiling_hook)
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(saved)
    assert bytes_of(saved) == untouched
    assert snapshot(net, optimizer) == before
    handle.remove()
    optimizer.register_load_state_dict_pre_hook(lambda opt, saved: saved["state"].clear())
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(saved)
    assert bytes_of(saved) == untouched


@KINDS
@pytest.mark.parametrize("tensor", [True, False])
def test_a_load_hook_that_raises_changes_nothing(kind: str, tensor: bool) -> None:
    _, source = trained(kind, steps=2)
    saved = own_copy(source.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    net, optimizer = trained(kind)
    if tensor:
        rate = torch.tensor(0.25)
        for group in optimizer.param_groups:
            group["lr"] = rate
    entries = dict(optimizer.state)
    before = snapshot(net, optimizer)

    def failing(optimizer: Any) -> None:
        assert snapshot(net, optimizer) != before
        raise OSError("disk full")

    optimizer.register_load_state_dict_post_hook(failing)
    with pytest.raises(OSError, match="disk full"):
        optimizer.load_state_dict(saved)
    assert snapshot(net, optimizer) == before
    assert all(optimizer.state[param] is entry for param, entry in entries.items())
    step(net, optimizer, 3)


def test_state_of_non_finite_gradients_is_resumed() -> None:
    """They propagate, so a run that met some can be saved and goes on as it would have."""
    (net, optimizer), (other_net, other) = trained("gefen"), fresh("gefen")
    step(net, optimizer, 3)
    net[1].weight.grad[0, 0] = torch.nan
    net[3].weight.grad[0] = torch.inf
    optimizer.step()
    assert optimizer.state[net[1].weight]["magnitude"].isnan().any()
    other_net.load_state_dict(net.state_dict())
    other.load_state_dict(own_copy(optimizer.state_dict()))
    step(net, optimizer, 4)
    step(other_net, other, 4)
    assert snapshot(net, optimizer) == snapshot(other_net, other)


def test_state_of_parameters_that_are_gone_is_left_out() -> None:
    _net, optimizer = trained("gefen")
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(24, 16))
    saved = optimizer.state_dict()
    assert saved["state"][0] == {"step": 0}
    optimizer.load_state_dict(saved)


def test_tensor_subclasses_are_refused() -> None:
    class Elsewhere(Tensor):
        pass

    _, optimizer = trained("gefen")
    saved = own_copy(optimizer.state_dict())
    saved["state"][1]["index"] = saved["state"][1]["index"].as_subclass(Elsewhere)
    with pytest.raises(CheckpointError, match="index is of type Elsewhere"):
        optimizer.load_state_dict(saved)


@KINDS
def test_default_dtype_and_device_do_not_matter(kind: str) -> None:
    net, optimizer = trained(kind)
    wanted = snapshot(net, optimizer)
    other_net, other = fresh(kind)
    other_net.load_state_dict(model().state_dict())
    probe = model()
    gradients = []
    for number in range(3):
        step(probe, torch.optim.SGD(probe.parameters(), lr=0.0), number)
        gradients.append([param.grad for param in probe.parameters()])
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        for number in range(3):
            for param, grad in zip(other_net.parameters(), gradients[number], strict=True):
                param.grad = grad
            other.step()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert snapshot(other_net, other) == wanted


DCP_OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "offloaded": {"full_state_dict": True, "cpu_offload": True},
}


@KINDS
@pytest.mark.parametrize("chosen", DCP_OPTIONS)
def test_distributed_checkpoint_helpers(kind: str, chosen: str) -> None:
    """They make state by a step with zero gradients and load what has its keys, by name."""
    from torch.distributed.checkpoint import state_dict as helpers

    net, optimizer = trained(kind)
    options = helpers.StateDictOptions(**DCP_OPTIONS[chosen])
    saved = helpers.get_optimizer_state_dict(net, optimizer, options=options)
    other_net, other = fresh(kind)
    other_net.load_state_dict(net.state_dict())
    helpers.set_optimizer_state_dict(other_net, other, saved, options=options)
    step(net, optimizer, 3)
    step(other_net, other, 3)
    assert snapshot(net, optimizer) == snapshot(other_net, other)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own
def test_distributed_checkpoint_through_a_file(tmp_path: Path) -> None:
    """As docs/sharding.md says: a fresh state has other shapes than a trained one."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as helpers
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    net, optimizer = trained("hybrid")
    saved = {"optimizer": helpers.get_optimizer_state_dict(net, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path / "run", no_dist=True)
    dcp_to_torch_save(tmp_path / "run", tmp_path / "run.pt")
    loaded = torch.load(tmp_path / "run.pt", weights_only=True)
    other_net, other = fresh("hybrid")
    other_net.load_state_dict(net.state_dict())
    helpers.set_optimizer_state_dict(other_net, other, loaded["optimizer"])
    assert snapshot(net, optimizer) == snapshot(other_net, other)


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


def test_hybrid_checkpoint_keeps_the_halves_apart() -> None:
    _net, optimizer = trained("hybrid")
    books = {id(entry["codebook"]) for entry in optimizer.state.values()}
    assert len(books) == 2
    _other_net, other = fresh("hybrid")
    other.load_state_dict(optimizer.state_dict())
    assert isinstance(other, GefenMuonHybrid)
    assert isinstance(other.muon, GefenMuon)
    assert other.muon.state is other.state
    assert len({id(entry["codebook"]) for entry in other.state.values()}) == 2
