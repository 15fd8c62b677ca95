"""How well each task of the stream was learned."""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import replace

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
    quantity. A labelled probe's results stand in where the tasks' own weren't recorded.
    """
    metrics = [choice.metric] if choice.metric else ["accuracy", "loss"]
    reasons = []
    for metric in metrics:
        try:
            data = demand_values(_results(table, choice, metric), metric)
        except NotEnoughEvidenceError as error:
            reasons.append(str(error))
            continue
        return grouped(_with_mean(data), choice).assign(metric=metric).pipe(_completed)
    raise NotEnoughEvidenceError("; ".join(reasons))


def _results(table: pd.DataFrame, choice: Choice, metric: str) -> pd.DataFrame:
    tasks = "task" in table and table["task"].notna().any()
    choice = replace(choice, x="task") if tasks and choice.x == "step" else choice
    data = pick(table, choice, metric, ("task", "network", "probe", "unit"))
    data = data[data["block"].isna() & data["head"].isna()].sort_values("point", kind="stable")
    return data.drop_duplicates(["run", "x"], keep="last") if tasks else data


def _with_mean(data: pd.DataFrame) -> pd.DataFrame:
    values = data.groupby("run", sort=False)["value"]
    count = values.cumcount() + 1
    total = values.transform(lambda one: one.cumsum(skipna=False))
    mean = data.assign(value=total / count, standard_error=float("nan"), series="running mean")
    return pd.concat([data.assign(series="task"), mean], ignore_index=True)


def _completed(data: pd.DataFrame) -> pd.DataFrame:
    return with_breaks(data, ["series", "metric"])


def draw_accuracy(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """Each task's result as markers on a thin line, the running mean over them."""
    metric = str(data["metric"].iloc[0])
    on = canvas(of, 1, axes, height=2.0)
    for series, colour, marker in (("task", BLUE, "o"), ("running mean", ORANGE, "")):
        name = f"{metric} of each task" if series == "task" else "running mean (AAT)"
        one = data[data["series"] == series]
        run_courses(on, on.panels[0], one, choice, name, colour, marker)
    finish_courses(on, replace(choice, x=_x(data, choice)), words(metric))
    return on


def _x(data: pd.DataFrame, choice: Choice) -> str:
    small = data["x"].max() <= len(data)
    return "task" if choice.x == "step" and small else choice.x


accuracy = Kind(
    "accuracy",
    "accuracy (or loss) of each task and its running mean; mean and deviation over grouped runs",
    accuracy_data,
    draw_accuracy,
    takes_metric=False,
)
