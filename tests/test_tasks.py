"""Several labelled probes, one a task: the accuracy on each right after it, and their mean."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import plastiscope
from plastiscope import figures, store
from plastiscope.config import Settings
from plastiscope.errors import UsageError
from plastiscope.export import _steps as steps_of
from plastiscope.figures.kind import choose
from plastiscope.show import View, view

TASKS = 3
Learned = tuple[Path, list[float]]


@pytest.fixture(params=["counted from 1", "named from 0"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Learned:
    """A linear classifier that takes on a new permutation of its classes with each task, and its
    accuracy on each task right after it, computed here."""
    folder = tmp_path / "run"
    folder.mkdir()
    random = np.random.default_rng(0)
    inputs = random.normal(size=(60, 4)).astype(np.float32)
    expected = []
    first = 1 if request.param == "counted from 1" else 0
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(TASKS + 1)]
    state = {"model": nets[0].state_dict(), "step": 0}
    torch.save(state, folder / "start.pt")
    for task, net in enumerate(nets[1:]):
        labels = random.integers(0, 3, 60)
        np.savez(folder / f"probe_task{task}.npz", inputs=inputs, labels=labels)
        right = net(torch.from_numpy(inputs)).argmax(1).numpy() == labels
        expected.append(float(right.mean()))
        saved = {"model": net.state_dict(), "step": 10 * task + 10, "task": task + first}
        torch.save(saved, folder / f"after_{task}.pt")
    return folder, expected


def recorded(out: Path) -> pd.DataFrame:
    table = store.read(out, results=True)
    mean = table["metric"] == "average_accuracy_across_tasks"
    return table[mean | (table["subject"] == "task")]


def test_the_command_line_gives_the_mean_over_tasks(run: Learned, tmp_path: Path) -> None:
    folder, expected = run
    out = tmp_path / "out"
    command = [sys.executable, "-m", "plastiscope", "analyze", str(folder), "-o", str(out)]
    only = "--only=accuracy,loss,average_accuracy_across_tasks"
    done = subprocess.run([*command, only, "--no-figures"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = recorded(out)
    each = rows[rows["metric"] == "accuracy"].sort_values("task")
    assert each["value"].tolist() == pytest.approx(expected)
    assert each["step"].tolist() == [10, 20, 30]
    (mean,) = rows[rows["metric"] == "average_accuracy_across_tasks"].to_dict("records")
    assert mean["value"] == pytest.approx(np.mean(expected)) and mean["parameters"] == "tasks=3"
    assert mean["standard_error"] == pytest.approx(np.std(expected, ddof=1) / 3**0.5)
    assert mean["step"] == 30
    assert "skipped probe" not in done.stderr.decode()
    figure = figures.accuracy.data(store.read(out, results=True), choose())
    shown = {name: part["value"].tolist() for name, part in figure.groupby("series")}
    assert shown["task"] == pytest.approx(expected)
    running = [np.mean(expected[: n + 1]) for n in range(TASKS)]
    assert shown["running mean (AAT)"] == pytest.approx(running)
    assert figure["x"].tolist() == [0, 1, 2] * 2
    told = subprocess.run(
        [sys.executable, "-m", "plastiscope", "show", str(out), "--format=csv",
         "--metric=average_accuracy_across_tasks"], capture_output=True, check=True,
    )  # fmt: skip
    told_table = pd.read_csv(io.BytesIO(told.stdout), float_precision="round_trip")
    assert told_table["value"].tolist() == [mean["value"]]


def test_each_probe_has_its_own_rows_and_tags(run: Learned, tmp_path: Path) -> None:
    folder, expected = run
    analysis = plastiscope.analyze(folder, Settings(out=tmp_path / "out", only=("accuracy",)))
    table = analysis.table()
    rows = view(table, View(metrics=["accuracy"], steps=[10]))
    assert rows["probe"].str.slice(0, 5).tolist() == ["task0", "task1", "task2"]
    wide = view(table, View(metrics=["accuracy"], subjects=["output"], pivot="step"))
    own = [wide.loc[task, str(10 * task + 10)] for task in range(TASKS)]
    assert own == pytest.approx(expected)
    for _, values in steps_of(table):
        tags = [tag for tag, _ in values]
        assert len(set(tags)) == len(tags) == TASKS
    twice = pd.concat([table, table.assign(value=2.0)])
    with pytest.raises(UsageError, match="several values at one place"):
        view(twice, View(metrics=["accuracy"], pivot="step"))


def test_a_task_without_its_checkpoint_leaves_no_mean(run: Learned, tmp_path: Path) -> None:
    folder, _ = run
    (folder / "after_2.pt").unlink()
    plastiscope.analyze(folder, Settings(out=tmp_path / "out"))
    rows = recorded(tmp_path / "out").set_index("metric")
    lost = rows[rows["task"] == 2].to_dict("records")
    assert [(r["status"], pd.isna(r["value"])) for r in lost] == [
        ("no_checkpoint_after_task", True)
    ]
    mean = rows.loc["average_accuracy_across_tasks"]
    assert pd.isna(mean["value"]) and mean["status"] == "non_finite"


def test_one_probe_is_no_stream(run: Learned, tmp_path: Path) -> None:
    folder, _ = run
    for task in (1, 2):
        (folder / f"probe_task{task}.npz").unlink()
    plastiscope.analyze(folder, Settings(out=tmp_path / "out"))
    assert not (tmp_path / "out" / "results").exists()


def test_checkpoints_that_name_no_task_leave_no_mean(run: Learned, tmp_path: Path) -> None:
    folder, _ = run
    for file in folder.glob("after_*.pt"):
        state = torch.load(file, weights_only=True)
        del state["task"]
        torch.save(state, file.with_name(f"at{state['step']}.pt"))
        file.unlink()
    plastiscope.analyze(folder, Settings(out=tmp_path / "out"))
    (mean,) = recorded(tmp_path / "out").to_dict("records")
    assert mean["metric"] == "average_accuracy_across_tasks"
    assert pd.isna(mean["value"]) and mean["status"] == "no_task_numbers"
