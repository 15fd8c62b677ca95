"""No layer is silently missing: biases, CLS tokens, attentions of other kinds, and reasons."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plastiscope.anatomy import trace
from tests.anatomy.nets import FlashAttention, FusedGPT, inputs_to
from tests.anatomy.test_replayed import TOKENS, replayed

WIDTH, HEADS = 12, 3
VECTORS = torch.randn(6, 7, WIDTH, generator=torch.Generator().manual_seed(0))


class Einsum(nn.Module):
    """Attention and a feed-forward part of parameters alone; biases are added after products."""

    def __init__(self, shape: tuple[int, ...] = (WIDTH,)) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (
            nn.Parameter(torch.randn(HEADS, WIDTH, 4) * 0.3) for _ in range(3)
        )
        self.wo, self.bo = (
            nn.Parameter(torch.randn(HEADS, 4, WIDTH)),
            nn.Parameter(torch.randn(shape) * 3),
        )
        self.up, self.b1 = nn.Parameter(torch.randn(WIDTH, 20)), nn.Parameter(torch.randn(20) * 3)
        self.down, self.b2 = (
            nn.Parameter(torch.randn(20, WIDTH)),
            nn.Parameter(torch.randn(WIDTH) * 3),
        )
        self.made: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hde->bhte", x, w) for w in (self.wq, self.wk, self.wv))
        mixed = torch.softmax(q @ k.mT / 2, -1) @ v
        out = torch.einsum("bhte,hed->btd", mixed, self.wo)
        biased = out + self.bo
        x = x + biased
        before = x @ self.up + self.b1
        made = torch.relu(before) @ self.down
        made += self.b2
        self.made = {"plain": out, "attention_output": biased, "fc1": before, "fc2": made.clone()}
        return x + made


def effective_rank(x: Tensor) -> float:
    p = torch.linalg.svdvals(x.detach().flatten(0, -2).double())
    p = p[p > 0] / p.sum()
    return float((-(p * p.log()).sum()).exp())


def test_a_bias_added_after_the_product_belongs_to_the_features() -> None:
    torch.manual_seed(0)
    net = Einsum().eval()
    rows = {r.component: r for r in replayed(net, VECTORS, "effective_rank") if r.head is None}
    net(VECTORS)
    for name in ("attention_output", "fc1", "fc2"):
        assert rows[name].value == pytest.approx(effective_rank(net.made[name]), rel=1e-5)
    assert rows["attention_output"].value != pytest.approx(
        effective_rank(net.made["plain"]), rel=1e-3
    )


def test_a_table_of_positions_isn_t_a_bias() -> None:
    torch.manual_seed(0)
    net = Einsum((1, 7, WIDTH)).eval()
    rows = {r.component: r for r in replayed(net, VECTORS, "effective_rank") if r.head is None}
    net(VECTORS)
    found = rows["attention_output"].value
    assert found == pytest.approx(effective_rank(net.made["plain"]), rel=1e-5)


class Stem(nn.Module):
    """Convolutions make the patches; a CLS token joins them; in the block, they leave it again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 24, 2, 2)
        self.cls = nn.Parameter(torch.randn(1, 1, 24))
        self.block = FusedGPT(layers=1).blocks[0]
        self.block.attn.mix = lambda q, k, v: (q @ k.mT).softmax(-1) @ v
        self.patches, self.head = nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x).relu()).flatten(2).mT
        x = self.block(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))
        x = torch.cat([x[:, :1], x[:, 1:] + self.patches(x[:, 1:])], 1)
        return self.head(x[:, 0] + 0.1 * x[:, 1:].mean(1))


def test_patches_alone_have_no_cls_token() -> None:
    """Before it joins, or where it's left out: null with its reason, never the first patch."""
    torch.manual_seed(0)
    net = Stem().eval()
    x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    rows = [r for r in replayed(net, x, "effective_rank") if r.tokens == "cls"]
    found = {r.component: (r.value, r.status) for r in rows}
    for name in ("conv1", "patches"):
        assert found[name] == (None, "no_cls_token")
    for name in ("embedding", "norm1", "fc1", "residual2", "head"):
        assert found[name][0] is not None
    assert "network" not in found


class LinearAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return self.out(q @ (k.mT @ v) / (q @ k.sum(1)[..., None]))


@pytest.mark.parametrize("hybrid", [False, True])
def test_an_attention_of_another_kind_is_a_row_with_the_reason(hybrid: bool) -> None:
    """Also beside attentions that are read, which keep their own rows."""
    torch.manual_seed(0)
    net = FusedGPT(LinearAttention).eval()
    if hybrid:
        net.blocks[1].attn = FusedGPT().blocks[1].attn
    rows = [r for r in replayed(net, TOKENS, "attention_entropy") if r.head is None]
    unread = ["blocks.0.attn"] if hybrid else ["blocks.0.attn", "blocks.1.attn"]
    assert [(r.component, r.value, r.status) for r in rows] == [
        (path, None, "no_softmax") for path in unread
    ]
    notes = trace(net, inputs_to(net), {"inputs": TOKENS[:2]}).notes
    assert [path for path in unread if any(path in n for n in notes)] == unread


def test_what_a_network_hasn_t_got_is_a_row_with_the_reason() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 4)).eval()
    metrics = ("effective_rank", "attention_entropy", "dead_fraction")
    rows = [r for r in replayed(net, VECTORS[:, 0], *metrics) if r.component == "network"]
    assert {(r.metric, r.subject, r.tokens, r.value, r.status) for r in rows} == {
        ("effective_rank", "feature", "cls", None, "no_cls_token"),
        ("attention_entropy", "attention", None, None, "no_attention"),
        ("dead_fraction", "unit", "all", None, "no_activation"),
    }


def test_a_layer_that_isn_t_seen_says_so() -> None:
    """A weight that is normalised before use, and a layer that is never run."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.hidden = nn.Linear(WIDTH, 8), nn.Linear(8, 8)
            self.spare, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.hidden.weight / self.hidden.weight.norm(dim=1, keepdim=True)
            return self.last(F.linear(self.first(x).relu(), weight).relu())

    rows = replayed(Net().eval(), VECTORS[:, 0], "effective_rank")
    found = {r.component: (r.value, r.status) for r in rows if r.tokens == "all"}
    assert found["hidden"] == (None, "output_not_seen")
    assert found["spare"] == (None, "not_used")


class Joint(FlashAttention):
    """q is made of k's rows too, so it isn't a component of its own."""

    def split(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().split(x)
        return [q + k, k, v]


def test_an_attention_whose_queries_have_no_rows_of_their_own_is_measured() -> None:
    torch.manual_seed(0)
    net = FusedGPT(Joint).eval()
    names = [
        (c.name, c.block) for c in trace(net, inputs_to(net), {"inputs": TOKENS[:2]}).components
    ]
    assert ("q", 0) not in names and ("k", 0) in names
    every = replayed(net, TOKENS, "attention_entropy", "feature_norm")
    kept: list[Tensor] = []
    net.blocks[0].attn.c_attn.register_forward_hook(lambda *given: kept.append(given[-1].detach()))
    net(TOKENS)
    rest = {r.component: r.value for r in every if r.tokens == "all" and r.block == 0}
    norm = float(kept[0][..., :24].norm(dim=-1).mean())  # the rows that k and v leave
    assert rest["blocks.0.attn.c_attn"] == pytest.approx(norm, rel=1e-5)
    rows = [r for r in every if r.component == "attention"]
    assert [(r.block, r.head) for r in rows] == [(b, h) for b in (0, 1) for h in range(3)]
    assert all(r.value is not None and r.value > 0 for r in rows)


class Late(FusedGPT):
    """The CLS token joins the patches between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attn.mix = lambda q, k, v: (q @ k.mT).softmax(-1) @ v
        self.embed, self.token = nn.Linear(WIDTH, 24), nn.Parameter(torch.randn(1, 1, 24))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(x))
        x = self.blocks[1](torch.cat([self.token.expand(len(x), -1, -1), x], 1))
        return self.head(self.ln_f(x)[:, 0])


def test_blocks_before_a_late_cls_token_have_none() -> None:
    """Neither their stream nor their queries: never the first patch."""
    torch.manual_seed(0)
    rows = [r for r in replayed(Late().eval(), VECTORS, "effective_rank") if r.tokens == "cls"]
    found = {(r.component, r.block): (r.value is None, r.status) for r in rows}
    for name in ("norm1", "q", "v", "attention_output", "fc1", "residual2"):
        assert found[name, 0] == (True, "no_cls_token")
        assert found[name, 1][0] is False
    assert found["head", None][0] is False
