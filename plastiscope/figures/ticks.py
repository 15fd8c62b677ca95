"""Text on a figure: numbers short, names made harmless, labels that never touch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator

from ..metrics import METRICS

Numbers = npt.NDArray[np.floating[Any]]
LONGEST = 36


def count_text(number: float) -> str:
    """A step or token count in few characters: 1500 -> 1.5k, 2000000 -> 2M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.4g}{letter}"
    return f"{number:.4g}"


def plain(text: object) -> str:
    """A name of the user's as a label.

    A dollar sign would start matplotlib's mathematics, a leading underscore would hide it from
    legends, a line break or a control character would break the layout, and a very long name
    would push the picture out of the page.
    """
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    if len(shown) > LONGEST:
        half = LONGEST // 2
        shown = f"{shown[: half - 1]}...{shown[-half + 2 :]}"
    shown = shown.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def words(name: str) -> str:
    """A metric's or component's name as words: attention_output -> attention output."""
    spaced = name.replace("_", " ")
    for ended in ("residual", "norm"):
        for digit in "12":
            spaced = spaced.replace(f"{ended}{digit}", f"{ended} {digit}")
    capitals = {"ntk": "NTK", "auc": "AUC", "cls": "CLS"}
    return plain(" ".join(capitals.get(word, word) for word in spaced.split(" ")))


def measure(metric: str) -> str:
    """A metric's name and, where its numbers have one, its unit."""
    unit = next((one.unit for one in METRICS if one.name == metric), "")
    return f"{words(metric)} ({unit})" if unit in ("nats", "bits") else words(metric)


def quantity(data: pd.DataFrame) -> str:
    """What the numbers are: metric, subject and, where the metric has one, its parameter."""
    metric, subject = (str(data[name].iloc[0]) for name in ("metric", "subject"))
    of = {"feature": " of features", "weight": " of weights"}.get(subject, "")
    of = "" if metric.startswith("weight") else of
    given = list(data["parameters"].dropna().unique()) if "parameters" in data else []
    parameters = [str(one) for one in given if one]
    return measure(metric) + of + (f" ({plain(parameters[0])})" if len(parameters) == 1 else "")


def stacked(name: str) -> str:
    """A long name in two lines."""
    return name.replace(" ", "\n", 1) if len(name) > 10 else name


def log_scale(axes: Axes, values: Iterable[float]) -> None:
    """A logarithmic y axis where the values span powers."""
    if spans_powers(values):
        axes.set_yscale("log")


def spans_powers(values: Iterable[float]) -> bool:
    """Whether all values are positive and more than a factor of 100 apart."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) > 100


def label_columns(axes: Axes, labels: Sequence[str]) -> None:
    """One label under each column of a picture; those that would touch are taken out later."""
    _fix(axes.xaxis, np.arange(len(labels), dtype=float), labels)


def label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """One label beside each row of a picture."""
    _fix(axes.yaxis, np.arange(len(labels), dtype=float), labels)


def count_axis(axis: Axis, most: int = 4, whole: bool = True) -> None:
    """Few ticks, at whole numbers, written short."""
    axis.set_major_locator(
        MaxNLocator(nbins=most, integer=whole, min_n_ticks=2, steps=[1, 2, 5, 10])
    )
    axis.set_major_formatter(FuncFormatter(lambda x, _: count_text(x)))


def _fix(axis: Axis, places: Numbers, labels: Sequence[str]) -> None:
    # Each label drawn costs about a millisecond, and no page has room for more than this.
    stride = max(1, math.ceil(len(labels) / 250))
    axis.set_major_locator(FixedLocator(list(places[::stride])))
    axis.set_major_formatter(FixedFormatter(list(labels[::stride])))
    axis.set_tick_params(which="major", length=0 if len(labels) > 1 else 2)


def thin_labels(figure: Figure) -> bool:
    """Keep every n-th label of the fixed ones, n the least with which no two touch.

    The figure must have been laid out. True when any label was taken out.
    """
    fixed = [
        (axis, side)
        for axes in figure.axes
        for axis, side in ((axes.xaxis, 0), (axes.yaxis, 1))
        if isinstance(axis.get_major_locator(), FixedLocator)
    ]
    return sum(_thin(axis, side) for axis, side in fixed) > 0


def _thin(axis: Axis, side: int) -> bool:
    labels = [label for label in axis.get_ticklabels() if label.get_text()]
    if len(labels) < 2:
        return False
    boxes = [label.get_window_extent().get_points()[:, side] for label in labels]
    middles = np.array([box.mean() for box in boxes])
    extent = np.array([box[1] - box[0] for box in boxes])
    air = 0.6 * extent.min() if side == 0 and labels[0].get_rotation() == 0 else 0.0
    stride = next(n for n in range(1, len(labels) + 1) if _apart(middles[::n], extent[::n], air))
    if stride > 1:
        axis.set_major_locator(FixedLocator(list(axis.get_majorticklocs())[::stride]))
        axis.set_major_formatter(FixedFormatter([x.get_text() for x in labels][::stride]))
    return stride > 1


def _apart(middles: Numbers, extent: Numbers, air: float) -> bool:
    return bool((np.abs(np.diff(middles)) >= (extent[1:] + extent[:-1]) / 2 + air).all())
