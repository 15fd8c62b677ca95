"""The results that a run recorded of itself: `results.csv` beside the checkpoints.

Columns step, perhaps task, and one or more of accuracy and loss (how well each task was learned
right after it), probe_auc (area under the loss of a probing task trained from there: the lower, the
more plastic) and parameter_count.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import replace
from pathlib import Path

from . import store
from .checkpoints import Run
from .errors import UsageError
from .metrics import Place, measure
from .observations import TaskAccuracies

NAME = "results.csv"
MEASURES = {
    "accuracy": "task",
    "loss": "task",
    "probe_auc": "network",
    "parameter_count": "network",
}
"""The columns that are read, and what each is a measure of."""


def write_recorded(out: Path, run: Run) -> str | None:
    """Write the rows of a run's recorded results, if it has any, as OUT/results/RUN.parquet.

    Gives a line for the user when the file is something else: it isn't ours to judge.
    """
    file = Path(run.path) / NAME
    if not file.is_file():
        return None
    content = file.read_bytes()
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    key = store.content_key(results=digest, measures=sorted(MEASURES))
    target = store.results_file(out, run.name)
    if store.is_finished(target, key):
        return None
    try:
        rows = read_recorded(file)
    except UsageError as error:
        return f"left out: {error}"
    common = {
        "run": run.name,
        "checkpoint": NAME,
        "step": None,
        "task": None,
        "branch": None,
        "checkpoint_fingerprint": None,
    }
    store.write(target, rows, common, key, {"source": str(file)})
    return None


def read_recorded(file: Path) -> list[store.Row]:
    """A row for each task, and the mean accuracy over all tasks (AAT).

    Raises UsageError for a file that isn't such a table.
    """
    try:
        with file.open(newline="", encoding="utf-8") as opened:
            entries = list(csv.DictReader(opened))
        found = [
            (metric, int(e["task"]) if e.get("task") else None, int(e["step"]), float(e[metric]))
            for metric in MEASURES
            for e in entries
            if e.get(metric)
        ]
    except (csv.Error, KeyError, ValueError, TypeError):
        found = []
    if not found:
        raise UsageError(f"{file} isn't a table of results (step, {' or '.join(MEASURES)})")
    rows = [_row(metric, task, step, value) for metric, task, step, value in found]
    accuracies = tuple(value for metric, _, _, value in found if metric == "accuracy")
    if accuracies:
        step = max(s for metric, _, s, _ in found if metric == "accuracy")
        place = Place("network", None, "task")
        found_mean = measure(TaskAccuracies(accuracies), place, None)
        rows += [replace(row, step=step) for row in found_mean]
    return rows


def _row(metric: str, task: int | None, step: int, value: float) -> store.Row:
    subject = MEASURES[metric]
    component = None if subject == "task" else subject
    at = f"{NAME} step {step}" if task is None else f"{NAME} task {task}"
    return store.Row(metric, subject, value, component, checkpoint=at, task=task, step=step)
