"""A character-level GPT on a stream of languages, Vietnamese held out; nanoGPT's checkpoints.

The text is what Django's translators wrote: the message catalogues of the installed package.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import astuple
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random

import torch
from stream import Moment, Stream, Task, main
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

LAYERS, HEADS, WIDTH, LENGTH = 4, 4, 32, 64
VOCABULARY = 192
MODEL_ARGS = {
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_embd": WIDTH,
    "block_size": LENGTH,
    "bias": True,
    "vocab_size": VOCABULARY,
    "dropout": 0.0,
}
HELD_OUT = "vi"
LEAST_TEXT = 8_000  # characters; smaller catalogues are no task
PROBE = 64
BATCH = 8
TASKS = 24
LEARNING_RATE = 2e-3
MESSAGE = re.compile(r'^msgstr(?:\[\d+\])? ((?:".*"\n?)+)', re.MULTILINE)


class Attention(nn.Module):
    """Causal self-attention with q, k and v in one matrix [3d, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.c_attn(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(-2))
        return output


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.c_proj(gelu(self.c_fc(x)))
        return output


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        output: Tensor = x + self.mlp(self.ln_2(x))
        return output


class Transformer(nn.Module):
    """Tokens [B, T] to features [B, T, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.ln_f = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.wte.weight, std=WIDTH**-0.5)
        nn.init.normal_(self.wpe.weight, std=WIDTH**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        output: Tensor = self.ln_f(self.h(x))
        return output


class GPT(nn.Module):
    """Tokens [B, T] to the next one's logits [B, T, V]; the output matrix is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Transformer()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.lm_head(self.transformer(tokens))
        return output


@cache
def catalogues() -> dict[str, str]:
    """Language code to its translated messages, one a line; only those that can be a task."""
    package = find_spec("django")
    if package is None or package.origin is None:
        sys.exit("the text comes from Django's message catalogues: python -m pip install django")
    messages: dict[str, list[str]] = {}
    for path in sorted(Path(package.origin).parent.rglob("locale/*/LC_MESSAGES/django*.po")):
        _header, *entries = MESSAGE.findall(path.read_text("utf-8"))
        texts = ("".join(map(ast.literal_eval, entry.splitlines())) for entry in entries)
        messages.setdefault(path.parts[-3], []).extend(filter(None, texts))
    joined = {code: "\n".join(texts) for code, texts in messages.items()}
    return {c: t for c, t in joined.items() if len(t) >= LEAST_TEXT and len(set(t)) <= VOCABULARY}


@cache
def language(code: str) -> Task:
    """The language's text in windows of 64 characters, the last tenth held out.

    Each language numbers its characters in a random order of its own, as a tokenizer trained for it
    alone might: what is learned about ids is of no use to the next.
    """
    text = catalogues()[code]
    ids = list(range(VOCABULARY))
    Random(code).shuffle(ids)
    number = dict(zip(sorted(set(text)), ids, strict=False))
    data = torch.tensor([number[character] for character in text])
    cut = len(data) * 9 // 10
    seen = data[:cut].unfold(0, LENGTH + 1, 16)
    held = data[cut:].unfold(0, LENGTH + 1, (len(data) - cut - LENGTH - 1) // (PROBE - 1))[:PROBE]
    return Task(seen[:, :-1], seen[:, 1:], held[:, :-1], held[:, 1:])


@cache
def languages() -> tuple[str, ...]:
    """Every language but the held-out one, in a fixed random order."""
    codes = sorted(catalogues().keys() - {HELD_OUT})
    Random(0).shuffle(codes)
    return tuple(codes)


def task(index: int) -> Task:
    codes = languages()
    return language(codes[index % len(codes)])


def mixed() -> Task:
    """All languages of the stream at once, in its numbering: the same text, without a change."""
    every = zip(*(astuple(task(index)) for index in range(TASKS)), strict=True)
    inputs, labels, held, held_labels = (torch.cat(parts) for parts in every)
    return Task(inputs, labels, held[::TASKS], held_labels[::TASKS])


def save(folder: Path, moment: Moment) -> None:
    torch.save(
        {
            "model": moment.model.state_dict(),
            "optimizer": moment.optimizer.state_dict(),
            "model_args": MODEL_ARGS,
            "iter_num": moment.step,
            "best_val_loss": min(moment.scores, default=1e9),
            "config": {"dataset": "django", "batch_size": BATCH, "learning_rate": LEARNING_RATE},
        },
        folder / f"ckpt_{moment.step}.pt",
    )


if __name__ == "__main__":
    main(
        Stream(
            name="gpt",
            build=GPT,
            task=task,
            stationary=mixed,
            unseen=lambda _: language(HELD_OUT),
            save=save,
            load=lambda file: torch.load(file, weights_only=True)["model"],
            tasks=TASKS,
            steps=150,
            batch=BATCH,
            learning_rate=LEARNING_RATE,
            checkpoints=(0, 1, 2, 4, 7, 11, 16, 24),
            score="loss",
            fused=True,
        )
    )
