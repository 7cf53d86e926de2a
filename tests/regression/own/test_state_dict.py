"""Checkpoints: what is saved and what survives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import fresh, own_copy, trained
from workload import OPTIMIZERS, bytes_of, model, snapshot, step

from gefen import Gefen, GefenMuon, GefenMuonHybrid
from gefen.errors import CheckpointError

KINDS = pytest.mark.parametrize("kind", OPTIMIZERS)


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
