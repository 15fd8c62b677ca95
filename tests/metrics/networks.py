"""Tiny networks of every kind, with a batch: cases for the gradient and Jacobian tests."""

import torch
from torch import nn


class EinsumAttention(nn.Module):
    """One [3, heads, d, dh] parameter and no Linear."""

    def __init__(self, d=12, heads=3):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, heads, d, d // heads) / 4)
        self.out = nn.Parameter(torch.randn(heads, d // heads, d) / 4)

    def forward(self, x):
        q, k, v = torch.einsum("btd,xhde->xbhte", x, self.qkv)
        a = (q @ k.mT).softmax(-1)
        return torch.einsum("bhte,hed->btd", a @ v, self.out)


class HomeMade(nn.Module):
    """CLS token, position table without a leading 1, a scale and a shared layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 12)
        self.cls = nn.Parameter(torch.randn(1, 1, 12))
        self.position = nn.Parameter(torch.randn(7, 12))
        self.attention = EinsumAttention()
        self.scale = nn.Parameter(torch.rand(12))
        self.shared = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.unused = nn.Linear(2, 2)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(12, 4))

    def forward(self, x):
        x = self.embed(x)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.position
        x = x + self.scale * self.attention(x)
        x = x + self.shared(torch.tanh(self.shared(self.norm(x))))
        return self.head(x[:, 0])


def _mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 3))


def _cnn():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3, padding=1, groups=2),
        nn.GroupNorm(2, 6),
        nn.GELU(),
        nn.Conv2d(6, 4, 1),
        nn.Flatten(),
        nn.Linear(4 * 16, 3),
    )


class Encoder(nn.Module):
    """nn.TransformerEncoder, whose attention works on [T, B, d] inside."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def _timm_vit():
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=8,
        embed_dim=12,
        depth=2,
        num_heads=3,
        num_classes=4,
        init_values=0.5,
    )


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2))


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=True,
        )
    )


def _hf_vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=20,
            image_size=16,
            patch_size=8,
            num_labels=4,
        )
    )


def _swin():
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], 8, [2], [2], [4, 4], num_classes=3, stochastic_depth_prob=0.0)


_SHAPES = {
    "mlp": (_mlp, (6,)),
    "cnn": (_cnn, (3, 8, 8)),
    "home-made": (HomeMade, (6, 5)),
    "encoder": (Encoder, (5, 8)),
    "timm vit": (_timm_vit, (3, 16, 16)),
    "hf vit": (_hf_vit, (3, 16, 16)),
    "swin": (_swin, (3, 16, 16)),
    "gpt2": (_gpt2, None),
    "llama": (_llama, None),
}
KINDS = tuple(_SHAPES)


def network(kind, inputs=5, dtype=torch.float64):
    """A module in eval mode, its forward(batch) and a batch with labels."""
    torch.manual_seed(0)
    make, shape = _SHAPES[kind]
    module = make().to(dtype).eval()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    if shape is None:
        ids = torch.randint(11, (inputs, 6))
        batch = {"inputs": ids, "labels": ids.roll(-1, 1)}
    else:
        batch = {"inputs": torch.randn(inputs, *shape, dtype=dtype)}
        batch["labels"] = torch.arange(inputs) % 3

    def forward(given):
        out = module(given["inputs"])
        return out if isinstance(out, torch.Tensor) else out.logits

    return module, forward, batch
