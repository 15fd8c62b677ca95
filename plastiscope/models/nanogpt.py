"""GPTs in nanoGPT's layout: transformer.wte, wpe, h.N.{ln_1, attn, ln_2, mlp}, ln_f, lm_head.

Axes: B inputs, T tokens, d width, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from plastiscope.checkpoints.run import State
from plastiscope.models.live import Batch, Inputs, Live, ModelError
from plastiscope.models.names import match

TABLE = "transformer.wte.weight"
POSITIONS = "transformer.wpe.weight"
HEAD = "lm_head.weight"
SYNTHETIC_LENGTH = 64


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT, read from its tensors; only the number of heads isn't in them."""

    vocabulary: int
    positions: int
    width: int
    blocks: int
    heads: int
    bias: bool
    tied: bool


def recognises(state: State) -> bool:
    """Whether the tensors have nanoGPT's names."""
    return {TABLE, POSITIONS, "transformer.h.0.attn.c_attn.weight"} <= set(state.tensors) and (
        _size(state, "transformer.h.0.attn.c_attn.weight")[0]
        == 3 * _size(state, "transformer.h.0.attn.c_attn.weight")[1]
    )


def build(state: State, assume: Mapping[str, str]) -> Live:
    """The network from its tensors' shapes and model_args["n_head"] (or assume["heads"])."""
    shape = _shape(state, assume)
    module = GPT(shape).eval()
    length = min(SYNTHETIC_LENGTH, shape.positions)
    inputs = Inputs("tokens", (length,), shape.vocabulary, longest=shape.positions, causal=True)
    stored = match(module, state.tensors)
    if shape.tied and TABLE not in state.tensors and HEAD in state.tensors:
        stored[TABLE] = HEAD

    def forward(batch: Batch) -> Tensor:
        output: Tensor = module(batch["inputs"])
        return output

    return Live(module, inputs, stored, forward, "nanoGPT's layout, from model_args")


def _shape(state: State, assume: Mapping[str, str]) -> Shape:
    arguments = state.extras.get("model_args") or state.extras.get("config") or {}
    heads = assume.get("heads") or arguments.get("n_head")
    vocabulary, width = _size(state, TABLE)
    if not heads or width % int(heads):
        raise ModelError(
            f"this GPT's number of heads isn't stored (model_args.n_head is {heads!r}, the width "
            f"{width}): say --assume heads=N"
        )
    tied = HEAD not in state.tensors or state.tensors[HEAD].alias_of == TABLE
    return Shape(
        vocabulary=vocabulary,
        positions=_size(state, POSITIONS)[0],
        width=width,
        blocks=sum(name.endswith(".attn.c_attn.weight") for name in state.tensors),
        heads=int(heads),
        bias="transformer.h.0.attn.c_attn.bias" in state.tensors,
        tied=tied,
    )


def _size(state: State, name: str) -> tuple[int, ...]:
    return state.tensors[name].shape


class Norm(nn.Module):
    """LayerNorm whose bias is optional; torch 2.0's own has none."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        return layer_norm(hidden, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Causal attention with q, k and v as three blocks of rows of c_attn."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.c_proj = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, T, d / H]
            for part in self.c_attn(hidden).chunk(3, dim=-1)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """c_fc, exact GELU, c_proj."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.width, 4 * shape.width, bias=shape.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * shape.width, shape.width, bias=shape.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.c_proj(self.gelu(self.c_fc(hidden)))
        return output


class Block(nn.Module):
    """Norm first, then attention or feed-forward, then the residual sum."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = Norm(shape.width, shape.bias)
        self.attn = Attention(shape)
        self.ln_2 = Norm(shape.width, shape.bias)
        self.mlp = FeedForward(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden))
        output: Tensor = hidden + self.mlp(self.ln_2(hidden))
        return output


class GPT(nn.Module):
    """Token ids [B, T] to logits [B, T, vocabulary]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(shape.vocabulary, shape.width),
                "wpe": nn.Embedding(shape.positions, shape.width),
                "h": nn.ModuleList(Block(shape) for _ in range(shape.blocks)),
                "ln_f": Norm(shape.width, shape.bias),
            }
        )
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.transformer["wte"](ids) + self.transformer["wpe"](places)
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            hidden = block(hidden)
        output: Tensor = self.lm_head(self.transformer["ln_f"](hidden))
        return output
