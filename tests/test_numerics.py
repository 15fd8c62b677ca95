"""Numerical faults end to end: from a checkpoint to the rows, and to the gate's verdict."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
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
