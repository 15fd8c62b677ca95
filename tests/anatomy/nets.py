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


class EinsumViT(nn.Module):
    """A ViT without modules: parameters only, one [3, H, d, dh] for q, k and v, average pooling."""

    def __init__(self, width: int = 12, heads: int = 3, layers: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.layers, self.width = layers, width
        shapes = {
            "qkv": (3, heads, width, width // heads),
            "out": (heads, width // heads, width),
            "gain1": (width,),
            "gain2": (width,),
            "up": (width, 4 * width),
            "up_bias": (4 * width,),
            "down": (4 * width, width),
        }
        self.weights = nn.ParameterDict(
            {
                f"{name}_{k}": nn.Parameter(torch.randn(shape) * 0.3)
                for k in range(layers)
                for name, shape in shapes.items()
            }
        )
        self.patch = nn.Parameter(torch.randn(3 * 16, width) * 0.2)
        self.places = nn.Parameter(torch.randn(16, width))
        self.to_logits = nn.Parameter(torch.randn(classes, width))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (self.width,), self.weights[name])

    def attend(self, x: Tensor, k: int) -> Tensor:
        q, key, v = torch.einsum("btd,shdk->sbhtk", x, self.weights[f"qkv_{k}"])
        scores = torch.einsum("bhik,bhjk->bhij", q, key) * q.shape[-1] ** -0.5
        mixed = torch.einsum("bhij,bhjk->bhik", torch.softmax(scores, dim=-1), v)
        return torch.einsum("bhtk,hkd->btd", mixed, self.weights[f"out_{k}"])

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, 4, stride=4).transpose(1, 2)
        x = patches @ self.patch + self.places
        for k in range(self.layers):
            x = x + self.attend(self.norm(x, f"gain1_{k}"), k)
            h = self.norm(x, f"gain2_{k}") @ self.weights[f"up_{k}"] + self.weights[f"up_bias_{k}"]
            h = 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * h**3)))
            x = x + h @ self.weights[f"down_{k}"]
        return x.mean(1) @ self.to_logits.t()


class ConvViT(nn.Module):
    """q, k and v from one 1x1 convolution, attention over pixels with channels first."""

    def __init__(self, width: int = 12, heads: int = 3, layers: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in range(2 * layers))
        self.qkv = nn.ModuleList(nn.Conv2d(width, 3 * width, 1, bias=False) for _ in range(layers))
        self.out = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.up = nn.ModuleList(nn.Conv2d(width, 2 * width, 1) for _ in range(layers))
        self.down = nn.ModuleList(nn.Conv2d(2 * width, width, 1) for _ in range(layers))
        self.classify = nn.Linear(width, classes)

    def attend(self, x: Tensor, k: int) -> Tensor:
        b, c, height, width = x.shape
        q, key, v = self.qkv[k](x).reshape(b, 3, self.heads, c // self.heads, -1).unbind(1)
        maps = (q.transpose(-2, -1) @ key).div(q.shape[-2] ** 0.5).softmax(-1)
        mixed = v @ maps.transpose(-2, -1)
        return self.out[k](mixed.reshape(b, c, height, width))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for k in range(len(self.qkv)):
            x = x + self.attend(self.norms[2 * k](x), k)
            h = self.up[k](self.norms[2 * k + 1](x))
            x = x + self.down[k](F.silu(h, inplace=True))
        return self.classify(x.mean((2, 3)))


class PlainGPT(nn.Module):
    """All written out: x @ W, RMSNorm in arithmetic, heads interleaved, parallel branches."""

    def __init__(
        self, width: int = 12, heads: int = 3, layers: int = 2, vocabulary: int = 9
    ) -> None:
        super().__init__()
        self.heads, self.depth = heads, layers
        self.table = nn.Parameter(torch.randn(vocabulary, width))
        for k in range(layers):
            for name, shape in {
                "g": (width,),
                "wqkv": (width, 3 * width),
                "wo": (width, width),
                "w1": (width, 3 * width),
                "w2": (3 * width, width),
            }.items():
                self.register_parameter(f"{name}{k}", nn.Parameter(torch.randn(shape) * 0.3))
        self.g = nn.Parameter(torch.ones(width))

    @staticmethod
    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain

    def attend(self, x: Tensor, weight: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = (x @ weight).view(b, t, self.heads, 3, d // self.heads).permute(3, 0, 2, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = torch.matmul(q, k.mT) / (d // self.heads) ** 0.5
        scores = scores + torch.full((t, t), float("-inf")).triu(1)
        return torch.matmul(scores.softmax(-1), v).transpose(1, 2).reshape(b, t, d)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.table)
        for k in range(self.depth):
            g, wqkv, wo, w1, w2 = (
                getattr(self, f"{n}{k}") for n in ("g", "wqkv", "wo", "w1", "w2")
            )
            h = self.norm(x, g)
            x = x + self.attend(h, wqkv) @ wo + torch.relu(h @ w1).square() @ w2
        return self.norm(x, self.g) @ self.table.t()


class RotaryLlama(nn.Module):
    """Llama in Meta's names: complex rotary positions, grouped heads, explicit attention."""

    def __init__(self, width: int = 16, heads: int = 4, shared: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.tok_embeddings = nn.Embedding(30, width)
        self.layers = nn.ModuleList(self.layer(width) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, 30, bias=False)

    def layer(self, width: int) -> nn.ModuleDict:
        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        narrow = self.shared * self.size
        return nn.ModuleDict(
            {
                "attention_norm": nn.RMSNorm(width),
                "attention": nn.ModuleDict(
                    {
                        "wq": linear(width, width),
                        "wk": linear(width, narrow),
                        "wv": linear(width, narrow),
                        "wo": linear(width, width),
                    }
                ),
                "ffn_norm": nn.RMSNorm(width),
                "feed_forward": nn.ModuleDict(
                    {
                        "w1": linear(width, 24),
                        "w2": linear(24, width),
                        "w3": linear(width, 24),
                    }
                ),
            }
        )

    def rotate(self, x: Tensor) -> Tensor:
        turns = torch.outer(torch.arange(x.shape[1]).float(), torch.tensor([1.0, 0.1]))
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(
            torch.ones_like(turns), turns
        ).unsqueeze(1)
        return torch.view_as_real(turned).flatten(3)

    def attend(self, part: nn.ModuleDict, x: Tensor) -> Tensor:
        q = self.rotate(part["wq"](x).unflatten(-1, (self.heads, -1))).transpose(1, 2)
        k = self.rotate(part["wk"](x).unflatten(-1, (self.shared, -1))).transpose(1, 2)
        v = part["wv"](x).unflatten(-1, (self.shared, -1)).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.shared, dim=1) for t in (k, v))
        scores = q @ k.transpose(2, 3) / self.size**0.5
        scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
        mixed = F.softmax(scores.float(), dim=-1).type_as(q) @ v
        return part["wo"](mixed.transpose(1, 2).flatten(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = x + self.attend(layer["attention"], layer["attention_norm"](x))
            h, ff = layer["ffn_norm"](x), layer["feed_forward"]
            x = x + ff["w2"](F.silu(ff["w1"](h)) * ff["w3"](h))
        return self.output(self.norm(x))
