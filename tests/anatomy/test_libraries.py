"""Attentions of libraries that are out of the ordinary: sinks, latent keys, encoder and decoder."""

from __future__ import annotations

import pytest
import torch

from plastiscope.anatomy import AttentionCall, trace, watch
from tests.anatomy import zoo
from tests.anatomy.test_trace import part


def test_attention_sinks_leave_the_keys_probabilities() -> None:
    """GPT-OSS: the softmax runs over one column more, which is dropped before the values."""
    values = {**zoo.TEXT, "intermediate_size": 16, "head_dim": 8, "num_local_experts": 4}
    model = zoo.hugging_face("GptOssForCausalLM", "GptOssConfig", "eager", **values)
    anatomy = trace(model.module, model.forward, model.batch)
    calls: dict[object, AttentionCall] = {}
    with (
        torch.no_grad(),
        watch(model.module, {}, anatomy.attention, lambda *_: None, calls.__setitem__) as watching,
    ):
        model.forward(model.batch)
        watching.check()
    p = calls[0].probabilities
    assert p.shape == (2, 4, 7, 7)
    assert p.sum(-1).max() < 1 and p.triu(1).abs().sum() == 0
    torch.testing.assert_close(p @ calls[0].v[:, [0, 0, 1, 1]], calls[0].output)


def test_latent_attention_names_what_it_can() -> None:
    """DeepSeek: k is written piece by piece into an empty tensor, from two weights: no heads."""
    values = {
        **zoo.TEXT, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 8,
        "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    model = zoo.hugging_face("DeepseekV3ForCausalLM", "DeepseekV3Config", "sdpa", **values)
    anatomy = trace(model.module, model.forward, model.batch)
    assert len(part(anatomy, "q").heads) == 4 and len(part(anatomy, "v").heads) == 4
    k = part(anatomy, "k")
    assert k.heads == () == k.weights
    shapes = {n: p.shape[0] for n, p in model.module.named_parameters() if "layers.0" in n}
    rows = {n: 0 for n in shapes if "kv_" in n and "norm" not in n}
    for c in anatomy.components:
        for m in c.weights:
            if m.tensor in rows:
                rows[m.tensor] += shapes[m.tensor] if m.rows is None else len(m.rows)
    assert rows == {n: shapes[n] for n in rows}  # every row once: v's, and what is left
    assert any("k comes from 2 weights" in note for note in anatomy.notes)
    assert part(anatomy, "norm1").path == "model.layers.0.input_layernorm"
    assert part(anatomy, "router", 1).path == "model.layers.1.mlp.gate"


def test_encoder_and_decoder_keep_their_own_feed_forward_parts() -> None:
    """T5: self and cross attention are blocks; each feed-forward part follows its own attention."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    module = transformers.T5ForConditionalGeneration(config).eval()

    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = batch["inputs"]
        return module(input_ids=ids, decoder_input_ids=ids).logits

    anatomy = trace(module, forward, zoo.tokens())
    assert list(anatomy.attention) == [0, 1, 2, 3, 4, 5]
    paths = {c.block: c.path for c in anatomy.components if c.name == "fc1"}
    assert paths == {
        0: "encoder.block.0.layer.1.DenseReluDense.wi",
        1: "encoder.block.1.layer.1.DenseReluDense.wi",
        3: "decoder.block.0.layer.2.DenseReluDense.wi",
        5: "decoder.block.1.layer.2.DenseReluDense.wi",
    }
    causal = [anatomy.attention[k].causal for k in range(6)]
    assert causal == [False, False, True, False, True, False]
