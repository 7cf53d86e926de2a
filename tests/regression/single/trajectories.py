"""Recorded trajectories of gefen-x 0.5.0, and how closely an optimizer must follow them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gefen import Gefen, GefenMuon

GOLDEN = Path(__file__).parent.parent / "golden"
STEPS = 8
RECORDED = (0, 1, 7)

# Differences of float32 rounding only.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-7}
# Entries whose value lies on the border between two, where rounding decides.
EQUAL_INDICES = 0.999
# RMS differences in relation to the RMS movement since the start. Muon's bfloat16 products are
# summed in another order on other machines; the recorder rounded codebook values to bfloat16.
FLOAT32_MUON, BFLOAT16_GEFEN = 0.04, 0.05
# Share of bfloat16 Muon elements that are within one unit in the last place after one step.
BFLOAT16_MUON = 0.99


@dataclass(frozen=True)
class Case:
    file: str
    make: partial[torch.optim.Optimizer]
    dtype: torch.dtype

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.make.keywords)

    @property
    def is_muon(self) -> bool:
        return self.file.startswith("muon")


CASES = [
    Case("gefen_factored_fp32", partial(Gefen, lr=1e-2, weight_decay=0.01), torch.float32),
    Case("gefen_block_fp32", partial(Gefen, lr=1e-2, factored_v_2d=False), torch.float32),
    Case("gefen_factored_bf16", partial(Gefen, lr=1e-2), torch.bfloat16),
    Case(
        "gefen_block_bf16",
        partial(Gefen, lr=1e-2, factored_v_2d=False, weight_decay=0.1),
        torch.bfloat16,
    ),
    Case("muon_standard_fp32", partial(GefenMuon, lr=2e-2), torch.float32),
    Case(
        "muon_tuned3_normuon_fp32",
        partial(
            GefenMuon,
            lr=2e-2,
            ns_schedule="tuned3",
            normuon=True,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.float32,
    ),
    Case(
        "muon_plain_momentum_bf16",
        partial(GefenMuon, lr=2e-2, nesterov=False, weight_decay=0.0),
        torch.bfloat16,
    ),
]


def recorded(file: str) -> dict[str, Tensor]:
    """Every array of a golden file, on the CPU."""
    with np.load(GOLDEN / f"{file}.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def names_of(values: dict[str, Tensor]) -> list[str]:
    return [name.removesuffix(".init") for name in values if name.endswith(".init")]


@dataclass
class Replay:
    after: dict[tuple[str, int], Tensor]
    """Parameters, float32 on the CPU, by name and step."""
    params: dict[str, nn.Parameter]
    optimizer: Any


def replay(
    case: Case,
    device: torch.device | str = "cpu",
    layout: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    **settings: Any,
) -> Replay:
    """Step through the recorded gradients; ``layout`` may rearrange tensors in memory.

    The recordings have the blocks and the codebook of gefen-x, which are not those that are
    chosen now. So the first step is taken as it comes, and what follows continues a checkpoint
    with the state that gefen-x had then.
    """
    values = recorded(case.file)
    params = {
        name: nn.Parameter(layout(values[f"{name}.init"].to(device, case.dtype)))
        for name in names_of(values)
    }
    optimizer = case.make(list(params.items()), **settings)
    after = {}
    for step in range(STEPS):
        for name, param in params.items():
            param.grad = layout(values[f"{name}.grad{step}"].to(device, case.dtype))
        optimizer.step()
        after |= {(name, step): p.detach().cpu().float().clone() for name, p in params.items()}
        if step == 0:
            state = optimizer.state_dict()
            for number, (name, param) in enumerate(params.items()):
                param.data.copy_(values[f"{name}.after0"])
                first = _first_state(case, values, name, state["state"][number])
                state["state"][number] = state["state"][number] | first
            optimizer.load_state_dict(state)
    return Replay(after, params, optimizer)


def _first_state(
    case: Case, values: dict[str, Tensor], name: str, made: dict[str, Any]
) -> dict[str, Any]:
    """What gefen-x had after the first step where it depends on blocks; ``made`` is ours."""
    period, grad = int(values[f"{name}.period"]), values[f"{name}.grad0"]
    beta, beta2 = (0.95, None) if case.is_muon else (0.9, 0.999)
    blocks = (1 - beta) * grad.view(-1, period)
    magnitude = blocks.abs().amax(dim=1)
    off = (blocks / magnitude[:, None]).double()[..., None] - values["codebook"].double()
    state = {
        "period": period,
        "codebook": values["codebook"],
        "index": off.abs().argmin(dim=-1).to(torch.uint8).view(made["index"].shape),
        "magnitude": magnitude,
    }
    if beta2 is not None and "v" in made:
        state["v"] = (1 - beta2) * grad.square().view(-1, period).mean(dim=1)
    rows = grad.numel() // period // len(grad)
    if made["magnitude"].dim() == 2 and rows * period * len(grad) == grad.numel():
        for key in {"magnitude", "v"} & state.keys():
            state[key] = state[key].view(len(grad), rows)
    return state


def assert_follows(case: Case, run: Replay) -> None:
    """Raise where a replay leaves the tolerances."""
    values = recorded(case.file)
    for name in run.params:
        # Blocks hardly matter to the first step of Muon, but to that of Gefen.
        for step in RECORDED if case.is_muon else RECORDED[1:]:
            wanted, got = values[f"{name}.after{step}"], run.after[name, step]
            _assert_parameters(case, f"{name} after step {step}", got, wanted, values, name, step)
        _assert_state(case, name, run.optimizer.state[run.params[name]], values)


def _assert_parameters(
    case: Case,
    what: str,
    got: Tensor,
    wanted: Tensor,
    values: dict[str, Tensor],
    name: str,
    step: int,
) -> None:
    if case.dtype == torch.float32 and not case.is_muon:
        torch.testing.assert_close(got, wanted, **FLOAT32, msg=lambda text: f"{what}: {text}")
    elif case.dtype == torch.bfloat16 and case.is_muon:
        if step == 0:
            unit = torch.exp2(torch.floor(torch.log2(wanted.abs())) - 7)
            share = ((got - wanted).abs() <= unit).float().mean().item()
            assert share >= BFLOAT16_MUON, f"{what}: {share:.4f} within one unit"
    else:
        start = values[f"{name}.init"]
        off = ((got - wanted).square().mean() / (wanted - start).square().mean()).sqrt().item()
        allowed = FLOAT32_MUON if case.is_muon else BFLOAT16_GEFEN
        assert off <= allowed, f"{what}: off by {off:.4f} of the movement"


def _assert_state(case: Case, name: str, state: dict[str, Any], values: dict[str, Tensor]) -> None:
    assert state["period"] == values[f"{name}.period"].item()
    assert torch.equal(state["codebook"].cpu(), values["codebook"])
    if case.dtype == torch.float32:
        equal = (state["index"].cpu().view(-1) == values[f"{name}.index"]).float().mean().item()
        assert equal >= EQUAL_INDICES, f"{name}: {equal:.4f} of the indices are equal"
        pairs = {"magnitude": "magnitude", "vmean": "v", "v_row": "v_row", "v_col": "v_col"}
        for theirs, ours in pairs.items():
            if f"{name}.{theirs}" in values:
                torch.testing.assert_close(
                    state[ours].cpu().view(-1), values[f"{name}.{theirs}"], **FLOAT32
                )
