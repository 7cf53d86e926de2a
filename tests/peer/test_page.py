"""docs/coming-from-gefen-x.md, line by line: every row of its tables has a test here."""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gefen_x_runs as cases
import pytest
import torch
import torch.distributed as dist
from gefen_x_runs import rebuilt, recorded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from training import gradients, start, train
from workload import model

import gefen
from gefen import Gefen, GefenMuon, GefenMuonHybrid, installed, params, tools
from gefen.errors import CheckpointError, InvalidArgumentError, UnsupportedFeatureError
from gefen.tools import find_lr

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-gefen-x.md"
SHAPE = (8, 12)

CHECKS: dict[str, Callable[[], None]] = {}


def row(first: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Marks the test of the row whose first cell is ``first``."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        assert first not in CHECKS
        CHECKS[first] = check
        return check

    return register


def rows() -> list[str]:
    """First cells of all tables but the one on installing, which test_installed.py does."""
    text = PAGE.read_text().partition("## Arguments and groups")[2]
    cells = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines()]
    lines = [c for c, line in zip(cells, text.splitlines(), strict=True) if line.startswith("| ")]
    return [c for c in lines if c not in ("gefen-x 0.5.0", "elsewhere", "---")]


def test_every_row_has_a_test() -> None:
    assert rows() == list(CHECKS)


def test_the_command_that_repairs() -> None:
    assert installed.repair(["gefen-x"]).removeprefix("To repair: ") in PAGE.read_text()


def run(make: Any, group: dict[str, Any] | None = None, **chosen: Any) -> Tensor:
    param = start(SHAPE)
    groups = [{"params": [("w", param)], **(group or {})}]
    return train(make(groups, **chosen), param, gradients(SHAPE, 4))


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b)


@row("constructor arguments")
def _() -> None:
    for kind in (Gefen, GefenMuon, GefenMuonHybrid):
        found = list(inspect.signature(kind).parameters)
        new = ["maximize", "bf16_stochastic_round"]
        if kind is GefenMuonHybrid:
            new += ["sides", "backup_factored_v_2d"]
        assert found[-len(new) :] == new  # the rest: test_init.py
    defaults = inspect.signature(GefenMuonHybrid).parameters
    assert defaults["ns_schedule"].default == "standard"
    assert defaults["backup_factored_v_2d"].default is True


@row("`fused=True`")
def _() -> None:
    assert same(run(Gefen, fused=True), run(Gefen, fused=False))


@row("`no_decay_substrings`, `period_one_substrings`")
def _() -> None:
    pairs = [("a.weight", start(SHAPE)), ("a.LayerNorm", start((4,)))]
    chosen = {"lr": 0.1, "weight_decay": 0.3, "no_decay_substrings": ["layernorm"]}
    groups = GefenMuonHybrid(pairs, **chosen).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert same(run(Gefen, period_one_substrings=["W"]), run(Gefen, force_2d_period_one=True))


@row("`beta1`, `beta2` of a group")
def _() -> None:
    wanted = run(Gefen, betas=(0.5, 0.8))
    assert same(run(Gefen, {"beta1": 0.5, "beta2": 0.8}), wanted)
    later("beta1", 0.5, Gefen, "group['betas']")
    param = start(SHAPE)
    optimizer = Gefen([param])
    optimizer.param_groups[0]["betas"] = (0.5, 0.8)
    assert same(train(optimizer, param, gradients(SHAPE, 4)), wanted)


def later(key: str, value: Any, make: Any, said: str) -> None:
    """A key written into a group of an existing optimizer raises at the next step."""
    param = start(SHAPE)
    optimizer = make([param])
    optimizer.param_groups[0][key] = value
    with pytest.raises(InvalidArgumentError, match=re.escape(said)):
        train(optimizer, param, gradients(SHAPE, 1))


@row("`beta1`, `betas` of a group of `GefenMuon`")
def _() -> None:
    for key in ("beta1", "betas"):
        with pytest.raises(InvalidArgumentError, match=key):
            run(GefenMuon, {key: 0.5})
    later("beta1", 0.5, GefenMuon, "group['momentum']")


@row("`maximize` of a group")
def _() -> None:
    for kind in (Gefen, GefenMuon):
        up = run(kind, {"maximize": True})
        assert same(up, run(kind, maximize=True))
        assert not same(up, run(kind))


@row("`amsgrad`, `differentiable`, `foreach` of a group")
def _() -> None:
    for kind in (Gefen, GefenMuon):
        neutral = {"amsgrad": False, "differentiable": False, "foreach": None}
        assert same(run(kind, neutral), run(kind, {"foreach": False}))
        for key in neutral:
            with pytest.raises(InvalidArgumentError, match=key):
                run(kind, {key: True})


@row("other settings of a group (`stochastic_round`, `factored_v_2d`, …)")
def _() -> None:
    for key, value in [("stochastic_round", True), ("factored_v_2d", False)]:
        assert same(run(Gefen, {key: value}), run(Gefen, **{key: value}))
        assert not same(run(Gefen, {key: value}), run(Gefen))


@row("settings of the other optimizer in a group")
def _() -> None:
    with pytest.raises(InvalidArgumentError, match="GefenMuon has this setting"):
        run(Gefen, {"ns_steps": 3})
    with pytest.raises(InvalidArgumentError, match="Gefen has this setting"):
        run(GefenMuon, {"factored_v_2d": False})


@row("keys of your own in a group")
def _() -> None:
    assert Gefen([{"params": [start(SHAPE)], "tag": 7}]).param_groups[0]["tag"] == 7


@row("`eps=0`, `normuon_eps=0`")
def _() -> None:
    for value in (0.0, 1e-38):
        for kind, name in [(Gefen, "eps"), (GefenMuon, "eps"), (GefenMuon, "normuon_eps")]:
            with pytest.raises(InvalidArgumentError, match=rf"{name}=.*2\*\*-126"):
                run(kind, **{name: value})


@row("`capturable=True` with `codebook_refresh_every`")
def _() -> None:
    with pytest.raises(InvalidArgumentError, match="codebook_refresh_every=2"):
        Gefen([start(SHAPE)], capturable=True, codebook_refresh_every=2)


@row("`deterministic=True` with `stochastic_round` and `factored_v_2d`")
def _() -> None:
    with pytest.raises(InvalidArgumentError, match="stochastic_round=True"):
        run(Gefen, deterministic=True, stochastic_round=True)
    run(Gefen, deterministic=True, stochastic_round=True, factored_v_2d=False)


@row("`stochastic_round=True`")
def _() -> None:
    for kind in (Gefen, GefenMuon):
        found = run(kind, stochastic_round=True)
        assert same(found, run(kind, stochastic_round=True))
        assert not same(found, run(kind))


@row("`batched_ns=True`")
def _() -> None:
    assert same(run(GefenMuon, batched_ns=True), run(GefenMuon))


@row("`fp8_ns=True`")
def _() -> None:
    assert same(run(GefenMuon, fp8_ns=True), run(GefenMuon))  # small
    found = {}
    for key, chosen in {"off": {}, "on": {"fp8_ns": True}}.items():
        for compiled in (True, False):
            param = start((512, 512))
            optimizer = GefenMuon([param], fp8_ns_compile=compiled, **chosen)
            found[key, compiled] = train(optimizer, param, gradients((512, 512), 1))
    assert same(found["on", True], found["on", False])
    assert not same(found["on", True], found["off", True])


@row("names of parameters")
def _() -> None:
    optimizer = Gefen([("Block.W", start(SHAPE))])
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["Block.W"]
    names = recorded("gefen")["state_dict"]["param_groups"][0]["param_names"]
    assert names[0] == "block.embed.weight"


@row("`optimizer.fused`, `.verbose`")
def _() -> None:
    optimizer = Gefen([start(SHAPE)])
    assert (optimizer.fused, optimizer.verbose) == (True, False)
    optimizer.fused, optimizer.verbose = False, True
    assert (optimizer.fused, optimizer.verbose) == (False, True)


@row("`optimizer.capturable`, `.backup_optimizer`, `.muon`, `.backup`")
def _() -> None:
    assert Gefen([start(SHAPE)], capturable=True).capturable is True
    hybrid = GefenMuonHybrid(model(), lr=0.1, backup_optimizer="adamw")
    assert (hybrid.capturable, hybrid.backup_optimizer) == (False, "adamw")
    assert isinstance(hybrid.muon, GefenMuon)
    assert isinstance(hybrid.backup, torch.optim.AdamW)


@row("`verbose=True`")
def _() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gefen")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        run(Gefen, verbose=True)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert any("codebook" in line for line in lines)


@row("`MEMORY_SAFE_FALLBACK`")
def _() -> None:
    param = start((64, 64))
    optimizer = Gefen([param], lr=1e-3)
    train(optimizer, param, [torch.randn(64, 64, generator=torch.Generator().manual_seed(0))])
    state = optimizer.state[param]
    held = sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, Tensor))
    assert held - 256 * 4 - 8 < 1.3 * param.numel()


@row("`gefen.params`")
def _() -> None:
    assert params.split_params_for_muon is gefen.split_params_for_muon
    assert params.validate_split is gefen.validate_split


@row("a state dict of `Gefen` or `GefenMuon`")
def _() -> None:
    goes_on("gefen", 1e-6)
    goes_on("gefen-block", 1e-6)
    goes_on("muon", None)


@row("a state dict of `GefenMuonHybrid`")
def _() -> None:
    assert recorded("hybrid")["state_dict"].keys() == {"muon", "backup", "backup_optimizer"}
    optimizer = goes_on("hybrid", None)
    goes_on("hybrid-adamw", None)
    assert optimizer.state_dict().keys() == {"state", "param_groups"}


def goes_on(kind: str, tolerance: float | None) -> Any:
    """More of it is in tests/regression/single/test_from_gefen_x.py."""
    net, optimizer, found = rebuilt(kind)
    optimizer.load_state_dict(found["state_dict"])
    cases.train(optimizer, kind, net, range(cases.BEFORE, cases.BEFORE + cases.AFTER))
    for name, param in net.items():
        off = (param.detach() - found["after"][name]).abs().max()
        moved = (found["after"][name] - found["before"][name]).abs().max()
        assert off <= (tolerance if tolerance is not None else 0.02 * moved + 1e-6), name
    return optimizer


@row("either, loaded under FSDP2")
def _() -> None:
    """On two ranks, with the steps that follow, in worlds/test_gefen_x.py."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        net, _, found = rebuilt("gefen-deterministic")
        spread = {
            name: nn.Parameter(distribute_tensor(param.detach(), mesh))
            for name, param in net.items()
        }
        optimizer = Gefen(spread.items(), deterministic=True)
        optimizer.load_state_dict(found["state_dict"])
        saved = found["state_dict"]["state"][0]["automatic_period"]
        assert saved == 24
        assert optimizer.state[spread["Block.Embed.weight"]]["period"] == 12
    finally:
        dist.destroy_process_group()


@row("`factored_v_2d` and others that it does not save")
def _() -> None:
    net, _, found = rebuilt("gefen-deterministic")
    saved = found["state_dict"]
    assert "factored_v_2d" not in saved["param_groups"][0]
    optimizer = Gefen(net.items(), factored_v_2d=False, deterministic=True)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["factored_v_2d"] is False


@row("state of parameters that FSDP2 had cut")
def _() -> None:
    _, optimizer, found = rebuilt("gefen")
    found["state_dict"]["state"][0] = {"name": 0, "_gefen_rank_local_member": True}
    with pytest.raises(CheckpointError, match="gefen-x"):
        optimizer.load_state_dict(found["state_dict"])


@row("`deterministic` in checkpoints")
def _() -> None:
    saved = Gefen([start(SHAPE)], deterministic=True).state_dict()
    assert saved["param_groups"][0]["deterministic"] is True
    with pytest.raises(CheckpointError, match="deterministic=True"):
        Gefen([start(SHAPE)]).load_state_dict(saved)


@row("`GefenDCPState`, `GefenSavePlanner`, `GefenFileSystemWriter`")
def _() -> None:
    for name in ("GefenDCPState", "GefenSavePlanner", "GefenFileSystemWriter"):
        with pytest.raises(UnsupportedFeatureError, match=r"gefen\.prepare_load"):
            getattr(gefen, name)()


@row("float32 parameters under `torch.autocast` and `GradScaler`")
def _() -> None:
    net = nn.Linear(4, 4)
    optimizer = Gefen(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = net.weight.detach().clone()
    for value in (1.0, float("inf")):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(torch.full((2, 4), value)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = not same(net.weight.detach(), before)
        assert moved == (value == 1.0)
        before = net.weight.detach().clone()
    assert scaler.get_scale() == 2.0**9


def snippet() -> dict[str, Any]:
    """What the page's code on float16 defines, for a small model."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1, bias=False).half()
    code = re.search(r"```python\n(masters = .*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"torch": torch, "Gefen": Gefen, "model": net, "device": "cpu"}
    exec(code[1], names)
    return names


@row("float16 parameters under `GradScaler`")
def _() -> None:
    """More of it is in own/test_scaling.py."""
    param = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer, scaler = Gefen([param], lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, float("inf")):
        before = param.detach().clone()
        optimizer.zero_grad()
        scaler.scale(param.float().sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert same(param.detach(), before) == (factor != 1.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)


@row('the same with `backup_optimizer="adamw"`')
def _() -> None:
    net = model(torch.float16)
    optimizer = GefenMuonHybrid(net, lr=0.1, backup_optimizer="adamw")
    other = torch.amp.GradScaler("cpu")
    other.scale(sum(p.float().sum() for p in net.parameters())).backward()
    with pytest.raises(InvalidArgumentError, match="step float32 copies"):
        other.step(optimizer)
    names = snippet()
    net, masters = names["model"], names["masters"]
    plain = [p.detach().float().requires_grad_() for p in net.parameters()]
    other = Gefen(plain, lr=1e-3)
    for number in range(4):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number)).half()
        before = [p.detach().clone() for p in masters]
        scale = names["scaler"].get_scale()
        overflow = number == 2
        loss = (net(inputs).float() * (float("inf") if overflow else 1e-6)).sum()
        names["step"](loss)
        assert all(map(same, masters, before)) == overflow
        if overflow:
            assert names["scaler"].get_scale() == scale / 2
            continue
        # Gradients of 1e-6, which float16 has 4 bits for, keep all of their precision.
        plain[0].grad = (inputs.float() * 1e-6).sum(0, keepdim=True)
        other.step()
        torch.testing.assert_close(masters[0], plain[0], rtol=2e-3, atol=2e-3)
        assert same(net.weight.detach(), masters[0].detach().half())


@row("`bf16_stochastic_round` of torchao")
def _() -> None:
    for make in (Gefen, GefenMuon):
        param = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        grads = [grad.bfloat16() for grad in gradients((64, 64), 1)]
        found = train(make([param], lr=1e-3, bf16_stochastic_round=True), param, grads)
        assert found.unique().numel() > 1
    GefenMuonHybrid(model(torch.bfloat16), lr=0.1, bf16_stochastic_round=True)
    with pytest.raises(UnsupportedFeatureError, match="backup_optimizer='gefen'"):
        GefenMuonHybrid(model(), lr=0.1, backup_optimizer="adamw", bf16_stochastic_round=True)


@row(
    "`gefen.tools.lr_range_test`, `measure_update_rms`, `calibrate_relative`, `calibrate_vs_adamw`"
)
def _() -> None:
    """Most of it is in own/test_tools.py."""
    param = nn.Parameter(torch.ones(SHAPE))
    optimizer = Gefen([param], lr=0.01)

    def closure() -> Tensor:
        loss = param.square().sum()
        loss.backward()
        return loss

    before = param.detach().clone()
    assert tools.lr_range_test(optimizer, closure, num_iter=20).suggested_lr > 0
    for tool in (tools.measure_update_rms, tools.calibrate_relative, tools.calibrate_vs_adamw):
        assert tool(optimizer, closure, num_steps=3, warmup=1)
    assert same(param.detach(), before)
    assert not optimizer.state


@row("`gefen.tools.find_lr.find_lr`")
def _() -> None:
    assert inspect.signature(find_lr.find_lr).parameters["num_iter"].default == 100
    with pytest.raises(UnsupportedFeatureError, match="restore=False"):
        find_lr.find_lr(model(), torch.zeros(2, 2).long(), restore=False)


@row("`python -m gefen.tools.find_lr`, `python -m gefen.tools.run_model_calibration`")
def _() -> None:
    for name in ("find_lr", "run_model_calibration"):
        command = [sys.executable, "-m", f"gefen.tools.{name}", "--model", "x"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert "call" in done.stderr


@row("`find_lr_parallel_sweep`, `find_lr_sharded_sweep`")
def _() -> None:
    for name in ("find_lr_parallel_sweep", "find_lr_sharded_sweep"):
        with pytest.raises(UnsupportedFeatureError, match="call"):
            getattr(find_lr, name)("path", ["cuda:0"])


@pytest.mark.parametrize("first", CHECKS)
def test_row(first: str) -> None:
    CHECKS[first]()
