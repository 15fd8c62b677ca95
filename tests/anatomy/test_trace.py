"""What the trace finds in real libraries' models and in home-made ones: parts, heads, tokens."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from plastiscope.anatomy import Anatomy, AttentionCall, Component, trace, watch
from plastiscope.anatomy.parts import CANONICAL
from tests.anatomy import zoo
from tests.anatomy.nets import (
    ConvViT,
    EinsumViT,
    ExplicitAttention,
    FlashAttention,
    FusedGPT,
    PlainGPT,
    inputs_to,
)

ATTENTION = {"q", "k", "v", "attention_output"}
PRE = ATTENTION | {"norm1", "residual1", "norm2", "fc1", "activation", "fc2", "residual2"}
GATED = PRE | {"gate"}
PARALLEL = PRE - {"residual1", "norm2"}
EXPERTS = (PRE - {"fc1", "activation", "fc2"}) | {"router", "experts"}
HOME_MADE = {
    "einsum_vit": (EinsumViT, zoo.images(16)),
    "conv_vit": (ConvViT, zoo.images(16)),
    "plain_gpt": (PlainGPT, {"inputs": torch.arange(12).reshape(2, 6) % 9}),
    "fused_gpt": (FusedGPT, {"inputs": torch.arange(16).reshape(2, 8)}),
}

# name: (block's parts, query heads of block 0, key/value heads, causal, activation, cls, prefix)
EXPECTED = {
    "gpt2": (PRE, 4, 4, True, "gelu", None, 0),
    "neox": (PARALLEL | {"norm2"}, 4, 4, True, "gelu", None, 0),
    "neox_sequential": (PRE, 4, 4, True, "gelu", None, 0),
    "llama": (GATED, 4, 2, True, "silu", None, 0),
    "qwen3": (GATED, 4, 2, True, "silu", None, 0),
    "phi3": (GATED, 4, 2, True, "silu", None, 0),
    "gemma": (GATED, 4, 2, True, "gelu", None, 0),
    "gemma2": (GATED, 4, 2, True, "gelu", None, 0),
    "olmo2": (GATED, 4, 2, True, "silu", None, 0),
    "falcon": (PARALLEL, 4, 1, True, "gelu", None, 0),
    "falcon_rw": (PARALLEL, 4, 4, True, "gelu", None, 0),
    "falcon_groups": (PARALLEL | {"norm2"}, 4, 2, True, "gelu", None, 0),
    "bloom": (PRE, 4, 4, True, "gelu", None, 0),
    "mixtral": (EXPERTS, 4, 2, True, None, None, 0),
    "bert": (PRE, 4, 4, False, "gelu", 0, 1),
    "roberta": (PRE, 4, 4, False, "gelu", None, 0),
    "vit": (PRE, 4, 4, False, "gelu", 0, 1),
    "deit": (PRE, 4, 4, False, "gelu", 0, 2),
    "dinov2_registers": (PRE, 4, 4, False, "gelu", 0, 4),
    "hf_swin": (PRE, 2, 2, False, "gelu", None, 0),
    "timm_vit": (PRE, 3, 3, False, "gelu", 0, 1),
    "timm_vit_average": (PRE, 3, 3, False, "gelu", None, 1),
    "timm_vit_qk_norm": (PRE, 3, 3, False, "gelu", 0, 1),
    "timm_deit": (PRE, 3, 3, False, "gelu", 0, 2),
    "timm_eva02_small": (GATED, 3, 3, False, "silu", None, 1),
    "timm_eva02": (GATED, 3, 3, False, "silu", None, 1),
    "timm_swin": (PRE, 2, 2, False, "gelu", None, 0),
    "timm_swin2": (PRE, 2, 2, False, "gelu", None, 0),
    "tv_vit": (PRE, 4, 4, False, "gelu", 0, 1),
    "tv_swin": (PRE, 2, 2, False, "gelu", None, 0),
    "encoder_post": (PRE, 4, 4, False, "relu", None, 0),
    "encoder_pre": (PRE, 4, 4, False, "relu", None, 0),
    "einsum_vit": (PRE, 3, 3, False, "gelu", None, 0),
    "conv_vit": (PRE, 3, 3, False, "silu", None, 0),
    "plain_gpt": (PARALLEL, 3, 3, True, "relu_squared", None, 0),
    "fused_gpt": (PRE, 3, 3, True, "gelu", None, 0),
}
MODELS = [n for n in (*zoo.NAMES, *HOME_MADE) if n.partition("-")[0] in EXPECTED]


@cache
def traced(name: str) -> tuple[zoo.Model, Anatomy]:
    if name in HOME_MADE:
        torch.manual_seed(0)
        build, batch = HOME_MADE[name]
        net = build().eval()
        model = zoo.Model(net, inputs_to(net), batch)
    else:
        model = zoo.build(name)
    return model, trace(model.module, model.forward, model.batch)


def part(anatomy: Anatomy, name: str, block: int | None = 0) -> Component:
    (found,) = [c for c in anatomy.components if (c.name, c.block) == (name, block)]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_parts_heads_and_tokens(name: str) -> None:
    parts, queries, shared, causal, function, cls, prefix = EXPECTED[name.partition("-")[0]]
    _, anatomy = traced(name)
    for block, site in anatomy.attention.items():
        names = {c.name for c in anatomy.components if c.block == block and "." not in c.name}
        assert names >= parts
        assert not (names - parts) & (PRE | GATED | EXPERTS)
        assert site.causal is causal
        if function is not None:
            assert part(anatomy, "activation", block).function == function
    site = anatomy.attention[0]
    assert (site.heads, site.kv_heads) == (queries, shared)
    repeat = queries // shared
    assert site.kv_of_head == tuple(h // repeat for h in range(queries))
    counts = {x: len(part(anatomy, x).heads) for x in ATTENTION}
    assert counts == {"q": queries, "k": shared, "v": shared, "attention_output": queries}
    assert (anatomy.cls, anatomy.prefix_tokens) == (cls, prefix)
    assert anatomy.source == "trace"


@pytest.mark.parametrize("name", MODELS)
def test_sites_are_found_again_with_other_weights_and_inputs(name: str) -> None:
    """And outputs are the same bits with and without watching, everything as before."""
    model, anatomy = traced(name)
    inputs = torch.cat([model.batch["inputs"]] * 2)[:3]
    sites = {
        (c.name, c.block, port): site
        for c in anatomy.components
        for port, site in (("after", c.features), ("before", c.pre_activation))
        if site is not None
    }
    seen: dict[object, torch.Tensor] = {}
    calls: dict[int, AttentionCall] = {}
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    before = [p.clone() for p in model.module.parameters()]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        plain = model.forward({"inputs": inputs})
    torch.backends.mha.set_fastpath_enabled(fast)
    with (
        torch.no_grad(),
        watch(
            model.module, sites, anatomy.attention, seen.__setitem__, calls.__setitem__
        ) as watching,
    ):
        for _ in range(2):
            output = model.forward({"inputs": inputs})
            watching.check()
    assert torch.equal(output, plain)
    assert all(torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.module.modules())
    assert seen.keys() == sites.keys()
    assert calls.keys() == anatomy.attention.keys()
    for block, call in calls.items():
        site = anatomy.attention[block]
        p = call.probabilities
        assert call.q.shape[1] == site.heads and call.k.shape[1] == site.kv_heads
        assert call.q.shape[0] % 3 == 0
        torch.testing.assert_close(p.sum(-1), torch.ones(p.shape[:-1]))
        v = call.v[:, list(site.kv_of_head)] if site.kv_heads != site.heads else call.v
        torch.testing.assert_close(p @ v, call.output, rtol=1e-4, atol=1e-6)
        if call.visible is not None:
            assert p.masked_select(~call.visible.expand_as(p)).abs().sum() == 0


def test_activation_is_what_the_next_layer_consumes() -> None:
    """After the gate's product in a gated part, with the function's own input before it."""
    model, anatomy = traced("phi3-sdpa")
    mlp = model.module.model.layers[0].mlp
    sites = {"after": part(anatomy, "activation").features}
    sites["before"] = part(anatomy, "activation").pre_activation
    seen: dict[str, torch.Tensor] = {}
    kept: list[torch.Tensor] = []
    hook = mlp.gate_up_proj.register_forward_hook(lambda _, __, out: kept.append(out.clone()))
    with (
        torch.no_grad(),
        watch(model.module, sites, {}, seen.__setitem__, lambda *_: None) as watching,
    ):
        model.forward(model.batch)
        watching.check()
    hook.remove()
    gate, up = kept[0].chunk(2, dim=-1)
    torch.testing.assert_close(seen["before"], gate)
    torch.testing.assert_close(seen["after"], F.silu(gate) * up)
    fc1, own = part(anatomy, "fc1").weights[0], part(anatomy, "gate").weights[0]
    assert own.rows == tuple(range(48)) and fc1.rows == tuple(range(48, 96))


@pytest.mark.parametrize("name", ["neox-sdpa", "neox_sequential-sdpa", "bloom-eager", "gptj"])
def test_stream_is_the_sum_of_what_is_added(name: str) -> None:
    """M12: parallel or not; BLOOM's attention module adds the residual itself."""
    if name == "gptj":
        values = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "rotary_dim": 8}
        model = zoo.hugging_face("GPTJForCausalLM", "GPTJConfig", "eager", **values)
        anatomy = trace(model.module, model.forward, model.batch)
    else:
        model, anatomy = traced(name)
    names = ("attention_output", "fc2", "residual1", "residual2")
    sites = {
        (c.name, c.block): c.features for c in anatomy.components if c.name in names and c.features
    }
    sites["start"] = part(anatomy, "embedding", None).features
    seen: dict[object, torch.Tensor] = {}
    with (
        torch.no_grad(),
        watch(model.module, sites, {}, seen.__setitem__, lambda *_: None) as watching,
    ):
        model.forward(model.batch)
        watching.check()
    stream = seen["start"]
    for block in (0, 1):
        middle = stream + seen["attention_output", block]
        if ("residual1", block) in seen:
            torch.testing.assert_close(seen["residual1", block], middle, rtol=1e-5, atol=1e-6)
        stream = seen["residual2", block]
        torch.testing.assert_close(stream, middle + seen["fc2", block], rtol=1e-5, atol=1e-6)
    assert (("residual1", 0) in seen) is (name in ("neox_sequential-sdpa", "bloom-eager"))


def test_norms_of_gemma_are_offsets_from_one() -> None:
    """M07."""
    assert part(traced("gemma-eager")[1], "norm1").offset_gain
    assert part(traced("gemma-eager")[1], "final_norm", None).offset_gain
    assert not part(traced("llama-eager")[1], "norm1").offset_gain


def test_fewer_key_heads_and_a_head_width_of_its_own() -> None:
    """M03: 8 query heads on 2 key heads, width 16, hidden 96."""
    values = {**zoo.TEXT, "hidden_size": 96, "num_attention_heads": 8, "head_dim": 16}
    model = zoo.hugging_face("LlamaForCausalLM", "LlamaConfig", "eager", **values)
    anatomy = trace(model.module, model.forward, model.batch)
    site = anatomy.attention[0]
    assert (site.heads, site.kv_heads, site.head_width) == (8, 2, 16)
    assert site.kv_of_head == (0, 0, 0, 0, 1, 1, 1, 1)
    shapes = {x: [len(h.rows) for h in part(anatomy, x).heads] for x in "qkv"}
    assert shapes == {"q": [16] * 8, "k": [16] * 2, "v": [16] * 2}


def test_tiled_key_heads_are_told_from_repeated_ones() -> None:
    class Tiled(FlashAttention):
        def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return super().mix(q, k[:, :2].repeat(1, 2, 1, 1), v[:, :2].repeat(1, 2, 1, 1))

    net = FusedGPT(Tiled, width=16, heads=4, layers=1)
    site = trace(net, inputs_to(net), {"inputs": torch.arange(8)[None]}).attention[0]
    assert (site.heads, site.kv_heads, site.kv_of_head) == (4, 2, (0, 1, 0, 1))


def test_heads_that_share_weights_are_left_undecided() -> None:
    """Rather no heads than wrong ones."""

    class Mixed(FlashAttention):
        def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return super().mix(q + q.flip(1) * 0.5, k, v)

    net = FusedGPT(Mixed, width=12, heads=3, layers=1)
    anatomy = trace(net, inputs_to(net), {"inputs": torch.arange(8)[None]})
    q = part(anatomy, "q")
    assert q.heads == () and q.weights[0].rows == tuple(range(12))
    assert len(part(anatomy, "v").heads) == 3
    assert any("heads of q share weight rows" in note for note in anatomy.notes)


def test_cls_token_that_nobody_reads_is_none() -> None:
    """M14: average pooling over patches: no CLS position, and a reason; never the first patch."""
    _, anatomy = traced("timm_vit_average")
    assert anatomy.cls is None
    assert "CLS" in " ".join(anatomy.notes)
    assert traced("einsum_vit")[1].cls is None


def test_shared_blocks_have_depth_but_one_weight() -> None:
    """R05: ALBERT."""
    values = {**zoo.OLD, "embedding_size": 16, "intermediate_size": 64}
    model = zoo.hugging_face("AlbertForMaskedLM", "AlbertConfig", "sdpa", **values)
    anatomy = trace(model.module, model.forward, model.batch)
    assert list(anatomy.attention) == [0, 1]
    for name in ("q", "fc1", "fc2"):
        first, second = part(anatomy, name, 0), part(anatomy, name, 1)
        assert first.weights == second.weights and first.heads == second.heads
    sites = [anatomy.attention[k].site for k in (0, 1)]
    assert [s.call for s in sites] == [0, 1] and sites[0].module == sites[1].module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("style", ["old", "parametrizations"])
def test_normalised_weights_are_named_as_they_are_used(style: str) -> None:
    """M09: `weight`, not its factors; the factors claim nothing of their own."""
    net = FusedGPT(width=12, layers=1)
    source = nn.utils if style == "old" else parametrizations
    source.weight_norm(net.blocks[0].attn.c_attn)
    source.spectral_norm(net.blocks[0].c_fc)
    anatomy = trace(net, inputs_to(net), {"inputs": torch.arange(8)[None]})
    assert [m.tensor for m in part(anatomy, "q").heads] == ["blocks.0.attn.c_attn.weight"] * 3
    assert part(anatomy, "fc1").weights[0].tensor == "blocks.0.c_fc.weight"
    assert [c.name for c in anatomy.components if "_g" in c.name or "original" in c.name] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "wrapping", ["reentrant", "non-reentrant", "compiled", "no_grad", "dropout"]
)
def test_wrappings_change_nothing(wrapping: str) -> None:
    """The same slices of the same weights, and the same values at every component."""

    class Wrapped(FusedGPT):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                if wrapping == "no_grad":
                    with torch.no_grad():
                        x = block(x)
                elif wrapping == "dropout":
                    x = F.dropout(block(x), 0.5, self.training)
                else:
                    x = checkpoint(block, x, use_reentrant=wrapping == "reentrant")
            return self.head(self.ln_f(x))

    batch = {"inputs": torch.arange(16).reshape(2, 8)}
    model, plain = traced("fused_gpt")
    own = FusedGPT() if wrapping == "compiled" else Wrapped()
    own.load_state_dict(model.module.state_dict())
    net = torch.compile(own.train()) if wrapping == "compiled" else own.train()
    anatomy = trace(net, inputs_to(net), batch)
    parts = [
        {(c.name, c.block): (c.weights, c.heads) for c in a.components if c.name in CANONICAL}
        for a in (anatomy, plain)
    ]
    assert len(parts[1]) > 20
    assert str(parts[0]).replace("_orig_mod.", "") == str(parts[1])
    values = [everything(n, a, batch) for n, a in ((net, anatomy), (model.module, plain))]
    assert len(values[1]) > 18
    torch.testing.assert_close(values[0], values[1])


def everything(
    net: nn.Module, anatomy: Anatomy, batch: dict[str, torch.Tensor]
) -> dict[object, torch.Tensor]:
    """The values of every component, and the probabilities of every attention."""
    sites = {(c.name, c.block): c.features for c in anatomy.components if c.features}
    seen: dict[object, torch.Tensor] = {}
    calls: dict[object, AttentionCall] = {}
    with (
        torch.no_grad(),
        watch(net, sites, anatomy.attention, seen.__setitem__, calls.__setitem__) as watching,
    ):
        net(batch["inputs"])
        watching.check()
    return {**seen, **{("attention", k): call.probabilities for k, call in calls.items()}}


def test_trace_leaves_the_module_as_it_was() -> None:
    """M16: bytes, storages, flags and gradients."""
    net = FusedGPT(ExplicitAttention)
    net.train()
    net.blocks[0].eval()
    net.wte.weight.requires_grad_(False)
    before = [
        (p.data_ptr(), p._version, p.detach().clone(), p.requires_grad) for p in net.parameters()
    ]
    flags = [m.training for m in net.modules()]
    state = torch.random.get_rng_state()
    trace(net, inputs_to(net), {"inputs": torch.arange(8)[None]})
    after = [(p.data_ptr(), p._version, p.detach(), p.requires_grad) for p in net.parameters()]
    for old, new in zip(before, after, strict=True):
        assert old[0] == new[0] and old[3] == new[3] and torch.equal(old[2], new[2])
    assert [m.training for m in net.modules()] == flags
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(p.grad is None for p in net.parameters())


def test_zero_weights_hide_nothing() -> None:
    """A freshly zero-initialised projection still has its heads."""
    net = FusedGPT()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    anatomy = trace(net, inputs_to(net), {"inputs": torch.zeros(2, 8, dtype=torch.int64)})
    assert [len(part(anatomy, x).heads) for x in "qkv"] == [3, 3, 3]
    assert part(anatomy, "activation").function == "gelu"


@pytest.mark.parametrize("name", ["bloom-eager", "encoder_post", "timm_vit"])
def test_one_input_is_enough(name: str) -> None:
    """Heads folded into the batch axis aren't taken for inputs."""
    model, anatomy = traced(name)
    single = {"inputs": model.batch["inputs"][:1]}
    assert trace(model.module, model.forward, single) == anatomy


def test_exported_program_is_traced_too() -> None:
    net = FusedGPT().eval()
    batch = {"inputs": torch.arange(16).reshape(2, 8)}
    module = torch.export.export(net, (batch["inputs"],)).module()
    anatomy = trace(module, inputs_to(module), batch)
    _, plain = traced("fused_gpt")
    for name in ("q", "k", "v", "attention_output", "fc1", "fc2", "norm1", "norm2"):
        assert part(anatomy, name, 1).weights == part(plain, name, 1).weights
        assert part(anatomy, name, 1).heads == part(plain, name, 1).heads
