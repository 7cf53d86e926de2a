from __future__ import annotations

import pytest
import torch
from torch import nn

from gefen import split_params_for_muon, validate_split
from gefen.errors import InvalidArgumentError, UnsupportedParameterError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.bag = nn.EmbeddingBag(4, 8)
        self.inner = nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.LM_Head = nn.Linear(8, 16)
        self.tied = nn.Linear(8, 16, bias=False)
        self.tied.weight = self.tokens.weight
        self.outer = nn.Linear(8, 8, bias=False)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)


def names(half: list[tuple[str, torch.Tensor]]) -> list[str]:
    return [name for name, _ in half]


def test_split() -> None:
    muon, backup = split_params_for_muon(Model())
    assert names(muon) == ["inner.weight", "outer.weight"]
    assert names(backup) == [
        "tokens.weight",
        "bag.weight",
        "inner.bias",
        "conv.weight",
        "conv.bias",
        "LM_Head.weight",
        "LM_Head.bias",
    ]


def test_split_finds_tied_heads_under_any_name() -> None:
    model = nn.Module()
    model.head = nn.Linear(8, 16, bias=False)
    model.inner = nn.Linear(8, 8, bias=False)
    model.tokens = nn.Embedding(16, 8)
    model.head.weight = model.tokens.weight
    muon, backup = split_params_for_muon(model)
    assert (names(muon), names(backup)) == (["inner.weight"], ["head.weight"])


def test_split_by_own_substrings() -> None:
    muon, _ = split_params_for_muon(Model(), ("INNER",))
    assert names(muon) == ["LM_Head.weight", "outer.weight"]
    muon, _ = split_params_for_muon(Model(), ())
    assert names(muon) == ["inner.weight", "LM_Head.weight", "outer.weight"]
    with pytest.raises(InvalidArgumentError, match="backup_substrings='inner'"):
        split_params_for_muon(Model(), "inner")
    with pytest.raises(InvalidArgumentError, match="model"):
        split_params_for_muon(Model().named_parameters())


def test_validate_accepts_generators_and_returns_lists() -> None:
    model = Model()
    muon, backup = split_params_for_muon(model)
    assert validate_split(iter(muon), iter(backup), model) == (muon, backup)


def test_validate_refuses() -> None:
    model = Model()
    muon, backup = split_params_for_muon(model)
    with pytest.raises(InvalidArgumentError, match=r"'inner.weight' is in both halves"):
        validate_split(muon, [*backup, muon[0]])
    with pytest.raises(InvalidArgumentError, match=r"'again' is in both halves"):
        validate_split(muon, [*backup, ("again", muon[0][1])])
    with pytest.raises(InvalidArgumentError, match=r"'bag.weight' is trainable but in neither"):
        validate_split(muon, [pair for pair in backup if pair[0] != "bag.weight"], model)
    with pytest.raises(InvalidArgumentError, match=r"Duplicate parameter 'inner\.weight'"):
        validate_split([*muon, muon[0]], backup)
    with pytest.raises(InvalidArgumentError, match=r"Duplicate parameter name 'inner\.weight'"):
        validate_split(muon, [*backup, ("inner.weight", nn.Parameter(torch.zeros(3)))])
    with pytest.raises(UnsupportedParameterError, match=r"'conv.bias' has shape \(8,\)"):
        validate_split([*muon, ("conv.bias", model.conv.bias)], [])
    with pytest.raises(UnsupportedParameterError, match=r"'ids' has dtype torch.int64"):
        validate_split(muon, [*backup, ("ids", torch.arange(4))])
    with pytest.raises(InvalidArgumentError, match=r"muon_named_params.*\(name, parameter\)"):
        validate_split([param for _, param in muon], backup)


def test_validate_wants_what_is_trainable_only() -> None:
    model = Model()
    split = split_params_for_muon(model)
    validate_split(*split, model)
    model.frozen.requires_grad_(True)
    with pytest.raises(InvalidArgumentError, match=r"'frozen.weight' is trainable"):
        validate_split(*split, model)
