"""Small networks in the ways people write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def inputs_to(net: nn.Module) -> Callable[..., Tensor]:
    """The forward of a network that takes its inputs alone."""
    return lambda batch: net(batch["inputs"])


class FlashAttention(nn.Module):
    """nanoGPT's attention: one fused Linear, causal scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def split(self, x: Tensor) -> list[Tensor]:
        parts = self.c_attn(x).split(x.shape[-1], dim=2)
        return [p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts]

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.mix(*self.split(x)).transpose(1, 2).flatten(2))


class ExplicitAttention(FlashAttention):
    """The same with a softmax between two products."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (
            F.dropout(scores.masked_fill(hidden, float("-inf")).softmax(-1), 0.1, self.training) @ v
        )


class FusedBlock(nn.Module):
    """A pre-norm block in nanoGPT's names."""

    def __init__(self, attention: type[nn.Module], width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class FusedGPT(nn.Module):
    """A small GPT with a tied head."""

    def __init__(
        self,
        attention: type[nn.Module] = FlashAttention,
        width: int = 24,
        heads: int = 3,
        layers: int = 2,
        vocabulary: int = 20,
        length: int = 8,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(FusedBlock(attention, width, heads) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))
