"""What a replay reports of a traced network: units, attention, scopes, and reasons."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plastiscope.anatomy import trace
from plastiscope.models.live import Inputs, Live
from plastiscope.replay import Replay, Sampling
from plastiscope.store import Row
from plastiscope.weigh import Scales
from tests.anatomy.nets import ExplicitAttention, FlashAttention, FusedGPT, inputs_to

TOKENS = torch.randint(20, (6, 8), generator=torch.Generator().manual_seed(0))


def replayed(net: nn.Module, x: Tensor, *metrics: str) -> list[Row]:
    anatomy = trace(net, inputs_to(net), {"inputs": x[:2]})
    live = Live(net, Inputs("vector", tuple(x.shape[1:])), {}, inputs_to(net), "test")
    replay = Replay(anatomy, len(x), Sampling(3, 4096, 4, 0))
    replay.run(live, {"inputs": x}, torch.device("cpu"))
    return replay.rows(metrics)


def values(rows: list[Row], component: str, block: int | None) -> Mapping[str, Row]:
    found = [r for r in rows if (r.component, r.block) == (component, block)]
    return {
        f"{r.metric} {r.head if r.head is not None else r.parameters}".strip(): r for r in found
    }


@pytest.mark.parametrize("attention", [FlashAttention, ExplicitAttention])
def test_attention_that_isn_t_finite_says_so(attention: type[nn.Module]) -> None:
    """N02: of the head it is in; never no_queries, and never an entropy of 0."""
    net = FusedGPT(attention, layers=1).eval()
    with torch.no_grad():
        net.blocks[0].attn.c_attn.weight[8] = float("nan")  # q of head 1
    rows = replayed(net, TOKENS, "attention_entropy", "attention_sink_rate")
    heads = [r for r in rows if r.component == "attention" and r.metric == "attention_entropy"]
    assert [r.status for r in heads] == ["ok", "non_finite", "ok"]
    assert [r.value is None for r in heads] == [False, True, False]


class Gated(FusedGPT):
    """A feed-forward part whose gate and fc1 are one Linear; `join` puts them together."""

    def __init__(self, join: str) -> None:
        super().__init__(width=12, layers=1)
        self.join = join
        block = self.blocks[0]
        block.c_fc, block.c_proj = nn.Linear(12, 40), nn.Linear(20, 12)
        block.forward = self.block  # type: ignore[method-assign]

    def parts(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """What the gate's function takes, and the product."""
        a, b = h.chunk(2, -1)
        return {"glu": (b, a * b.sigmoid()), "swiglu": (a, F.silu(a) * b)}[self.join]

    def block(self, x: Tensor) -> Tensor:
        block = self.blocks[0]
        x = x + block.attn(block.ln_1(x))
        h = block.c_fc(block.ln_2(x))
        return x + block.c_proj(F.glu(h, -1) if self.join == "glu" else self.parts(h)[1])


@pytest.mark.parametrize("join", ["glu", "swiglu"])
def test_units_and_features_of_a_fused_gate(join: str) -> None:
    """Gate and fc1 are each their own channels; the units are the product, on where the gate is."""
    torch.manual_seed(1)
    net = Gated(join).eval()
    with torch.no_grad():
        net.blocks[0].c_fc.bias[23] = net.blocks[0].c_fc.bias[3] = -60.0
    kept: list[Tensor] = []
    hook = net.blocks[0].c_fc.register_forward_hook(lambda *a: kept.append(a[2].detach()))
    net(TOKENS)
    hook.remove()
    gate, product = net.parts(kept[0].flatten(0, 1))
    other = kept[0].flatten(0, 1)[:, slice(0, 20) if join == "glu" else slice(20, 40)]
    rows = replayed(
        net, TOKENS, "active_fraction", "dead_fraction", "dormancy_score", "feature_norm",
        "saturated_fraction",
    )  # fmt: skip
    units = values([r for r in rows if r.subject == "unit"], "activation", 0)
    assert units["active_fraction"].value == pytest.approx((gate > 0).double().mean().item())
    assert units["dead_fraction"].value == 1 / 20
    means = product.double().abs().mean(0)
    lowest = (means / means.mean()).quantile(0.01).item()
    assert units["dormancy_score quantile=1"].value == pytest.approx(lowest)
    for name, own in (("gate", gate), ("fc1", other), ("activation", product)):
        norm = own.double().norm(dim=1).mean().item()
        assert values(rows, name, 0)["feature_norm"].value == pytest.approx(norm, rel=1e-5)
    if join == "glu":
        flat = ((gate.sigmoid() < 0.01) | (gate.sigmoid() > 0.99)).double().mean().item()
        assert flat > 0 and units["saturated_fraction"].value == pytest.approx(flat)


def test_tables_of_positions_belong_to_the_embedding() -> None:
    """The non-embedding scope holds neither the tied table of tokens nor that of positions."""
    net = FusedGPT(layers=1)
    anatomy = trace(net, inputs_to(net), {"inputs": TOKENS[:2]})
    names = {id(p): n for n, p in net.named_parameters()}
    same = {n: names[id(p)] for n, p in net.named_parameters(remove_duplicate=False)}
    scales = Scales(net.get_parameter, same.__getitem__, frozenset({"weight_l2"}))
    rows = [r for r in scales.weigh(anatomy) if r.component == "network"]
    found = {r.parameters: r.value for r in rows if r.parameters.startswith("pooled")}
    inner = {
        n: p.detach().double()
        for n, p in net.named_parameters()
        if (n not in ("wte.weight", "wpe.weight") and p.ndim > 1) or ("ln" in n and "weight" in n)
    }
    square = sum(p.square().sum().item() for p in inner.values())
    assert found["pooled, scope=non-embedding"] == pytest.approx(square**0.5)
    tables = net.wte.weight.detach().double(), net.wpe.weight.detach().double()
    both = square + sum(t.square().sum().item() for t in tables)
    assert found["pooled"] == pytest.approx(both**0.5)
