"""Text on a figure: numbers short, names made harmless, labels that never touch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator

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


def label_columns(axes: Axes, labels: Sequence[str]) -> None:
    """One label under each column of a picture; those that would touch are taken out later."""
    _fix(axes.xaxis, np.arange(len(labels)), labels)


def label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """One label beside each row of a picture."""
    _fix(axes.yaxis, np.arange(len(labels)), labels)


def count_axis(axis: Axis, most: int = 4, whole: bool = True) -> None:
    """Few ticks, at whole numbers, written short."""
    axis.set_major_locator(
        MaxNLocator(nbins=most, integer=whole, min_n_ticks=2, steps=[1, 2, 5, 10])
    )
    axis.set_major_formatter(FuncFormatter(lambda x, _: count_text(x)))


def _fix(axis: Axis, places: Sequence[float] | np.ndarray[Any, Any], labels: Sequence[str]) -> None:
    # Each label drawn costs about a millisecond, and no page has room for more than this.
    stride = max(1, math.ceil(len(labels) / 250))
    axis.set_major_locator(FixedLocator(list(places[::stride])))
    axis.set_major_formatter(FixedFormatter(list(labels[::stride])))
    axis.set_tick_params(which="major", length=0 if len(labels) > 1 else 2)


def thin_labels(figure: Figure) -> None:
    """Keep every n-th label of the fixed ones, n the least with which no two touch.

    The figure must have been laid out.
    """
    for axes in figure.axes:
        for axis, side in ((axes.xaxis, 0), (axes.yaxis, 1)):
            if isinstance(axis.get_major_locator(), FixedLocator):
                _thin(axis, side)


def _thin(axis: Axis, side: int) -> None:
    labels = [label for label in axis.get_ticklabels() if label.get_text()]
    if len(labels) < 2:
        return
    boxes = [label.get_window_extent() for label in labels]
    middles = np.array(
        [(box.get_points()[0, side] + box.get_points()[1, side]) / 2 for box in boxes]
    )
    extent = np.array([box.get_points()[1, side] - box.get_points()[0, side] for box in boxes])
    air = 0.6 * extent.min() if side == 0 else 0.0
    for stride in range(1, len(labels) + 1):
        kept = slice(None, None, stride)
        room = np.abs(np.diff(middles[kept])) - (extent[kept][1:] + extent[kept][:-1]) / 2
        if (room >= air).all():
            break
    places = list(axis.get_majorticklocs())[kept]
    texts = [label.get_text() for label in labels][kept]
    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FixedFormatter(texts))
