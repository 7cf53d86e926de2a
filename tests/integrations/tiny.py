"""A tiny language model of transformers with random weights, its data, and the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gefen import Gefen, GefenMuonHybrid

VOCABULARY = 32

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "gefen": lambda model: Gefen(model.named_parameters(), lr=1e-2, weight_decay=0.1),
    "hybrid": lambda model: GefenMuonHybrid(model, lr=1e-2, weight_decay=0.1),
}


def language_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def texts(count: int, start: int = 0) -> list[dict[str, Tensor]]:
    """Sequences that count up by one or by two, so that there is something to learn."""
    found = []
    for number in range(start, start + count):
        first, by = number % VOCABULARY, 1 + number // VOCABULARY % 2
        tokens = (first + by * torch.arange(12)) % VOCABULARY
        found.append({"input_ids": tokens, "labels": tokens.clone()})
    return found


def batch(number: int, size: int = 8) -> dict[str, Tensor]:
    rows = texts(size, number * size)
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def fell(losses: list[float], to: float = 0.8) -> bool:
    """Whether the losses of the last steps are at most ``to`` times those of the first."""
    return sum(losses[-3:]) < to * sum(losses[:3])


def launched(rank: int, world: int) -> dict[str, str]:
    """What a launcher sets for a rank; its process group is there already."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    master = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    return {key: str(value) for key, value in own.items()} | master
