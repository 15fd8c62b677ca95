"""The ViT study's protocol and bounds, re-derived with numpy and the library's own modules from the
stored tensors of the sample ViT, against the rows of an analysis."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file

import plastiscope
from plastiscope.config import Settings

SAMPLE = Path(__file__).parents[2] / "sample_checkpoints" / "vit"
LAST, HEADS, WIDTH, TOKENS = 4800, 4, 8, 17
BLOCKS = (0, 5)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    settings = Settings(
        out=tmp_path_factory.mktemp("out"), steps=str(LAST), gradient_inputs=6,
        only=("rate_of_change_bound", "rate_of_change_embedding"),
    )  # fmt: skip
    return plastiscope.analyze(SAMPLE, settings).table()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    folder = SAMPLE / f"checkpoint-{LAST}"
    found = transformers.ViTForImageClassification.from_pretrained(
        folder, attn_implementation="eager"
    )
    return found.eval()


@pytest.fixture(scope="module")
def embedded(model: torch.nn.Module) -> torch.Tensor:
    """The embedding's output for the first six inputs of the probe [6, 17, 32]."""
    inputs = torch.from_numpy(np.load(SAMPLE / "probe.npz")["inputs"][:6])
    with torch.no_grad():
        return model.vit.embeddings(inputs)


def value(table: pd.DataFrame, metric: str, component: str, block: int) -> float:
    chosen = table[(table["metric"] == metric) & (table["component"] == component)]
    (row,) = chosen[chosen["block"] == block].to_dict("records")
    assert row["status"] == "ok"
    return float(row["value"])


def stored() -> dict[str, np.ndarray]:
    return load_file(SAMPLE / f"checkpoint-{LAST}" / "model.safetensors")


def tensor(block: int, *words: str) -> np.ndarray:
    """The one tensor of a block whose name holds all words."""
    (name,) = [n for n in stored() if f".{block}." in n and all(w in n for w in words)]
    return stored()[name].astype(np.float64)


def norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 2))


@pytest.mark.parametrize("block", BLOCKS)
def test_bounds_of_norms_and_layers(table: pd.DataFrame, block: int) -> None:
    found = {c: value(table, "rate_of_change_bound", c, block) for c in
             ("norm1", "norm2", "fc1", "fc2")}  # fmt: skip
    before = np.abs(tensor(block, "layernorm_before", "weight")).max()
    after = np.abs(tensor(block, "layernorm_after", "weight")).max()
    fc1 = norm(tensor(block, "intermediate", "weight"))
    (name,) = [n for n in stored() if n.endswith(f".{block}.output.dense.weight")]
    fc2 = norm(stored()[name].astype(np.float64))
    expected = {"norm1": before, "norm2": after, "fc1": fc1, "fc2": fc2}
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("block", BLOCKS)
def test_bound_of_attention_sums_over_heads_that_are_rows(
    table: pd.DataFrame, embedded: torch.Tensor, block: int
) -> None:
    """A_h = Q_h^T K_h / sqrt(dh), r the mean over inputs of the root mean square token."""
    q, k, v = (tensor(block, f".{n}.weight") for n in ("query", "key", "value"))
    o = tensor(block, "attention.output.dense.weight")
    r = np.mean([np.sqrt((x**2).sum(1).mean()) for x in embedded.double().numpy()])
    total = 0.0
    for h in range(HEADS):
        at = slice(WIDTH * h, WIDTH * (h + 1))
        a = q[at].T @ k[at] / np.sqrt(WIDTH)
        inner = 3 * TOKENS + (12 * TOKENS + 3) * r**4 * norm(a) ** 2
        total += norm(o[:, at]) * norm(v[at]) * np.sqrt(inner)
    found = value(table, "rate_of_change_bound", "attention", block)
    assert found == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_component_is_fed_the_embedding(
    table: pd.DataFrame, model: torch.nn.Module, embedded: torch.Tensor, block: int
) -> None:
    """LN1(x), MHA(x) with its output projection and no residual, LN2(x), FC1 before its
    activation, FC2 on [x, 0, 0]: by matrix products from the file, none of the model's layers."""
    x = embedded.double().numpy()

    def layer_norm(which: str) -> np.ndarray:
        gain, shift = (tensor(block, which, kind) for kind in ("weight", "bias"))
        centred = x - x.mean(-1, keepdims=True)
        eps = model.config.layer_norm_eps
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * gain + shift

    def project(name: str) -> np.ndarray:
        y = x @ tensor(block, f".{name}.weight").T + tensor(block, f".{name}.bias")
        return y.reshape(*y.shape[:2], HEADS, WIDTH).transpose(0, 2, 1, 3)

    q, k, v = (project(n) for n in ("query", "key", "value"))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(WIDTH)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    (fc2,) = [n for n in stored() if n.endswith(f".{block}.output.dense.weight")]
    outputs = {
        "norm1": layer_norm("layernorm_before"),
        "norm2": layer_norm("layernorm_after"),
        "attention": mixed @ tensor(block, "attention.output.dense.weight").T,
        "fc1": x @ tensor(block, "intermediate", "weight").T,
        "fc2": x @ stored()[fc2].astype(np.float64)[:, : x.shape[-1]].T,
    }
    for component, fx in outputs.items():
        ratios = [
            np.linalg.norm(fx[i] - fx[i - s]) / np.linalg.norm(x[i] - x[i - s])
            for i in range(6)
            for s in range(1, 5)
        ]
        found = value(table, "rate_of_change_embedding", component, block)
        assert found == pytest.approx(np.mean(ratios), rel=1e-4), component
