"""What a replay reports of a traced network: units, attention, scopes, and reasons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plastiscope.anatomy import trace
from plastiscope.checkpoints import discover
from plastiscope.config import Settings
from plastiscope.models.live import Inputs, Live
from plastiscope.network import open_network
from plastiscope.observations import observe_ntk
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


def weighed(net: nn.Module, x: Tensor, *metrics: str) -> list[Row]:
    anatomy = trace(net, inputs_to(net), {"inputs": x[:2]})
    return Scales(net.get_parameter, str, frozenset(metrics)).weigh(anatomy)


def test_weights_that_blocks_share_are_measured_once() -> None:
    """R05: features for every depth, one row of the weight."""
    net = FusedGPT(layers=1)
    net.blocks = nn.ModuleList([net.blocks[0], net.blocks[0], net.blocks[0]])
    rows = [r for r in weighed(net, TOKENS, "effective_rank", "weight_l2") if r.tensor]
    places = [(r.component, r.head, r.metric, r.tensor) for r in rows]
    assert len(places) == len(set(places))
    assert {r.block for r in rows if r.component in ("q", "fc1", "norm1")} == {0}
    seen = replayed(net, TOKENS, "effective_rank")
    assert {r.block for r in seen if r.component == "fc1"} == {0, 1, 2}


def test_a_gain_stored_as_an_offset_is_one_when_it_is_zero() -> None:
    """M07: Gemma's norm of zeros has gain 1; Llama's has gain 0, and that is flagged."""

    class Offset(nn.Module):
        def __init__(self, offset: float) -> None:
            super().__init__()
            self.offset = offset
            self.weight = nn.Parameter(torch.zeros(24))

        def forward(self, x: Tensor) -> Tensor:
            scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return scaled * (1.0 + self.weight if self.offset else self.weight)

    for offset, magnitude, status in ((1.0, 1.0, "ok"), (0.0, 0.0, "zero_matrix")):
        net = FusedGPT(layers=1)
        net.blocks[0].ln_1 = Offset(offset)
        rows = weighed(net, TOKENS, "weight_magnitude")
        (row,) = [r for r in rows if (r.component, r.block) == ("norm1", 0)]
        assert (row.value, row.status) == (magnitude, status)


def test_average_pooling_has_no_cls_token() -> None:
    """M14: null with its reason, once for the network; with a token that is read, values."""

    class Pooled(FusedGPT):
        def __init__(self, first: bool) -> None:
            super().__init__(ExplicitAttention, layers=1)
            self.first, self.cls = first, nn.Parameter(torch.randn(1, 1, 24))
            self.blocks[0].attn.mix = lambda q, k, v: (q @ k.mT).softmax(-1) @ v
            self.embed = nn.Linear(3, 24)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.cls.expand(len(x), -1, -1), self.embed(x)], 1)
            x = self.ln_f(self.blocks[0](x))
            return self.head(x[:, 0] if self.first else x[:, 1:].mean(1))

    x = torch.randn(6, 7, 3, generator=torch.Generator().manual_seed(0))
    for first in (False, True):
        rows = replayed(Pooled(first).eval(), x, "effective_rank")
        cls = [r for r in rows if r.tokens == "cls"]
        if first:
            some = [r for r in cls if r.component in ("fc2", "norm1", "q")]
            assert len(some) == 3 and all(r.value is not None and r.value >= 1 for r in some)
        else:
            found = {(r.component, r.block, r.value, r.status) for r in cls}
            assert found == {("network", None, None, "no_cls_token")}


def test_kernel_of_fused_and_of_explicit_attention() -> None:
    """R12: the same to 1e-5."""
    torch.manual_seed(0)
    nets = [FusedGPT(a, 12, 3, 1, 7, 6) for a in (FlashAttention, ExplicitAttention)]
    nets[1].load_state_dict(nets[0].state_dict())
    batch = {"inputs": torch.randint(7, (4, 6))}
    kernels = [
        observe_ntk(net.eval(), inputs_to(net), batch, function="mean_logit", seed=0)
        for net in nets
    ]
    for key, kernel in kernels[0].items():
        torch.testing.assert_close(
            torch.as_tensor(kernel.gram), torch.as_tensor(kernels[1][key].gram),
            rtol=1e-5, atol=1e-8,
        )  # fmt: skip


def test_norms_in_the_table_are_those_of_the_file() -> None:
    """M16: nothing is folded or centred before it's measured."""
    folder = Path(__file__).parents[2] / "sample_checkpoints" / "gpt"
    (run,) = discover(folder)
    state = run.checkpoints[-1].open()
    net = open_network(state, run.path, Settings())
    scales = Scales(
        net.reader(state), lambda n: net.counted_name(state, n), frozenset({"weight_l2"})
    )
    square: dict[str, float] = defaultdict(float)
    for row in scales.weigh(net.anatomy):
        if row.tensor is not None and row.head is None and row.component != "head":
            assert row.value is not None
            square[row.tensor] += row.value**2
    weights = {n for n, i in state.tensors.items() if i.kind == "weight" and i.alias_of is None}
    assert square.keys() == weights
    for name in weights:
        norm = state.read(name).double().norm().item()
        assert square[name] ** 0.5 == pytest.approx(norm, rel=1e-6)


class Stream(nn.Module):
    """A CLS token and nn.TransformerEncoder, which keeps tokens first unless told otherwise."""

    def __init__(self, inputs_first: bool) -> None:
        super().__init__()
        self.first, self.embed, self.head = inputs_first, nn.Linear(5, 16), nn.Linear(16, 3)
        self.cls = nn.Parameter(torch.randn(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=inputs_first, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(len(x), -1, -1), self.embed(x)], 1)
        x = self.encoder(x if self.first else x.transpose(0, 1))
        return self.head(x[:, 0] if self.first else x[0])


@pytest.mark.parametrize("tokens", [4, 7])
def test_tokens_first_or_inputs_first_is_all_the_same(tokens: int) -> None:
    """Values, standard errors, rows and CLS tokens, also with as many tokens as inputs."""
    torch.manual_seed(0)
    nets = [Stream(True).eval(), Stream(False).eval()]
    nets[1].load_state_dict(nets[0].state_dict())
    x = torch.randn(tokens + 1, tokens, 5)
    first, second = (
        {
            (r.component, r.block, r.head, r.tokens, r.metric, r.parameters): r
            for r in replayed(net, x, "effective_rank", "feature_norm", "active_fraction")
        }
        for net in nets
    )
    assert first.keys() == second.keys() and len(first) > 80
    for key, row in first.items():
        other = second[key]
        assert (row.rows, row.status) == (other.rows, other.status), key
        for a, b in ((row.value, other.value), (row.standard_error, other.standard_error)):
            assert a == b or a == pytest.approx(b, rel=1e-3, abs=1e-6), key


def test_rows_inside_multihead_attention_belong_to_their_inputs() -> None:
    """It projects rows [T*B, d]: the CLS token's are every input's first, not the first input's."""
    torch.manual_seed(0)
    net, x = Stream(True).eval(), torch.randn(6, 4, 5)
    rows = values(
        [r for r in replayed(net, x, "feature_norm") if r.tokens == "cls"], "attention_output", 0
    )
    layer = net.encoder.layers[0]
    stream = torch.cat([net.cls.expand(6, -1, -1), net.embed(x)], 1)
    normed = layer.norm1(stream)
    made = layer.self_attn(normed, normed, normed)[0][:, 0]
    norm = made.double().norm(dim=1).mean().item()
    assert rows["feature_norm"].value == pytest.approx(norm, rel=1e-5)


class Windowed(nn.Module):
    """Attention in two windows of tokens, the windows' axis before or after the inputs'."""

    def __init__(self, windows_first: bool) -> None:
        super().__init__()
        self.first = windows_first
        self.embed, self.qkv = nn.Linear(5, 12), nn.Linear(12, 36)
        self.out, self.head = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        parts = self.qkv(x).reshape(len(x), 2, 3, 3, 2, 6)  # inputs, windows, tokens, qkv, heads
        order = (3, 1, 0, 4, 2, 5) if self.first else (3, 0, 1, 4, 2, 5)
        q, k, v = parts.permute(order)
        mixed = (q @ k.mT / 6**0.5).softmax(-1) @ v
        mixed = mixed.transpose(0, 1) if self.first else mixed
        x = x + self.out(mixed.transpose(2, 3).reshape(x.shape))
        return self.head(x.mean(1))


def test_windows_before_the_inputs_change_nothing() -> None:
    torch.manual_seed(0)
    nets = [Windowed(False).eval(), Windowed(True).eval()]
    nets[1].load_state_dict(nets[0].state_dict())
    x = torch.randn(6, 6, 5)
    first, second = (
        {
            (r.component, r.head, r.metric): (r.value, r.standard_error, r.rows)
            for r in replayed(net, x, "attention_entropy", "effective_rank")
            if r.component in ("q", "k", "v", "attention")
        }
        for net in nets
    )
    assert len(first) == 11
    for key, (value, error, rows) in first.items():
        assert second[key][::2] == (pytest.approx(value), rows), key
        assert second[key][1] == (None if error is None else pytest.approx(error, rel=1e-4)), key
