"""nanoGPT and llama2.c layouts against the transformers library with the same weights."""

from __future__ import annotations

import pytest
import torch

from plastiscope import checkpoints
from plastiscope.models import ModelError, build, load

hf = pytest.importorskip("transformers")

NANO = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 50}


def nano_tensors(bias: bool = True, tied: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    width, hidden = 32, 128
    tensors = {
        "transformer.wte.weight": torch.randn(50, width) * 0.1,
        "transformer.wpe.weight": torch.randn(16, width) * 0.1,
    }
    for block in range(2):
        h = f"transformer.h.{block}."
        for name, shape in (
            ("ln_1", (width,)),
            ("attn.c_attn", (3 * width, width)),
            ("attn.c_proj", (width, width)),
            ("ln_2", (width,)),
            ("mlp.c_fc", (hidden, width)),
            ("mlp.c_proj", (width, hidden)),
        ):
            tensors[f"{h}{name}.weight"] = torch.randn(shape) * 0.2
            if bias:
                tensors[f"{h}{name}.bias"] = torch.randn(shape[0]) * 0.2
    tensors["transformer.ln_f.weight"] = torch.randn(width)
    if bias:
        tensors["transformer.ln_f.bias"] = torch.randn(width)
    head = tensors["transformer.wte.weight"]
    tensors["lm_head.weight"] = head if tied else torch.randn(50, width) * 0.1
    return tensors


def as_gpt2(tensors: dict[str, torch.Tensor]):
    """The library's GPT-2 with these weights: its Conv1D stores them transposed."""
    config = hf.GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        activation_function="gelu",
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = hf.GPT2LMHeadModel(config).eval()
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    state = {n: t.T if n.endswith(turned) else t for n, t in tensors.items()}
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and name not in state:
            state[name] = torch.zeros_like(parameter)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and not missing
    return model


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_nanogpt_equals_gpt2_with_exact_gelu(state_of, bias, tied):
    tensors = nano_tensors(bias, tied)
    state = state_of(tensors, model_args={**NANO, "bias": bias})
    live = build(state)
    assert load(live, state).full
    ids = torch.randint(50, (3, 16))
    with torch.no_grad():
        torch.testing.assert_close(
            live.forward({"inputs": ids}), as_gpt2(tensors)(ids).logits, rtol=1e-5, atol=1e-5
        )
    assert live.inputs.vocabulary == 50 and live.inputs.longest == 16 and live.inputs.causal
    same = live.module.get_parameter("lm_head.weight") is live.module.get_parameter(
        "transformer.wte.weight"
    )
    assert same == tied


def test_the_number_of_heads_matters_and_is_never_guessed(state_of):
    tensors = nano_tensors()
    ids = torch.randint(50, (2, 9))
    outputs = []
    for heads in ("4", "8"):
        state = state_of(tensors, model_args={"n_layer": 2})
        live = build(state, None, {"heads": heads})
        load(live, state)
        outputs.append(live.forward({"inputs": ids}))
    assert not torch.allclose(*outputs, atol=1e-3)
    for arguments in ({}, {"n_head": 5}):
        with pytest.raises(ModelError, match="--assume heads=N"):
            build(state_of(tensors, model_args=arguments))


def test_old_checkpoints_hold_masks_that_are_no_weights(state_of):
    tensors = nano_tensors()
    state = state_of(
        {**tensors, "transformer.h.0.attn.count": torch.ones(1, 1, 16, 16)}, model_args=NANO
    )
    live = build(state)
    report = load(live, state)
    assert report.full and report.ignored == ("transformer.h.0.attn.count",)


def test_only_one_of_the_two_tied_names_is_stored(state_of):
    tensors = nano_tensors()
    ids = torch.randint(50, (2, 9))
    outputs = []
    for left_out in ("lm_head.weight", "transformer.h.9"):
        kept = {n: t for n, t in tensors.items() if n != left_out}
        state = state_of(kept, model_args=NANO)
        live = build(state)
        assert load(live, state).full
        outputs.append(live.forward({"inputs": ids}))
    assert torch.equal(*outputs)


def split_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows from neighbouring pairs (llama2.c's rotary order) to two halves (the library's)."""
    width = weight.shape[0] // heads
    return weight.reshape(heads, width // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def as_llama(tensors: dict[str, torch.Tensor], arguments: dict[str, int]):
    heads, kv_heads = arguments["n_heads"], arguments["n_kv_heads"]
    vocabulary, width = tensors["tok_embeddings.weight"].shape
    config = hf.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=arguments["n_layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        intermediate_size=tensors["layers.0.feed_forward.w1.weight"].shape[0],
        bos_token_id=1,
        eos_token_id=2,
    )
    renamed = {
        "model.embed_tokens.weight": tensors["tok_embeddings.weight"],
        "model.norm.weight": tensors["norm.weight"],
        "lm_head.weight": tensors["output.weight"],
    }
    names = {
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    for block in range(arguments["n_layers"]):
        old, new = f"layers.{block}.", f"model.layers.{block}."
        for name, other in names.items():
            renamed[f"{new}{other}.weight"] = tensors[f"{old}{name}.weight"]
        for name, count in (("q", heads), ("k", kv_heads)):
            weight = tensors[f"{old}attention.w{name}.weight"]
            renamed[f"{new}self_attn.{name}_proj.weight"] = split_pairs(weight, count)
    model = hf.LlamaForCausalLM(config).eval()
    model.load_state_dict(renamed)
    return model


def test_llama2c_equals_the_library_s_llama(corpus):
    state = checkpoints.discover(corpus / "llama2xs")[0].checkpoints[0].open()
    live = build(state)
    assert load(live, state).full
    assert live.inputs.vocabulary == 512 and live.inputs.longest == 256
    tensors = {name: state.read(name) for name in state.tensors}
    tensors["output.weight"] = tensors["tok_embeddings.weight"]
    ids = torch.randint(512, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = as_llama(tensors, state.extras["model_args"])(ids).logits
        found = live.forward({"inputs": ids})
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # Rotated the other way round, the same weights answer otherwise.
    tensors["layers.0.attention.wq.weight"] = split_pairs(
        tensors["layers.0.attention.wq.weight"], 8
    )
    with torch.no_grad():
        other = as_llama(tensors, state.extras["model_args"])(ids).logits
    assert (found - other).abs().max() > 1e-2
    assert live.module.get_parameter("output.weight") is live.module.get_parameter(
        "tok_embeddings.weight"
    )


def test_llama2c_without_its_number_of_heads(corpus, state_of):
    state = checkpoints.discover(corpus / "llama2xs")[0].checkpoints[0].open()
    bare = state_of({name: state.read(name) for name in state.tensors})
    with pytest.raises(ModelError, match="--assume heads=N"):
        build(bare)
