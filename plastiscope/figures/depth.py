"""The class token on its way through the network."""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from ..errors import NotEnoughEvidenceError
from .delta import depth_order
from .kind import Kind
from .panels import Canvas, canvas, course, depth_colours, legend, runs_of
from .selection import Choice, demand_values, grouped, pick, spaced
from .style import Look
from .ticks import count_text, label_columns, plain, words

SAMPLED = 5


def cls_rank_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Effective rank of the [inputs, width] matrix of class tokens after every component.

    `place` counts the components from the input to the output; five checkpoints, evenly spaced
    among those of each run.
    """
    metric = choice.metric or "effective_rank"
    data = pick(table, choice, metric, ("feature",), tokens="cls")
    data = demand_values(data[data["head"].isna()], f"{metric} of the class token")
    data = grouped(data, choice)
    if data.empty:
        raise NotEnoughEvidenceError(f"the tables hold no {metric} of the class token")
    kept = [
        one[one["point"].isin(spaced(sorted(int(p) for p in one["point"].unique()), SAMPLED))]
        for _, one in data.groupby("run", sort=False)
    ]
    data = pd.concat(kept, ignore_index=True).assign(metric=metric, subject="feature")
    places = {key: place for place, key in enumerate(depth_order(data))}
    keys = zip(data["block"], data["component"], strict=True)
    return data.assign(place=[places[None if pd.isna(b) else int(b), name] for b, name in keys])


def draw_cls_rank(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """Depth on x, a line a sampled checkpoint from dark (first) to bright, a panel a run."""
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
        for place in range(1, len(order)):
            if order[place][0] != order[place - 1][0]:
                panel.axvline(place - 0.5, color=of.ink, linewidth=0.4 * of.line, alpha=0.6)
        panel.grid(visible=False, axis="x")
        label_columns(panel, [_label(*key) for key in order])
        panel.tick_params(axis="x", labelrotation=90)
        panel.set_ylabel(f"{words(data['metric'].iloc[0])} of CLS")
        if len(runs) > 1:
            panel.set_title(plain(run))
    legend(on)
    return on


def _label(block: int | None, component: str) -> str:
    return words(component) if block is None else f"{block}: {words(component)}"


cls_rank = Kind(
    "cls-rank",
    "effective rank of the CLS token along the depth, a line a sampled checkpoint",
    cls_rank_data,
    draw_cls_rank,
)
