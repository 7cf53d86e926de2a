"""What benchmarks/convergence.py trains: small models on data that are on the machine already.

- "characters", "words": a causal transformer on sources of the standard library (the modules in
  MODULES, of the Python that runs), cut into characters, or into words and signs of which the
  most frequent have numbers. The last tenth of every file is for validation.
- "digits": a vision transformer on the 8 x 8 images that scikit-learn ships, 400 of them for
  validation; training images are shifted by up to a pixel at random.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

MODULES = (
    *("argparse", "ast", "configparser", "difflib", "doctest", "ftplib", "imaplib", "inspect"),
    *("ipaddress", "mailbox", "optparse", "pdb", "pickle", "pickletools", "pydoc", "shutil"),
    *("smtplib", "socket", "ssl", "statistics", "subprocess", "tarfile", "threading", "turtle"),
    "typing",
)
WORD = re.compile(r"\w+|[^\w\s]|\n")
UNKNOWN = 0
HEADS = 4


@dataclass(frozen=True, kw_only=True)
class Data:
    """Examples as (inputs, targets), where row i of both belongs together.

    For a text, ``train`` is one row of tokens; examples of it are drawn by ``batch``.
    """

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    classes: int

    def digest(self) -> str:
        """Tells results on other data apart: the standard library differs between versions."""
        whole = hashlib.sha256()
        for tensor in (*self.train, *self.valid):
            whole.update(tensor.numpy().tobytes())
        return whole.hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data, and how long it trains."""

    load: Callable[[Path | None], Data]
    model: Callable[[int], nn.Module]
    batch: Callable[[Data, torch.Generator], tuple[Tensor, Tensor]]
    steps: int


class Block(nn.Module):
    """Attention and a two-layer network, each after a normalisation and around a shortcut."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm1(x)
        heads = [f(normal).unflatten(-1, (HEADS, -1)) for f in (self.query, self.key, self.value)]
        query, key, value = (head.transpose(1, 2) for head in heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """Logits of the next token at every position."""

    def __init__(self, tokens: int, width: int, length: int, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, tokens, bias=False)
        for embedding in (self.embed, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.lm_head(self.norm(self.blocks(self.embed(tokens) + self.positions(places))))


class Vision(nn.Module):
    """Logits of an image's class, from patches of 2 x 2 pixels."""

    def __init__(self, classes: int, width: int, layers: int = 2) -> None:
        super().__init__()
        self.patch_embed, self.positions = nn.Linear(4, width), nn.Embedding(16, width)
        self.blocks = nn.Sequential(*(Block(width, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)
        # As large as the patches: the mean over smaller ones would hardly know their places.
        nn.init.normal_(self.positions.weight, std=0.5)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images[:, None], 2, stride=2).transpose(1, 2)
        x = self.blocks(self.patch_embed(patches) + self.positions.weight)
        return self.classifier(self.norm(x).mean(1))


def characters(text: str) -> list[str]:
    return [character if character.isascii() else "?" for character in text]


def sources() -> Iterator[str]:
    """Texts of MODULES."""
    for name in MODULES:
        yield (Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text(encoding="utf-8")


def text(split: Callable[[str], list[str]], limit: int, length: int, windows: int) -> Data:
    """The sources as numbers of their ``limit`` most frequent tokens.

    For validation, ``windows`` rows of ``length`` tokens, evenly spread.
    """
    files = [split(source) for source in sources()]
    counts = Counter(token for file in files for token in file)
    # By count and name: the order must not depend on anything else.
    known = sorted(counts, key=lambda token: (-counts[token], token))[: limit - 1]
    numbers = {token: number for number, token in enumerate(known, start=1)}
    coded = [torch.tensor([numbers.get(token, UNKNOWN) for token in file]) for file in files]
    train = torch.cat([file[: len(file) * 9 // 10] for file in coded])
    valid = torch.cat([file[len(file) * 9 // 10 :] for file in coded])
    rows = valid.unfold(0, length + 1, (len(valid) - length) // windows)[:windows]
    return Data(
        train=(train[:-1], train[1:]),
        valid=(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()),
        classes=limit,
    )


def windows(rows: int, length: int) -> Callable[[Data, torch.Generator], tuple[Tensor, Tensor]]:
    """Draws ``rows`` pieces of a text, ``length`` tokens each."""

    def batch(data: Data, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, targets = data.train
        starts = torch.randint(len(inputs) - length + 1, (rows, 1), generator=generator)
        where = starts + torch.arange(length)
        return inputs[where], targets[where]

    return batch


def digits(table: Path | None) -> Data:
    """From scikit-learn's digits.csv.gz: 64 pixels of 0 to 16 and the digit in each line."""
    if table is None:
        raise SystemExit("The task digits needs scikit-learn's images: give --digits PATH")
    lines = torch.from_numpy(np.loadtxt(table, delimiter=",", dtype=np.float32))
    images, labels = lines[:, :64].view(-1, 8, 8) / 16, lines[:, 64].long()
    held = torch.zeros(len(lines), dtype=torch.bool)
    held[torch.randperm(len(lines), generator=torch.Generator().manual_seed(0))[:400]] = True
    return Data(
        train=(images[~held], labels[~held]), valid=(images[held], labels[held]), classes=10
    )


def shifted(data: Data, generator: torch.Generator, rows: int = 32) -> tuple[Tensor, Tensor]:
    """Draws ``rows`` images, moved by -1, 0 or 1 pixel in both directions."""
    chosen = torch.randint(len(data.train[0]), (rows,), generator=generator)
    padded = F.pad(data.train[0][chosen], (1, 1, 1, 1))
    down, right = torch.randint(3, (2, rows, 1, 1), generator=generator)
    places = torch.arange(8)
    where = torch.arange(rows)[:, None, None]
    return padded[where, down + places[:, None], right + places], data.train[1][chosen]


TASKS = {
    "characters": Task(
        load=lambda _: text(characters, 100, 48, 160),
        model=lambda classes: Language(classes, 64, 48),
        batch=windows(12, 48),
        steps=400,
    ),
    "words": Task(
        load=lambda _: text(WORD.findall, 1024, 32, 240),
        model=lambda classes: Language(classes, 64, 32),
        batch=windows(16, 32),
        steps=400,
    ),
    "digits": Task(
        load=digits, model=lambda classes: Vision(classes, 48), batch=shifted, steps=500
    ),
}
