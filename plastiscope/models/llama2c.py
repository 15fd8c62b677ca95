"""Llamas in llama2.c's (and Meta's) layout: tok_embeddings, layers.N.attention.wq ..., output.

Axes: B inputs, T tokens, d width, H heads, G key/value heads, dh head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from plastiscope.checkpoints.run import State
from plastiscope.models.live import Batch, Inputs, Live, ModelError
from plastiscope.models.names import match

TABLE = "tok_embeddings.weight"
HEAD = "output.weight"
SYNTHETIC_LENGTH = 64


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama; `heads`, `eps` and `theta` come from model_args, the rest from tensors."""

    vocabulary: int
    width: int
    blocks: int
    heads: int
    kv_heads: int
    hidden: int
    eps: float
    theta: float
    tied: bool


def recognises(state: State) -> bool:
    """Whether the tensors have llama2.c's names."""
    return {TABLE, "layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight"} <= set(
        state.tensors
    )


def build(state: State, assume: Mapping[str, str]) -> Live:
    """The network from its tensors' shapes and model_args (n_heads, norm_eps, rope_theta)."""
    arguments = _arguments(state)
    shape = _shape(state, arguments, assume)
    module = Llama(shape).eval()
    longest = arguments.get("max_seq_len")
    longest = int(longest) if isinstance(longest, int) else None
    length = min(SYNTHETIC_LENGTH, longest or SYNTHETIC_LENGTH)
    stored = match(module, state.tensors)
    if shape.tied and TABLE not in stored and HEAD in state.tensors:
        stored[TABLE] = HEAD

    def forward(batch: Batch) -> Tensor:
        output: Tensor = module(batch["inputs"])
        return output

    return Live(
        module=module,
        inputs=Inputs("tokens", (length,), shape.vocabulary, longest=longest, causal=True),
        stored=stored,
        forward=forward,
        source="llama2.c's layout, from model_args",
        assumptions=_assumptions(arguments, shape),
        unused=tuple(name for name in state.tensors if name == "rope.freqs"),
    )


def _arguments(state: State) -> Mapping[str, Any]:
    for name in ("model_args", "params", "config"):
        found = state.extras.get(name)
        if isinstance(found, Mapping):
            return found
    return {}


def _shape(state: State, arguments: Mapping[str, Any], assume: Mapping[str, str]) -> Shape:
    vocabulary, width = state.tensors[TABLE].shape
    heads = int(assume.get("heads") or arguments.get("n_heads") or 0)
    if not heads or width % heads:
        raise ModelError(
            f"this Llama's number of heads isn't stored (model_args.n_heads is {heads or None}, "
            f"the width {width}): say --assume heads=N"
        )
    head_width = width // heads
    return Shape(
        vocabulary=vocabulary,
        width=width,
        blocks=sum(name.endswith(".attention.wq.weight") for name in state.tensors),
        heads=heads,
        kv_heads=state.tensors["layers.0.attention.wk.weight"].shape[0] // head_width,
        hidden=state.tensors["layers.0.feed_forward.w1.weight"].shape[0],
        eps=float(arguments.get("norm_eps") or 1e-5),
        theta=float(arguments.get("rope_theta") or 10000.0),
        tied=HEAD not in state.tensors or state.tensors[HEAD].alias_of == TABLE,
    )


def _assumptions(arguments: Mapping[str, Any], shape: Shape) -> tuple[str, ...]:
    unsaid = [
        f"{name} {value:g}"
        for name, value in (("norm_eps", shape.eps), ("rope_theta", shape.theta))
        if not arguments.get(name)
    ]
    return (f"assumed: {', '.join(unsaid)}, as llama2.c does",) if unsaid else ()


class RMSNorm(nn.Module):
    """Divides by the root mean square, then scales."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eps = shape.eps
        self.weight = nn.Parameter(torch.ones(shape.width))

    def forward(self, hidden: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)
        return hidden * scale * self.weight


def rotate(heads: Tensor, theta: float) -> Tensor:
    """Turn each pair of neighbouring features of [B, T, H, dh] by an angle that grows with T."""
    length, width = heads.shape[1], heads.shape[-1]
    places = torch.arange(length, dtype=torch.float32, device=heads.device)
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=heads.device) / width
    angles = torch.outer(places, theta**-exponents)[None, :, None].to(heads.dtype)
    real, imaginary = heads.unflatten(-1, (-1, 2)).unbind(-1)  # type: ignore[no-untyped-call]
    cos, sin = angles.cos(), angles.sin()
    turned = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)
    return turned.flatten(-2)


class Attention(nn.Module):
    """Causal attention with rotary positions; each key/value head serves H / G query heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width // shape.heads
        self.shape, self.head_width = shape, width
        self.wq = nn.Linear(shape.width, shape.heads * width, bias=False)
        self.wk = nn.Linear(shape.width, shape.kv_heads * width, bias=False)
        self.wv = nn.Linear(shape.width, shape.kv_heads * width, bias=False)
        self.wo = nn.Linear(shape.heads * width, shape.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            part(hidden).unflatten(-1, (-1, self.head_width))
            for part in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, self.shape.theta), rotate(k, self.shape.theta)
        shared = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(shared, dim=2), v.repeat_interleave(shared, dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.w2(silu(self.w1(hidden)) * self.w3(hidden))
        return output


class Block(nn.Module):
    """Norm first, then attention or feed-forward, then the residual sum."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)
        self.attention_norm = RMSNorm(shape)
        self.ffn_norm = RMSNorm(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        output: Tensor = hidden + self.feed_forward(self.ffn_norm(hidden))
        return output


class Llama(nn.Module):
    """Token ids [B, T] to logits [B, T, vocabulary]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = RMSNorm(shape)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tok_embeddings(ids)
        for block in self.layers:
            hidden = block(hidden)
        logits: Tensor = self.output(self.norm(hidden))
        return logits
