"""Every rule of routing, on small modules with the names and types of real architectures."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from gefen import routing_table


def tree(**modules: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in modules.items():
        module.add_module(name, child)
    return module


def linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


def holding(kind: str, **shapes: tuple[int, ...]) -> nn.Module:
    """A module of a class called ``kind`` that has parameters of its own."""
    module = type(kind, (nn.Module,), {})()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return module


def torchtitan_llama() -> nn.Module:
    """``output`` is as wide as the table is long."""
    layer = tree(
        attention=tree(wq=linear(8, 8), wk=linear(4, 8), wv=linear(4, 8), wo=linear(8, 8)),
        feed_forward=tree(w1=linear(12, 8), w2=linear(8, 12), w3=linear(12, 8)),
        attention_norm=nn.RMSNorm(8),
    )
    return tree(
        tok_embeddings=nn.Embedding(20, 8),
        layers=nn.ModuleDict({"0": layer}),
        norm=nn.RMSNorm(8),
        output=linear(20, 8),
    )


def torchtitan_experts() -> nn.Module:
    moe = tree(
        experts=holding("GroupedExperts", w1=(4, 12, 8), w2=(4, 8, 12), w3=(4, 12, 8)),
        router=tree(gate=linear(4, 8)),
        shared_experts=tree(w1=linear(12, 8), w2=linear(8, 12)),
    )
    return tree(layers=nn.ModuleDict({"0": tree(moe=moe)}))


def gpt_oss() -> nn.Module:
    experts = holding(
        "GptOssExperts",
        gate_up_proj=(4, 8, 24),
        gate_up_proj_bias=(4, 24),
        down_proj=(4, 12, 8),
        down_proj_bias=(4, 8),
    )
    router = holding("GptOssTopKRouter", weight=(4, 8), bias=(4,))
    attention = holding("GptOssAttention", sinks=(4,))
    return tree(layers=nn.ModuleList([tree(attn=attention, experts=experts, router=router)]))


def old_granite_experts() -> nn.Module:
    return tree(input_linear=holding("ParallelExperts", weight=(4, 8, 12), bias=(4, 1, 12)))


def dbrx() -> nn.Module:
    """The matrices of all experts lie below each other."""
    experts = holding("DbrxExpertGLU", w1=(48, 8), v1=(48, 8), w2=(48, 8))
    experts.moe_num_experts = 4
    router = holding("DbrxTopKRouter", weight=(4, 8))
    block = holding("MoeBlock", w=(8, 8))
    router.num_experts = block.num_experts = 4
    return tree(experts=tree(mlp=experts), router=router, block=block)


def mamba() -> nn.Module:
    mixer = holding("MambaMixer", A_log=(16, 4), D=(16,))
    mixer.conv1d = nn.Conv1d(16, 16, 4, groups=16)
    mixer.in_proj, mixer.x_proj = linear(32, 8), linear(9, 16)
    return tree(embeddings=nn.Embedding(20, 8), layers=nn.ModuleList([tree(mixer=mixer)]))


def gpt2() -> nn.Module:
    attention = tree(c_attn=holding("Conv1D", weight=(8, 24), bias=(24,)))
    return tree(wte=nn.Embedding(20, 8), wpe=nn.Embedding(12, 8), h=nn.ModuleList([attention]))


def xlnet() -> nn.Module:
    attention = holding(
        "XLNetRelativeAttention", q=(8, 2, 4), r_w_bias=(2, 4), seg_embed=(2, 2, 4)
    )
    attention.layer_norm = nn.LayerNorm(8)
    feed_forward = tree(layer_1=linear(12, 8))
    return tree(layer=nn.ModuleList([tree(rel_attn=attention, ff=feed_forward)]))


def swin() -> nn.Module:
    position = holding("SwinRelativePositionBias", relative_position_bias_table=(49, 2))
    position.rel_pos_h = nn.Parameter(torch.zeros(7, 4))
    patches = tree(projection=nn.Conv2d(3, 8, 4))
    return tree(
        patches=patches,
        layers=nn.ModuleList([tree(position=position, qkv=linear(24, 8))]),
        head=linear(10, 8),
    )


def t5() -> nn.Module:
    """The head is tied, the table of relative positions an embedding called a bias."""
    model = tree(
        lm=linear(20, 8),
        shared=nn.Embedding(20, 8),
        block=nn.ModuleList([tree(relative_attention_bias=nn.Embedding(32, 4), q=linear(8, 8))]),
    )
    model.lm.weight = model.shared.weight
    return model


def bert() -> nn.Module:
    """An untied decoder that another width leads to."""
    embeddings = tree(word=nn.Embedding(20, 8), kind=nn.Embedding(2, 8))
    head = tree(transform=linear(8, 8), decoder=linear(20, 6))
    layer = tree(query=linear(8, 8), output=tree(dense=linear(8, 12)), intermediate=linear(12, 8))
    return tree(
        embeddings=embeddings,
        encoder=tree(layer=nn.ModuleList([layer])),
        pooler=linear(8, 8),
        cls=tree(predictions=head, seq_relationship=linear(2, 8)),
    )


class Declared(nn.Module):
    """A model as transformers' are, whose head no name or shape gives away."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.inner = linear(8, 8)
        self.lm_loss = head

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_loss


class Undeclared(Declared):
    def get_output_embeddings(self) -> nn.Module:
        raise NotImplementedError


def declared() -> nn.Module:
    heads = nn.ModuleList([linear(20, 8), linear(20, 8)])
    lost = Declared(linear(20, 8))
    del lost.lm_loss
    return tree(
        one=Declared(linear(20, 8)),
        several=Declared(heads),
        none=Undeclared(linear(9, 8)),
        lost=lost,
    )


class ScaledTable(nn.Embedding):
    pass


class VocabParallel(nn.Module):
    """Not torch's, but the same."""

    def __init__(self) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = 20, 8
        self.weight = nn.Parameter(torch.zeros(20, 8))


def tables() -> nn.Module:
    return tree(
        words=ScaledTable(20, 8),
        parallel=VocabParallel(),
        bag=nn.EmbeddingBag(20, 8),
        learned=holding("PatchEmbeddings", weight=(4, 8), queries=(1, 4, 8)),
    )


def torchs_own() -> nn.Module:
    return tree(
        attention=nn.MultiheadAttention(8, 2, add_bias_kv=True),
        lstm=nn.LSTM(8, 4),
        norm=nn.LayerNorm((4, 8)),
        conv=nn.Conv2d(4, 4, 3),
        up=nn.ConvTranspose1d(4, 4, 3),
        pair=nn.Bilinear(4, 4, 8),
        column=nn.Linear(8, 1),
        weighed=parametrizations.weight_norm(nn.Linear(8, 8)),
    )


def loose() -> nn.Module:
    """Parameters of modules that no rule knows go by what they are called."""
    return holding(
        "Loose",
        **dict.fromkeys(("w", "W_q", "w1", "x_proj", "kernel", "gate_weight"), (4, 8)),
        **dict.fromkeys(("latents", "scale", "u", "weight_scale", "pos_emb", "prompt"), (4, 8)),
    )


def a_position_table_as_wide_as_long() -> nn.Module:
    """Hidden matrices of the table's shape are no heads: others take their outputs in."""
    layers = nn.ModuleList([tree(up=linear(16, 8), down=linear(8, 16)), tree(up=linear(16, 8))])
    return tree(positions=nn.Embedding(8, 8), bytes=nn.Embedding(16, 8), layers=layers)


def heads_of_several_layers() -> nn.Module:
    """Where several have as many rows as the table, shapes do not tell: these stay Muon's."""
    layers = nn.ModuleList([tree(qkv=linear(24, 8)), tree(qkv=linear(24, 8))])
    return tree(table=nn.Embedding(24, 8), layers=layers)


MUON = {
    torchtitan_llama: "wq wk wv wo w1 w2 w3",
    torchtitan_experts: "experts.w1 experts.w2 experts.w3 router.gate shared_experts.w1 "
    "shared_experts.w2",
    gpt_oss: "experts.gate_up_proj experts.down_proj router",
    old_granite_experts: "input_linear",
    dbrx: "router block.w",
    mamba: "in_proj x_proj",
    gpt2: "c_attn",
    xlnet: "layer_1",
    swin: "qkv",
    t5: "q",
    bert: "query output.dense intermediate pooler transform",
    declared: "one.inner several.inner none.inner none.lm_loss lost.inner",
    tables: "",
    torchs_own: "in_proj_weight out_proj lstm.weight_ih_l0 lstm.weight_hh_l0",
    loose: "w W_q w1 x_proj kernel gate_weight",
    a_position_table_as_wide_as_long: "0.up 0.down 1.up",
    heads_of_several_layers: "0.qkv 1.qkv",
}


@pytest.mark.parametrize("architecture", MUON, ids=lambda made: made.__name__)
def test_what_goes_to_muon(architecture: object) -> None:
    table = routing_table(architecture())
    found = {route.name.removesuffix(".weight") for route in table if route.side == "muon"}
    ends = MUON[architecture].split()
    assert {end for end in ends if any(name.endswith(end) for name in found)} == set(ends)
    assert len(found) == len(ends), found
    assert {route.side for route in table} <= {"muon", "backup"}


@pytest.mark.parametrize(
    ("architecture", "name", "why"),
    [
        (torchtitan_llama, "tok_embeddings.weight", "table of an embedding (Embedding)"),
        (torchtitan_llama, "output.weight", "it has a row for each entry of 'tok_embeddings'"),
        (torchtitan_llama, "norm.weight", "no matrix, but a vector"),
        (torchtitan_experts, "layers.0.moe.experts.w1", "matrices of 4 experts"),
        (gpt_oss, "layers.0.experts.down_proj_bias", "no weight matrix by its name"),
        (gpt_oss, "layers.0.router.weight", "weight matrix of GptOssTopKRouter"),
        (dbrx, "experts.mlp.v1", "matrices of several experts below each other"),
        (mamba, "layers.0.mixer.conv1d.weight", "kernel of a convolution (Conv1d)"),
        (xlnet, "layer.0.rel_attn.q", "3 dimensions, and not known to be matrices of experts"),
        (xlnet, "layer.0.rel_attn.seg_embed", "its name contains 'embed'"),
        (t5, "lm.weight", "table of an embedding (Embedding)"),
        (swin, "head.weight", "output head, being called 'head'"),
        (bert, "cls.seq_relationship.weight", "output head"),
        (declared, "several.lm_loss.1.weight", "output head: get_output_embeddings()"),
        (tables, "learned.queries", "table of an embedding (PatchEmbeddings)"),
        (torchs_own, "norm.weight", "scales of a norm (LayerNorm)"),
        (torchs_own, "column.weight", "vectors, as matrices of one row"),
        (torchs_own, "pair.weight", "3 dimensions"),
        (loose, "u", "a parameter of Loose that is not called a weight"),
        (loose, "w", "weight matrix of Loose"),
    ],
)
def test_reasons(architecture: object, name: str, why: str) -> None:
    route = next(route for route in routing_table(architecture()) if route.name == name)
    assert why in route.why


def test_convolutions_among_experts_are_none_of_them() -> None:
    model = tree(experts=nn.ModuleList([nn.Conv1d(4, 4, 3)]))
    assert routing_table(model)[0].why == "kernel of a convolution (Conv1d)"
    assert routing_table(model.named_parameters())[0].side == "backup"


def test_a_head_at_any_place_is_found_by_the_table_it_answers() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), linear(12, 8), linear(8, 12), linear(20, 8))
    assert [route.side for route in routing_table(model)] == ["backup", "muon", "muon", "backup"]
