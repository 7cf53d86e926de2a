from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from training import start

from gefen import Gefen
from gefen.errors import (
    GefenError,
    InvalidArgumentError,
    UnsupportedFeatureError,
    UnsupportedParameterError,
)


def test_refused_parameters_are_named() -> None:
    good = ("good", start((3,)))
    bad: dict[str, Any] = {
        "is sparse": nn.Parameter(torch.zeros(3).to_sparse()),
        "has dtype torch.complex64": nn.Parameter(torch.zeros(3, dtype=torch.complex64)),
        "has dtype torch.int64": torch.arange(3),
        "is not a leaf": start((3,)) * 2,
        "is an expanded tensor": nn.Parameter(torch.zeros(1).expand(3)),
        "is of type float": 3.0,
    }
    for message, param in bad.items():
        with pytest.raises(UnsupportedParameterError, match=f"Parameter 'bad' {message}"):
            Gefen([good, ("bad", param)])
        with pytest.raises(UnsupportedParameterError, match=f"Parameter 'param_1' {message}"):
            Gefen([good[1], param])


def test_duplicates_are_named() -> None:
    a, b = start((3,)), start((3,))
    with pytest.raises(InvalidArgumentError, match=r"Duplicate parameter 'again'.*'w'"):
        Gefen([("w", a), ("again", a)])
    with pytest.raises(InvalidArgumentError, match="Duplicate parameter name 'w'"):
        Gefen([("w", a), ("w", b)])
    with pytest.raises(InvalidArgumentError, match=r"Duplicate parameter 'param_1'.*'param_0'"):
        Gefen([a, a])
    optimizer = Gefen([("w", a)])
    for pair in (("other", a), ("w", b)):
        with pytest.raises(InvalidArgumentError, match="Duplicate"):
            optimizer.add_param_group({"params": [pair]})
    assert len(optimizer.param_groups) == 1


def test_other_bad_arguments() -> None:
    for params in (start((3,)), [], {}, None, 3, [[start((3,))]], ["w"], nn.Linear(2, 2)):
        with pytest.raises(GefenError):
            Gefen(params)
    with pytest.raises(InvalidArgumentError, match="not a mix"):
        Gefen([("w", start((3,))), start((3,))])
    assert issubclass(UnsupportedFeatureError, NotImplementedError)


def test_modules_are_refused_with_what_to_pass() -> None:
    for module in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))):
        with pytest.raises(InvalidArgumentError, match=r"model\.named_parameters\(\)"):
            Gefen(module)


def test_parameters_that_cannot_be_updated_are_named() -> None:
    with torch.inference_mode():
        param = nn.Parameter(torch.zeros(3))
    with pytest.raises(UnsupportedParameterError, match="'w' was made under"):
        Gefen([("w", param)])
    with pytest.raises(UnsupportedParameterError, match="'weight' is not initialized"):
        Gefen(nn.LazyLinear(4).named_parameters())


def test_names_are_for_all_groups_or_none() -> None:
    named, bare = {"params": [("w", start((3,)))]}, {"params": [start((3,))]}
    for groups in ([named, bare], [bare, named]):
        with pytest.raises(InvalidArgumentError, match="in all groups or in none"):
            Gefen(groups)
    optimizer = Gefen([named])
    with pytest.raises(InvalidArgumentError, match="in all groups or in none"):
        optimizer.add_param_group(bare)
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["param_names"] = []
    optimizer.step()


def test_groups_may_come_from_generators() -> None:
    layers = [nn.Linear(2, 3), nn.Linear(3, 4)]
    optimizer = Gefen({"params": (p for p in layer.parameters())} for layer in layers)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]


def test_arguments_of_other_optimizers_are_refused() -> None:
    for name in ("foreach", "differentiable", "amsgrad", "momentum_dtype"):
        with pytest.raises(TypeError, match=name):
            Gefen([start((3,))], **{name: True})
