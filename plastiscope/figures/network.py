"""The study of language models: the whole network, its layers, its heads, its trainability.

The onset follows the study: the first checkpoint from which a 3-point moving average of the
probing loss's AUC rises for good.
"""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes

from ..errors import NotEnoughEvidenceError
from .kind import Kind
from .panels import (
    Canvas,
    canvas,
    course,
    depth_colours,
    finish_courses,
    run_courses,
    runs_of,
    visible,
    with_breaks,
)
from .selection import Choice, demand_values, grouped, pick
from .style import BLUE, ORANGE, Look
from .ticks import plain, words

Numbers = npt.NDArray[np.floating[Any]]
POOLED = ("pooled, scope=non-embedding", "pooled", "pooled, tau=0.025", "tau=0.025")
SERIES = ["block", "component", "head", "index"]


def _several(
    table: pd.DataFrame, choice: Choice, wanted: Mapping[str, tuple[str, ...]], what: str
) -> pd.DataFrame:
    """Whole-network courses of several metrics; those that the table lacks are left out."""
    parts, reasons = [], []
    for metric, subjects in wanted.items():
        try:
            data = pick(table, choice, metric, subjects, parameters=POOLED)
        except NotEnoughEvidenceError as error:
            reasons.append(str(error))
            continue
        data = data[data["block"].isna() & data["head"].isna()]
        data = data[data["component"] == "network"]
        if len(data):
            parts.append(grouped(data, choice).assign(metric=metric))
    if not parts:
        raise NotEnoughEvidenceError("; ".join(reasons) or f"no {what}")
    return with_breaks(demand_values(pd.concat(parts), what), ["metric", *SERIES])


def network_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Parameter magnitude and dormant fraction of the whole network over checkpoints.

    Pooled over one list of all (non-embedding) parameters and of all units, as the study does.
    """
    wanted = {"weight_magnitude": ("network", "weight"), "dormant_fraction": ("network", "unit")}
    return _several(table, choice, wanted, "total of the whole network")


def draw_network(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """A panel for each of the two."""
    metrics = list(dict.fromkeys(data["metric"]))
    on = canvas(of, len(metrics), axes, columns=2, height=1.7, share=(True, False))
    marks = {"weight_magnitude": (BLUE, "o"), "dormant_fraction": (ORANGE, "s")}
    for panel, metric in zip(on.panels, metrics, strict=True):
        run_courses(on, panel, data[data["metric"] == metric], choice, "", *marks[metric])
        panel.set_title(f"{words(metric)} of the network")
    finish_courses(on, choice, "")
    return on


def dormant_layers_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Dormant fraction of every layer over checkpoints."""
    metric = choice.metric or "dormant_fraction"
    data = pick(table, choice, metric, ("unit",), parameters="tau=0.025")
    data = demand_values(data[data["block"].notna()], f"{metric} by layer")
    parameters = data["parameters"].iloc[0]
    data = with_breaks(grouped(data, choice), SERIES)
    return data.assign(metric=metric, parameters=parameters)


def draw_dormant_layers(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """A line a layer, dark at the input, bright at the output."""
    places = data[["block", "component"]].drop_duplicates().sort_values("block", kind="stable")
    on = canvas(of, 1, axes, height=2.2)
    colours = depth_colours(len(places), of)
    several = places["block"].duplicated().any()
    marks = "osv^DP<>ph" if len(places) <= 10 else ""
    for number, (block, name) in enumerate(places.itertuples(index=False, name=None)):
        one = data[(data["block"] == block) & (data["component"] == name)]
        label = f"block {int(block)}" + (f" {words(name)}" if several else "")
        marker = marks[number] if marks else ""
        run_courses(on, on.panels[0], one, choice, label, colours[number], marker)
    parameters = str(data["parameters"].iloc[0] or "")
    suffix = f" ({parameters})" if parameters else ""
    finish_courses(on, choice, words(str(data["metric"].iloc[0])) + suffix)
    return on


def head_shares_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Share of heads that are lazy (entropy near its maximum) and collapsed (near zero).

    The mean over blocks of each block's share (or over the heads, where they have a row each);
    null at a checkpoint where any has no value.
    """
    parts, reasons = [], []
    for metric in ("lazy_head", "collapsed_head"):
        try:
            data = pick(table, choice, metric, ("attention", "network"))
        except NotEnoughEvidenceError as error:
            reasons.append(str(error))
            continue
        by = data.groupby(["run", "checkpoint", "point", "x"], sort=False)
        share = by["value"].agg(lambda one: one.mean(skipna=False)).reset_index()
        share = share.assign(averaged=by.size().to_numpy(), metric=metric, status="ok")
        parts.append(share.assign(block=np.nan, component="network", head=np.nan, index=np.nan))
    if not parts:
        raise NotEnoughEvidenceError("; ".join(reasons))
    shares = [grouped(part, choice).assign(metric=part["metric"].iloc[0]) for part in parts]
    return with_breaks(demand_values(pd.concat(shares), "lazy or collapsed heads"), ["metric"])


def draw_head_shares(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """Both shares from 0 to 1."""
    on = canvas(of, 1, axes, height=1.9)
    for metric, name, colour, marker in (
        ("lazy_head", "lazy", BLUE, "o"),
        ("collapsed_head", "collapsed", ORANGE, "s"),
    ):
        one = data[data["metric"] == metric]
        if len(one):
            run_courses(on, on.panels[0], one, choice, name, colour, marker)
    finish_courses(on, choice, "share of heads", fraction=True)
    return on


def moving_average(values: Numbers) -> Numbers:
    """Centred 3-point mean; null at both ends and beside a null."""
    smooth = np.full(len(values), np.nan)
    if len(values) >= 3:
        smooth[1:-1] = (values[:-2] + values[1:-1] + values[2:]) / 3
    return smooth


def onset_place(values: Numbers) -> int | None:
    """Where the 3-point moving average begins to rise for good: the place of its last minimum.

    None when it doesn't rise at the end, has fewer than two points, or where a value is missing.
    """
    smooth = moving_average(np.asarray(values, float))
    known = np.flatnonzero(np.isfinite(smooth))
    if len(known) < 2 or not np.isfinite(values).all():
        return None
    rising = np.diff(smooth[known]) > 0
    if not rising[-1]:
        return None
    falls = np.flatnonzero(~rising)
    return int(known[falls[-1] + 1]) if len(falls) else int(known[0])


def probe_auc_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """AUC of the probing loss, its 3-point moving average, and whether a point is the onset.

    No checkpoint holds it: it takes training from each. A run records it in its results.csv.
    """
    metric = "probe_auc"
    if not (table["metric"] == metric).any():
        raise NotEnoughEvidenceError(
            "no probe_auc: a run records it, step by step, in results.csv beside its checkpoints"
        )
    data = pick(table, choice, metric, ())
    data = data[data["block"].isna()]
    data = grouped(demand_values(data, metric), choice)
    parts = []
    for _, one in data.groupby("run", sort=False):
        one = one.sort_values("point", kind="stable")
        values = one["value"].to_numpy(float)
        place = onset_place(values)
        marked = [place == number for number in range(len(one))]
        parts.append(one.assign(moving_average=moving_average(values), onset=marked))
    return pd.concat(parts, ignore_index=True).assign(metric=metric)


def draw_probe_auc(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """A panel a run: the AUC as points, its moving average, a vertical line at the onset."""
    runs, name = runs_of(data, choice), words(str(data["metric"].iloc[0]))
    several = len(runs) > 1
    on = canvas(of, len(runs), axes, columns=4, height=1.25 if several else 2.0)
    colour = visible(BLUE, of)
    for panel, run in zip(on.panels, runs, strict=True):
        one = data[data["run"] == run].sort_values("point", kind="stable")
        x, y, spread = (one[column].to_numpy(float) for column in ("x", "value", "spread"))
        (points,) = panel.plot(x, y, "o", color=colour, markersize=0.8 * of.marker)
        panel.fill_between(x, y - spread, y + spread, color=colour, alpha=0.2, linewidth=0)
        on.entries[name] = points
        smooth = one.assign(value=one["moving_average"], spread=np.nan)
        course(on, panel, smooth, "3-point moving average", colour=ORANGE)
        for at in one.loc[one["onset"], "x"]:
            line = panel.axvline(at, color=of.ink, linewidth=of.line, linestyle=":")
            on.entries["onset of the lasting rise"] = line
        panel.set_title(plain(run) if several else "")
    finish_courses(on, choice, name)
    return on


network_course = Kind(
    "network",
    "parameter magnitude and dormant fraction of the whole network over checkpoints",
    network_data,
    draw_network,
    takes_metric=False,
)
dormant_layers = Kind(
    "dormant-layers",
    "dormant fraction of each layer over checkpoints, a line a layer",
    dormant_layers_data,
    draw_dormant_layers,
    takes_metric=False,
)
head_shares = Kind(
    "head-shares",
    "share of lazy and of collapsed heads over checkpoints",
    head_shares_data,
    draw_head_shares,
    takes_metric=False,
)
probe_auc = Kind(
    "probe-auc",
    "AUC of the probing loss, its 3-point moving average and the onset of its lasting rise",
    probe_auc_data,
    draw_probe_auc,
    takes_metric=False,
)
