"""Transformers in the ways that nobody has in common: the same canonical parts, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plastiscope.anatomy import Anatomy, trace, verify, watch
from tests.anatomy import zoo
from tests.anatomy.nets import inputs_to

WIDTH, HEADS, TOKENS = 24, 4, 8
PRE = "norm1 q k v attention_output residual1 norm2 fc1 activation fc2 residual2"
POST = "q k v attention_output residual1 norm1 fc1 activation fc2 residual2 norm2"
Sequences = {"inputs": torch.randn(2, TOKENS, 5, generator=torch.Generator().manual_seed(0))}


class Attention(nn.Module):
    """Attention written out; a subclass changes a step of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.before, self.after = nn.Linear(HEADS, HEADS), nn.Linear(HEADS, HEADS)

    def split(self, x: Tensor) -> list[Tensor]:
        parts = [f(x) for f in (self.q, self.k, self.v)]
        return [p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / q.shape[-1] ** 0.5

    def maps(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        mixed = self.maps(self.scores(q, k)) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class Alibi(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.06])[:, None, None]
        return super().scores(q, k) - (places[:, None] - places).abs() * slopes


class Talking(Attention):
    """Heads are mixed before the softmax and after it."""

    def maps(self, scores: Tensor) -> Tensor:
        mixed = self.before(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)
        return self.after(mixed.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class WrittenOut(Attention):
    """No softmax function: exp(x), divided by its sum."""

    def maps(self, scores: Tensor) -> Tensor:
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        return powers / powers.sum(dim=-1, keepdim=True)


class Pooled(Attention):
    """A depthwise convolution over the tokens of every head's keys, the same for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.Conv1d(6, 6, 3, padding=1, groups=6)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        pooled = self.pool(k.flatten(0, 1).mT).mT.unflatten(0, (-1, HEADS))
        return super().scores(q, pooled)


class Block(nn.Module):
    """One block; `order` is how its parts are put together."""

    def __init__(self, attention: Callable[[], nn.Module], order: str) -> None:
        super().__init__()
        self.attention, self.order = attention(), order
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.n3, self.n4 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.middle = nn.Conv1d(40, 40, 3, padding=1, groups=40)
        self.up2, self.down2 = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))

    def ff(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        a, ff, n1, n2 = self.attention, self.ff, self.n1, self.n2
        if self.order == "pre":
            x = x + a(n1(x))
            return x + ff(n2(x))
        if self.order == "scaled":
            x = x + self.scale * a(n1(x))
            return x + self.scale * ff(n2(x))
        if self.order == "sandwich":
            x = x + self.n3(a(n1(x)))
            return x + self.n4(ff(n2(x)))
        if self.order == "deep":  # DeepNorm: the skip is what is scaled
            x = n1(1.5 * x + a(x))
            return n2(1.5 * x + ff(x))
        if self.order == "bare":
            x = x + a(x)
            return x + ff(x)
        if self.order == "feed-forward first":
            x = x + ff(n2(x))
            return x + a(n1(x))
        if self.order == "macaron":
            x = x + 0.5 * self.down2(F.gelu(self.up2(self.n3(x))))
            x = x + a(n1(x))
            return x + 0.5 * ff(n2(x))
        x = x + a(n1(x))  # a depthwise convolution inside the feed-forward part
        return x + self.down(F.gelu(self.middle(self.up(n2(x)).mT).mT))


class Network(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], order: str) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block(attention, order) for _ in range(3))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x).mean(1))


def traced(net: nn.Module, batch: dict[str, Tensor]) -> Anatomy:
    """The anatomy, with every block's map proved."""
    torch.manual_seed(0)
    anatomy = trace(net, inputs_to(net), batch)
    proofs = verify(net, inputs_to(net), batch, anatomy, dict(net.named_parameters()))
    assert all(p.ok and p.error < 1e-5 for p in proofs), proofs
    return anatomy


STYLES = {
    "alibi": (Alibi, "pre", PRE),
    "talking heads": (Talking, "pre", PRE),
    "written-out softmax": (WrittenOut, "pre", PRE),
    "pooled keys": (Pooled, "pre", PRE),
    "layer scale": (Attention, "scaled", PRE),
    "sandwich norms": (Attention, "sandwich", PRE),
    "deepnorm": (Attention, "deep", POST),
    "no norms": (Attention, "bare", PRE.replace("norm1 ", "").replace("norm2 ", "")),
    "macaron": (Attention, "macaron", PRE),
    "convolution between": (Attention, "mixed", PRE),
    "feed-forward first": (
        Attention,
        "feed-forward first",
        "norm2 fc1 activation fc2 residual2 norm1 q k v attention_output residual1",
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_parts_of_a_block_in_any_style(style: str) -> None:
    """Each block's parts are its own modules, in the order in which they run, heads proved."""
    attention, order, names = STYLES[style]
    anatomy = traced(Network(attention, order), Sequences)
    own = {"n1": "norm1", "n2": "norm2", "up": "fc1", "down": "fc2"}
    for block in range(3):
        parts = [c for c in anatomy.components if c.block == block and "." not in c.name]
        assert [c.name for c in parts] == names.split()
        paths = {c.name: c.path for c in parts}
        for path, name in own.items():
            assert paths.get(name, f"blocks.{block}.{path}") == f"blocks.{block}.{path}"
        assert {x: len(c.heads) for c in parts if (x := c.name) in "qkv"} == dict.fromkeys("qkv", 4)
        assert [h.rows for c in parts if c.name == "k" for h in c.heads] == [
            tuple(range(6 * h, 6 * h + 6)) for h in range(HEADS)
        ]
    rest = [c.name for c in anatomy.components if c.block is None and "." not in c.name]
    assert rest == ["embedding", "final_norm", "head"]


class Channels(Attention):
    """Cross-covariance: the maps are over a head's channels."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.normalize(t.mT, dim=-1) for t in self.split(x))
        return self.o(((q @ k.mT).softmax(-1) @ v).mT.transpose(1, 2).flatten(2))


def test_attention_over_channels_is_left_out_and_said() -> None:
    net = Network(Channels, "pre")
    anatomy = trace(net, inputs_to(net), Sequences)
    assert anatomy.attention == {}
    assert "blocks.1.attention attends over channels" in anatomy.notes[1]
    names = {m.tensor for c in anatomy.components for m in c.weights}
    assert {f"blocks.{b}.attention.{x}.weight" for b in range(3) for x in "qkvo"} <= names


class Linear(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        mixed = q @ (k.mT @ v) / (q @ k.sum(2)[..., None])
        return self.o(mixed.transpose(1, 2).flatten(2))


class Latent(Attention):
    """Queries that are learned, the same for all inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(1, TOKENS, WIDTH))

    def split(self, x: Tensor) -> list[Tensor]:
        return [super().split(self.latent)[0].expand(len(x), -1, -1, -1), *super().split(x)[1:]]

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.split(x))
        return self.o(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("attention", "why"), [(Linear, "with no softmax between"), (Latent, "the same queries")]
)
def test_what_isnt_read_as_attention_is_said(attention: type[Attention], why: str) -> None:
    """Every weight is still a part, under its own path."""
    net = Network(attention, "pre")
    anatomy = trace(net, inputs_to(net), Sequences)
    assert anatomy.attention == {} and why in anatomy.notes[0]
    names = {m.tensor for c in anatomy.components for m in c.weights}
    assert {f"blocks.{b}.attention.{x}.weight" for b in range(3) for x in "qkvo"} <= names


def test_a_single_head_in_windows_is_one_head() -> None:
    class Windows(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(1, (4, 2)) for f in (self.q, self.k, self.v))
            return self.o((self.scores(q, k).softmax(-1) @ v).flatten(1, 2))

    anatomy = traced(Network(Windows, "pre"), Sequences)
    site = anatomy.attention[0]
    assert (site.heads, site.kv_heads, site.head_width) == (1, 1, WIDTH)


class Pictures(nn.Module):
    """A stem of convolutions; the CLS token stands in front, behind, or after registers."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, WIDTH, 3, 2, 1))
        self.cls, self.registers = (nn.Parameter(torch.randn(1, n, WIDTH)) for n in (1, 3))
        self.place, self.block = place, Block(Attention, "pre")
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        cls, registers = (t.expand(len(x), -1, -1) for t in (self.cls, self.registers))
        order = {"front": [cls, registers, x], "end": [x, cls], "inside": [registers, cls, x]}
        at = {"front": 0, "end": -1, "inside": 3}
        return self.head(self.block(torch.cat(order[self.place], 1))[:, at[self.place]])


@pytest.mark.parametrize(
    ("place", "cls", "prefix"), [("front", 0, 4), ("end", -1, 0), ("inside", 3, 4)]
)
def test_cls_token_wherever_it_stands(place: str, cls: int, prefix: int) -> None:
    net = Pictures(place)
    anatomy = traced(net, zoo.images(16))
    assert (anatomy.cls, anatomy.prefix_tokens) == (cls, prefix)
    (embedding,) = [c for c in anatomy.components if c.name == "embedding"]
    seen: dict[str, Tensor] = {}
    with (
        torch.no_grad(),
        watch(net, {"x": embedding.features}, {}, seen.__setitem__, lambda *_: None) as watching,
    ):
        net(zoo.images(16)["inputs"])
        watching.check()
    assert torch.equal(seen["x"][:, cls], net.cls[0].expand(2, -1))


def test_a_stem_is_one_component_a_convolution() -> None:
    """Never two matrices in one component; all of them in the embedding's scope."""
    anatomy = traced(Pictures("front"), zoo.images(16))
    found = {c.name: [m.tensor for m in c.weights] for c in anatomy.components if c.weights}
    assert found["embedding"] == ["stem.2.weight"] and found["stem.0"] == ["stem.0.weight"]
    assert max(map(len, found.values())) == 1
    embeds = {c.name for c in anatomy.components if c.embeds}
    assert embeds >= {"stem.0", "cls"}


def test_a_norm_that_holds_its_activation() -> None:
    """timm's BatchNormAct2d: the norm is seen before the activation, the units after it."""

    class NormAct(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.silu(super().forward(x), inplace=True)

    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), NormAct(6), nn.Conv2d(6, 4, 3), NormAct(4), nn.Flatten(),
        nn.Linear(64, 2),
    ).eval()  # fmt: skip
    images = torch.randn(2, 3, 8, 8)
    anatomy = trace(net, inputs_to(net), {"inputs": images})
    parts = [(c.name, c.block, c.function) for c in anatomy.components]
    layer = [("conv", None), ("norm", None), ("activation", "silu")]
    assert parts == [(n, k, f) for k in (0, 1) for n, f in layer] + [("head", None, None)]
    sites = {c.name: c.features for c in anatomy.components if c.block == 0}
    seen: dict[str, Tensor] = {}
    with torch.no_grad(), watch(net, sites, {}, seen.__setitem__, lambda *_: None) as watching:
        net(images)
        watching.check()
        normed = nn.BatchNorm2d.forward(net[1], net[0](images))
    torch.testing.assert_close(seen["norm"], normed)
    torch.testing.assert_close(seen["activation"], F.silu(normed))
