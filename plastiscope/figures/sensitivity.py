"""The study of non-smooth components: how fast each component's output moves with its input."""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ..errors import NotEnoughEvidenceError
from .kind import Kind
from .panels import (
    RUN,
    Canvas,
    bottom,
    canvas,
    course,
    finish_courses,
    legend,
    run_courses,
    runs_of,
    say_shade,
    visible,
)
from .selection import Choice, demand_values, grouped, ordered, pick
from .style import BLUE, GREEN, OLIVE, ORANGE, PURPLE, RED, Look, mark
from .ticks import count_axis, count_text, label_columns, log_scale, plain, words

RUN_COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, OLIVE)
RATES = ("rate_of_change", "rate_of_change_embedding")


def rate_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Rate of change of every component and block at each run's last checkpoint.

    `low` and `high` are the 95 % band: 1.96 standard errors, or, for a group of runs, 1.96 times
    their standard deviation over the square root of their number.
    """
    metric = _rate(table, choice)
    data = pick(table, choice, metric)
    data = grouped(data[data["block"].notna() & data["head"].isna()], choice)
    data = demand_values(data, metric)
    last = data.groupby("run")["point"].transform("max")
    data = data[data["point"] == last]
    error = data["standard_error"].fillna(data["spread"] / np.sqrt(data["runs"]))
    band = {"low": data["value"] - 1.96 * error, "high": data["value"] + 1.96 * error}
    return data.assign(metric=metric, **band)


def _rate(table: pd.DataFrame, choice: Choice) -> str:
    present = set(table["metric"].dropna().unique())
    found = choice.metric or next((name for name in RATES if name in present), None)
    if found is None:
        raise NotEnoughEvidenceError("the tables hold no rate_of_change")
    return found


def draw_rate(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """Block on x, a line a component, its band shaded."""
    on = canvas(of, 1, axes, height=2.2)
    panel, names = on.panels[0], ordered(list(data["component"].unique()))
    half = (data["high"] - data["low"]) / 2
    along = data.assign(x=data["block"], point=data["block"], spread=half)
    for name in names:
        one = along[along["component"] == name]
        run_courses(on, panel, one, choice, words(name), *mark(name, names))
    log_scale(panel, data["low"].fillna(data["value"]))
    count_axis(panel.xaxis, 8)
    if on.own:
        panel.set_title(_when(data, choice))
    if half.notna().any():
        say_shade(on, "95 % band")
    panel.set_xlabel("block")
    panel.set_ylabel(words(str(data["metric"].iloc[0])))
    legend(on)
    return on


def _when(data: pd.DataFrame, choice: Choice) -> str:
    """Which checkpoint it is: the last of each run."""
    last = data.groupby("run", sort=False)["x"].max()
    return f"at {choice.x} " + ", ".join(count_text(x) for x in dict.fromkeys(last))


def rate_box_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Rate of change of every component, block and checkpoint."""
    metric = _rate(table, choice)
    data = pick(table, choice, metric)
    data = data[data["block"].notna() & data["head"].isna()]
    return demand_values(data, metric).assign(metric=metric)


def draw_rate_box(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """A box a component over its blocks and checkpoints; null values are counted in the label."""
    names = ordered(list(data["component"].unique()))
    on = canvas(of, 1, axes, height=2.2, width=of.single if len(names) < 5 else of.double)
    panel = on.panels[0]
    labels = []
    for place, name in enumerate(names):
        values = data.loc[data["component"] == name, "value"].to_numpy(float)
        known = values[np.isfinite(values)]
        labels.append(f"{words(name)}\n(n = {len(known)})")
        box = panel.boxplot([known], positions=[place], widths=0.6, patch_artist=True)
        for patch in box["boxes"]:
            patch.set(facecolor=visible(mark(name)[0], of), alpha=0.6, edgecolor=of.ink)
        for part in ("whiskers", "caps", "medians"):
            for line in box[part]:
                line.set(color=of.ink, linewidth=0.8 * of.line)
        for line in box["fliers"]:
            line.set(markersize=of.marker, markeredgecolor=of.ink)
    label_columns(panel, labels)
    log_scale(panel, data["value"])
    panel.set_ylabel(words(str(data["metric"].iloc[0])))
    return on


def rate_bound_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Measured rate of change and its theoretical bound, component by component and block."""
    measured = rate_data(table, choice)
    bound = pick(table, choice, "rate_of_change_bound", matching=lambda _: True)
    bound = grouped(bound[bound["block"].notna() & bound["head"].isna()], choice)
    keys = ["run", "point", "block", "component"]
    both = measured.merge(bound[[*keys, "value"]].rename(columns={"value": "bound"}), on=keys)
    if not np.isfinite(both["bound"].to_numpy(float)).any():
        raise NotEnoughEvidenceError("no bound on the rate of change")
    return both


def draw_rate_bound(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """A panel a component, block on x: measured solid, bound dashed, a colour a run, log y."""
    names = ordered(list(data["component"].unique()))
    on = canvas(of, len(names), axes, columns=3, height=1.4)
    runs = runs_of(data, choice)
    for panel, name in zip(on.panels, names, strict=True):
        for run, colour in zip(runs, RUN_COLOURS * len(runs), strict=False):
            one = data[(data["component"] == name) & (data["run"] == run)].sort_values("block")
            along = one.assign(x=one["block"], point=one["block"], spread=np.nan)
            course(on, panel, along, "measured", colour=colour, marker="o")
            limit = along.assign(value=one["bound"])
            course(on, panel, limit, "bound", colour=colour if len(runs) > 1 else of.ink, dash="--")
            if len(runs) > 1:
                key = {"color": visible(colour, of), "linewidth": of.line}
                on.entries.setdefault(RUN + plain(run), Line2D([], [], **key))
        panel.set_yscale("log", nonpositive="mask")
        panel.set_title(words(name))
    if on.own:
        on.figure.suptitle(_when(data, choice), fontsize=of.font)
    finish_courses(on, choice, words(str(data["metric"].iloc[0])))
    for panel in bottom(on):
        panel.set_xlabel("block")
    return on


rate_of_change = Kind(
    "rate-of-change",
    "rate of change by depth, a line a component with a 95 % band, at the last checkpoint",
    rate_data,
    draw_rate,
    takes_metric=False,
)
rate_box = Kind(
    "rate-of-change-box",
    "rate of change by component over blocks and checkpoints",
    rate_box_data,
    draw_rate_box,
    takes_metric=False,
)
rate_bound = Kind(
    "rate-of-change-bound",
    "measured rate of change against its theoretical bound, log y",
    rate_bound_data,
    draw_rate_bound,
    takes_metric=False,
)
