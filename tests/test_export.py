"""Exports are opened by the trackers' own readers; steps and values are those of the tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from plastiscope import store
from plastiscope.errors import NotEnoughEvidenceError, UsageError
from plastiscope.export import to_mlflow, to_tensorboard, to_wandb
from plastiscope.store import Row

RANK = "effective_rank/q/block 1/head 2/all/feature"
DORMANT = "dormant_fraction (tau=0.1)/activation/block 0/unit"


@pytest.fixture
def table(tmp_path: Path) -> pd.DataFrame:
    for step in (1000, 50):
        rows = [
            Row("effective_rank", "feature", step / 8, "q", 1, 2, "all"),
            Row("dormant_fraction", "unit", 0.25, "activation", 0, parameters="tau=0.1"),
            Row("effective_rank", "feature", None, "k", 1, 2, "all", status="non_finite"),
        ]
        shared = {"run": "r", "checkpoint": str(step), "step": step, "task": None}
        shared |= {"branch": "raw", "checkpoint_fingerprint": "f"}
        store.write(store.checkpoint_file(tmp_path, "r", str(step)), rows, shared, "k", {})
    return store.read(tmp_path)


def test_tensorboard_reads_it(table: pd.DataFrame, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    to_tensorboard(table.assign(value=7.0), tmp_path / "events")
    (folder,) = to_tensorboard(table, tmp_path / "events")
    events = EventAccumulator(str(folder))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == [DORMANT, RANK]
    assert [(e.step, e.value) for e in events.Scalars(RANK)] == [(50, 6.25), (1000, 125.0)]


def test_mlflow_reads_it(table: pd.DataFrame, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    to_mlflow(table.assign(value=7.0), tmp_path / "ml")
    to_mlflow(table, tmp_path / "ml")
    client = MlflowClient(f"sqlite:///{tmp_path / 'ml' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("plastiscope").experiment_id
    (run,) = client.search_runs([experiment])
    history = client.get_metric_history(run.info.run_id, RANK)
    assert [(m.step, m.value) for m in history] == [(50, 6.25), (1000, 125.0)]


def test_wandb_reads_it(table: pd.DataFrame, tmp_path: Path) -> None:
    (folder,) = to_wandb(table, tmp_path / "wb")
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", folder]
    quiet = os.environ | {"WANDB_ERROR_REPORTING": "false"}
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=quiet).stdout
    records = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    assert [(h["_step"], h[RANK]) for h in history] == [(50, 6.25), (1000, 125.0)]
    assert all(h[DORMANT] == 0.25 for h in history)
    (run,) = [r["run"] for r in records if r["type"] == "run"]
    assert (run["display_name"], run["project"]) == ("r", "plastiscope")
    assert folder.name.startswith("offline-run-")
    assert '"host"' not in told and not (folder / "files" / "requirements.txt").exists()


@pytest.mark.parametrize("write", [to_tensorboard, to_mlflow, to_wandb])
def test_a_file_in_the_folder_s_place_is_one_clear_line(
    table: pd.DataFrame, tmp_path: Path, write: Callable[[pd.DataFrame, Path], list[Path]]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"can't write in .*file: File exists: name another"):
        write(table, tmp_path / "file")


def test_nothing_to_export_says_so(table: pd.DataFrame, tmp_path: Path) -> None:
    with pytest.raises(NotEnoughEvidenceError):
        to_tensorboard(table.assign(value=float("nan")), tmp_path / "none")
