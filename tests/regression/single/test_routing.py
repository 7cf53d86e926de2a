from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gefen import GefenMuonHybrid, routing_table, split_params_for_muon, validate_split
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
    assert names(muon) == ["inner.weight", "outer.weight", "frozen.weight"]
    assert names(backup) == [
        "tokens.weight",
        "bag.weight",
        "inner.bias",
        "conv.weight",
        "conv.bias",
        "LM_Head.weight",
        "LM_Head.bias",
        "frozen.bias",
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
    assert names(muon) == ["outer.weight", "frozen.weight"]
    muon, _ = split_params_for_muon(Model(), ())
    assert names(muon) == ["inner.weight", "outer.weight", "frozen.weight"]
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
    muon, backup = split_params_for_muon(model)
    frozen = [pair for pair in muon if pair[0] != "frozen.weight"]
    validate_split(frozen, backup, model)
    model.frozen.requires_grad_(True)
    with pytest.raises(InvalidArgumentError, match=r"'frozen.weight' is trainable"):
        validate_split(frozen, backup, model)


def test_frozen_parameters_that_cannot_be_stepped_are_in_neither_half() -> None:
    model = Model()
    quantised = torch.zeros(8, 8, dtype=torch.uint8)
    model.inner.weight = nn.Parameter(quantised, requires_grad=False)
    muon, backup = split_params_for_muon(model)
    assert "inner.weight" not in names(muon) + names(backup)
    validate_split(muon, backup, model)
    route = next(route for route in routing_table(model) if route.name == "inner.weight")
    assert route.side == "left out"
    assert "frozen, and could not be stepped: " in route.why
    assert "torch.uint8" in route.why
    model.inner.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.complex64))
    with pytest.raises(UnsupportedParameterError, match="complex64"):
        GefenMuonHybrid(model, lr=0.1)


def test_table() -> None:
    table = routing_table(Model())
    assert table[0] == ("tokens.weight", (16, 8), "backup", "table of an embedding (Embedding)")
    assert (table[2].name, table[2].side) == ("inner.weight", "muon")
    assert [route.name for route in table] == [n for n, _ in Model().named_parameters()]
    lines = str(table).splitlines()
    assert len(lines) == len(table)
    assert lines[2] == "muon    inner.weight    (8, 8)     weight of a linear layer (Linear)"
    assert str(routing_table([])) == ""


def test_table_of_pairs_goes_by_names_and_shapes() -> None:
    matrix, batch = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(2, 4, 4))
    for name, param, side in (
        ("layers.0.wq.weight", matrix, "muon"),
        ("wq", matrix, "muon"),
        ("layers.0.PatchEmbed.weight", matrix, "backup"),
        ("layers.0.A_log", matrix, "backup"),
        ("layers.0.bias_table.weight", matrix, "backup"),
        ("shared.weight", matrix, "backup"),
        ("output.weight", matrix, "backup"),
        ("layers.0.output.weight", matrix, "muon"),
        ("layers.0.output.dense.weight", matrix, "muon"),
        ("cls.predictions.decoder.weight", matrix, "backup"),
        ("decoder.weight", matrix, "backup"),
        ("model.decoder.weight", matrix, "muon"),
        ("layers.0.experts.w1", batch, "muon"),
        ("layers.0.experts.matrices", batch, "muon"),
        ("layers.0.mlp.gate_up_proj", batch, "muon"),
        ("layers.0.experts.bias", batch, "backup"),
        ("layers.0.experts.conv.weight", batch, "backup"),
        ("layers.0.experts.3.weight", batch, "backup"),
        ("layers.0.wq.weight", batch, "backup"),
    ):
        assert (name, routing_table([(name, param)])[0].side) == (name, side)


def test_bare_parameters_are_refused() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        routing_table(Model().parameters())
    assert "optimizers=(GefenMuonHybrid.from_model(model), None)" in str(caught.value)
    with pytest.raises(InvalidArgumentError, match="pairs"):
        routing_table(3)


def test_lazy_parameters_are_named_once_validated() -> None:
    model = nn.Sequential(nn.LazyLinear(8))
    assert [route.shape for route in routing_table(model)] == [(), ()]
    with pytest.raises(UnsupportedParameterError, match=r"'0\.weight' is not initialized"):
        validate_split(*split_params_for_muon(model))


def test_caller_chooses_sides() -> None:
    model = Model()
    for chosen in (
        {"outer.weight": "backup", "tokens.weight": "muon"},
        {"outer.*": "backup", "tok*.weight": "muon", "outer.weight": "muon"},
        lambda name, param: {"outer.weight": "backup", "tokens.weight": "muon"}.get(name),
    ):
        muon, _ = split_params_for_muon(model, sides=chosen)
        assert names(muon) == ["tokens.weight", "inner.weight", "frozen.weight"]
        table = {route.name: route for route in routing_table(model, sides=chosen)}
        assert table["outer.weight"].why == "chosen by the caller"
        assert table["inner.weight"].why == "weight of a linear layer (Linear)"


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ({"inner.weihgt": "muon"}, "no parameter is called 'inner.weihgt'"),
        ({"inner.weight": "Muon"}, r"sides\['inner.weight'\]='Muon': must be 'muon' or 'backup'"),
        ({3: "muon"}, "sides"),
        (["inner.weight"], "must be a mapping"),
        ("inner.weight", "must be a mapping"),
        (lambda name, param: True, r"sides\['tokens.weight'\]=True"),
    ],
)
def test_bad_sides_are_refused(sides: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        split_params_for_muon(Model(), sides=sides)
    with pytest.raises(InvalidArgumentError, match=message):
        GefenMuonHybrid.from_model(Model(), lr=0.1, sides=sides)


def test_wrappers_in_names_change_nothing() -> None:
    model = nn.ModuleDict({"decoder": nn.Linear(8, 9), "inner": nn.Linear(8, 8)})
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": model})})
    for chosen, sides in (
        (None, ["backup", "muon"]),
        ({"inner.weight": "backup"}, ["backup"] * 2),
    ):
        for module in (model, wrapped):
            table = routing_table(module, sides=chosen)
            assert [r.side for r in table if r.name.endswith("weight")] == sides


class ShortConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4))


class MarginLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 5))


class SparseMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.ones(4, 8, 6))
        self.bias = nn.Parameter(torch.ones(4, 2, 6))


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.ones(2, 8))
        self.lora_B = nn.Parameter(torch.ones(8, 2))


def test_what_is_parametrized_is_no_weight_itself() -> None:
    """Among pairs neither, where a head's would be taken for a hidden layer's."""
    parametrized = nn.utils.parametrizations.weight_norm
    model = nn.ModuleDict({"inner": nn.Linear(8, 8), "head": nn.Linear(8, 3)})
    model["square"] = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
    for name in ("inner", "head"):
        parametrized(model[name])
    for source in (model, model.named_parameters()):
        assert {route.side for route in routing_table(source)} == {"backup"}


@pytest.mark.parametrize(
    ("name", "module", "side"),
    [
        ("layers.0.k_conv", ShortConvolution(), "backup"),
        ("objective", MarginLoss(), "backup"),
        ("rel_pos_bias", nn.Linear(6, 4), "backup"),
        ("ctc_head", nn.Linear(8, 20), "backup"),
        ("attn.q_head", nn.Linear(8, 8), "muon"),
        ("layers.0.ctc_head", nn.Linear(8, 20), "muon"),
        ("layers.0.mixer", SparseMoE(), "muon"),
        ("layers.0.proj", LoRA(), "muon"),
    ],
)
def test_what_other_families_have(name: str, module: nn.Module, side: str) -> None:
    model = nn.Module()
    *path, last = name.split(".")
    inner = model
    for part in path:
        inner.add_module(part, nn.Module())
        inner = getattr(inner, part)
    inner.add_module(last, module)
    table = {r.name.rpartition(".")[2]: r.side for r in routing_table(model)}
    assert table.pop("bias", "backup") == "backup"
    assert set(table.values()) == {side}


def test_experts_of_pairs_by_the_name_of_their_module() -> None:
    experts = nn.Parameter(torch.ones(4, 8, 6))
    assert routing_table([("layers.0.moe.w_in", experts)])[0].side == "muon"
    assert routing_table([("moe_model.layers.0.attn.q", experts)])[0].side == "backup"
