"""How well each task of the stream was learned."""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pandas as pd
from matplotlib.axes import Axes

from ..errors import NotEnoughEvidenceError
from .kind import Kind
from .panels import Canvas, canvas, finish_courses, run_courses, with_breaks
from .selection import Choice, demand_values, grouped, pick
from .style import BLUE, ORANGE, Look
from .ticks import words


def accuracy_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """The result of each task right after it, and the running mean over the tasks so far (AAT).

    Accuracy, or the loss where a run has no accuracy. `series` is "task" or "running mean"; after
    a task without a result the running mean is null: the mean of the others would be another
    quantity. Where the tasks' own results weren't recorded, those on the labelled probe, which are
    no per-task results and get no running mean.
    """
    metrics = [choice.metric] if choice.metric else ["accuracy", "loss"]
    reasons = []
    for subjects, metric in product((("task",), ("output", "network")), metrics):
        try:
            data = demand_values(_results(table, choice, metric, subjects), metric)
        except NotEnoughEvidenceError as error:
            reasons.append(str(error))
            continue
        return grouped(_with_mean(data), choice).assign(metric=metric).pipe(_completed)
    raise NotEnoughEvidenceError("; ".join(reasons))


def _results(
    table: pd.DataFrame, choice: Choice, metric: str, subjects: tuple[str, ...]
) -> pd.DataFrame:
    data = pick(table, choice, metric, subjects)
    if data["subject"].iloc[0] == "task" and choice.x == "step" and table["task"].notna().any():
        data = pick(table, replace(choice, x="task"), metric, ("task",))
    return data[data["block"].isna() & data["head"].isna()].sort_values("point", kind="stable")


def _with_mean(data: pd.DataFrame) -> pd.DataFrame:
    if data["subject"].iloc[0] != "task":
        return data.assign(series="probe")
    data = data.drop_duplicates(["run", "x"], keep="last")
    values = data.groupby("run", sort=False)["value"]
    total = values.transform(lambda one: one.cumsum(skipna=False))
    mean = data.assign(value=total / (values.cumcount() + 1), standard_error=float("nan"))
    every = data.groupby("run", sort=False)["x"].transform(lambda one: one.diff().max())
    name = "running mean (AAT)" if (every.fillna(1) <= 1).all() else "running mean of these tasks"
    return pd.concat([data.assign(series="task"), mean.assign(series=name)], ignore_index=True)


def _completed(data: pd.DataFrame) -> pd.DataFrame:
    return with_breaks(data, ["series", "metric"])


def draw_accuracy(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """Each task's result as markers on a thin line, the running mean over them."""
    metric = str(data["metric"].iloc[0])
    on = canvas(of, 1, axes, height=2.0)
    names = {"task": f"{metric} of each task", "probe": f"{metric} on the probe"}
    for series in sorted(data["series"].unique(), key=lambda name: name not in names):
        own = series in names
        name, colour = names.get(series, series), BLUE if own else ORANGE
        marker = "o" if own and data["x"].nunique() <= 40 else ""
        run_courses(on, on.panels[0], data[data["series"] == series], choice, name, colour, marker)
    tasks = "task" in data["series"].unique() and choice.x == "step"
    finish_courses(on, replace(choice, x="task") if tasks else choice, words(metric))
    if len(on.entries) < 2:
        on.panels[0].set_ylabel(words(next(iter(on.entries), metric)))
    return on


accuracy = Kind(
    "accuracy",
    "accuracy (or loss) of each task and its running mean; mean and deviation over grouped runs",
    accuracy_data,
    draw_accuracy,
)
