"""The class token on its way through the network, and the axis of any figure along the depth."""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator

from ..errors import NotEnoughEvidenceError
from .delta import depth_order
from .kind import Kind
from .panels import Canvas, canvas, course, depth_colours, legend, runs_of, say_shade
from .selection import (
    Choice,
    blocks_of,
    demand_values,
    grouped,
    in_chosen_blocks,
    pick,
    spaced,
)
from .style import Look
from .ticks import count_text, label_columns, plain, words

SAMPLED = 5
MOST_PLACES = 250
Place = tuple[int | None, str]


def sampled(data: pd.DataFrame, most: int) -> pd.DataFrame:
    """At most so many checkpoints of each run, evenly spaced, with the first and the last."""
    kept = [
        one[one["point"].isin(spaced(sorted(int(p) for p in one["point"].unique()), most))]
        for _, one in data.groupby("run", sort=False)
    ]
    return pd.concat(kept, ignore_index=True)


def with_places(data: pd.DataFrame) -> pd.DataFrame:
    """`place` counts the components from the input to the output."""
    places = {key: place for place, key in enumerate(depth_order(data))}
    keys = zip(data["block"], data["component"], strict=True)
    return data.assign(place=[places[None if pd.isna(b) else int(b), name] for b, name in keys])


def within_room(data: pd.DataFrame, places: int) -> tuple[pd.DataFrame, str]:
    """Of more places than there is room for, those of some blocks; and a line that says so."""
    blocks, count = blocks_of(data), len(depth_order(data))
    most = max(2, places * len(blocks) // max(count, 1))
    if count <= places or len(blocks) <= most:
        return data, ""
    shown = spaced(blocks, most)
    kept = data[data["block"].isna() | data["block"].isin(shown)]
    return with_places(kept), f"{len(shown)} of {len(blocks)} blocks, evenly spaced"


def cls_rank_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Effective rank of the [inputs, width] matrix of class tokens after every component.

    At five checkpoints, evenly spaced among those of each run.
    """
    metric = choice.metric or "effective_rank"
    data = pick(table, choice, metric, ("feature",), tokens="cls")
    data = in_chosen_blocks(data[data["head"].isna()], choice)
    data = grouped(demand_values(data, f"{metric} of the class token"), choice)
    if data.empty:
        raise NotEnoughEvidenceError(f"the tables hold no {metric} of the class token")
    data = sampled(data, SAMPLED).assign(metric=metric, subject="feature")
    return with_places(data)


def draw_cls_rank(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """Depth on x, a line a sampled checkpoint from dark (first) to bright, a panel a run."""
    data, some = within_room(data, MOST_PLACES)
    runs, order = runs_of(data, choice), depth_order(data)
    on = canvas(of, len(runs), axes, columns=1, height=2.2, width=of.double)
    for panel, run in zip(on.panels, runs, strict=True):
        here = data[data["run"] == run]
        points = sorted(here["point"].unique())
        for colour, marker, point in zip(
            depth_colours(len(points), of), "osv^D", points, strict=False
        ):
            one = here[here["point"] == point].set_index("place").reindex(range(len(order)))
            name = f"{choice.x} {count_text(one['x'].max())}"
            along = pd.DataFrame(
                {"x": one.index, "point": one.index, "value": one["value"], "spread": one["spread"]}
            )
            course(on, panel, along, name, colour=colour, marker=marker)
        panel.set_ylabel(f"{words(data['metric'].iloc[0])} of CLS")
        if len(runs) > 1:
            panel.set_title(plain(run))
    depth_axes(on, order)
    if on.own and some:
        on.figure.suptitle(some)
    if choice.groups:
        say_shade(on, "standard deviation over runs")
    legend(on)
    return on


def depth_axes(on: Canvas, order: Sequence[Place]) -> None:
    """Name every place on x, smaller where it must be; of too many, only the blocks.

    Then the label of the axis says what the places are between two blocks.
    """
    starts = [n for n in range(1, len(order)) if order[n][0] != order[n - 1][0]]
    for panel in on.panels:
        panel.grid(visible=False, axis="x")
        panel.set_xlim(-1, len(order))
        for start in starts:
            panel.axvline(start - 0.5, color=on.look.ink, linewidth=0.4 * on.look.line, alpha=0.6)
    size = min(0.9 * on.look.font, _width(on) / (len(order) + 1) / 1.25)
    if size < 0.66 * on.look.font:
        _name_blocks(on, order)
        return
    for panel in on.panels:
        label_columns(panel, [_label(*place) for place in order])
        panel.tick_params(axis="x", labelrotation=90, labelsize=size)


def _name_blocks(on: Canvas, order: Sequence[Place]) -> None:
    blocks = sorted({block for block, _ in order if block is not None})
    middles = []
    for block in blocks:
        places = [n for n, (of, _) in enumerate(order) if of == block]
        middles.append((places[0] + places[-1]) / 2)
    for panel in on.panels:
        panel.xaxis.set_major_locator(FixedLocator(middles))
        panel.xaxis.set_major_formatter(FixedFormatter([str(block) for block in blocks]))
        panel.tick_params(axis="x", length=0)
    within = ", ".join(dict.fromkeys(words(name) for block, name in order if block is not None))
    text = f"block; from left to right in each: {within}"
    outside = [words(name) for block, name in order if block is None]
    if outside:
        text += f". Outside: {', '.join(outside)}"
    characters = int(_width(on) / (0.55 * on.look.font))
    on.panels[-1].set_xlabel("\n".join(textwrap.wrap(text, characters)))


def _width(on: Canvas) -> float:
    """The width of a panel in points; of one's own, before it is laid out, an estimate."""
    if on.own:
        return 0.92 * on.figure.get_figwidth() * 72
    return on.panels[0].bbox.width * 72 / on.figure.dpi


def _label(block: int | None, component: str) -> str:
    return words(component) if block is None else f"{block}: {words(component)}"


cls_rank = Kind(
    "cls-rank",
    "effective rank of the CLS token along the depth, a line a sampled checkpoint",
    cls_rank_data,
    draw_cls_rank,
)
