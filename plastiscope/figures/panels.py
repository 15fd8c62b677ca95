"""Panels on one scale, lines that break where a value is missing, maps that are grey there."""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import matplotlib.colors
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..errors import UsageError
from .selection import Choice, completed, spaced
from .style import DASHES, LIGHTER, Look, new_figure
from .ticks import count_axis, count_text, label_columns, label_rows, plain

MOST_PANELS = 24
MOST_ENTRIES = 12
FEW = 10
RUN = "run: "


@dataclass
class Canvas:
    """A figure, its panels in order, and the legend entries gathered while drawing.

    `own` is false when the caller gave the Axes: then the figure around it isn't touched.
    """

    figure: Figure
    panels: list[Axes]
    own: bool
    look: Look
    columns: int = 1
    entries: dict[str, Any] = field(default_factory=dict)


def canvas(
    of: Look,
    count: int,
    axes: Axes | None = None,
    *,
    columns: int = 4,
    width: float | None = None,
    height: float = 1.25,
    share: tuple[bool, bool] = (True, True),
) -> Canvas:
    """`count` panels in rows of `columns`, or the one given; `height` of a row in paper inches.

    Raises UsageError when one Axes is given for several panels.
    """
    if axes is not None:
        if count != 1:
            raise UsageError(f"this figure has {count} panels: choose one block, or give no axes")
        figure = axes.get_figure(root=True)
        assert figure is not None
        return Canvas(figure, [axes], False, of)
    columns = even_columns(count, columns)
    rows = math.ceil(count / columns)
    wide = of.double if columns > 1 else of.single
    scale = of.double / Look.double
    figure = new_figure(of, width or wide, rows * height * scale + 4.5 * of.row)
    grid = figure.subplots(rows, columns, sharex=share[0], sharey=share[1], squeeze=False)
    panels = list(grid.flat)
    for empty in panels[count:]:
        empty.remove()
    # With a short last row the panels above the gap end their columns: they carry the x labels.
    for panel in panels[max(0, count - columns) : count]:
        panel.tick_params(labelbottom=True)
    return Canvas(figure, panels[:count], True, of, columns)


def even_columns(count: int, columns: int) -> int:
    """`columns`, or one more or less where that leaves fewer gaps in the last row."""
    if columns == 1 or count <= columns:
        return min(count, columns)
    return min((columns, columns + 1, columns - 1), key=lambda n: -count % n if n > 1 else count)


def shown_blocks(blocks: Sequence[int]) -> list[int]:
    """The blocks that get a panel: evenly spaced ones of very many."""
    return spaced(list(blocks), MOST_PANELS)


def course(
    on: Canvas,
    axes: Axes,
    one: pd.DataFrame,
    name: str,
    *,
    colour: str,
    marker: str = "",
    dash: Any = "-",
    line: float | None = None,
) -> None:
    """One series over x: a line, broken at null values, and its spread as a band.

    Values that stand alone between two missing ones get a marker, or they'd be invisible.
    """
    one = _parted(one.sort_values("point", kind="stable"))
    colour = visible(colour, on.look)
    x, y = one["x"].to_numpy(float), one["value"].to_numpy(float)
    y = np.where(np.isfinite(y), y, np.nan)
    axes.plot(
        x,
        y,
        color=colour,
        linestyle=dash,
        marker=marker or "o",
        markevery=_marked(y, _most_marks(on, axes) if marker else 0),
        linewidth=line or on.look.line,
        label=plain(name),
    )
    if "spread" in one and one["spread"].notna().any():
        spread = one["spread"].to_numpy(float)
        axes.fill_between(x, y - spread, y + spread, color=colour, alpha=0.2, linewidth=0)
    if name:
        key = {"color": colour, "linestyle": dash, "linewidth": line or on.look.line}
        on.entries.setdefault(plain(name), Line2D([], [], marker=marker, **key))


def _parted(one: pd.DataFrame) -> pd.DataFrame:
    """A null between segments: what was measured across a change of shape isn't one course."""
    if "segment" not in one or one["segment"].nunique() < 2:
        return one
    known = one["segment"].ffill()
    breaks = one[(known != known.shift()) & known.shift().notna()]
    gaps = breaks.assign(value=np.nan, point=breaks["point"] - 0.5)
    return pd.concat([one, gaps]).sort_values("point", kind="stable")


def visible(colour: Any, of: Look) -> Any:
    """The colour that stands for this one on dark paper."""
    dark_paper = sum(matplotlib.colors.to_rgb(of.paper)) < 1.5
    return LIGHTER.get(colour, colour) if dark_paper else colour


def _most_marks(on: Canvas, axes: Axes) -> int:
    """How many markers have room side by side."""
    points = axes.bbox.width * 72 / on.figure.dpi
    return max(1, int(points / (2.2 * max(on.look.marker, 1))))


def _marked(y: np.ndarray[Any, Any], most: int) -> list[int]:
    """Every point, or of more than `most` a few, to tell the lines apart; always those alone.

    Only the latter when `most` is 0.
    """
    known = np.isfinite(y)
    padded = np.concatenate([[False], known, [False]])
    alone = known & ~padded[:-2] & ~padded[2:]
    some = set(np.flatnonzero(alone).tolist())
    if most:
        some |= set(range(0, len(y), 1 if len(y) <= most else math.ceil(len(y) / FEW)))
    return sorted(some)


def runs_of(data: pd.DataFrame, choice: Choice) -> list[str]:
    """The runs, or groups, in the order asked for."""
    present = [str(run) for run in data["run"].unique()]
    return [name for name in choice.groups if name in present] or present


def run_courses(
    on: Canvas,
    axes: Axes,
    data: pd.DataFrame,
    choice: Choice,
    name: str,
    colour: str,
    marker: str = "",
) -> None:
    """The same series of every run: one colour, a dash pattern a run."""
    runs = choice.runs or runs_of(data, choice)
    dashes = {run: DASHES[place % len(DASHES)] for place, run in enumerate(runs)}
    if len(runs) > 1:
        key = {"color": visible(colour, on.look), "marker": marker, "linewidth": on.look.line}
        if name:
            on.entries.setdefault(plain(name), Line2D([], [], **key))
        for run, dash in dashes.items():
            key = {"color": on.look.ink, "linestyle": dash, "linewidth": on.look.line}
            on.entries.setdefault(RUN + plain(run), Line2D([], [], **key))
    for run, dash in dashes.items():
        one = data[data["run"] == run]
        if len(one):
            course(on, axes, one, name, colour=colour, marker=marker, dash=dash)


def legend(on: Canvas) -> None:
    """One legend under the panels, or in the given Axes; few of many layers, few of many runs."""
    names = list(on.entries)
    if len(names) < 2 and not any(name.startswith("shaded") for name in names):
        return
    runs = [name for name in names if name.startswith(RUN)]
    kept = _capped([name for name in names if name not in runs], 16, MOST_ENTRIES)
    kept += _capped(runs, 8, 6)
    handles, labels = [on.entries[name] for name in kept], list(kept)
    if len(kept) < len(names):
        handles.append(Line2D([], [], linestyle=""))
        labels.append(f"({len(names) - len(kept)} more)")
    if not on.own:
        on.panels[0].legend(handles, labels)
        return
    widest = max(len(label) for label in labels) * 0.55 + 4
    room = on.figure.get_figwidth() * 72 / (on.look.font * 0.9)
    columns = max(1, min(len(labels), int(room / widest)))
    columns = math.ceil(len(labels) / math.ceil(len(labels) / columns))
    on.figure.legend(handles, labels, loc="outside lower center", ncols=columns, columnspacing=1.2)


def _capped(names: list[str], most: int, kept: int) -> list[str]:
    """All of a few names; of many, such as layers, an even sample that shows the order."""
    return names if len(names) <= most else [names[at] for at in spaced(range(len(names)), kept)]


def depth_colours(count: int, of: Look) -> list[Any]:
    """Colours from the first block to the last, readable on the look's paper."""
    light = sum(matplotlib.colors.to_rgb(of.paper)) > 1.5
    ends = (0.0, 0.88) if light else (0.35, 1.0)
    return [matplotlib.colormaps["viridis"](place) for place in np.linspace(*ends, count)]


def x_label(choice: Choice) -> str:
    """What lies on the x axis."""
    return {"step": "training step", "tokens": "training tokens"}.get(choice.x, choice.x)


def say_shade(on: Canvas, what: str) -> None:
    """What the band around a line is, in the legend."""
    on.entries[f"shaded: {what}"] = Patch(facecolor=on.look.ink, alpha=0.2, linewidth=0)


def finish_courses(on: Canvas, choice: Choice, y: str, *, fraction: bool = False) -> None:
    """Labels, short ticks and the legend of panels of lines."""
    for axes in on.panels:
        count_axis(axes.xaxis, 4 if len(on.panels) > 1 else 6)
        if fraction:
            axes.set_ylim(-0.03, 1.03)
        _tidy_limits(axes)
    if choice.groups:
        say_shade(on, "standard deviation over runs")
    narrow = on.columns > 6
    for axes in bottom(on)[on.columns // 2 :: on.columns] if narrow else bottom(on):
        axes.set_xlabel(x_label(choice))
    if y and on.own and len(on.panels) > 1:
        on.figure.supylabel(y, fontsize=on.look.font)
    elif y:
        on.panels[0].set_ylabel(y)
    legend(on)


def _tidy_limits(axes: Axes) -> None:
    """One point of x gets one tick; nothing but zeros isn't centred between -0.05 and 0.05."""
    nothing = [np.empty(0)]
    x = np.concatenate([np.asarray(line.get_xdata(), float) for line in axes.lines] or nothing)
    y = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines] or nothing)
    if len(x) and len(set(x)) == 1:
        axes.set_xlim(x[0] - 1, x[0] + 1)
        axes.set_xticks([x[0]])
    known = y[np.isfinite(y)]
    if len(known) and not known.any():
        axes.set_ylim(-0.03, 1.03)


def bottom(on: Canvas) -> list[Axes]:
    """The last panel of each column."""
    return on.panels[-on.columns :]


def symmetric_limit(values: Any) -> float:
    """max |d| over the finite values: zero lies in the middle; 1 when all are zero or missing."""
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    limit = float(np.abs(finite).max()) if finite.size else 0.0
    return limit if limit > 0 else 1.0


def span(values: Any, percentiles: tuple[float, float] = (0, 100)) -> tuple[float, float]:
    """The least and greatest finite value (or percentiles), never equal."""
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return 0.0, 1.0
    low, high = (float(one) for one in np.percentile(finite, percentiles))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def picture(
    on: Canvas, axes: Axes, values: np.ndarray[Any, Any], limits: tuple[float, float], cmap: str
) -> AxesImage:
    """A map of values [rows, columns]: grey where there is none, the same colours for all maps.

    Positive limits more than a factor of 100 apart are coloured by their logarithm.
    """
    shown = np.ma.masked_invalid(np.asarray(values, float))
    colours = matplotlib.colormaps[cmap].with_extremes(bad=on.look.missing)
    wide = limits[0] > 0 and limits[1] / limits[0] > 100
    norm = LogNorm(*limits) if wide else Normalize(*limits)
    image = axes.imshow(shown, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    if np.ma.getmaskarray(shown).any():
        on.entries["no value"] = Patch(facecolor=on.look.missing, label="no value")
    return image


def map_labels(axes: Axes, rows: Sequence[str], xs: Sequence[float]) -> None:
    """Row names and the x of each column."""
    label_rows(axes, rows)
    label_columns(axes, [count_text(x) if math.isfinite(x) else "?" for x in xs])


def colour_bar(on: Canvas, image: AxesImage, label: str, extend: Any = "neither") -> Colorbar:
    """One colour bar for all panels."""
    of = on.look
    target: Any = on.panels if on.own else on.panels[0]
    bar = on.figure.colorbar(image, ax=target, label=label, extend=extend, aspect=25, pad=0.015)
    bar.outline.set_linewidth(0.4 * of.line)
    bar.ax.grid(visible=False)
    if not isinstance(image.norm, LogNorm):
        count_axis(bar.ax.yaxis, 5, whole=False)
    if "no value" in on.entries and on.own:
        on.figure.legend([on.entries["no value"]], ["no value"], loc="outside lower right")
    return bar


def matrix(data: pd.DataFrame, rows: Sequence[Any], key: str) -> tuple[Any, list[float]]:
    """One run's values as [rows, points] and the x of each point; NaN where there is no row."""
    points = data[["point", "x"]].drop_duplicates("point").sort_values("point")
    wide = data.pivot(index=key, columns="point", values="value")
    wide = wide.reindex(index=list(rows), columns=points["point"])
    return wide.to_numpy(float), [float(x) for x in points["x"]]


def with_breaks(data: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Every run's series completed with null rows, so that a line never bridges a gap."""
    parts = [
        completed(one.drop(columns="run"), keys).assign(run=run)
        for run, one in data.groupby("run", sort=False)
    ]
    return pd.concat(parts, ignore_index=True) if parts else data
