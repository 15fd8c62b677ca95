"""Models of the transformers library: rebuilt from config.json, the same outputs bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from plastiscope.models import ModelError, build, load
from plastiscope.models.outputs import answer

hf = pytest.importorskip("transformers")

IDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {
    **IDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
PIXELS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 8,
    "patch_size": 2,
}

TEXT = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SMALL),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "Phi3ForCausalLM": ("Phi3Config", GROUPED),
    "GemmaForCausalLM": ("GemmaConfig", {**GROUPED, "head_dim": 8}),
    "FalconForCausalLM": (
        "FalconConfig",
        {**IDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "BloomForCausalLM": ("BloomConfig", {**IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, "num_local_experts": 3}),
    "BertModel": ("BertConfig", SMALL),
    "BertForSequenceClassification": ("BertConfig", {**SMALL, "num_labels": 5}),
    "RobertaForMaskedLM": ("RobertaConfig", SMALL),
}
IMAGES = {
    "ViTModel": ("ViTConfig", {**PIXELS, "num_channels": 1}),
    "ViTForImageClassification": ("ViTConfig", {**PIXELS, "num_labels": 7}),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", PIXELS),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", PIXELS),
    "SwinForImageClassification": (
        "SwinConfig",
        {
            "image_size": 32,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "ConvNextForImageClassification": (
        "ConvNextConfig",
        {"image_size": 32, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    ),
}


def make(name, config, values):
    if not hasattr(hf, name):
        pytest.skip(f"transformers {hf.__version__} has no {name}")
    torch.manual_seed(0)
    model = getattr(hf, name)(getattr(hf, config)(**values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # no zero bias, no norm at one
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def saved(model, folder, state_of):
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return state_of(load_file(folder / "model.safetensors"), config=config)


def assert_same(model, state, inputs):
    live = build(state)
    report = load(live, state)
    assert report.full
    with torch.no_grad():
        assert torch.equal(live.forward({"inputs": inputs}), answer(model(inputs)))
    return live


@pytest.mark.parametrize("name", TEXT)
def test_text_models(name, tmp_path, state_of):
    model = make(name, *TEXT[name])
    live = assert_same(model, saved(model, tmp_path, state_of), torch.randint(3, 64, (2, 9)))
    assert live.inputs.kind == "tokens" and live.inputs.vocabulary == 64
    assert live.inputs.causal == name.endswith(("CausalLM", "LMHeadModel"))
    # RoBERTa counts positions from behind its padding id; rotary and ALiBi have no table.
    longest = {"GPT2LMHeadModel": 32, "BertModel": 32, "RobertaForMaskedLM": 31}
    longest["BertForSequenceClassification"] = 32
    assert live.inputs.longest == longest.get(name)
    assert live.inputs.classes == (5 if "Classification" in name else None)


@pytest.mark.parametrize("name", IMAGES)
def test_image_models(name, tmp_path, state_of):
    config, values = IMAGES[name]
    model = make(name, config, values)
    channels, side = values.get("num_channels", 3), values["image_size"]
    images = torch.randn(2, channels, side, side)
    live = assert_same(model, saved(model, tmp_path, state_of), images)
    assert live.inputs.kind == "image" and live.inputs.shape == (channels, side, side)
    assert live.inputs.resizable == name.startswith(("Swin", "ConvNext"))


def test_experts_stored_one_by_one_are_merged(tmp_path, state_of):
    model = make("MixtralForCausalLM", *TEXT["MixtralForCausalLM"])
    state = saved(model, tmp_path, state_of)
    live = build(state)
    stored_apart = [name for name in state.tensors if ".experts." in name]
    assert len(stored_apart) == 2 * 3 * 3
    if "model.layers.0.mlp.experts.gate_up_proj" in live.module.state_dict():
        assert {source for merge in live.merges for source in merge.sources} == set(stored_apart)
    else:  # before its fifth version the library kept them apart, too
        assert set(stored_apart) <= set(live.stored.values())
    with_gap = state_of(
        {n: state.read(n) for n in state.tensors if n != stored_apart[0]},
        config=state.extras["config"],
    )
    with pytest.raises(ModelError):
        load(build(with_gap), with_gap)


def test_padding_reaches_the_model(tmp_path, state_of):
    model = make("BertModel", *TEXT["BertModel"])
    state = saved(model, tmp_path, state_of)
    live = build(state)
    load(live, state)
    ids, mask = torch.randint(3, 64, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    with torch.no_grad():
        masked = live.forward({"inputs": ids, "mask": mask})
        expected = model(ids, attention_mask=mask).last_hidden_state
        alone = live.forward({"inputs": ids[1:, :5]})
    assert torch.equal(masked, expected)
    torch.testing.assert_close(masked[1, :5], alone[0])


def test_a_base_model_saved_without_its_head_and_the_module_s_own_names(tmp_path, state_of):
    model = make("GPT2LMHeadModel", *TEXT["GPT2LMHeadModel"])
    state = saved(model, tmp_path, state_of)
    config = state.extras["config"]
    ids = torch.randint(3, 64, (2, 9))
    bare = state_of(model.transformer.state_dict(), config=config)
    assert_same(model, bare, ids)
    assert_same(model, state_of(model.state_dict(), config=config), ids)
    vit = make("ViTForImageClassification", *IMAGES["ViTForImageClassification"])
    config = saved(vit, tmp_path, state_of).extras["config"]
    assert_same(vit, state_of(vit.state_dict(), config=config), torch.randn(2, 3, 8, 8))


def test_a_class_of_the_user_s_choice(tmp_path, state_of):
    model = make("BertModel", *TEXT["BertModel"])
    state = saved(model, tmp_path, state_of)
    live = build(state, "transformers:BertForMaskedLM")
    with pytest.raises(ModelError, match="without a stored tensor"):
        load(live, state)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "gpt2", "architectures": ["MyGPT"]}, "no model class MyGPT"),
        (
            {
                "model_type": "gpt2",
                "architectures": ["MyGPT"],
                "auto_map": {"AutoModel": "x.MyGPT"},
            },
            "its own code is never run",
        ),
        ({"model_type": "gpt2"}, "names no architecture"),
        ({"model_type": "notype", "architectures": ["GPT2LMHeadModel"]}, "can't read this config"),
        ({"model_type": "gpt2", "architectures": ["GPT2Config"]}, "no model class GPT2Config"),
    ],
)
def test_configs_that_give_no_model(config, why, state_of):
    with pytest.raises(ModelError, match=why) as error:
        build(state_of({"a.weight": torch.zeros(2, 2)}, config=config))
    assert "--model" in str(error.value) or "install" in str(error.value)


def test_no_config(state_of):
    with pytest.raises(ModelError, match=r"config\.json"):
        build(state_of({"a.weight": torch.zeros(2, 2)}), "transformers:GPT2LMHeadModel")


def test_building_leaves_the_random_numbers_alone(tmp_path, state_of):
    model = make("GPT2LMHeadModel", *TEXT["GPT2LMHeadModel"])
    state = saved(model, tmp_path, state_of)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    build(state)
    assert torch.equal(torch.get_rng_state(), before)
