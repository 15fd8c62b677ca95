"""Numerical faults end to end: from a checkpoint to the rows, and to the gate's verdict."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import plastiscope
from plastiscope.config import Settings
from plastiscope.errors import NOT_ENOUGH_EVIDENCE, PASSED

STEPS = 6


def save(folder: Path, bad: dict[str, float]) -> Path:
    """A run of six checkpoints of one network that hardly moves; in the last one, the given
    entries of the named weights."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    for step in range(STEPS):
        state = {k: t + 1e-3 * torch.randn_like(t) for k, t in net.state_dict().items()}
        for name, value in bad.items() if step == STEPS - 1 else ():
            state[name][0, 0] = value
        torch.save({"model": state, "step": step}, folder / f"step_{step}.pt")
    inputs = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    np.savez(folder / "probe.npz", inputs=inputs)
    return folder


def weights_at_the_end(table: pd.DataFrame) -> pd.DataFrame:
    last = table[(table["step"] == STEPS - 1) & (table["subject"] == "weight")]
    return last[last["metric"] == "effective_rank"].set_index("tensor")


def test_nan_and_infinity_are_null_and_stop_the_gate(tmp_path: Path) -> None:
    """N02: NaN in one layer, infinity in another; the third goes on, the gate doesn't pass."""
    run = save(tmp_path / "run", {"0.weight": math.nan, "4.weight": math.inf})
    analysis = plastiscope.analyze(run, Settings(out=tmp_path / "out"))
    ranks = weights_at_the_end(analysis.table())
    assert ranks["status"].to_dict() == {
        "0.weight": "non_finite", "2.weight": "ok", "4.weight": "non_finite",
    }  # fmt: skip
    assert pd.isna(ranks.loc["0.weight", "value"]) and pd.isna(ranks.loc["4.weight", "value"])
    assert ranks.loc["2.weight", "value"] > 5
    assert plastiscope.check(tmp_path / "out").status == NOT_ENOUGH_EVIDENCE
    sound = save(tmp_path / "sound", {})
    plastiscope.analyze(sound, Settings(out=tmp_path / "out2"))
    assert plastiscope.check(tmp_path / "out2").status == PASSED


def test_threads_do_not_move_a_verdict(tmp_path: Path) -> None:
    """N13: one thread against two, equal to 1e-9 (features, summed in float32: 1e-6), and the gate
    finds no regression between them."""
    run = save(tmp_path / "run", {})
    before = torch.get_num_threads()
    tables = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            settings = Settings(out=tmp_path / f"out{count}")
            tables.append(plastiscope.analyze(run, settings).table())
    finally:
        torch.set_num_threads(before)
    one, two = tables
    assert (one["status"] == two["status"]).all()
    ranks = (one["metric"] == "effective_rank") & (one["subject"] == "weight")
    np.testing.assert_allclose(one[ranks]["value"], two[ranks]["value"], rtol=1e-9)
    seen = (one["metric"] == "effective_rank") & (one["subject"] == "feature")
    np.testing.assert_allclose(one[seen]["value"], two[seen]["value"], rtol=1e-6)
    result = plastiscope.check(tmp_path / "out2", baseline=tmp_path / "out1")
    assert result.status == PASSED and result.compared > 0


def test_a_projection_that_starts_at_zero_is_no_alarm(tmp_path: Path) -> None:
    """N04: zero-initialised at step 0 by design; rank 0 with its status there, and a rank later."""
    folder = tmp_path / "run"
    folder.mkdir()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    for step in range(STEPS):
        state = {**net.state_dict(), "2.weight": step * net.state_dict()["2.weight"]}
        torch.save({"model": state, "step": step}, folder / f"step_{step}.pt")
    table = plastiscope.analyze(folder, Settings(out=tmp_path / "out")).table()
    head = table[(table["tensor"] == "2.weight") & (table["metric"] == "effective_rank")]
    assert head["value"].iloc[0] == 0 and head["status"].iloc[0] == "zero_matrix"
    assert (head["value"].iloc[1:] > 2).all() and set(head["status"].iloc[1:]) == {"ok"}
    (found,) = plastiscope.diagnose(table)
    assert not found.verdict.startswith("Losing plasticity")


FUNCTIONAL = """
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self, first, act, after, embed=None):
        super().__init__()
        self.embed = embed
        self.fc1, self.act, self.after = first, act, after
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        return self.fc2(self.after(self.act(self.fc1(x))))

def vectors(): return Net(nn.Linear(6, 8), F.relu, lambda x: x)
def tokens(): return Net(nn.Linear(6, 8), F.relu, lambda x: x.mean(1), nn.Embedding(40, 6))
def images(): return Net(nn.Conv2d(3, 8, 3), F.relu, lambda x: x.mean((2, 3)))
def gelu(): return Net(nn.Linear(6, 8), F.gelu, lambda x: x)
"""
SHAPES = {"vectors": (6,), "tokens": (5,), "images": (3, 7, 7), "gelu": (6,)}


def units_of(folder: Path, build: str, weight: torch.Tensor, bias: torch.Tensor) -> pd.DataFrame:
    """The rows of a network with a functional activation, and this first layer."""
    (folder / "run").mkdir()
    (folder / "net.py").write_text(FUNCTIONAL)
    state = {
        "fc1.weight": weight, "fc1.bias": bias, "fc2.weight": torch.ones(3, 8) * weight.any(),
        "fc2.bias": torch.zeros(3),
    }  # fmt: skip
    random = np.random.default_rng(0)
    inputs = random.normal(size=(32, *SHAPES[build])).astype(np.float32)
    if build == "tokens":
        state["embed.weight"] = torch.randn(40, 6)
        inputs = random.integers(0, 40, (32, *SHAPES[build]))
    torch.save({"model": state, "step": 1}, folder / "run" / "step_1.pt")
    np.savez(folder / "run" / "probe.npz", inputs=inputs)
    settings = Settings(out=folder / "out", model=f"{folder / 'net.py'}:{build}")
    table = plastiscope.analyze(folder / "run", settings).table()
    return table[table["component"] == "activation"]


def rows_of(table: pd.DataFrame, metric: str, parameters: str = "") -> list[tuple[float, str]]:
    chosen = table[(table["metric"] == metric) & (table["parameters"] == parameters)]
    return list(zip(chosen["value"], chosen["status"], strict=True))


def test_an_all_zero_network_with_a_functional_gelu_is_not_healthy(tmp_path: Path) -> None:
    """N14, N15: its units are all dormant and dead, its features have rank 0, nothing is NaN."""
    table = units_of(tmp_path, "gelu", torch.zeros(8, 6), torch.zeros(8))
    for tau in ("0", "0.025", "0.1"):
        assert rows_of(table, "dormant_fraction", f"tau={tau}") == [(1.0, "layer_dead")]
    assert rows_of(table, "dead_fraction") == [(1.0, "layer_dead")]
    assert rows_of(table, "active_fraction") == [(0.0, "layer_dead")]
    assert rows_of(table, "effective_rank") == [(0.0, "zero_matrix")]


@pytest.mark.parametrize("build", ["vectors", "tokens", "images"])
def test_half_of_the_units_dead_is_a_half_in_any_shape(build: str, tmp_path: Path) -> None:
    """N14: inputs of 2, 3 and 4 dimensions; a unit of a convolution is a channel."""
    torch.manual_seed(0)
    shape = (8, 3, 3, 3) if build == "images" else (8, 6)
    bias = torch.where(torch.arange(8) % 2 == 0, -100.0, 0.5)
    table = units_of(tmp_path, build, torch.randn(shape), bias)
    assert rows_of(table, "dead_fraction") == [(0.5, "ok")]
    assert rows_of(table, "dormant_fraction", "tau=0") == [(0.5, "ok")]
    assert rows_of(table, "dormant_fraction", "tau=0.025") == [(0.5, "ok")]
    assert 0.2 < rows_of(table, "active_fraction")[0][0] < 0.5
    assert set(table[table["subject"] == "unit"]["columns"]) == {8}
