"""What the state of a parameter holds, and how much."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from workload import OPTIMIZERS, model, step

from gefen import Gefen
from gefen.layout import Layout
from gefen.state import LARGEST_COUNT, disagreement, impossible, momentum_spec


def test_state_is_what_is_documented() -> None:
    net = model()
    optimizer = OPTIMIZERS["gefen"](net)
    for number in range(3):
        step(net, optimizer, number)
    weight = optimizer.state[net[1].weight]
    assert {
        key: (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else type(value)
        for key, value in weight.items()
    } == {
        "step": int,
        "period": int,
        "index": (torch.uint8, (40, 16)),
        "magnitude": (torch.float32, (40, 16 // weight["period"])),
        "v_row": (torch.float32, (40,)),
        "v_col": (torch.float32, (16,)),
        "global_step": (torch.int64, ()),
        "codebook": (torch.float32, (256,)),
    }
    bias = optimizer.state[net[1].bias]
    assert bias["index"].shape == (40,)
    assert bias["v"].shape == bias["magnitude"].shape == (40 // bias["period"],)
    assert bias["codebook"] is weight["codebook"]
    assert bias["step"] == bias["global_step"] == 3


GPT2_SMALL = {
    "wte": (50257, 768),
    "wpe": (1024, 768),
    "qkv.weight": (768, 2304),
    "qkv.bias": (2304,),
    "proj.weight": (768, 768),
    "proj.bias": (768,),
    "up.weight": (768, 3072),
    "up.bias": (3072,),
    "down.weight": (3072, 768),
    "down.bias": (768,),
    "norm.weight": (768,),
    "norm.bias": (768,),
}


@pytest.mark.parametrize("factored", [True, False])
def test_state_is_about_one_byte_per_parameter(factored: bool) -> None:
    """GPT-2 small: counted on the embeddings and on one of its twelve equal layers."""
    generator = torch.Generator().manual_seed(0)
    params = {
        name: nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        for name, shape in GPT2_SMALL.items()
    }
    for param in params.values():
        param.grad = torch.randn(param.shape, generator=generator).bfloat16()
    optimizer = Gefen(params.items(), factored_v_2d=factored)
    optimizer.step()
    counted: set[int] = set()
    elements = state = 0
    for name, param in params.items():
        times = 1 if name.startswith("w") else 24 if name.startswith("norm") else 12
        elements += times * param.numel()
        for value in optimizer.state[param].values():
            storage = value.untyped_storage() if isinstance(value, Tensor) else None
            if storage is not None and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                state += times * storage.nbytes()
    assert elements > 124_000_000
    assert 1 < state / elements <= 1.02


@pytest.mark.parametrize("shape", [(6, 48), (4, 3, 8, 2), (96,), (), (0, 5), (5, 0)], ids=str)
def test_blocks_of_state_lie_in_rows(shape: tuple[int, ...]) -> None:
    """Of every form: what a rank has of a parameter's rows it has of their state."""
    param = nn.Parameter(torch.zeros(shape))
    optimizer = Gefen([param], factored_v_2d=False)
    runs = torch.arange(-(-param.numel() // 8)).exp().repeat_interleave(8)[: param.numel()]
    for grad in (torch.zeros(shape), runs.view(shape)):
        param.grad = grad
        optimizer.step()
        state = optimizer.state[param]
        assert state["index"].shape == shape
        length = param.numel() // shape[0] if len(shape) > 1 and shape[0] else param.numel()
        blocks = length // state["period"] if state["period"] else min(length, 1)
        lead = shape[:1] if len(shape) > 1 else ()
        if param.numel():
            assert state["magnitude"].shape == state["v"].shape == (*lead, blocks)


def test_a_first_gradient_of_zeros_decides_nothing() -> None:
    param = nn.Parameter(torch.ones(6, 48))
    optimizer = Gefen([param], factored_v_2d=False)
    for number, periods in enumerate([0, 0, 16]):
        runs = torch.logspace(0, 3, 18).repeat_interleave(16).view(6, 48)
        param.grad = runs * (number == 2)
        optimizer.step()
        assert optimizer.state[param]["period"] == periods
        assert torch.equal(param, torch.ones(6, 48)) is (number < 2)
    assert optimizer.state[param]["step"] == 3


def test_counts_are_bounded() -> None:
    """So that they fit the arithmetic that they go into."""
    layout = Layout(torch.Size([0]))
    entry = {
        "step": 10**400,
        "period": 1,
        "index": torch.zeros(0, dtype=torch.uint8),
        "magnitude": torch.zeros(0),
        "codebook": torch.linspace(-1, 1, 256),
        "global_step": torch.tensor(1),
    }
    found = disagreement(momentum_spec(layout, entry), entry)
    assert found == f"step is larger than {LARGEST_COUNT}"
    entry["step"] = 1
    assert disagreement(momentum_spec(layout, entry), entry) is None
    assert impossible(entry) is None


def test_what_is_not_finite_is_possible_and_what_is_negative_is_not() -> None:
    for value, verdict in ((torch.nan, True), (torch.inf, True), (-0.5, False)):
        found = impossible({"step": 1, "magnitude": torch.tensor([0.0, value])})
        assert (found is None) is verdict, value
