from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from training import start

from gefen import Gefen
from gefen.errors import (
    InvalidArgumentError,
)

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
    ("eps", [-1e-8, math.nan, math.inf, False, None, "x"]),
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
