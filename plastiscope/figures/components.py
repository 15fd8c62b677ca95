"""Ranks of what the components compute, and magnitude and rank of what they are."""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from ..errors import NotEnoughEvidenceError
from .delta import any_subject
from .kind import Kind
from .panels import (
    RUN,
    Canvas,
    canvas,
    depth_colours,
    finish_courses,
    run_courses,
    shown_blocks,
    with_breaks,
)
from .selection import (
    Choice,
    blocks_of,
    demand_values,
    grouped,
    in_chosen_blocks,
    is_transformer,
    ordered,
    pick,
    spaced,
    without_heads,
)
from .style import Look, mark
from .ticks import count_axis, quantity, stacked, words

SERIES = ["block", "component", "head", "index"]
NOT_SHOWN = ("q", "k", "v")
PROJECTIONS = ("q", "k", "v", "attention_output", "gate", "fc1", "fc2", "conv", "fc")


def course_data(table: pd.DataFrame, choice: Choice, metric: str) -> pd.DataFrame:
    """The metric of every component over the checkpoints, gaps filled with nulls."""
    data = pick(table, choice, metric, any_subject(table, metric), parameters="tau=0.025")
    data = demand_values(without_heads(in_chosen_blocks(data, choice)), metric)
    subject = data["subject"].iloc[0]
    return with_breaks(grouped(data, choice), SERIES).assign(metric=metric, subject=subject)


def component_rank_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Effective rank (or the chosen metric) of each component's features over checkpoints."""
    return course_data(table, choice, choice.metric or "effective_rank")


def stable_rank_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Stable rank of each component's features over checkpoints."""
    return course_data(table, choice, "stable_rank")


def _without_projections(data: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Without q, k and v (head-rank has them) unless they were asked for or are all there is."""
    rest = data[~data["component"].isin(NOT_SHOWN)]
    return data if choice.components or rest.empty else rest


def draw_component_rank(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """A panel a block; the components outside blocks (embedding, head) in the last one."""
    data = _without_projections(data, choice)
    blocks = blocks_of(data)
    outside = bool(data["block"].isna().any())
    on = canvas(of, len(shown := shown_blocks(blocks)) + outside, axes)
    for panel, block in zip(on.panels, [*shown, None] if outside else shown, strict=True):
        here = data[data["block"].isna() if block is None else data["block"] == block]
        names = ordered(list(here["component"].unique()))
        for name in names:
            colour, marker = mark(name, names)
            one = here[here["component"] == name]
            run_courses(on, panel, one, choice, words(name), colour, marker)
        panel.set_title("outside the blocks" if block is None else f"block {block}")
    _say_left_out(on, len(blocks), len(shown))
    finish_courses(on, choice, quantity(data))
    return on


def _say_left_out(on: Canvas, count: int, shown: int) -> None:
    if on.own and shown < count:
        on.figure.suptitle(f"{shown} of {count} blocks, evenly spaced")


def draw_component_grid(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """A row a component, a column a block, one scale: the appendix form."""
    data = _without_projections(data, choice)
    data = data[data["block"].notna()]
    names = ordered(list(data["component"].unique()))
    blocks = spaced(blocks_of(data), 12)
    on = canvas(
        of, len(names) * len(blocks), axes, columns=len(blocks), height=0.62, width=of.double
    )
    for place, panel in enumerate(on.panels):
        name, block = names[place // len(blocks)], blocks[place % len(blocks)]
        colour, _ = mark(name)
        here = data[(data["component"] == name) & (data["block"] == block)]
        run_courses(on, panel, here, choice, words(name), colour, "")
        if place < len(blocks):
            panel.set_title(str(block) if place else f"block {block}")
        if place % len(blocks) == 0 and len(on.panels) > 1:
            panel.set_ylabel(stacked(words(name)), rotation=0, ha="right", va="center")
    _say_left_out(on, len(blocks_of(data)), len(blocks))
    on.entries = {n: h for n, h in on.entries.items() if n.startswith(RUN)}
    finish_courses(on, choice, quantity(data))
    for panel in on.panels:
        count_axis(panel.xaxis, 2)
    return on


def weight_magnitude_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Weight magnitude and effective rank of the whole matrices of each block over checkpoints."""
    parts: list[pd.DataFrame] = []
    reasons: list[str] = []
    for metric in dict.fromkeys([choice.metric or "weight_magnitude", "effective_rank"]):
        try:
            parts.append(_of_matrices(table, choice, metric))
        except NotEnoughEvidenceError as error:
            # Either panel is worth drawing alone.
            reasons.append(str(error))
    if not parts:
        raise NotEnoughEvidenceError(reasons[0])
    return pd.concat(parts, ignore_index=True).assign(subject="weight")


def _of_matrices(table: pd.DataFrame, choice: Choice, metric: str) -> pd.DataFrame:
    data = pick(table, choice, metric, ("weight",))
    data = data[data["component"].isin(choice.components or PROJECTIONS)]
    data = demand_values(without_heads(data), f"{metric} of a weight matrix")
    return with_breaks(grouped(data, choice), SERIES).assign(metric=metric)


def draw_weight_magnitude(
    data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None
) -> Canvas:
    """Left the magnitude, right the rank; a row a block, or all layers in one row.

    Attention projections are blue, fc1 red, fc2 green.
    """
    metrics = list(dict.fromkeys(data["metric"]))
    metrics = metrics[:1] if axes is not None else metrics
    blocks = [int(b) for b in choice.blocks] or spaced(blocks_of(data), 3)
    layered = not is_transformer(data)
    rows: list[int | None] = [None] if layered else list(blocks)
    height = 1.9 if layered else 1.45
    on = canvas(
        of, len(rows) * len(metrics), axes, columns=len(metrics), height=height, width=of.double,
        share=(True, False),
    )  # fmt: skip
    for place, panel in enumerate(on.panels):
        block, metric = rows[place // len(metrics)], metrics[place % len(metrics)]
        here = data[data["metric"] == metric]
        if block is None:
            _layers(on, panel, here, choice, of)
        else:
            _projections(on, panel, here[here["block"] == block], choice)
        if place < len(metrics):
            panel.set_title(quantity(here.head(1)))
        if block is not None and place % len(metrics) == 0:
            panel.set_ylabel(f"block {block}")
    _one_scale(on, len(metrics))
    finish_courses(on, choice, "" if on.own else words(metrics[0]))
    return on


def _projections(on: Canvas, axes: Axes, data: pd.DataFrame, choice: Choice) -> None:
    names = ordered(list(data["component"].unique()))
    for name in names:
        colour, marker = mark(name, names)
        run_courses(on, axes, data[data["component"] == name], choice, words(name), colour, marker)


def _layers(on: Canvas, axes: Axes, data: pd.DataFrame, choice: Choice, of: Look) -> None:
    """Networks without attention: a line a layer, dark at the input, bright at the output."""
    places = data[["block", "component"]].drop_duplicates().sort_values("block", na_position="last")
    colours = depth_colours(len(places), of)
    markers = "osv^DP<>ph"
    for number, (block, name) in enumerate(places.itertuples(index=False, name=None)):
        label = words(name) if pd.isna(block) else f"{int(block)}: {words(name)}"
        same = data["block"].isna() if pd.isna(block) else data["block"] == block
        one = data[same & (data["component"] == name)]
        marker = markers[number % len(markers)] if len(places) <= 12 else ""
        run_courses(on, axes, one, choice, label, colours[number], marker)


def _one_scale(on: Canvas, columns: int) -> None:
    """The panels of one metric share its scale."""
    for column in range(columns):
        panels = on.panels[column::columns]
        for panel in panels[1:]:
            panel.sharey(panels[0])
        panels[0].autoscale_view()


component_rank = Kind(
    "component-rank",
    "effective rank of each component's features over checkpoints, a panel a block",
    component_rank_data,
    draw_component_rank,
)
component_stable_rank = Kind(
    "component-stable-rank",
    "stable rank of each component's features over checkpoints, a panel a block",
    stable_rank_data,
    draw_component_rank,
    takes_metric=False,
)
component_rank_grid = Kind(
    "component-rank-grid",
    "effective rank of features, a row a component and a column a block",
    component_rank_data,
    draw_component_grid,
)
weight_magnitude = Kind(
    "weight-magnitude",
    "weight magnitude over checkpoints for chosen blocks, and effective rank of the same weights",
    weight_magnitude_data,
    draw_weight_magnitude,
)
