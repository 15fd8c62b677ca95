"""Units of the activation layers: how many are active, how many dormant."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes

from ..errors import NotEnoughEvidenceError
from .kind import Kind
from .panels import Canvas, canvas, finish_courses, run_courses, shown_blocks, with_breaks
from .selection import Choice, blocks_of, demand_values, grouped, pick
from .style import BLUE, ORANGE, Look

SERIES = {"active_fraction": ("active", BLUE, "o"), "dormant_fraction": ("dormant", ORANGE, "s")}


def units_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Active and dormant fraction (tau = 0.025, unless another is chosen) of each block's units."""
    parts, reasons = [], []
    for metric in SERIES:
        asked = choice if metric == "dormant_fraction" else _without_parameters(choice)
        try:
            data = pick(table, asked, metric, ("unit",), parameters="tau=0.025")
        except NotEnoughEvidenceError as error:
            reasons.append(str(error))
            continue
        data = data[data["block"].notna()]
        tau = data["parameters"].iloc[0] if len(data) else ""
        data = with_breaks(grouped(data, choice), ["block", "component", "head", "index"])
        parts.append(data.assign(metric=metric, parameters=tau, subject="unit"))
    if not parts:
        raise NotEnoughEvidenceError("; ".join(reasons))
    return demand_values(pd.concat(parts, ignore_index=True), "active or dormant fraction")


def _without_parameters(choice: Choice) -> Choice:
    return replace(choice, parameters=None)


def draw_units(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """A small panel a block, both fractions from 0 to 1."""
    blocks = blocks_of(data)
    shown = shown_blocks(blocks)
    on = canvas(of, len(shown), axes, height=1.05)
    for panel, block in zip(on.panels, shown, strict=True):
        for metric, (name, colour, marker) in SERIES.items():
            one = data[(data["block"] == block) & (data["metric"] == metric)]
            for _, part in one.groupby("component", sort=False):
                run_courses(on, panel, part, choice, _name(name, part), colour, marker)
        panel.set_title(f"block {block}")
    if on.own and len(shown) < len(blocks):
        on.figure.suptitle(f"{len(shown)} of {len(blocks)} blocks, evenly spaced")
    finish_courses(on, choice, "fraction of units", fraction=True)
    return on


def _name(name: str, data: pd.DataFrame) -> str:
    """Active shares are of (row, unit) entries, dormant ones of units, at a threshold."""
    parameters = str(data["parameters"].iloc[0] or "")
    return f"{name} ({parameters})" if "tau" in parameters else name


units = Kind(
    "units",
    "active and dormant fraction of each block's activation over checkpoints, a panel a block",
    units_data,
    draw_units,
    takes_metric=False,
)
