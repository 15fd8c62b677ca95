"""The loop: resumed, content-addressed, one bad file doesn't stop the others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import plastiscope
from plastiscope import metrics as plastiscope_metrics
from plastiscope import store
from plastiscope.analysis import choose_metrics
from plastiscope.config import Settings
from plastiscope.errors import NotEnoughEvidenceError, UnreadableError, UsageError


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    )


def save(run: Path, steps: range, seed: int = 0, probe: bool = True) -> Path:
    """A run of random networks, each with its step, and a labelled probe."""
    run.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    for step in steps:
        net = network()
        state = {"model_state_dict": net.state_dict(), "step": step}
        torch.save(state, run / f"step_{step}.pt")
    if probe:
        random = np.random.default_rng(0)
        inputs = random.normal(size=(40, 6)).astype(np.float32)
        np.savez(run / "probe.npz", inputs=inputs, labels=random.integers(0, 3, 40))
    return run


def rows(table: pd.DataFrame) -> pd.DataFrame:
    """The table in one order, for comparing analyses."""
    columns = list(table.columns)
    return (
        table.astype(object)
        .sort_values(columns, key=lambda c: c.astype(str))
        .reset_index(drop=True)
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save(tmp_path / "run", range(0, 300, 100))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(out=tmp_path / "out", batch_size=16)


def test_a_finished_run_is_not_measured_again(run: Path, settings: Settings) -> None:
    """O09: a second analysis adds no row."""
    first = plastiscope.analyze(run, settings)
    assert first.runs[0].measured == 3
    before = {f: f.stat().st_mtime_ns for f in first.runs[0].files}
    second = plastiscope.analyze(run, settings)
    assert second.runs[0].measured == 0
    assert {f: f.stat().st_mtime_ns for f in second.runs[0].files} == before
    pd.testing.assert_frame_equal(first.table(), second.table())


def test_a_new_checkpoint_costs_one(run: Path, settings: Settings) -> None:
    """O09: a further checkpoint adds its own rows only."""
    plastiscope.analyze(run, settings)
    save(run, range(300, 400, 100), seed=1, probe=False)
    again = plastiscope.analyze(run, settings)
    assert again.runs[0].measured == 1
    assert sorted(again.table()["step"].unique()) == [0, 100, 200, 300]


def test_a_replaced_checkpoint_is_measured_anew(run: Path, settings: Settings) -> None:
    """O09: a file of the same name and other content replaces its rows."""
    old = plastiscope.analyze(run, settings).table()
    save(run, range(100, 101), seed=9, probe=False)
    analysis = plastiscope.analyze(run, replace(settings, only=("effective_rank",)))
    assert analysis.runs[0].measured == 3
    new = plastiscope.analyze(run, settings).table()

    def rank(table: pd.DataFrame, step: int) -> float:
        at = (table["step"] == step) & (table["metric"] == "effective_rank")
        weights = table[at & (table["subject"] == "weight") & (table["component"] == "head")]
        return float(weights["value"].iloc[0])

    assert rank(new, 100) != rank(old, 100)
    assert rank(new, 200) == rank(old, 200)
    assert len(new) == len(old)


def test_another_probe_is_another_analysis(run: Path, settings: Settings) -> None:
    before = plastiscope.analyze(run, settings).table()
    inputs = np.random.default_rng(5).normal(size=(40, 6)).astype(np.float32)
    np.savez(run / "probe.npz", inputs=inputs)
    analysis = plastiscope.analyze(run, settings)
    assert analysis.runs[0].measured == 3
    probes = analysis.table()["probe"].dropna().unique()
    assert len(probes) == 1 and probes[0] not in set(before["probe"].dropna())


def test_rows_do_not_depend_on_the_batch_size_or_on_other_checkpoints(
    tmp_path: Path, run: Path, settings: Settings
) -> None:
    only = tuple(m for m in ("effective_rank", "dormant_fraction", "loss", "weight_magnitude"))
    whole = plastiscope.analyze(run, replace(settings, only=only)).table()
    alone = replace(settings, out=tmp_path / "alone", batch_size=7, only=only, steps="200")
    part = plastiscope.analyze(run, alone).table()
    pd.testing.assert_frame_equal(
        rows(whole[whole["step"] == 200]), rows(part), check_exact=False, rtol=1e-6
    )


def test_a_bad_file_costs_only_itself(run: Path, settings: Settings) -> None:
    (run / "step_300.pt").write_bytes((run / "step_200.pt").read_bytes()[:900])
    analysis = plastiscope.analyze(run, settings)
    assert sorted(analysis.table()["step"].unique()) == [0, 100, 200]
    (line,) = analysis.failures
    assert "step_300.pt" in line and "truncated" in line and "\n" not in line
    with pytest.raises(UnreadableError, match=r"step_300\.pt"):
        plastiscope.analyze(run, replace(settings, strict=True))


def test_nothing_readable_is_an_error(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.pt").write_bytes(b"")
    with pytest.raises(UnreadableError, match=r"a\.pt"):
        plastiscope.analyze(tmp_path / "bad", settings)
    assert not settings.out.exists()


def test_only_vectors_and_only_features_is_not_enough(tmp_path: Path, settings: Settings) -> None:
    folder = tmp_path / "vectors"
    folder.mkdir()
    torch.save({"a": torch.ones(3), "b": torch.ones(4)}, folder / "step_1.pt")
    with pytest.raises(NotEnoughEvidenceError, match="nothing to measure"):
        plastiscope.analyze(folder, replace(settings, only=("effective_rank",)))


def test_unknown_metrics_and_devices_are_named(run: Path, settings: Settings) -> None:
    with pytest.raises(UsageError, match="did you mean 'effective_rank'"):
        plastiscope.analyze(run, replace(settings, only=("efective_rank",)))
    with pytest.raises(UsageError, match="--device nowhere"):
        plastiscope.analyze(run, replace(settings, device="nowhere"))
    assert plastiscope.analyze(run, settings).runs[0].measured == 3
    with pytest.raises(UsageError, match="--device nowhere"):
        plastiscope.analyze(run, replace(settings, device="nowhere"))


def test_only_and_with_add_up() -> None:
    only = choose_metrics(Settings(only=("srank",), extra=("sensitivity",)))
    assert only == {"srank", "rate_of_change", "rate_of_change_embedding", "rate_of_change_bound"}
    more = choose_metrics(Settings(extra=("ntk_trace",)))
    assert more == plastiscope_metrics.default_metrics() | {"ntk_trace"}


def test_a_probe_of_the_wrong_shape_keeps_what_was_written(run: Path, settings: Settings) -> None:
    before = plastiscope.analyze(run, settings).table()
    np.savez(run / "probe.npz", inputs=np.zeros((4, 7), dtype=np.float32))
    with pytest.raises(UsageError, match=r"7.*6|6.*7"):
        plastiscope.analyze(run, settings)
    pd.testing.assert_frame_equal(store.read(settings.out), before)


def test_two_runs_of_one_name_are_not_mixed(tmp_path: Path, settings: Settings) -> None:
    a = save(tmp_path / "a" / "run", range(0, 200, 100))
    b = save(tmp_path / "b" / "run", range(500, 700, 100), seed=3)
    with pytest.raises(UsageError, match="two runs are called 'run'"):
        plastiscope.analyze([a, b], settings)
    plastiscope.analyze(a, settings)
    with pytest.raises(UsageError, match="already holds a run called 'run'"):
        plastiscope.analyze(b, settings)


def test_without_a_model_the_weights_are_still_measured(tmp_path: Path, settings: Settings) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    for step in range(3):
        torch.manual_seed(step)
        branches = {f"{side}.tower.weight": torch.randn(5, 9) for side in ("left", "right")}
        torch.save(branches, folder / f"step_{step}.pt")
    analysis = plastiscope.analyze(folder, settings)
    assert "--model" in str(analysis.runs[0].missing)
    table = analysis.table()
    lost = table[table["status"] == "no_model"]
    assert set(table[table["status"] != "no_model"]["subject"]) == {"weight", "network"}
    assert lost["value"].isna().all() and set(lost["component"]) == {"network"}
    named = set(zip(lost["metric"], lost["subject"], strict=True))
    assert {("effective_rank", "feature"), ("dead_fraction", "unit"), ("loss", "output")} <= named
    assert ("attention_entropy", "attention") in named and "ntk_trace" not in set(lost["metric"])
    covered = table[table["metric"] == "coverage"].set_index("parameters")["value"]
    assert set(covered["of=parameters"]) == {1.0}
    ranks = table[(table["metric"] == "effective_rank") & (table["step"] == 0)]
    ranks = ranks[ranks["subject"] == "weight"]
    assert set(ranks["tensor"]) == {"left.tower.weight", "right.tower.weight"}


class Counting:
    """A reporter that counts."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def say(self, line: str) -> None:
        self.seen.append(line)

    def start(self, run: str, total: int) -> None:
        self.seen.append((run, total))

    def advance(self, checkpoint: str, step: int, resumed: bool) -> None:
        self.seen.append((checkpoint, step, resumed))


def test_the_reporter_hears_of_everything(run: Path, settings: Settings) -> None:
    reporter = Counting()
    plastiscope.analyze(run, settings, reporter)
    assert ("run", 3) in reporter.seen
    steps = [s for s in reporter.seen if isinstance(s, tuple) and len(s) == 3]
    assert steps == [(f"step_{s}.pt", s, False) for s in (0, 100, 200)]
    assert any("relu" in line for line in reporter.seen if isinstance(line, str))


def test_killed_and_resumed_equals_undisturbed(tmp_path: Path) -> None:
    """O09: killed midway and run again gives the rows of one clean run."""
    run = save(tmp_path / "run", range(0, 600, 100))
    command = [sys.executable, "-m", "plastiscope", "analyze", str(run), "--no-figures", "--out"]
    whole = plastiscope.analyze(run, Settings(out=tmp_path / "whole")).table()
    process = subprocess.Popen([*command, str(tmp_path / "killed")], stderr=subprocess.DEVNULL)
    metrics = tmp_path / "killed" / "metrics"
    deadline = time.monotonic() + 120
    while not list(metrics.rglob("*.parquet")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(store.metric_files(tmp_path / "killed")) < 6
    subprocess.run([*command, str(tmp_path / "killed"), "--quiet"], check=True, env=os.environ)
    pd.testing.assert_frame_equal(rows(store.read(tmp_path / "killed")), rows(whole), rtol=1e-9)


def test_the_same_weights_in_another_format_give_the_same_rows(
    tmp_path: Path, run: Path, settings: Settings
) -> None:
    from safetensors.torch import save_file

    other = tmp_path / "elsewhere" / "run"
    other.mkdir(parents=True)
    shutil.copy(run / "probe.npz", other)
    for file in run.glob("step_*.pt"):
        state = torch.load(file, weights_only=True)["model_state_dict"]
        save_file({f"module.{k}": v for k, v in state.items()}, other / f"{file.stem}.safetensors")
    one = plastiscope.analyze(run, settings).table()
    two = plastiscope.analyze(other, replace(settings, out=tmp_path / "out2")).table()
    same = [c for c in one.columns if c not in ("checkpoint", "checkpoint_fingerprint")]
    pd.testing.assert_frame_equal(rows(one[same]), rows(two[same]))


def test_odd_files_beside_each_other_cost_only_themselves(
    tmp_path: Path, settings: Settings
) -> None:
    """One layer without a name, a scalar, a matrix, and nothing but integers."""
    folder = tmp_path / "odd"
    folder.mkdir()
    layer = nn.Linear(4, 3)
    torch.save(layer.state_dict(), folder / "layer.pt")
    torch.save({"scale": torch.tensor(2.0), "m.weight": torch.eye(3)}, folder / "scalar.pt")
    torch.save({"counts": torch.arange(5)}, folder / "integers.pt")
    analysis = plastiscope.analyze(folder, settings)
    empty = [why for run in analysis.runs for why in run.empty.values()]
    assert len(empty) == 1 and "integers.pt" in empty[0]
    table = analysis.table()
    rank = table[(table["metric"] == "effective_rank") & (table["tensor"] == "m.weight")]
    assert rank["value"].tolist() == [pytest.approx(3.0)]
    magnitude = table[(table["metric"] == "weight_magnitude") & (table["tensor"] == "scale")]
    assert magnitude["value"].tolist() == [2.0]


def test_differences_across_a_break_are_null_with_the_reason(
    tmp_path: Path, settings: Settings
) -> None:
    run = save(tmp_path / "run", range(0, 200, 100))
    for step in (200, 300):
        torch.manual_seed(step)
        other = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
        torch.save({"model_state_dict": other.state_dict(), "step": step}, run / f"step_{step}.pt")
    only = ("weight_change", "weight_drift")
    whole = plastiscope.analyze(run, replace(settings, only=(*only, "ntk_drift"))).table()
    drift = whole[whole["metric"] == "ntk_drift"]
    # Every input has the same gradient into the last bias: nothing is left of it when centred.
    constant = drift["component"] == "head.bias"
    assert drift[constant & (drift["step"] != 200)]["status"].unique().tolist() == ["undefined"]
    kinds = drift[~constant].groupby("step")["status"].unique().to_dict()
    assert {step: list(kind) for step, kind in kinds.items()} == {
        100: ["ok"], 200: ["across_break"], 300: ["ok"],
    }  # fmt: skip
    assert drift[drift["step"] == 200]["value"].isna().all()
    places = set(drift[drift["step"] == 200]["component"])
    assert {"network", "head"} <= places == set(drift[drift["step"] == 300]["component"])
    table = whole[whole["component"] == "head"]
    for metric in only:
        rows = table[table["metric"] == metric].set_index("step")
        assert 0 not in rows.index
        assert rows.loc[100, "value"] > 0 and rows.loc[100, "status"] == "ok"
        assert pd.isna(rows.loc[200, "value"]) and rows.loc[200, "status"] == "across_break"
        assert rows.loc[300, "value"] > 0 and rows.loc[300, "status"] == "ok"
        assert rows.loc[300, "segment"] == rows.loc[200, "segment"] != rows.loc[100, "segment"]


def test_an_optimizer_that_says_nothing_is_a_row_with_the_reason(
    tmp_path: Path, settings: Settings
) -> None:
    """At the start it has no state yet; another network's can't be told apart by shape."""
    run = save(tmp_path / "run", range(0, 200, 100))
    net, other = network(), nn.Linear(3, 3)
    for step, model in ((200, net), (300, other)):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
        state = {"model_state_dict": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step}, run / f"step_{step}.pt")
    table = plastiscope.analyze(run, replace(settings, only=("update_to_weight_ratio",))).table()
    found = table.groupby("step")["status"].unique().to_dict()
    assert {step: list(kind) for step, kind in found.items()} == {
        0: ["no_optimizer_state"], 100: ["no_optimizer_state"], 200: ["ok"], 300: ["not_matched"],
    }  # fmt: skip
    assert table["value"].isna().tolist() == [True, True, *[False] * 6, True]


def test_a_new_first_checkpoint_is_told(run: Path, settings: Settings) -> None:
    """Old checkpoints get deleted; drift is then from another one, in all rows alike."""
    plastiscope.analyze(run, settings)
    (run / "step_0.pt").unlink()
    reporter = Counting()
    analyzed = plastiscope.analyze(run, settings, reporter).runs[0]
    assert "run: drift is from step_100.pt now, and was from step_0.pt" in reporter.seen
    facts = [store.read_facts(file)["first"] for file in analyzed.files]
    assert facts == [None, "step_100.pt"]
    again = Counting()
    plastiscope.analyze(run, settings, again)
    assert not any("drift" in str(line) for line in again.seen)


def test_a_probe_without_labels_has_a_reason_for_loss_and_accuracy(
    run: Path, settings: Settings
) -> None:
    np.savez(run / "probe.npz", inputs=np.load(run / "probe.npz")["inputs"])
    table = plastiscope.analyze(run, replace(settings, steps="100")).table()
    found = table[table["metric"].isin(["loss", "accuracy"])]
    assert found["value"].isna().all() and set(found["status"]) == {"no_labels"}
    assert sorted(found["metric"]) == ["accuracy", "loss"]
    assert set(found["component"]) == {"head"} and found["probe"].notna().all()
