"""Tiny random models of real libraries, each with how it is called and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Forward = Callable[[Mapping[str, Tensor]], Tensor]
TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 8,
}
SHORT = {"n_layer": 2, "n_head": 4, "vocab_size": 60}
STAGES = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
OLD = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}


@dataclass(frozen=True)
class Model:
    """A live model; `config` is what its checkpoint would say."""

    module: nn.Module
    forward: Forward
    batch: dict[str, Tensor]
    config: dict[str, Any] = field(default_factory=dict)


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"inputs": torch.randint(3, 50, (2, 7), generator=generator)}


def images(size: int) -> dict[str, Tensor]:
    return {"inputs": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))}


def hugging_face(model: str, config: str, attention: str, **values: Any) -> Model:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    made = getattr(transformers, config)(**values, attn_implementation=attention)
    made.eos_token_id = made.bos_token_id = None
    module = getattr(transformers, model)(made).eval()
    if "image_size" in values:

        def forward(batch: Mapping[str, Tensor]) -> Tensor:
            return module(pixel_values=batch["inputs"]).logits

        return Model(module, forward, images(values["image_size"]), made.to_dict())

    def forward_text(batch: Mapping[str, Tensor]) -> Tensor:
        return module(input_ids=batch["inputs"]).logits

    return Model(module, forward_text, tokens(), made.to_dict())


HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**SHORT, "n_embd": 32}),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**OLD, "intermediate_size": 64}),
    "neox_sequential": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**OLD, "intermediate_size": 64, "use_parallel_residual": False},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**TEXT, "head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**TEXT, "pad_token_id": 0}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**TEXT, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**TEXT, "head_dim": 8}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", TEXT),
    "falcon": ("FalconForCausalLM", "FalconConfig", OLD),
    "falcon_rw": ("FalconForCausalLM", "FalconConfig", {**OLD, "multi_query": False}),
    "falcon_groups": (
        "FalconForCausalLM",
        "FalconConfig",
        {**OLD, "num_kv_heads": 2, "new_decoder_architecture": True},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**SHORT, "hidden_size": 32}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**TEXT, "num_local_experts": 3}),
    "bert": ("BertForSequenceClassification", "BertConfig", {**OLD, "intermediate_size": 64}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**OLD, "intermediate_size": 64}),
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGE),
    "deit": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", IMAGE),
    "dinov2_registers": (
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        {**IMAGE, "num_register_tokens": 3},
    ),
    "hf_swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {**STAGES, "image_size": 32, "patch_size": 4, "window_size": 4},
    ),
}  # fmt: skip
EAGER_ONLY = {"bloom", "gemma2"}

TIMM: dict[str, tuple[str, int, dict[str, Any]]] = {
    "timm_vit": ("vit_tiny_patch16_224", 32, {}),
    "timm_vit_average": ("vit_tiny_patch16_224", 32, {"global_pool": "avg"}),
    "timm_vit_qk_norm": ("vit_tiny_patch16_224", 32, {"qk_norm": True, "init_values": 1e-5}),
    "timm_deit": ("deit_tiny_distilled_patch16_224", 32, {}),
    "timm_eva02_small": ("eva02_tiny_patch14_224", 28, {}),
    "timm_eva02": ("eva02_base_patch14_224", 28, {}),
    "timm_swin": ("swin_tiny_patch4_window7_224", 56, STAGES),
    "timm_swin2": ("swinv2_tiny_window8_256", 64, STAGES),
    "timm_convnext": ("convnext_tiny", 32, {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 20)}),
}  # fmt: skip


def timm_model(name: str) -> Model:
    timm = pytest.importorskip("timm")
    architecture, size, values = TIMM[name]
    if architecture.startswith(("vit", "deit", "eva")):
        values = {"embed_dim": 24, "depth": 2, "num_heads": 3, **values}
    if "convnext" not in name:
        values = {"img_size": size, **values}
    module = timm.create_model(architecture, num_classes=5, **values).eval()
    return Model(module, lambda b: module(b["inputs"]), images(size), values)


class Encoder(nn.Module):
    """nn.TransformerEncoder between two linear layers."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
        self.embed, self.head = nn.Linear(5, 16), nn.Linear(16, 3)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


def torchvision_model(name: str) -> Model:
    models = pytest.importorskip("torchvision.models")
    made: dict[str, tuple[Callable[[], nn.Module], int]] = {
        "tv_vit": (lambda: models.VisionTransformer(16, 8, 2, 4, 32, 64), 16),
        "tv_swin": (lambda: models.SwinTransformer([4, 4], 12, [2, 2], [2, 4], [4, 4]), 32),
        "tv_resnet": (lambda: models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1]), 32),
    }
    build, size = made[name]
    module = build().eval()
    return Model(module, lambda b: module(b["inputs"]), images(size), {"num_heads": 4})


def encoder(norm_first: bool) -> Model:
    module = Encoder(norm_first).eval()
    return Model(
        module, lambda b: module(b["inputs"]), {"inputs": torch.randn(2, 6, 5)}, {"nhead": 4}
    )


NAMES = (
    *(f"{n}-sdpa" for n in HUGGING_FACE if n not in EAGER_ONLY),
    *(f"{n}-eager" for n in HUGGING_FACE),
    *TIMM,
    "tv_vit",
    "tv_swin",
    "tv_resnet",
    "encoder_post",
    "encoder_pre",
)


def build(name: str) -> Model:
    """One of NAMES."""
    torch.manual_seed(0)
    family, _, attention = name.partition("-")
    if attention:
        model, config, values = HUGGING_FACE[family]
        return hugging_face(model, config, attention, **values)
    if name in TIMM:
        return timm_model(name)
    return encoder(name == "encoder_pre") if "encoder" in name else torchvision_model(name)
