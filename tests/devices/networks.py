"""Tiny transformers with everything a device could disturb: a convolution, BatchNorm, a CLS token,
a position table, tied embeddings, a mask and a scale made in the forward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, CLASSES, WORDS = 16, 2, 4, 24


class Block(nn.Module):
    """Pre-norm attention and feed-forward. No bias for k: its gradient is zero but for rounding."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        if self.causal:
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            a = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        x = x + self.proj(a.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class TinyViT(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.patch, self.batch_norm = nn.Conv2d(3, WIDTH, 4, 4), nn.BatchNorm2d(WIDTH)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.position = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.ModuleList(Block(causal=False) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch_norm(self.patch(x)).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class TinyGPT(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(6, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def vit() -> nn.Module:
    return TinyViT(1)


def gpt() -> nn.Module:
    return TinyGPT(1)


INPUTS = {
    "vit": lambda: torch.randn(12, 3, 8, 8, dtype=torch.float64),
    "gpt": lambda: torch.randint(WORDS, (12, 6)),
}
