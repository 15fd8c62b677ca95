"""Which parts of a network have a Jacobian, whole or by position, against dense derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

from plastiscope.anatomy import trace
from plastiscope.derivatives import jacobian_places, jacobian_rows
from plastiscope.models.live import Batch, Inputs, Live
from plastiscope.network import Network
from plastiscope.observations import Called, Jacobian, observe_jacobians


def opened(net: nn.Module, batch: Batch, forward: Callable[[Batch], Tensor]) -> Network:
    live = Live(net, Inputs("vector", tuple(batch["inputs"].shape[1:])), {}, forward, "test")
    return Network(trace(net, forward, batch), live, (), None, (), torch.device("cpu"), False)


def means(network: Network, batch: Batch, metric: str) -> dict[tuple[str, int | None], object]:
    """Each component's value, or the reason why it has none."""
    rows = jacobian_rows(network, batch, frozenset({metric}), 0)
    return {
        (r.component, r.block): r.status if r.value is None else r.value
        for r in rows
        if "quantile" not in (r.parameters or "")
    }


def whole(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The singular values [B, s] of each input's whole Jacobian."""
    found = [jacrev(lambda one: function(one[None])[0])(one) for one in x]
    return torch.stack(
        [torch.linalg.svdvals(j.reshape(-1, one.numel())) for j, one in zip(found, x, strict=True)]
    )


def keep(given: dict[nn.Module, Tensor], parts: Iterable[nn.Module]) -> None:
    """Keeps what each part is given first."""

    def before(part: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        given.setdefault(part, arguments[0].detach())

    for part in parts:
        part.register_forward_pre_hook(before)


class Pairs(nn.Module):
    """Tokens 1 and 2, 3 and 4 ... see each other; the first one sees itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        pairs = x[:, 1:].reshape(-1, 2, 4)
        seen = self.attention(pairs, pairs, pairs)[0].reshape(len(x), -1, 4)
        return torch.cat([x[:, :1], seen], 1)


class Gain(nn.Module):
    """A gain by position, which a shorter input takes the start of."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linspace(0.1, 5, 5, dtype=x.dtype)[: x.shape[1], None]


class Table(nn.Module):
    """A table of positions before what bends: a single position would get all of it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + torch.linspace(-2, 2, 5, dtype=x.dtype)[:, None])


class Late(nn.Module):
    """The third token sees the second: no such tokens in a single position."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :2], (x[:, 2] + 3 * x[:, 1])[:, None], x[:, 3:]], 1)


@pytest.mark.parametrize("module", [Pairs(), Gain(), Table(), Late()])
def test_what_is_not_the_same_at_each_position_alone_is_taken_whole(module: nn.Module) -> None:
    torch.manual_seed(0)
    module, x = module.double().eval(), torch.randn(3, 5, 4, dtype=torch.float64)
    found = observe_jacobians(module, lambda b: module(b["inputs"]), {"inputs": x}, {0: ""})[0]
    assert (found.method, found.rows, found.columns) == ("dense", 20, 20)
    sigma = np.sort(whole(module, x).detach().numpy())
    np.testing.assert_allclose(np.sort(found.nodes), sigma, atol=1e-9)


@pytest.mark.parametrize(("axis", "shape"), [(-1, (2, 3, 4, 6)), (1, (2, 6, 3, 4)), (1, (2, 6, 5))])
def test_positions_are_all_axes_but_the_channels(axis: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    gelu, places = nn.GELU().eval(), {0: Called("", channel_axis=axis)}
    found = observe_jacobians(gelu, lambda b: gelu(b["inputs"]), {"inputs": x}, places)[0]
    assert (found.method, found.rows, found.columns) == ("positions", 6, 6)
    slopes = torch.special.ndtr(x) + x * torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    expected = slopes.abs().flatten(1).sort().values.numpy()
    np.testing.assert_allclose(np.sort(found.nodes), expected, rtol=1e-9)


class ChannelsLast(nn.Module):
    """Maps [B, h, w, C] between a convolution and the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 6, 2, 2), nn.LayerNorm(6)
        self.fc1, self.act, self.fc2 = nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        x = x + self.fc2(self.act(self.fc1(self.norm1(x))))
        return self.head(x.mean((1, 2)))


def test_channels_last_layers_are_taken_of_one_position() -> None:
    torch.manual_seed(0)
    net = ChannelsLast().double().eval().requires_grad_(False)
    batch = {"inputs": torch.randn(3, 3, 8, 8, dtype=torch.float64)}
    forward = lambda b: net(b["inputs"])  # noqa: E731
    found = means(opened(net, batch, forward), batch, "jacobian_frobenius")
    given: dict[nn.Module, Tensor] = {}
    keep(given, (net.norm1, net.act))
    forward(batch)
    for name, part in (("norm", net.norm1), ("activation", net.act)):
        mean_square = whole(part, given[part]).square().sum(1) / 16  # over positions
        value = next(v for key, v in found.items() if key[0] == name)
        assert value == pytest.approx(float(mean_square.sqrt().mean()), rel=1e-9)


class Cut(nn.Module):
    """No gradient goes through its middle; another part can't be differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.round, self.numpy = nn.Linear(5, 6), Rounded(), ByNumpy()
        self.bend, self.last = nn.Tanh(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.bend(self.numpy(self.round(self.first(x)))))


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.round(x.detach())


class ByNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.numpy()))


def test_a_part_without_a_gradient_costs_no_other_its_jacobian() -> None:
    torch.manual_seed(0)
    net = Cut().double().eval()
    batch = {"inputs": torch.randn(4, 5, dtype=torch.float64)}
    places = {name: name for name in ("first", "round", "numpy", "bend", "last", "")}
    found = observe_jacobians(net, lambda b: net(b["inputs"]), batch, places)
    status = {name: jacobian.status for name, jacobian in found.items()}
    assert status == {
        "first": "ok", "round": "no_gradient", "numpy": "not_differentiated", "bend": "ok",
        "last": "ok", "": "no_gradient",
    }  # fmt: skip
    np.testing.assert_allclose(
        found["last"].nodes[0], torch.linalg.svdvals(net.last.weight).detach().numpy()
    )
    net.numpy = nn.Identity().eval()  # which no trace goes through
    values = means(opened(net, batch, lambda b: net(b["inputs"])), batch, "jacobian_sigma_max")
    assert values["network", None] == "no_gradient"
    last = float(torch.linalg.matrix_norm(net.last.weight, 2))
    assert values["head", None] == pytest.approx(last)


# --- attentions ---


def attended(
    x: Tensor, qkv: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], heads: int, hidden: Tensor
) -> Tensor:
    """Attention [B, T, d] from its definition; `hidden` [B, T, T] are keys that aren't seen."""
    b, t, d = x.shape
    q, k, v = (x @ qkv[0].T + qkv[1]).reshape(b, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT / math.sqrt(d // heads)
    weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(b, t, d) @ out[0].T + out[1]


def vit() -> tuple[nn.Module, Batch, Callable[[Batch], Tensor], list[nn.Module]]:
    timm = pytest.importorskip("timm")
    net = timm.models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2, num_classes=3
    )
    batch = {"inputs": torch.randn(3, 3, 8, 8, dtype=torch.float64)}
    return net.double(), batch, lambda b: net(b["inputs"]), [x.attn for x in net.blocks]


def gpt() -> tuple[nn.Module, Batch, Callable[[Batch], Tensor], list[nn.Module]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, use_cache=False
    )
    net = transformers.GPT2LMHeadModel(config).double()
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[1, 4:] = 0
    batch = {"inputs": torch.randint(0, 11, (3, 6)), "mask": mask}

    def forward(b: Batch) -> Tensor:
        return net(input_ids=b["inputs"], attention_mask=b["mask"]).logits

    return net, batch, forward, [x.attn for x in net.transformer.h]


@pytest.mark.parametrize("build", [vit, gpt])
def test_attentions_have_the_jacobian_of_their_definition(build: Callable[[], tuple]) -> None:
    """As they were called: over all tokens, or causal and with padding behind."""
    torch.manual_seed(0)
    net, batch, forward, attentions = build()
    net.eval().requires_grad_(False)
    for parameter in net.parameters():
        parameter.normal_(std=0.5)
    network, given = opened(net, batch, forward), {}
    keep(given, attentions)
    forward(batch)
    found = means(network, batch, "jacobian_sigma_max")
    places = {k: p for k, p in jacobian_places(network).items() if k[0] == "attention"}  # type: ignore[index]
    estimates = observe_jacobians(net, forward, batch, places, dense_side=8)
    for block, part in enumerate(attentions):
        x = given[part]
        t = x.shape[1]
        hidden = torch.zeros(len(x), t, t, dtype=torch.bool)
        if "mask" in batch:
            hidden = torch.ones(t, t).triu(1).bool() | (batch["mask"] == 0)[:, None]
            joint, out = part.c_attn, part.c_proj
            weights = (joint.weight.T, joint.bias), (out.weight.T, out.bias)
        else:
            weights = (part.qkv.weight, part.qkv.bias), (part.proj.weight, part.proj.bias)
        sigma = torch.cat(
            [
                whole(lambda one, w=weights, h=h: attended(one, *w, 2, h), xi)
                for xi, h in zip(x.split(1), hidden.split(1), strict=True)
            ]
        )
        assert found["attention", block] == pytest.approx(float(sigma[:, 0].mean()), rel=1e-8)
        estimate: Jacobian = estimates["attention", block]
        assert estimate.method == "lanczos"
        np.testing.assert_allclose(estimate.nodes.max(1), sigma[:, 0].numpy(), rtol=0.02)


def test_an_attention_that_is_no_module_is_null_with_the_reason() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.q, self.k, self.v, self.o, self.head = (
                nn.Linear(6, n) for n in (6, 6, 6, 6, 6, 3)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            weights = (self.q(x) @ self.k(x).mT / math.sqrt(6)).softmax(-1)
            return self.head((x + self.o(weights @ self.v(x))).mean(1))

    torch.manual_seed(0)
    net, batch = Flat().eval(), {"inputs": torch.randn(3, 4, 6)}
    found = means(opened(net, batch, lambda b: net(b["inputs"])), batch, "jacobian_sigma_max")
    assert found["attention", 0] == "no_module_of_its_own"
