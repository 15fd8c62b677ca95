"""How well each task was learned right after it, where every task has a labelled probe of its own.

Probes whose names end in a number (probe_0.npz, probe_task1.npz) belong to the tasks of those
numbers; the checkpoint after task k is the last one whose own task number is k. A run that counts
the tasks it has learned, from 1 on, is told from one that names the last of them, from 0 on, by its
having no checkpoint of task 0 after the start.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd

from . import store
from .checkpoints import Checkpoint, Run
from .metrics import Place, absent, measure
from .observations import TaskAccuracies

NAME = "probes"
COLUMNS = ("checkpoint", "metric", "subject", "probe", "value")


def write_task_results(out: Path, run: Run, chosen: frozenset[str]) -> None:
    """Write the accuracy on each task right after it and their mean (AAT) as OUT/results, when
    the run's tables hold the accuracy on two or more numbered probes."""
    if "average_accuracy_across_tasks" not in chosen or "accuracy" not in chosen:
        return
    accuracies: list[pd.DataFrame] = []
    for checkpoint in run.checkpoints:
        file = store.checkpoint_file(out, run.name, checkpoint.name)
        table = store.read_file(file, COLUMNS) if file.exists() else None
        if table is None:
            continue
        found = table[(table["metric"] == "accuracy") & (table["subject"] == "output")]
        if found["probe"].nunique() < 2:
            return
        accuracies.append(found)
    rows = task_rows(pd.concat(accuracies), run) if accuracies else []
    if not rows:
        return
    common = dict.fromkeys(("step", "task", "branch", "checkpoint_fingerprint"))
    common |= {"run": run.name, "checkpoint": NAME}
    key = store.content_key(rows=[[r.value, r.step, r.task, r.probe] for r in rows])
    target = store.results_file(out, f"{run.name}-{NAME}")
    if not store.is_finished(target, key):
        store.write(target, rows, common, key, {"source": str(run.path)})


def task_rows(table: pd.DataFrame, run: Run) -> list[store.Row]:
    """The rows of the accuracies `table` [checkpoint, probe, value]: one for each task and AAT.

    A task without a checkpoint right after it is a null row, and so is the mean then.
    """
    probes = {_number(str(p)): str(p) for p in table["probe"].dropna().unique()}
    numbers = sorted(n for n in probes if n is not None)
    after = checkpoints_after(run)
    if len(numbers) < 2:
        return []
    place = Place("network", None, "task")
    if not after:
        return absent("TaskAccuracies", place, "no_task_numbers")
    learned = 1 if numbers[0] == 0 and 0 not in after else 0
    values = {
        (str(c), str(p)): float(v)
        for c, p, v in zip(table["checkpoint"], table["probe"], table["value"], strict=True)
    }
    rows = []
    for number in numbers:
        checkpoint = after.get(number + learned)
        name = checkpoint.name if checkpoint else f"{NAME} task {number}"
        value = values.get((name, probes[number]))
        known = value is not None and value == value
        rows.append(
            store.Row(
                "accuracy", "task", value if known else None, checkpoint=name, task=number,
                step=checkpoint.step if checkpoint else None, probe=probes[number],
                status="ok" if known else "no_checkpoint_after_task",
            )
        )  # fmt: skip
    accuracies = tuple(float("nan") if r.value is None else r.value for r in rows)
    last = max((r.step for r in rows if r.step is not None), default=None)
    mean = measure(TaskAccuracies(accuracies), place)
    return rows + [replace(row, step=last) for row in mean]


def checkpoints_after(run: Run) -> dict[int, Checkpoint]:
    """The last checkpoint of each task number; the start of the run is after no task."""
    return {c.task: c for c in run.checkpoints if c.task is not None and c.step > 0}


def _number(probe: str) -> int | None:
    """The number at the end of a probe's name ("task_3@1f2e" is 3)."""
    found = re.search(r"(\d+)$", probe.rpartition("@")[0])
    return int(found[1]) if found else None
