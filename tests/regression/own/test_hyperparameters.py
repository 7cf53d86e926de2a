from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from training import start

from gefen import Gefen, GefenMuon
from gefen.errors import InvalidArgumentError

BAD_SETTINGS = [
    (
        "lr",
        [
            -1,
            -1e-9,
            math.nan,
            math.inf,
            True,
            "0.1",
            None,
            torch.tensor([0.1, 0.2]),
            torch.tensor(1),
            torch.tensor(-0.1),
            1j,
            10**400,
            np.array([0.1]),
            torch.tensor(0.1, device="meta"),
            torch.tensor([0.1]).to_sparse(),
        ],
    ),
    ("betas", [(0.9,), (0.9, 0.99, 0.999), 0.9, None, "ab"]),
    ("betas[0]", [(1.0, 0.9), (-0.1, 0.9), (math.nan, 0.9), (True, 0.9), ("0.9", 0.9)]),
    ("betas[1]", [(0.9, 1.0), (0.9, math.inf), (0.9, None)]),
    ("eps", [0, -1e-8, 1e-46, 2.0**-127, math.nan, math.inf, False, None, "x"]),
    ("weight_decay", [-0.1, math.nan, math.inf, True, None]),
    ("codebook_refresh_every", [-1, 1.5, True, None, math.nan]),
    ("period_one_substrings", ["bias", None, (1,), 3]),
    *[
        (name, [0, 1, None, "yes"])
        for name in (
            "fused",
            "force_1d_period_one",
            "force_2d_period_one",
            "factored_v_2d",
            "stochastic_round",
            "deterministic",
            "capturable",
            "verbose",
            "maximize",
            "bf16_stochastic_round",
        )
    ],
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_SETTINGS for value in values]
)
def test_bad_settings_are_named(name: str, value: Any) -> None:
    argument = name.partition("[")[0]
    with pytest.raises(InvalidArgumentError) as caught:
        Gefen([("w", start((3,)))], **{argument: value})
    assert str(caught.value).startswith(f"Invalid {name}=")
    assert "must be" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_numpy_numbers_become_plain() -> None:
    optimizer = Gefen([start((3,))], lr=np.float32(0.5), eps=np.float64(1e-8), weight_decay=1)
    group = optimizer.param_groups[0]
    assert (type(group["lr"]), type(group["eps"]), type(group["weight_decay"])) == (float,) * 3
    assert Gefen([start((3,))], lr=np.array(0.5)).param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("make", "name"), [(Gefen, "eps"), (GefenMuon, "eps"), (GefenMuon, "normuon_eps")]
)
def test_what_is_divided_by_is_not_zero_in_float32(make: Any, name: str) -> None:
    """The smallest that is allowed gives no NaN at a zero gradient, the next one is refused."""
    chosen = {"normuon": True} if make is GefenMuon else {"factored_v_2d": False}
    with pytest.raises(InvalidArgumentError, match=rf"Invalid {name}=.* must be .*2\*\*-126"):
        make([start((4, 8))], **{name: 1e-38}, **chosen)
    param = start((4, 8))
    optimizer = make([param], **{name: 2.0**-126}, **chosen)
    param.grad = torch.zeros(4, 8)
    param.grad[0] = 1.0
    optimizer.step()
    assert param.isfinite().all()


def test_a_captured_step_learns_no_codebook() -> None:
    with pytest.raises(InvalidArgumentError, match=r"codebook_refresh_every=3.*capturable=True"):
        Gefen([start((3,))], capturable=True, codebook_refresh_every=3)


def test_deterministic_factored_steps_round_to_nearest() -> None:
    both = {"deterministic": True, "stochastic_round": True}
    with pytest.raises(InvalidArgumentError, match=r"stochastic_round=True.*factored_v_2d=False"):
        Gefen([start((3, 3))], **both)
    optimizer = Gefen([start((3, 3))], factored_v_2d=False, **both)
    with pytest.raises(InvalidArgumentError, match="stochastic_round=True"):
        optimizer.add_param_group({"params": [start((3, 3))], "factored_v_2d": True})
    optimizer.param_groups[0]["factored_v_2d"] = True
    with pytest.raises(InvalidArgumentError, match="stochastic_round=True"):
        optimizer.step()
