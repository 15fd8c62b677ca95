"""Dynamical isometry of the components: the singular values of their Jacobians by depth."""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ..errors import NotEnoughEvidenceError
from .delta import depth_order
from .depth import depth_axes, sampled, with_places, within_room
from .kind import Kind
from .panels import Canvas, canvas, legend, runs_of, visible
from .selection import Choice, demand_values, grouped, in_chosen_blocks, pick
from .style import BLUE, ORANGE, SKY, Look
from .ticks import count_text, plain

WHOLE = ("block", "network")
"""What consists of the other components: no place of its own along the depth."""
LEAST = 1e-4
MOST_BARS = 130


def jacobian_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Quantiles of the Jacobian's singular values by component along the depth.

    At the first, middle and last checkpoint; `quantile` is 0 for the least, 1 for the greatest.
    Whole blocks and the network, when they are asked for as components.
    """
    parts = _of_quantile(table, choice, "jacobian_sigma_min", 0.0)
    parts += _of_quantile(table, choice, "jacobian_sigma_max", 1.0)
    for percent in (5, 25, 50, 75, 95):
        word = f"sigma quantile={percent}"
        parts += _of_quantile(table, choice, "jacobian_sigma", percent / 100, word)
    if not parts:
        raise NotEnoughEvidenceError("the tables hold no Jacobian singular values")
    data = pd.concat(parts, ignore_index=True)
    if not choice.components:
        data = data[~data["component"].isin(WHOLE)]
    data = in_chosen_blocks(data[data["head"].isna()], choice)
    data = demand_values(data, "Jacobian singular values")
    return with_places(sampled(data, 3))


def _of_quantile(
    table: pd.DataFrame, choice: Choice, metric: str, quantile: float, word: str = ""
) -> list[pd.DataFrame]:
    """Means over inputs; exact and estimated components have parameters of their own."""

    def mean(parameters: str) -> bool:
        parts = parameters.split(", ")
        return parts[0] == "mean" and (not word or word in parts)

    try:
        data = pick(table, choice, metric, ("jacobian",), matching=mean)
    except NotEnoughEvidenceError:
        return []
    return [] if data.empty else [grouped(data, choice).assign(quantile=quantile)]


def draw_jacobian(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """A panel a checkpoint: for each component the spread of its singular values, a line at 1.

    Logarithmic; what is under 1e-4 (a layer norm has an exact zero) lies on the lower edge.
    """
    data, some = within_room(data, MOST_BARS)
    order = depth_order(data)
    pairs = [
        (run, point)
        for run in runs_of(data, choice)
        for point in sorted(data.loc[data["run"] == run, "point"].unique())
    ]
    on = canvas(of, len(pairs), axes, columns=1, height=1.5, width=of.double)
    for panel, (run, point) in zip(on.panels, pairs, strict=True):
        here = data[(data["run"] == run) & (data["point"] == point)]
        wide = here.pivot(index="place", columns="quantile", values="value")
        _spreads(on, panel, wide.clip(lower=LEAST))
        panel.set_yscale("log")
        panel.axhline(1, color=of.ink, linestyle="--", linewidth=0.8 * of.line)
        who = f"{plain(run)}, " if data["run"].nunique() > 1 else ""
        panel.set_title(f"{who}{choice.x} {count_text(here['x'].iloc[0])}")
    if (data["value"] < LEAST).any():
        on.panels[0].set_ylim(bottom=LEAST)
    depth_axes(on, order)
    if on.own:
        on.figure.supylabel("singular values of the Jacobian", fontsize=of.font)
        if some:
            on.figure.suptitle(some)
    else:
        on.panels[0].set_ylabel("singular values of the Jacobian")
    legend(on)
    return on


def _spreads(on: Canvas, axes: Axes, wide: pd.DataFrame) -> None:
    """From the least to the greatest value a hairline, ever thicker towards the median."""
    of, blue = on.look, visible(BLUE, on.look)
    for low, high, name, width, colour in (
        (0.0, 1.0, "least to greatest", 0.8, of.ink),
        (0.05, 0.95, "5 % to 95 %", 2.2, SKY),
        (0.25, 0.75, "25 % to 75 %", 4.0, blue),
    ):
        if {low, high} <= set(wide.columns):
            style: dict[str, Any] = {"color": colour, "linewidth": width * of.line}
            axes.vlines(wide.index, wide[low], wide[high], **style)
            on.entries[name] = Line2D([], [], **style)
    if 0.5 in wide.columns:
        (on.entries["median"],) = axes.plot(
            wide.index, wide[0.5], "o", color=ORANGE, markersize=1.1 * of.marker, clip_on=False
        )


jacobian_depth = Kind(
    "jacobian-depth",
    "quantiles of the Jacobian's singular values by depth, with a line at 1",
    jacobian_data,
    draw_jacobian,
    takes_metric=False,
)
