"""The results that a run recorded itself become rows; another file of that name is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from plastiscope.errors import UsageError
from plastiscope.recorded import read_recorded

SAMPLES = Path(__file__).parents[1] / "sample_checkpoints"


def test_a_row_a_task_and_their_mean(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    file.write_text("task,step,accuracy\n0,10,0.5\n1,20,0.75\n2,30,0.25\n")
    rows = read_recorded(file)
    tasks = [(r.task, r.step, r.value) for r in rows if r.metric == "accuracy"]
    assert tasks == [(0, 10, 0.5), (1, 20, 0.75), (2, 30, 0.25)]
    (mean,) = [r for r in rows if r.metric == "average_accuracy_across_tasks"]
    assert (mean.value, mean.step) == (0.5, 30)
    assert len({(r.checkpoint, r.metric) for r in rows}) == 4


def test_losses_have_no_average_accuracy(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    file.write_text("task,step,loss\n0,10,2.5\n")
    (row,) = read_recorded(file)
    assert (row.metric, row.subject, row.value) == ("loss", "task", 2.5)


def test_trainability_and_size_of_a_run_without_tasks(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    file.write_text("step,probe_auc,parameter_count\n10,2.5,\n20,2.25,1000\n")
    rows = [(r.metric, r.subject, r.component, r.step, r.value) for r in read_recorded(file)]
    assert rows == [
        ("probe_auc", "network", "network", 10, 2.5),
        ("probe_auc", "network", "network", 20, 2.25),
        ("parameter_count", "network", "network", 20, 1000.0),
    ]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "task,step,accuracy\n0,10,high\n", "\0\n"])
def test_anything_else_is_no_table_of_results(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.csv").write_text(text)
    with pytest.raises(UsageError, match="isn't a table of results"):
        read_recorded(tmp_path / "results.csv")


@pytest.mark.parametrize("run", ["mlp", "cnn", "vit", "gpt"])
def test_the_samples_have_one(run: str) -> None:
    assert len(read_recorded(SAMPLES / run / "results.csv")) >= 8
