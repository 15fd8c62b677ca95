"""The main job on the sample runs: the rows against values computed another way, from the files.

The oracles use numpy's SVD, the libraries' own models and plain loops, never plastiscope's parts.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import plastiscope
from plastiscope.analysis import Analysis
from plastiscope.config import Settings
from plastiscope.diagnosis import SIGNS

SAMPLES = Path(__file__).parents[1] / "sample_checkpoints"
RUNS = ("mlp", "cnn", "vit", "gpt")


@pytest.fixture(scope="module")
def analyses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Analysis]:
    """The first and the last checkpoint of every sample run, measured with no options."""
    settings = Settings(out=tmp_path_factory.mktemp("out"), every=1000)
    return {
        run: plastiscope.analyze(
            SAMPLES / run, dataclasses.replace(settings, out=settings.out / run)
        )
        for run in RUNS
    }


@pytest.fixture(scope="module")
def tables(analyses: dict[str, Analysis]) -> dict[str, pd.DataFrame]:
    last = {}
    for run, analysis in analyses.items():
        table = analysis.table()
        last[run] = table[table["step"] == table["step"].max()]
    return last


def value(table: pd.DataFrame, metric: str, **where: Any) -> float:
    """The one value of these coordinates; a coordinate that isn't given must be null."""
    chosen = table[(table["metric"] == metric)]
    for column in ("component", "block", "head", "tokens", "subject"):
        given = where.get(column)
        match = chosen[column].isna() if given is None else chosen[column] == given
        chosen = chosen[match]
    if "parameters" in where:
        chosen = chosen[chosen["parameters"] == where["parameters"]]
    (row,) = chosen.to_dict("records")
    return float(row["value"])


def effective_rank(matrix: Any) -> float:
    sigma = np.linalg.svd(np.asarray(matrix, dtype=np.float64), compute_uv=False)
    p = sigma / sigma.sum()
    p = p[p > 0]
    return float(np.exp(-(p * np.log(p)).sum()))


def last_checkpoint(run: str, pattern: str) -> Path:
    def digits(path: Path) -> list[int]:
        return [int(d) for d in re.findall(r"\d+", path.name)]

    return max((SAMPLES / run).glob(pattern), key=digits)


def probe(run: str) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = np.load(SAMPLES / run / "probe.npz")
    return torch.from_numpy(arrays["inputs"]), torch.from_numpy(arrays["labels"])


@pytest.mark.parametrize("run", RUNS)
def test_every_component_of_every_run_is_measured(
    run: str, analyses: dict[str, Analysis], tables: dict[str, pd.DataFrame]
) -> None:
    (analyzed,) = analyses[run].runs
    assert analyses[run].failures == () and analyzed.missing is None
    assert len(analyzed.run.checkpoints) == 2
    assert analyzed.run.checkpoints[0].step == 0
    table = tables[run]
    blocks = {"mlp": 3, "cnn": 3, "vit": 6, "gpt": 4}[run]
    assert sorted(table["block"].dropna().unique()) == list(range(blocks))
    features = table[(table["metric"] == "effective_rank") & (table["subject"] == "feature")]
    without = features["component"] == "network"
    assert set(features.loc[without, "status"]) == (set() if run == "vit" else {"no_cls_token"})
    features = features[~without]
    names = {
        "vit": "norm1 q k v attention_output residual1 norm2 fc1 activation fc2 residual2",
        "gpt": "norm1 q k v attention_output residual1 norm2 fc1 activation fc2 residual2",
        "mlp": "fc activation",
    }
    if run in names:
        for block in range(blocks):
            at = features[(features["block"] == block) & features["head"].isna()]
            assert set(at.loc[at["tokens"] == "all", "component"]) == set(names[run].split())
    coverage = table[table["metric"] == "coverage"]
    assert coverage["value"].tolist() == [1.0, 1.0]
    outside = {"embedding", "final_norm", "head"} if run in ("vit", "gpt") else {"head"}
    assert set(features.loc[features["block"].isna(), "component"]) == outside
    assert features["value"].notna().all() and (features["value"] <= features["maximum"]).all()


def test_mlp_against_a_plain_forward_pass(tables: dict[str, pd.DataFrame]) -> None:
    table = tables["mlp"]
    state = torch.load(last_checkpoint("mlp", "task_*.pt"), weights_only=True)["model_state_dict"]
    inputs, labels = probe("mlp")
    x, layers = inputs.double(), [0, 2, 4, 6]
    for block, layer in enumerate(layers):
        weight, bias = state[f"net.{layer}.weight"].double(), state[f"net.{layer}.bias"].double()
        x = x @ weight.T + bias
        name, at = ("fc", block) if layer != 6 else ("head", None)
        found = value(table, "effective_rank", component=name, block=at, subject="weight")
        assert found == pytest.approx(effective_rank(weight), rel=1e-9)
        found = value(
            table, "effective_rank", component=name, block=at, subject="feature", tokens="all"
        )
        assert found == pytest.approx(effective_rank(x), rel=1e-4)
        if layer == 6:
            break
        x = x.relu()
        units = {"component": "activation", "block": block, "subject": "unit", "tokens": "all"}
        score = x.mean(0) / x.mean()
        for tau in ("0", "0.01", "0.025", "0.1"):
            found = value(table, "dormant_fraction", **units, parameters=f"tau={tau}")
            assert found == pytest.approx(float((score <= float(tau)).double().mean()))
        assert value(table, "dead_fraction", **units) == float((x == 0).all(0).double().mean())
        active = float((x > 0).double().mean())
        assert value(table, "active_fraction", **units) == pytest.approx(active, abs=1e-6)
    outputs = {"component": "head", "subject": "output"}
    accuracy = float((x.argmax(1) == labels).double().mean())
    assert value(table, "accuracy", **outputs) == pytest.approx(accuracy)
    loss = float(nn.functional.cross_entropy(x, labels))
    assert value(table, "loss", **outputs) == pytest.approx(loss, rel=1e-5)


def test_cnn_against_a_network_built_by_hand(tables: dict[str, pd.DataFrame]) -> None:
    table = tables["cnn"]
    stored = torch.load(last_checkpoint("cnn", "*.ckpt"), weights_only=True)["state_dict"]
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    net.load_state_dict({key.removeprefix("net."): t for key, t in stored.items()})
    inputs, labels = probe("cnn")
    with torch.no_grad():
        conv = net[0](inputs)
        logits = net(inputs)
    units = {"component": "activation", "block": 0, "subject": "unit", "tokens": "all"}
    channels = conv.relu().double().abs().mean((0, 2, 3))
    dormant = float((channels / channels.mean() <= 0.025).double().mean())
    found = value(table, "dormant_fraction", **units, parameters="tau=0.025")
    assert found == pytest.approx(dormant)
    active = float((conv > 0).double().mean())
    assert value(table, "active_fraction", **units) == pytest.approx(active, abs=1e-6)
    kernel = stored["net.3.weight"].flatten(1)
    found = value(table, "effective_rank", component="conv", block=1, subject="weight")
    assert found == pytest.approx(effective_rank(kernel), rel=1e-9)
    accuracy = float((logits.argmax(1) == labels).double().mean())
    assert value(table, "accuracy", component="head", subject="output") == pytest.approx(accuracy)


def test_vit_against_transformers_own_outputs(tables: dict[str, pd.DataFrame]) -> None:
    transformers = pytest.importorskip("transformers")
    table = tables["vit"]
    folder = last_checkpoint("vit", "checkpoint-*")
    model = transformers.ViTForImageClassification.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    inputs, labels = probe("vit")
    with torch.no_grad():
        out = model(inputs, output_attentions=True, output_hidden_states=True)
    for block, maps in enumerate(out.attentions):
        entropy = -torch.special.xlogy(maps.double(), maps.double()).sum(-1).mean((0, 2))
        for head in range(4):
            place = {"component": "attention", "block": block, "subject": "attention"}
            found = value(table, "attention_entropy", **place, head=head)
            assert found == pytest.approx(float(entropy[head]), abs=1e-5)
    for block in range(5):
        hidden = out.hidden_states[block + 1]
        place = {"component": "residual2", "block": block, "subject": "feature"}
        found = value(table, "effective_rank", **place, tokens="cls")
        assert found == pytest.approx(effective_rank(hidden[:, 0]), rel=1e-4)
        found = value(table, "effective_rank", **place, tokens="all")
        assert found == pytest.approx(effective_rank(hidden.flatten(0, 1)), rel=1e-4)
    stored = load_file(folder / "model.safetensors")
    names = {"q": "q", "k": "k", "v": "v"}
    for name, key in names.items():
        weight = next(t for n, t in stored.items() if _is_projection(n, key, block=3))
        for head in range(4):
            found = value(
                table, "effective_rank", component=name, block=3, head=head, subject="weight"
            )
            assert found == pytest.approx(effective_rank(weight[8 * head : 8 * head + 8]), rel=1e-9)
    accuracy = float((out.logits.argmax(1) == labels).double().mean())
    assert value(table, "accuracy", component="head", subject="output") == pytest.approx(accuracy)


def _is_projection(name: str, letter: str, block: int) -> bool:
    word = {"q": ("query", "q_proj"), "k": ("key", "k_proj"), "v": ("value", "v_proj")}[letter]
    return f".{block}." in name and name.endswith(tuple(f"{w}.weight" for w in word))


def test_gpt_against_attention_by_hand(tables: dict[str, pd.DataFrame]) -> None:
    table = tables["gpt"]
    stored = torch.load(last_checkpoint("gpt", "ckpt_*.pt"), weights_only=True)
    state = {k.removeprefix("_orig_mod."): t.double() for k, t in stored["model"].items()}
    args = stored["model_args"]
    heads, d = args["n_head"], args["n_embd"]
    tokens, labels = probe("gpt")
    x = state["transformer.wte.weight"][tokens]
    x = x + state["transformer.wpe.weight"][: tokens.shape[1]]
    norm = lambda x, n: nn.functional.layer_norm(  # noqa: E731
        x, (d,), state[f"{n}.weight"], state.get(f"{n}.bias")
    )
    linear = lambda x, n: nn.functional.linear(  # noqa: E731
        x, state[f"{n}.weight"], state.get(f"{n}.bias")
    )
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    for block in range(args["n_layer"]):
        at = f"transformer.h.{block}"
        qkv = linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").split(d, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv)
        scores = (q @ k.mT / (d // heads) ** 0.5).masked_fill(~mask, -torch.inf)
        maps = scores.softmax(-1)
        entropy = -torch.special.xlogy(maps, maps).sum(-1).mean((0, 2))
        for head in range(heads):
            place = {"block": block, "head": head}
            found = value(
                table, "attention_entropy", component="attention", subject="attention", **place
            )
            assert found == pytest.approx(float(entropy[head]), abs=1e-5)
            found = value(
                table, "effective_rank", component="v", subject="feature", tokens="all", **place
            )
            assert found == pytest.approx(effective_rank(v[:, head].flatten(0, 1)), rel=1e-4)
        mixed = (maps @ v).transpose(1, 2).flatten(2)
        x = x + linear(mixed, f"{at}.attn.c_proj")
        inner = nn.functional.gelu(linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc"))
        x = x + linear(inner, f"{at}.mlp.c_proj")
    logits = norm(x, "transformer.ln_f") @ state["transformer.wte.weight"].T
    loss = float(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    assert value(table, "loss", component="head", subject="output") == pytest.approx(loss, rel=1e-5)


def test_tied_weights_count_once(tables: dict[str, pd.DataFrame]) -> None:
    stored = torch.load(last_checkpoint("gpt", "ckpt_*.pt"), weights_only=True)["model"]
    tensors = {t.data_ptr(): t for t in stored.values()}.values()
    total = sum(float(t.double().abs().sum()) for t in tensors)
    count = sum(t.numel() for t in tensors)
    found = value(
        tables["gpt"],
        "weight_magnitude",
        component="network",
        subject="weight",
        parameters="pooled",
    )
    assert found == pytest.approx(total / count, rel=1e-9)


@pytest.mark.parametrize("run", RUNS)
def test_the_verdict_on_runs_that_lost_plasticity(run: str, tmp_path: Path) -> None:
    needed = {sign.metric for sign in SIGNS} | {"spectral_norm"}
    settings = Settings(out=tmp_path, only=tuple(sorted(needed)))
    (found,) = plastiscope.diagnose(plastiscope.analyze(SAMPLES / run, settings).table())
    assert found.verdict.startswith("Losing plasticity")
    assert "features lose rank" in {f.sign.name for f in found.present}
    assert found.checkpoints >= 8 and found.first == 0


@pytest.mark.parametrize("run", RUNS)
def test_the_evidence_covers_every_checkpoint(run: str) -> None:
    """And says that the last one learns a task never seen worse than a fresh network."""
    found = pd.read_csv(SAMPLES / run / "trainability.csv", index_col="from_task")
    (discovered,) = plastiscope.discover(SAMPLES / run)
    assert len(found) == len(discovered.checkpoints) + 1 and found.index[0] == "fresh"
    (score,) = [c for c in found.columns if c in ("accuracy_mean", "loss_mean")]
    sign = 1 if score == "accuracy_mean" else -1
    lost = sign * (found.loc["fresh", score] - found[score])
    np.testing.assert_allclose(found["lost_mean"], lost, atol=1.1e-4)
    error = found["lost_sd"] / np.sqrt(found["seeds"])
    assert found["lost_mean"].iloc[-1] > 10 * error.iloc[-1] > 0
    assert abs(found["lost_mean"].iloc[1]) <= 3 * error.iloc[1]
