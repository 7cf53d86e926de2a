"""Which half each parameter of real architectures goes to: transformers' own, small and random."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from gefen import GefenMuonHybrid, routing_table, split_params_for_muon, validate_split
from gefen.errors import InvalidArgumentError

WIDE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WORDS = {"vocab_size": 80, **TOKENS}
DECODER = {**WIDE, **WORDS, "num_key_value_heads": 2, "max_position_embeddings": 64}
ENCODER = {**WIDE, **WORDS, "max_position_embeddings": 64, "tie_word_embeddings": False}
IMAGE = {"image_size": 32, "num_labels": 10}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
}
SPEECH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 20,
    "decoder_start_token_id": 1,
}

CONFIGS = {
    "GPT2LMHeadModel": {**WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "LlamaForCausalLM": DECODER,
    "Gemma2ForCausalLM": {**DECODER, "head_dim": 8},
    "FalconForCausalLM": {**WIDE, **WORDS},
    "MixtralForCausalLM": {**DECODER, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": {
        **DECODER,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "DeepseekV3ForCausalLM": {
        **DECODER,
        **LATENT,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "GptOssForCausalLM": {
        **DECODER,
        "num_local_experts": 4,
        "head_dim": 8,
        "rope_parameters": ROPE,
    },
    "DbrxForCausalLM": {
        **WORDS,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 32,
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
    },
    "MambaForCausalLM": {**WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "Mamba2ForCausalLM": {
        **WORDS,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 2,
    },
    "T5ForConditionalGeneration": {
        **WORDS,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
    },
    "BertForPreTraining": ENCODER,
    "RobertaForMaskedLM": ENCODER,
    "XLNetLMHeadModel": {**WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    "WhisperForConditionalGeneration": {**WORDS, **SPEECH, "tie_word_embeddings": False},
    "Wav2Vec2ForCTC": {
        **WIDE,
        **WORDS,
        "conv_dim": (16, 16),
        "conv_kernel": (3, 3),
        "conv_stride": (2, 2),
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
    },
    "ViTForImageClassification": {**WIDE, **IMAGE, "patch_size": 8},
    "BeitForImageClassification": {
        **WIDE,
        **IMAGE,
        "patch_size": 8,
        "use_relative_position_bias": True,
    },
    "SwinForImageClassification": {
        **IMAGE,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 4],
        "patch_size": 4,
        "window_size": 4,
    },
    "CLIPModel": {
        "text_config": {**WIDE, **WORDS},
        "vision_config": {**WIDE, "image_size": 32, "patch_size": 8},
        "projection_dim": 20,
    },
}

ATTENTION = "model.layers.*.self_attn.{q,k,v,o}_proj.weight "
MLP = "model.layers.*.mlp.{gate,up,down}_proj.weight "
EXPERTS = "model.layers.*.mlp.experts.{gate_up,down}_proj "
ENDS = "model.embed_tokens.weight lm_head.weight "
BERT = (
    "bert.encoder.layer.*.attention.self.{query,key,value}.weight "
    "bert.encoder.layer.*.{attention.output,intermediate,output}.dense.weight "
)
TABLES = "bert.embeddings.{word,position,token_type}_embeddings.weight "

# Names, with * for numbers, of all that is no vector: Muon's, then the backup's.
SIDES = {
    "GPT2LMHeadModel": (
        "transformer.h.*.{attn.c_attn,attn.c_proj,mlp.c_fc,mlp.c_proj}.weight",
        "transformer.{wte,wpe}.weight",
    ),
    "LlamaForCausalLM": (ATTENTION + MLP, ENDS),
    "Gemma2ForCausalLM": (ATTENTION + MLP, "model.embed_tokens.weight"),
    "FalconForCausalLM": (
        "transformer.h.*.self_attention.{query_key_value,dense}.weight "
        "transformer.h.*.mlp.{dense_h_to_4h,dense_4h_to_h}.weight",
        "transformer.word_embeddings.weight",
    ),
    "MixtralForCausalLM": (ATTENTION + EXPERTS + "model.layers.*.mlp.gate.weight", ENDS),
    "Qwen3MoeForCausalLM": (ATTENTION + EXPERTS + "model.layers.*.mlp.gate.weight", ENDS),
    "DeepseekV3ForCausalLM": (
        "model.layers.*.self_attn.{q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj}.weight "
        "model.layers.*.mlp.shared_experts.{gate,up,down}_proj.weight "
        + MLP
        + EXPERTS
        + "model.layers.*.mlp.gate.weight",
        ENDS,
    ),
    "GptOssForCausalLM": (
        ATTENTION + EXPERTS + "model.layers.*.mlp.router.weight",
        ENDS + "model.layers.*.mlp.experts.{gate_up,down}_proj_bias",
    ),
    "DbrxForCausalLM": (
        "transformer.blocks.*.norm_attn_norm.attn.{Wqkv,out_proj}.weight "
        "transformer.blocks.*.ffn.router.layer.weight",
        "transformer.wte.weight transformer.blocks.*.ffn.experts.mlp.{v1,w1,w2} lm_head.weight",
    ),
    "MambaForCausalLM": (
        "backbone.layers.*.mixer.{in,x,dt,out}_proj.weight",
        "backbone.embeddings.weight backbone.layers.*.mixer.{A_log,conv1d.weight}",
    ),
    "Mamba2ForCausalLM": (
        "backbone.layers.*.mixer.{in,out}_proj.weight",
        "backbone.embeddings.weight backbone.layers.*.mixer.conv1d.weight lm_head.weight",
    ),
    "T5ForConditionalGeneration": (
        "{encoder,decoder}.block.*.layer.*.SelfAttention.{q,k,v,o}.weight "
        "decoder.block.*.layer.*.EncDecAttention.{q,k,v,o}.weight "
        "{encoder,decoder}.block.*.layer.*.DenseReluDense.{wi,wo}.weight",
        "shared.weight "
        "{encoder,decoder}.block.*.layer.*.SelfAttention.relative_attention_bias.weight",
    ),
    "BertForPreTraining": (
        BERT + "bert.pooler.dense.weight cls.predictions.transform.dense.weight",
        TABLES + "cls.predictions.decoder.weight cls.seq_relationship.weight",
    ),
    "RobertaForMaskedLM": (
        BERT.replace("bert.", "roberta."),
        TABLES.replace("bert.", "roberta.") + "lm_head.{dense,decoder}.weight",
    ),
    "XLNetLMHeadModel": (
        "transformer.layer.*.ff.layer_{1,2}.weight",
        "transformer.word_embedding.weight transformer.mask_emb "
        "transformer.layer.*.rel_attn.{q,k,v,o,r,r_r_bias,r_s_bias,r_w_bias,seg_embed}",
    ),
    "WhisperForConditionalGeneration": (
        "model.{encoder,decoder}.layers.*.self_attn.{q,k,v,out}_proj.weight "
        "model.decoder.layers.*.encoder_attn.{q,k,v,out}_proj.weight "
        "model.{encoder,decoder}.layers.*.fc{1,2}.weight",
        "model.encoder.{conv1,conv2,embed_positions}.weight "
        "model.decoder.{embed_tokens,embed_positions}.weight proj_out.weight",
    ),
    "Wav2Vec2ForCTC": (
        "wav2vec2.encoder.layers.*.attention.{q,k,v,out}_proj.weight "
        "wav2vec2.encoder.layers.*.feed_forward.{intermediate,output}_dense.weight "
        "wav2vec2.feature_projection.projection.weight",
        "wav2vec2.feature_extractor.conv_layers.*.conv.weight "
        "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original{0,1} "
        "lm_head.weight",
    ),
    "ViTForImageClassification": (
        "vit.layers.*.attention.{q,k,v,o}_proj.weight vit.layers.*.mlp.fc{1,2}.weight",
        "vit.embeddings.{cls_token,position_embeddings,patch_embeddings.projection.weight} "
        "classifier.weight",
    ),
    "BeitForImageClassification": (
        "beit.layers.*.attention.{q,k,v,o}_proj.weight beit.layers.*.mlp.fc{1,2}.weight",
        "beit.embeddings.{cls_token,patch_embeddings.projection.weight} classifier.weight "
        "beit.layers.*.relative_position_bias.relative_position_bias_table",
    ),
    "SwinForImageClassification": (
        "swin.encoder.layers.*.blocks.*.attention.{q,k,v,o}_proj.weight "
        "swin.encoder.layers.*.blocks.*.mlp.fc{1,2}.weight "
        "swin.encoder.layers.*.downsample.reduction.weight",
        "swin.embeddings.patch_embeddings.projection.weight classifier.weight "
        "swin.encoder.layers.*.blocks.*.attention.relative_position_bias"
        ".relative_position_bias_table",
    ),
    "CLIPModel": (
        "{text,vision}_model.encoder.layers.*.self_attn.{q,k,v,out}_proj.weight "
        "{text,vision}_model.encoder.layers.*.mlp.fc{1,2}.weight {text,visual}_projection.weight",
        "text_model.embeddings.{token,position}_embedding.weight "
        "vision_model.embeddings.{patch,position}_embedding.weight",
    ),
}


def built(name: str) -> nn.Module:
    made = getattr(transformers, name)
    return made(made.config_class(**CONFIGS[name]))


def expanded(patterns: str) -> set[str]:
    """``a.{b,c}`` as ``a.b`` and ``a.c``."""
    found = set()
    for pattern in patterns.split():
        parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
        found |= {"".join(chosen) for chosen in itertools.product(*parts)}
    return found


def sides(model: nn.Module) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"muon": set(), "backup": set()}
    for route in routing_table(model):
        if len(route.shape) > 1:
            found[route.side].add(re.sub(r"(?<=\.)\d+(?=\.)", "*", route.name))
        else:
            assert route.side == "backup"
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_table(name: str) -> None:
    model = built(name)
    muon, backup = SIDES[name]
    assert sides(model) == {"muon": expanded(muon), "backup": expanded(backup)}
    validate_split(*split_params_for_muon(model), model)
    # Names and shapes alone tell nearly as much.
    pairs = {route.name: route.side for route in routing_table(model.named_parameters())}
    unlike = {route.name for route in routing_table(model) if route.side != pairs[route.name]}
    assert all("experts.mlp" in name for name in unlike) if "Dbrx" in name else not unlike


def test_trains_a_decoder() -> None:
    torch.manual_seed(0)
    model = built("LlamaForCausalLM")
    tokens = torch.randint(3, 80, (4, 16))
    optimizer = GefenMuonHybrid.from_model(model, lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_trainer_makes_one_of_the_model(tmp_path: Path) -> None:
    """Through a factory, which it calls with the model; its groups of bare parameters say less."""
    tokens = torch.arange(3, 19)
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )

    def trained(kind: Any) -> transformers.Trainer:
        trainer = transformers.Trainer(
            model=built("LlamaForCausalLM"),
            args=arguments,
            train_dataset=[{"input_ids": tokens, "labels": tokens}] * 4,
            optimizer_cls_and_kwargs=(kind, {"lr": 1e-3}),
        )
        trainer.train()
        return trainer

    optimizer = trained(lambda: GefenMuonHybrid.from_model).optimizer.optimizer
    assert type(optimizer) is GefenMuonHybrid
    assert "model.layers.0.mlp.up_proj.weight" in optimizer.param_groups[0]["param_names"]
    with pytest.raises(InvalidArgumentError, match="from_model"):
        trained(GefenMuonHybrid)
