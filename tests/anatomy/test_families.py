"""Tables of known families: what they find, and that they agree with the trace on real models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plastiscope.anatomy import Anatomy, Matrix, from_names, trace, verify
from plastiscope.anatomy.parts import plain_name
from plastiscope.checkpoints.run import State, TensorInfo
from plastiscope.errors import UsageError
from tests.anatomy import zoo
from tests.anatomy.nets import FusedGPT, RotaryLlama

STORED = {
    "embedding", "norm1", "q", "k", "v", "attention_output", "norm2", "router", "gate",
    "fc1", "fc2", "final_norm", "head", "conv", "fc", "norm",
}  # fmt: skip


def state_of(tensors: Mapping[str, torch.Tensor], extras: Mapping[str, Any] | None = None) -> State:
    buffers = ("running_mean", "running_var", "num_batches_tracked", "relative_position_index")
    infos = {
        n: TensorInfo(n, tuple(t.shape), t.dtype, "buffer" if n.endswith(buffers) else "weight")
        for n, t in tensors.items()
    }
    return State(infos, lambda name: tensors[name], extras or {})


def places(matrix: Matrix, tensors: Mapping[str, torch.Tensor]) -> tuple[str, tuple[int, ...]]:
    """The tensor and, row by row, which of its elements a matrix takes."""
    shape = tensors[matrix.tensor].shape
    taken = matrix.of(torch.arange(shape.numel()).reshape(shape))
    return matrix.tensor, tuple(taken.flatten().tolist())


def layout(anatomy: Anatomy, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    """Every canonical component's weights and heads as elements of tensors."""
    found = {}
    for c in anatomy.components:
        if c.weights and plain_name(c.name) in STORED:
            key = (c.name, c.block)
            whole = sorted(places(m, tensors) for m in c.weights)
            found[key] = (whole, [places(m, tensors) for m in c.heads], c.offset_gain)
    return found


def tied(module: torch.nn.Module) -> dict[str, str]:
    """Each name of a parameter, to the one that the trace uses."""
    first = {id(p): n for n, p in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {n: first[id(p)] for n, p in every}


@pytest.mark.parametrize("name", zoo.NAMES)
def test_table_and_trace_agree_slice_for_slice(name: str) -> None:
    model = zoo.build(name)
    names = tied(model.module)
    tensors = {n: t for n, t in model.module.state_dict().items() if names.get(n, n) == n}
    found = trace(model.module, model.forward, model.batch)
    traced = layout(found, tensors)
    stored = from_names(state_of(tensors), model.config)
    assert stored.source.startswith("family ")
    tabled = layout(stored, tensors)
    shared = {n for n, count in Counter(names.values()).items() if count > 1}
    if traced["head", None][0][0][0] in shared:
        del traced["head", None]  # a tied head isn't stored
    if name.startswith("encoder"):
        del traced["embedding", None]  # the user's own layers around nn.TransformerEncoder
        del traced["head", None]
    assert tabled.keys() == traced.keys()
    for key in traced:
        assert tabled[key] == traced[key], key
    embeds = {c.weights[0].tensor for c in stored.components if c.embeds}
    assert embeds == {c.weights[0].tensor for c in found.components if c.embeds}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["vit-sdpa", "deit-sdpa", "dinov2_registers-sdpa", "hf_swin-sdpa", "mixtral-sdpa"]
)
def test_files_with_older_names_hold_the_same_heads(name: str, tmp_path: Path) -> None:
    """transformers writes other names than its modules have: the values must be the same."""
    model = zoo.build(name)
    traced = trace(model.module, model.forward, model.batch)
    model.module.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    live = model.module.state_dict()
    stored = from_names(state_of(saved), model.config)
    assert saved.keys() != live.keys() and stored.source.startswith("family ")
    parts = {(c.name, c.block): c for c in stored.components}
    for c in traced.components:
        if plain_name(c.name) not in STORED or not c.weights:
            continue
        other = parts[c.name, c.block]
        assert len(other.heads) == len(c.heads)
        for own, new in zip((*c.weights, *c.heads), (*other.weights, *other.heads), strict=True):
            assert torch.equal(own.of(live[own.tensor]), new.of(saved[new.tensor]))
    if name == "mixtral-sdpa":
        experts = [c for c, block in parts if block == 0 and c.startswith("expert ")]
        assert experts[:4] == ["expert 0 gate", "expert 0 fc1", "expert 0 fc2", "expert 1 gate"]
        assert len(experts) == 9


def test_tables_agree_on_a_rotary_network_in_llama2_names() -> None:
    net = RotaryLlama()
    batch = {"inputs": torch.arange(12).reshape(2, 6)}
    tensors = net.state_dict()
    traced = trace(net, lambda b: net(b["inputs"]), batch)
    stored = from_names(state_of(tensors, {"model_args": {"n_heads": 4, "n_kv_heads": 2}}))
    assert stored.source == "family llama2c"
    assert layout(stored, tensors) == layout(traced, tensors)
    assert traced.attention[0].kv_of_head == (0, 0, 1, 1)
    own = dict(net.named_parameters())
    assert all(p.ok for p in verify(net, lambda b: net(b["inputs"]), batch, traced, own))


def test_the_checkpoints_own_config_says_how_many_heads() -> None:
    net = FusedGPT(width=24, heads=3)
    renamed = {}
    for name, tensor in net.state_dict().items():
        name = name.replace("blocks.", "h.").replace(".c_fc", ".mlp.c_fc")
        name = name.replace(".c_proj", ".mlp.c_proj").replace("attn.mlp.", "attn.")
        renamed["transformer." + name] = tensor
    renamed["lm_head.weight"] = renamed.pop("transformer.head.weight")
    stored = from_names(state_of(renamed, {"model_args": {"n_head": 3}}))
    assert stored.source == "family nanogpt"
    q = next(c for c in stored.components if (c.name, c.block) == ("q", 1))
    assert [h.rows for h in q.heads] == [tuple(range(8 * h, 8 * h + 8)) for h in range(3)]
    k = next(c for c in stored.components if (c.name, c.block) == ("k", 1))
    assert k.heads[0].rows == tuple(range(24, 32))


def interleaved(config: dict[str, Any]) -> Anatomy:
    tensors = {
        "gpt_neox.embed_in.weight": torch.zeros(9, 32),
        "gpt_neox.layers.0.attention.query_key_value.weight": torch.zeros(96, 32),
        "gpt_neox.layers.0.mlp.dense_h_to_4h.weight": torch.zeros(64, 32),
    }
    return from_names(state_of(tensors), config)


def test_interleaved_tensor_isnt_split_without_the_number_of_heads() -> None:
    """M02: if the layout is unknown, the fused matrix only."""
    found = interleaved({})
    assert not [c for c in found.components if c.name in "qkv"]
    fused = [c for c in found.components if "query_key_value" in c.name]
    assert len(fused) == 1 and not fused[0].heads
    assert any("can't be split" in note for note in found.notes)
    split = interleaved({"num_attention_heads": 4})
    q = next(c for c in split.components if c.name == "q")
    assert q.heads[1].rows == tuple(range(24, 32))


def test_norm_of_gemma_is_an_offset_and_of_llama_is_not() -> None:
    """M07: the same keys and zeros; only the config tells the gain 1 + 0 from 0."""
    names = ("input_layernorm", "self_attn.q_proj", "mlp.gate_proj")
    tensors = {f"model.layers.0.{n}.weight": torch.zeros(4, 4) for n in names}
    tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(4)
    tensors["model.embed_tokens.weight"] = torch.zeros(9, 4)
    for kind, offset in (("gemma", True), ("llama", False)):
        found = from_names(state_of(tensors), {"model_type": kind, "num_attention_heads": 2})
        norm = next(c for c in found.components if c.name == "norm1")
        assert norm.offset_gain is offset


def test_unknown_tensors_get_components_of_their_own() -> None:
    """M15: unknown names with 2-D tensors give rows without heads; buffers none."""
    tensors = {
        "foo.alpha.weight": torch.zeros(4, 3),
        "foo.alpha.bias": torch.zeros(4),
        "foo.beta": torch.zeros(2, 3, 5),
        "foo.running_mean": torch.zeros(4),
    }
    found = from_names(state_of(tensors))
    assert [(c.name, len(c.heads)) for c in found.components] == [("foo.alpha", 0), ("foo.beta", 0)]
    assert found.unexplained == ("foo.alpha.weight", "foo.beta")
    assert found.source == "names"


def test_family_from_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\ndetect = ["trunk.0.mix.weight"]\n[config]\nheads = ["n_mix"]\n'
        '[[tensor]]\ninto = ["k", "q", "v"]\nkey = "trunk.{block}.mix.weight"\n'
        'layout = "(heads into width) i"\n'
    )
    tensors = {f"trunk.{k}.mix.weight": torch.zeros(12, 5) for k in (0, 2, 10)}
    found = from_names(state_of(tensors), {"n_mix": 2}, [path])
    assert found.source == "family mine"
    parts = {(c.name, c.block): c for c in found.components}
    assert [m.tensor for m in parts["q", 2].weights] == ["trunk.10.mix.weight"]
    assert [h.rows for h in parts["q", 0].heads] == [(2, 3), (8, 9)]
    assert [h.rows for h in parts["k", 0].heads] == [(0, 1), (6, 7)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('name = "x"', "lacks detect"),
        ("name = ", "can't be read"),
        ('name = "x"\ndetect = ["a"]\ncolour = 1', "colour"),
        ('name = "x"\ndetect = ["a"]\n[[tensor]]\nkey = "a"\npart = "q"', "layout"),
        ('name = "x"\ndetect = ["a"]\n[[tensor]]\nkey = "a"\npart = "q"\nlayout = "h i"', "axis h"),
    ],
)
def test_wrong_family_file_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        from_names(state_of({"a": torch.zeros(2, 2)}), None, [path])
