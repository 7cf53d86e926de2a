"""Checkpoints as people take them, from any number of ranks to any other."""

from __future__ import annotations

import functools
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import STEPS, made, optimizer_of, sharded, train, values
from pool import RankPool
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from gefen import prepare_load
from gefen.errors import CheckpointError

END = 2 * STEPS


class Dcp:
    """Into a fresh optimizer, by torch.distributed.checkpoint."""

    flat = False

    @classmethod
    def save(cls, net: nn.Module, optimizer: Any, folder: Path) -> None:
        dcp.save(cls._state(net, optimizer), checkpoint_id=folder)

    @classmethod
    def load(cls, net: nn.Module, optimizer: Any, folder: Path) -> None:
        prepare_load(net, optimizer, folder)
        state = cls._state(net, optimizer)
        dcp.load(state, checkpoint_id=folder)
        options = StateDictOptions(flatten_optimizer_state_dict=cls.flat)
        set_model_state_dict(net, state["model"])
        set_optimizer_state_dict(net, optimizer, state["optim"], options=options)

    @classmethod
    def _state(cls, net: nn.Module, optimizer: Any) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=cls.flat)
        return {
            "model": get_model_state_dict(net),
            "optim": get_optimizer_state_dict(net, optimizer, options=options),
        }


class Flat(Dcp):
    flat = True


class Async(Dcp):
    @classmethod
    def save(cls, net: nn.Module, optimizer: Any, folder: Path) -> None:
        dcp.async_save(cls._state(net, optimizer), checkpoint_id=folder).result()


class App:
    """What docs of torch call AppState."""

    def __init__(self, net: nn.Module, optimizer: Any) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        return Dcp._state(self.net, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.net, state["model"])
        set_optimizer_state_dict(self.net, self.optimizer, state["optim"])


class AsStateful:
    @staticmethod
    def save(net: nn.Module, optimizer: Any, folder: Path) -> None:
        dcp.save({"app": App(net, optimizer)}, checkpoint_id=folder)

    @staticmethod
    def load(net: nn.Module, optimizer: Any, folder: Path) -> None:
        prepare_load(net, optimizer, folder)
        dcp.load({"app": App(net, optimizer)}, checkpoint_id=folder)


class Full:
    """One file with everything, read by every rank."""

    options: ClassVar[dict[str, Any]] = {}

    @classmethod
    def save(cls, net: nn.Module, optimizer: Any, folder: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = {
            "model": get_model_state_dict(net, options=options),
            "optim": get_optimizer_state_dict(net, optimizer, options=options),
        }
        folder.mkdir(exist_ok=True)
        if torch.distributed.get_rank() == 0:
            torch.save(state, folder / "full.pt")

    @classmethod
    def load(cls, net: nn.Module, optimizer: Any, folder: Path) -> None:
        options = StateDictOptions(full_state_dict=True, **cls.options)
        state: dict[str, Any] = {"model": {}, "optim": {}}
        if not cls.options or torch.distributed.get_rank() == 0:
            state = torch.load(folder / "full.pt")
        set_model_state_dict(net, state["model"], options=options)
        set_optimizer_state_dict(net, optimizer, state["optim"], options=options)


class Broadcast(Full):
    options: ClassVar[dict[str, Any]] = {"broadcast_from_rank0": True}


class Converted(Dcp):
    """What ``dcp_to_torch_save`` makes of a checkpoint: one file with everything."""

    @classmethod
    def load(cls, net: nn.Module, optimizer: Any, folder: Path) -> None:
        if torch.distributed.get_rank() == 0:
            dcp_to_torch_save(folder, folder / "full.pt")
        torch.distributed.barrier()
        state = torch.load(folder / "full.pt", weights_only=False)
        set_model_state_dict(net, state["model"], options=StateDictOptions(full_state_dict=True))
        set_optimizer_state_dict(net, optimizer, state["optim"])


class Own:
    """Each rank its own file, by torch.save."""

    @staticmethod
    def save(net: nn.Module, optimizer: Any, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        state = net.state_dict(), optimizer.state_dict()
        torch.save(state, folder / f"{torch.distributed.get_rank()}.pt")

    @staticmethod
    def load(net: nn.Module, optimizer: Any, folder: Path) -> None:
        model, state = torch.load(folder / f"{torch.distributed.get_rank()}.pt")
        net.load_state_dict(model)
        optimizer.load_state_dict(state)


ROUTES: dict[str, Any] = {
    "dcp": Dcp,
    "flat": Flat,
    "async": Async,
    "stateful": AsStateful,
    "full": Full,
    "broadcast": Broadcast,
    "converted": Converted,
    "own": Own,
}
KINDS = {
    "Gefen": ("gefen", "exact"),
    "Gefen, blocks": ("block", "exact"),
    "GefenMuon, exact": ("muon", "exact"),
    "GefenMuon, distributed": ("muon", "distributed"),
    "GefenMuon, approx": ("muon", "approx"),
    "GefenMuonHybrid, exact": ("hybrid", "exact"),
    "GefenMuonHybrid, distributed": ("hybrid", "distributed"),
    "GefenMuonHybrid, approx": ("hybrid", "approx"),
    "GefenMuonHybrid, AdamW": ("adamw", "distributed"),
}
LAYOUTS = {
    "1 process": (1, "plain"),
    "FSDP2, 2 ranks": (2, "fsdp"),
    "FSDP2, 3 ranks": (3, "fsdp"),
    "FSDP2, 4 ranks": (4, "fsdp"),
    "HSDP, 2 x 2 ranks": (4, "hsdp"),
}


def saved(rank: int, world: int, layout: str, route: str, at: str, kinds: list[str]) -> Any:
    """What is trained and saved, and what the run goes on to."""
    found = {}
    for kind in kinds:
        name, mode = KINDS[kind]
        net = sharded(world, layout)
        optimizer = optimizer_of(name, net, mode)
        train(net, optimizer, range(STEPS))
        ROUTES[route].save(net, optimizer, Path(at) / kind)
        state = momenta(optimizer)
        train(net, optimizer, range(STEPS, END))
        found[kind] = state, values(net)
    return found


def resumed(rank: int, world: int, layout: str, route: str, at: str, kinds: list[str]) -> Any:
    found = {}
    for kind in kinds:
        name, mode = KINDS[kind]
        net = sharded(world, layout)
        with torch.no_grad():
            for param in net.parameters():
                param.zero_()
        optimizer = optimizer_of(name, net, mode)
        ROUTES[route].load(net, optimizer, Path(at) / kind)
        state = momenta(optimizer)
        train(net, optimizer, range(STEPS, END))
        found[kind] = state, values(net)
    return found


def momenta(optimizer: Any) -> list[torch.Tensor]:
    """All momentum, as whole tensors, by name: FSDP2 reorders parameters."""
    pairs = [
        pair
        for group in optimizer.param_groups
        for pair in zip(group["param_names"], group["params"], strict=True)
    ]
    keys = ("index", "magnitude", "exp_avg")
    entries = [optimizer.state[param] for _, param in sorted(pairs, key=itemgetter(0))]
    tensors = [entry[key] for entry in entries for key in keys if key in entry]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).clone() for t in tensors]


def alone(kind: str) -> dict[str, torch.Tensor]:
    net = made()
    optimizer = optimizer_of(KINDS[kind][0], net)
    train(net, optimizer, range(END))
    return values(net)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Sums over ranks are added in another order."""
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_continues_with_the_numbers_of_one_process(
    ranks: RankPool, tmp_path: Path, route: str
) -> None:
    kinds = [kind for kind in KINDS if "approx" not in kind]
    worlds = {"own": (2, 2), "broadcast": (3, 2)}.get(route, (2, 3))
    ranks.run(saved, worlds[0], "fsdp", route, str(tmp_path), kinds, limit_s=60)
    results = ranks.run(resumed, worlds[1], "fsdp", route, str(tmp_path), kinds, limit_s=60)
    for kind in kinds:
        expected = alone(kind)
        for result in results:
            assert_close(result[kind][1], expected)


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function of two layouts: what was saved on the first, and what the second makes of it."""
    folder, all_kinds = tmp_path_factory.mktemp("checkpoints"), list(KINDS)

    @functools.cache
    def save(layout: str) -> Any:
        world, form = LAYOUTS[layout]
        (folder / layout).mkdir()
        at = str(folder / layout)
        return ranks.run(saved, world, form, "dcp", at, all_kinds, limit_s=60)[0]

    @functools.cache
    def load(first: str, second: str) -> Any:
        before, (world, form) = save(first), LAYOUTS[second]
        at = str(folder / first)
        return before, ranks.run(resumed, world, form, "dcp", at, all_kinds, limit_s=60)

    return load


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_what_one_layout_saves_another_continues(
    runs: Any, first: str, second: str, kind: str
) -> None:
    before, results = runs(first, second)
    momentum, end = before[kind]
    for result in results:
        for value, expected in zip(result[kind][0], momentum, strict=True):
            assert torch.equal(value, expected)
        if "approx" not in kind:
            assert_close(result[kind][1], alone(kind))
        elif first == second:
            assert_close(result[kind][1], end)
        else:  # each rank orthogonalises its rows: other rows, other numbers
            assert all(value.isfinite().all() for value in result[kind][1].values())


def refused(rank: int, world: int, kinds: list[str], at: str) -> dict[str, str]:
    """What every rank is told where all load the file of rank 0."""
    told = {}
    for kind in kinds:
        name, mode = KINDS[kind]
        net = sharded(world, "fsdp")
        optimizer = optimizer_of(name, net, mode)
        train(net, optimizer, range(STEPS))
        Own.save(net, optimizer, Path(at))
        torch.distributed.barrier()
        before = momenta(optimizer)
        state = torch.load(Path(at) / "0.pt")[1]
        try:
            optimizer.load_state_dict(state)
        except CheckpointError as error:
            told[kind] = str(error)
        for value, expected in zip(momenta(optimizer), before, strict=True):
            assert torch.equal(value, expected)
        train(net, optimizer, range(STEPS, END))
    return told


def test_the_file_of_one_rank_is_refused_by_name_on_all(ranks: RankPool, tmp_path: Path) -> None:
    kinds = [kind for kind in KINDS if "approx" not in kind]
    for told in ranks.run(refused, 2, kinds, str(tmp_path), limit_s=60):
        for kind in kinds:
            assert (
                "holds the part of the rank at (0,) of the mesh, this one is at (1,)" in told[kind]
            )
            assert "changed nothing on any rank" in told[kind]


def test_the_file_of_one_rank_is_refused_by_one_process(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(saved, 2, "fsdp", "own", str(tmp_path), ["Gefen"])
    ranks.run(refused_alone, 1, str(tmp_path))


def refused_alone(rank: int, world: int, at: str) -> None:
    net = made()
    optimizer = optimizer_of("gefen", net)
    with pytest.raises(CheckpointError, match=r"'embed.weight'.* is a DTensor, expected a plain"):
        optimizer.load_state_dict(torch.load(Path(at) / "Gefen" / "0.pt")[1])
