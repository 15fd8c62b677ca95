"""Heads that are computed one by one are one attention, in order, and proved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plastiscope.anatomy import AttentionCall, verify, watch
from tests.anatomy.nets import inputs_to
from tests.anatomy.test_styles import HEADS, PRE, TOKENS, WIDTH, Network, Sequences, traced


class OneHead(nn.Module):
    """A head as a module with weights and a softmax of its own; keys may be shared."""

    def __init__(self, shared: nn.ModuleList | None) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, 6, bias=False)
        self.key, self.value = shared or (nn.Linear(WIDTH, 6, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT * 6**-0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ self.value(x)


class OneByOne(nn.Module):
    def __init__(self, share: bool, fused: bool) -> None:
        super().__init__()
        linear = [nn.ModuleList(nn.Linear(WIDTH, 6, bias=False) for _ in "kv") for _ in range(2)]
        shared = [linear[h // 2] if share else None for h in range(HEADS)]
        self.heads = nn.ModuleList(OneHead(each) for each in shared)
        self.proj = nn.Linear(WIDTH, WIDTH)
        if fused:
            for head in self.heads:
                head.forward = lambda x, h=head: F.scaled_dot_product_attention(
                    h.query(x), h.key(x), h.value(x), is_causal=True
                )

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], -1))


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_heads_that_are_computed_one_by_one_are_one_attention(fused: bool, share: bool) -> None:
    """Ranks planted in every head's own weights (q 1, k 2, v 4); keys of two heads may be one."""
    net = Network(lambda: OneByOne(share, fused), "pre").double()
    heads = net.blocks[0].attention.heads
    with torch.no_grad():
        for head in heads:
            for rank, layer in ((1, head.query), (2, head.key), (4, head.value)):
                draw = torch.randn(6, rank, dtype=torch.float64)
                layer.weight.copy_(draw @ torch.randn(rank, WIDTH, dtype=torch.float64))
    batch = {"inputs": Sequences["inputs"].double()}
    anatomy = traced(net, batch)
    assert list(anatomy.attention) == [0, 1, 2]
    site = anatomy.attention[0]
    groups = (0, 0, 1, 1) if share else (0, 1, 2, 3)
    assert (site.heads, site.kv_heads, site.causal) == (4, max(groups) + 1, True)
    assert site.kv_of_head == groups
    parts = {c.name: c for c in anatomy.components if c.block == 0}
    assert {n for n in parts if "." not in n} == set(PRE.split())
    for x, rank in (("q", 1), ("k", 2), ("v", 4)):
        found = [h.of(net.get_parameter(h.tensor)) for h in parts[x].heads]
        assert [torch.linalg.matrix_rank(w).item() for w in found] == [rank] * len(found)
        assert len(found) == (4 if x == "q" else site.kv_heads) and not parts[x].weights
    assert [h.columns for h in parts["attention_output"].heads][2] == tuple(range(12, 18))
    seen: dict[object, Tensor] = {}
    calls: dict[object, AttentionCall] = {}
    with (
        torch.no_grad(),
        watch(
            net, {"x": parts["norm1"].features}, anatomy.attention,
            seen.__setitem__, calls.__setitem__,
        ) as watching,
    ):  # fmt: skip
        net(batch["inputs"])
        watching.check()
    call, x = calls[0], seen["x"]
    twin = torch.stack([head.query(x) for head in heads], 1)
    torch.testing.assert_close(call.q, twin)
    for name, own in (("k", "key"), ("v", "value")):
        each = [heads[groups.index(g)] for g in range(site.kv_heads)]
        torch.testing.assert_close(
            getattr(call, name), torch.stack([getattr(h, own)(x) for h in each], 1)
        )
    scores = twin @ torch.stack([head.key(x) for head in heads], 1).mT * 6**-0.5
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    maps = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    torch.testing.assert_close(call.probabilities, maps)


def test_a_wrong_order_of_heads_computed_one_by_one_is_refused() -> None:
    net = Network(lambda: OneByOne(False, False), "pre")
    anatomy = traced(net, Sequences)
    components = tuple(
        replace(c, heads=c.heads[1:] + c.heads[:1]) if (c.name, c.block) == ("q", 1) else c
        for c in anatomy.components
    )
    wrong = replace(anatomy, components=components)
    proofs = verify(net, inputs_to(net), Sequences, wrong, dict(net.named_parameters()))
    assert [p.ok for p in proofs] == [True, False, True]
