"""Attention heads, one by one: rank or magnitude of each head's q, k and v in one block."""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from ..errors import NotEnoughEvidenceError
from .kind import Kind
from .panels import (
    Canvas,
    canvas,
    colour_bar,
    finish_courses,
    map_labels,
    matrix,
    picture,
    run_courses,
    runs_of,
    shown_blocks,
    span,
    with_breaks,
    x_label,
)
from .selection import Choice, blocks_of, demand_values, grouped, ordered, pick
from .style import Look, mark
from .ticks import measure, plain, quantity, words


def head_data(
    table: pd.DataFrame, choice: Choice, metric: str, subjects: tuple[str, ...]
) -> pd.DataFrame:
    """The metric of every head of one block: the chosen one, or the last that every run has."""
    data = pick(table, choice, metric, subjects, parameters="tau=0.025")
    data = data[data["head"].notna()]
    projected = data["component"].isin(["q", "k", "v"])
    data = data if choice.components or not projected.any() else data[projected]
    if data.empty:
        raise NotEnoughEvidenceError(f"the tables hold no {metric} by head")
    lasts = [blocks_of(one)[-1] for _, one in data.groupby("run") if blocks_of(one)]
    block = choice.blocks[0] if choice.blocks else min(lasts)
    subject = data["subject"].iloc[0]
    data = demand_values(data[data["block"] == block], f"{metric} by head in block {block}")
    data = with_breaks(grouped(data, choice), ["block", "component", "head", "index"])
    return data.assign(metric=metric, subject=subject)


def head_rank_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Effective rank (or the chosen metric) of each head: its features, or else its weights."""
    subjects = ("feature", "weight", "attention")
    return head_data(table, choice, choice.metric or "effective_rank", subjects)


def head_magnitude_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Weight magnitude of each head's slices of q, k and v."""
    return head_data(table, choice, "weight_magnitude", ("weight",))


def _title(data: pd.DataFrame) -> str:
    return f"{quantity(data)}, block {int(data['block'].iloc[0])}"


def draw_head_lines(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """A small panel a head: q blue, k red, v green."""
    heads = sorted(int(head) for head in data["head"].unique())
    shown = shown_blocks(heads)
    on = canvas(of, len(shown), axes, columns=4 if len(shown) <= 12 else 6, height=1.05)
    for panel, head in zip(on.panels, shown, strict=True):
        here = data[data["head"] == head]
        for name in ordered(list(here["component"].unique())):
            one = here[here["component"] == name]
            run_courses(on, panel, one, choice, words(name), *mark(name))
        panel.set_title(f"head {head}")
    if on.own:
        some = "" if len(shown) == len(heads) else f" ({len(shown)} of {len(heads)} heads)"
        on.figure.suptitle(_title(data) + some)
    finish_courses(on, choice, measure(data["metric"].iloc[0]))
    return on


def draw_head_maps(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """Heads x checkpoints, a panel for each of q, k and v, a row of panels for each run."""
    names, runs = ordered(list(data["component"].unique())), runs_of(data, choice)
    most = int(data["head"].max()) + 1
    height = max(0.9, min(most * of.row * 0.95, 6)) / (of.double / Look.double)
    on = canvas(
        of, len(names) * len(runs), axes, columns=len(names), height=height, width=of.double,
        share=(False, False),
    )  # fmt: skip
    limits = span(data["value"])
    for place, panel in enumerate(on.panels):
        run, name = runs[place // len(names)], names[place % len(names)]
        here = data[(data["run"] == run) & (data["component"] == name)]
        heads = sorted(here["head"].unique())
        values, xs = matrix(here, heads, "head")
        image = picture(on, panel, values, limits, "viridis")
        map_labels(panel, [str(int(head)) for head in heads], xs)
        panel.set_title(words(name) if len(runs) == 1 else f"{words(name)}, {plain(run)}")
        panel.set_xlabel(x_label(choice))
        if place % len(names) == 0:
            panel.set_ylabel("head")
    if on.own:
        on.figure.suptitle(_title(data))
    colour_bar(on, image, measure(data["metric"].iloc[0]))
    return on


head_rank = Kind(
    "head-rank",
    "effective rank of each head's q, k and v in one block, a panel a head",
    head_rank_data,
    draw_head_lines,
)
head_rank_map = Kind(
    "head-rank-map",
    "effective rank, heads x checkpoints, a panel for q, k and v",
    head_rank_data,
    draw_head_maps,
)
head_magnitude = Kind(
    "head-magnitude",
    "weight magnitude of each head's q, k and v in one block, a panel a head",
    head_magnitude_data,
    draw_head_lines,
    takes_metric=False,
)
head_magnitude_map = Kind(
    "head-magnitude-map",
    "weight magnitude, heads x checkpoints, a panel for q, k and v",
    head_magnitude_data,
    draw_head_maps,
    takes_metric=False,
)
