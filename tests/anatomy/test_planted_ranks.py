"""Heads planted with ranks q 1, k 2, v 4 are found in every stored layout, head by head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from plastiscope.anatomy import Anatomy, Component, Matrix, Site, trace, verify, watch
from plastiscope.models import nanogpt
from tests.anatomy import zoo
from tests.anatomy.nets import ConvViT, EinsumViT, FusedGPT, PlainGPT, inputs_to

RANKS = {"q": 1, "k": 2, "v": 4}
Heads = Mapping[str, list[Tensor]]


def planted(heads: int, shared: int, width: int, inputs: int) -> Heads:
    """For each of q, k, v its heads [width, inputs], of the planted rank."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    counts = {"q": heads, "k": shared, "v": shared}
    return {
        x: [draw(width, rank) @ draw(rank, inputs) for _ in range(counts[x])]
        for x, rank in RANKS.items()
    }


def blocks(h: Heads) -> Tensor:
    """[Q | K | V] as rows."""
    return torch.cat([*h["q"], *h["k"], *h["v"]])


def in_turn(h: Heads) -> Tensor:
    """q, k, v of the first head, then of the second ..."""
    return torch.cat([h[x][k] for k in range(len(h["q"])) for x in "qkv"])


def in_groups(h: Heads) -> Tensor:
    """The queries, the key, the value of each group."""
    groups, repeat = len(h["k"]), len(h["q"]) // len(h["k"])
    return torch.cat(
        [
            piece
            for g in range(groups)
            for piece in (*h["q"][g * repeat : (g + 1) * repeat], h["k"][g], h["v"][g])
        ]
    )


def stacked(h: Heads) -> Tensor:
    """[3, H, inputs, width]."""
    return torch.stack([torch.stack([w.T for w in h[x]]) for x in "qkv"])


def set_weight(module: nn.Module, name: str, value: Tensor) -> None:
    module.get_parameter(name).data = value.clone()


def one(name: str, pack: Callable[[Heads], Tensor]) -> Callable[[nn.Module, Heads], None]:
    return lambda module, heads: set_weight(module, name, pack(heads))


def apart(pattern: str, names: str) -> Callable[[nn.Module, Heads], None]:
    def store(module: nn.Module, heads: Heads) -> None:
        for x, name in zip("qkv", names.split(), strict=True):
            set_weight(module, pattern.format(name), torch.cat(heads[x]))

    return store


SELF = "transformer.h.0.self_attention.query_key_value.weight"
BERT = "bert.encoder.layer.0.attention.self.{}.weight"
DINO = "dinov2_with_registers.encoder.layer.0.attention.{}_proj.weight"
HF_SWIN = "swin.encoder.layers.0.blocks.0.attention.{}_proj.weight"
TORCHVISION = "encoder.layers.encoder_layer_0.self_attention.in_proj_weight"
LLAMA = apart("model.layers.0.self_attn.{}_proj.weight", "q k v")
# name: (heads, key/value heads, head width, inputs, how they are stored)
STORED: dict[str, tuple[int, int, int, int, Callable[[nn.Module, Heads], None]]] = {
    "gpt2": (4, 4, 8, 32, one("transformer.h.0.attn.c_attn.weight", lambda h: blocks(h).T)),
    "neox": (4, 4, 8, 32, one("gpt_neox.layers.0.attention.query_key_value.weight", in_turn)),
    "bloom": (4, 4, 8, 32, one(SELF, in_turn)),
    "falcon": (4, 1, 8, 32, one(SELF, blocks)),
    "falcon_rw": (4, 4, 8, 32, one(SELF, in_turn)),
    "falcon_groups": (4, 2, 8, 32, one(SELF, in_groups)),
    "llama": (4, 2, 8, 32, LLAMA),
    "qwen3": (4, 2, 16, 32, LLAMA),
    "gemma": (4, 2, 8, 32, LLAMA),
    "olmo2": (4, 2, 8, 32, LLAMA),
    "mixtral": (4, 2, 8, 32, LLAMA),
    "phi3": (4, 2, 8, 32, one("model.layers.0.self_attn.qkv_proj.weight", blocks)),
    "bert": (4, 4, 8, 32, apart(BERT, "query key value")),
    "vit": (4, 4, 8, 32, apart("vit.layers.0.attention.{}_proj.weight", "q k v")),
    "dinov2_registers": (4, 4, 8, 32, apart(DINO, "q k v")),
    "timm_vit": (3, 3, 8, 24, one("blocks.0.attn.qkv.weight", blocks)),
    "timm_deit": (3, 3, 8, 24, one("blocks.0.attn.qkv.weight", blocks)),
    "timm_eva02_small": (3, 3, 8, 24, one("blocks.0.attn.qkv.weight", blocks)),
    "timm_eva02": (3, 3, 8, 24, apart("blocks.0.attn.{}_proj.weight", "q k v")),
    "hf_swin": (2, 2, 8, 16, apart(HF_SWIN, "q k v")),
    "nanogpt": (4, 4, 8, 32, one("transformer.h.0.attn.c_attn.weight", blocks)),
    "timm_swin": (2, 2, 8, 16, one("layers.0.blocks.0.attn.qkv.weight", blocks)),
    "timm_swin2": (2, 2, 8, 16, one("layers.0.blocks.0.attn.qkv.weight", blocks)),
    "tv_vit": (4, 4, 8, 32, one(TORCHVISION, blocks)),
    "tv_swin": (2, 2, 6, 12, one("features.1.0.attn.qkv.weight", blocks)),
    "encoder_pre": (4, 4, 4, 16, one("encoder.layers.0.self_attn.in_proj_weight", blocks)),
    "fused_gpt": (3, 3, 8, 24, one("blocks.0.attn.c_attn.weight", blocks)),
    "einsum_vit": (3, 3, 4, 12, one("weights.qkv_0", stacked)),
    "conv_vit": (3, 3, 4, 12, one("qkv.0.weight", lambda h: blocks(h)[:, :, None, None])),
    "plain_gpt": (3, 3, 4, 12, one("wqkv0", lambda h: in_turn(h).T)),
}  # fmt: skip
HOME_MADE = {
    "einsum_vit": (EinsumViT, zoo.images(16)),
    "conv_vit": (ConvViT, zoo.images(16)),
    "plain_gpt": (PlainGPT, {"inputs": torch.arange(12).reshape(2, 6) % 9}),
    "fused_gpt": (FusedGPT, {"inputs": torch.arange(16).reshape(2, 8)}),
}


def built(name: str) -> zoo.Model:
    if name == "nanogpt":
        net = nanogpt.GPT(nanogpt.Shape(60, 16, 32, 2, 4, True, True)).eval()
        return zoo.Model(net, inputs_to(net), zoo.tokens())
    if name in HOME_MADE:
        build, batch = HOME_MADE[name]
        net = build().eval()
        return zoo.Model(net, inputs_to(net), batch)
    eager = {"bloom", "gemma2", "olmo2"}
    full = f"{name}-{'eager' if name in eager else 'sdpa'}" if name in zoo.HUGGING_FACE else name
    return zoo.build(full)


def part(anatomy: Anatomy, name: str) -> Component:
    (found,) = [c for c in anatomy.components if (c.name, c.block) == (name, 0)]
    return found


@pytest.mark.parametrize("name", STORED)
def test_planted_heads_are_found_in_order(name: str) -> None:
    heads, shared, width, inputs, store = STORED[name]
    model, made = built(name), planted(heads, shared, width, inputs)
    dtype = torch.float32 if name == "mixtral" else torch.float64  # grouped_mm has no float64
    made = {x: [w.to(dtype) for w in own] for x, own in made.items()}
    module = model.module.to(dtype)
    store(module, made)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in model.batch.items()}
    anatomy = trace(module, model.forward, batch)
    for x, rank in RANKS.items():
        found = [h.of(module.get_parameter(h.tensor).detach()) for h in part(anatomy, x).heads]
        assert len(found) == len(made[x])
        for head, own in zip(found, made[x], strict=True):
            assert torch.equal(head, own)
            assert torch.linalg.matrix_rank(head).item() == rank
    proofs = verify(module, model.forward, batch, anatomy, dict(module.named_parameters()))
    assert proofs[0].ok and proofs[0].error < (1e-5 if dtype == torch.float32 else 1e-6)


ROTARY = {
    "neox", "falcon", "falcon_rw", "falcon_groups", "llama", "qwen3", "gemma", "olmo2", "mixtral",
    "phi3", "timm_eva02", "timm_eva02_small",
}  # fmt: skip
"""Positions turn their q and k on the way to the attention; v arrives as it was made."""
CALLED_AS_FUNCTION = {"tv_swin", "timm_swin2", "timm_eva02_small"}
"""Not the module is called but F.linear, with the module's weight."""
NORMED = {"timm_swin2"}
"""Their q and k are made unit vectors."""


@pytest.mark.parametrize("name", STORED)
def test_explicitly_split_twin_computes_the_same_heads(name: str) -> None:
    """The planted heads as separate matrices give the q, k and v that arrive at the attention."""
    heads, shared, width, inputs, store = STORED[name]
    model, made = built(name), planted(heads, shared, width, inputs)
    dtype = torch.float32 if name == "mixtral" else torch.float64
    made = {x: [w.to(dtype) for w in own] for x, own in made.items()}
    module = model.module.to(dtype)
    store(module, made)
    for parameter_name, parameter in module.named_parameters():
        if "bias" in parameter_name and parameter.ndim == 1:
            parameter.data.zero_()
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in model.batch.items()}
    anatomy = trace(module, model.forward, batch)
    seen: dict[object, Tensor] = {}
    calls: dict[object, object] = {}
    path = part(anatomy, "v").path
    if name in ("einsum_vit", "plain_gpt"):
        site = part(anatomy, "norm1").features
    elif name in CALLED_AS_FUNCTION:
        site = Site(path.rpartition(".")[0], op="linear", port="input")
    else:
        site = Site(path, port="input")
    with (
        torch.no_grad(),
        watch(
            module, {"x": site}, anatomy.attention, seen.__setitem__, calls.__setitem__
        ) as watching,
    ):
        model.forward(batch)
        watching.check()
    x = seen["x"].flatten(2).transpose(1, 2) if name == "conv_vit" else seen["x"]
    x = x.reshape(-1, calls[0].v.shape[2], inputs)
    for letter in "v" if name in ROTARY | NORMED else "qkv":
        twin = torch.stack([x @ w.T for w in made[letter]], dim=1)
        if letter == "q" and name in ("timm_swin", "tv_swin"):
            twin = twin * width**-0.5  # these scale the queries, not the scores
        torch.testing.assert_close(getattr(calls[0], letter), twin)


def test_interleaved_heads_read_as_blocks_have_other_ranks() -> None:
    """M02: read as [Q | K | V] the "q" heads come out 1, 2, 4, 1 and fused q has rank 8, not 4."""
    made = planted(4, 4, 8, 32)
    weight = in_turn(made)
    right = Matrix("w", rows=tuple(r for h in range(4) for r in range(24 * h, 24 * h + 8)))
    wrong = [Matrix("w", rows=tuple(range(8 * h, 8 * h + 8))).of(weight) for h in range(4)]
    ranks = [torch.linalg.matrix_rank(w).item() for w in wrong]
    assert ranks == [1, 2, 4, 1]
    assert torch.linalg.matrix_rank(torch.cat(wrong)).item() == 8
    assert torch.linalg.matrix_rank(right.of(weight)).item() == 4


def test_conv1d_and_linear_of_the_same_weights_give_the_same_heads() -> None:
    """M01: [in, out] and [out, in]."""
    made = planted(3, 3, 8, 24)
    net = FusedGPT().double()
    set_weight(net, "blocks.0.attn.c_attn.weight", blocks(made))
    batch = {"inputs": torch.arange(16).reshape(2, 8)}
    first = trace(net, inputs_to(net), batch)

    class Conv1D(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.weight = nn.Parameter(linear.weight.detach().T.clone())
            self.bias = nn.Parameter(linear.bias.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
            return flat.view(*x.shape[:-1], -1)

    for block in net.blocks:
        block.attn.c_attn = Conv1D(block.attn.c_attn)
    second = trace(net, inputs_to(net), batch)
    for x in "qkv":
        for old, new in zip(part(first, x).heads, part(second, x).heads, strict=True):
            assert new.out_axes == (1,)
            assert replace(new, out_axes=(0,)) == old


@pytest.mark.parametrize("kdim", [None, 6])
def test_bare_parameters_of_multihead_attention(kdim: int | None) -> None:
    """M04: in_proj_weight, and q_proj_weight, k_proj_weight, v_proj_weight when widths differ."""

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 2)
            self.mix = nn.MultiheadAttention(16, 4, kdim=kdim, vdim=kdim, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            q = self.embed(x)
            k = q if kdim is None else x
            return self.head((q + self.mix(q, k, k)[0]).mean(1))

    net = Cross()
    anatomy = trace(net, inputs_to(net), {"inputs": torch.randn(2, 5, 6)})
    own = ["in_proj_weight"] * 3 if kdim is None else [f"{x}_proj_weight" for x in "qkv"]
    names = [part(anatomy, x).heads[0].tensor for x in "qkv"]
    assert names == [f"mix.{n}" for n in own]
    offset = 0 if kdim else 16
    for k, x in enumerate("qkv"):
        rows = [h.rows for h in part(anatomy, x).heads]
        starts = [k * offset + 4 * h for h in range(4)]
        assert rows == [tuple(range(s, s + 4)) for s in starts]
    assert part(anatomy, "attention_output").heads[1].columns == (4, 5, 6, 7)
    proofs = verify(
        net, inputs_to(net), {"inputs": torch.randn(2, 5, 6)}, anatomy, dict(net.named_parameters())
    )
    assert proofs[0].ok


def test_two_sharp_heads_have_no_entropy_and_their_average_has_ln_2() -> None:
    """R02: nn.MultiheadAttention returns maps averaged over heads; here each head is on its own."""

    class Sharp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.mix(x, x, x)[0])

    net = Sharp().eval()
    with torch.no_grad():
        net.mix.in_proj_weight.zero_()
        net.mix.in_proj_bias.zero_()
        net.mix.in_proj_bias[0] = net.mix.in_proj_bias[2] = 20.0  # q of both heads
        net.mix.in_proj_weight[4, 0] = net.mix.in_proj_weight[6, 2] = 20.0  # k at tokens 0 and 2
    x = torch.eye(4)[None].repeat(2, 1, 1)
    anatomy = trace(net, inputs_to(net), {"inputs": x})
    calls: dict[object, object] = {}
    with (
        torch.no_grad(),
        watch(net, {}, anatomy.attention, lambda *_: None, calls.__setitem__) as watching,
    ):
        net(x)
        watching.check()
    maps = calls[0].probabilities
    assert maps.shape == (2, 2, 4, 4)
    entropy = -torch.special.xlogy(maps, maps).sum(-1)
    assert entropy.max().item() < 1e-6
    average = maps.mean(1)
    mixed = -torch.special.xlogy(average, average).sum(-1)
    torch.testing.assert_close(mixed, torch.full((2, 4), 2.0).log())
    assert maps[0, 0].argmax(-1).tolist() == [0] * 4 and maps[0, 1].argmax(-1).tolist() == [2] * 4
