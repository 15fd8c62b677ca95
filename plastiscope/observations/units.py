"""Statistics of hidden units over the probe, unit by unit and fold by fold.

Axes: n rows (inputs, tokens or positions), u units, K folds. A unit of a convolution is a channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .device import fetched
from .folds import Folds
from .moments import counts_without_each, without_each
from .spectra import Floats
from .symmetric import at_once

RELU_FAMILY = frozenset({"relu", "relu6", "relu_", "threshold", "relu2", "squared_relu"})
"""Activation functions that are exactly zero where the unit is off."""
SATURATION = {"tanh": (-0.99, 0.99), "sigmoid": (0.01, 0.99)}
"""Bounds beyond which a bounded activation counts as saturated; also hard variants by name."""
BOUNDED = {"tanh": torch.tanh, "sigmoid": torch.sigmoid}
_ROWS = 255


@dataclass(frozen=True)
class Units:
    """Sums for every unit [1 + K, u]: over all rows, then over all rows but one fold's.

    `absolute`, `signed` are means of |h| and h after the activation function; `on` the share of
    rows on which the unit is active (None when that can't be said: `on_status` tells why), `lit`
    the share on which the output isn't exactly 0, `positive` that on which the pre-activation is
    above 0, `saturated` that beyond the bounds of a tanh or sigmoid.
    """

    function: str | None
    rows: int
    absolute: Floats
    signed: Floats
    lit: Floats
    on: Floats | None
    on_status: str
    positive: Floats | None
    saturated: Floats | None
    status: str
    replicated: ClassVar[bool] = True

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"Units": self}

    @property
    def is_relu(self) -> bool:
        """Whether a unit that is off is exactly 0."""
        return self.function in RELU_FAMILY

    @property
    def size(self) -> tuple[int | None, int | None]:
        """Rows seen and units."""
        return self.rows, self.absolute.shape[1]


def rows_of(x: Tensor, is_conv: bool = False) -> Tensor:
    """Rows [n, d] of [B, d], [B, T, d] or, when convolutional, [B, C, h, w]: a unit is a channel.

    Rows of one input lie together: input b has rows b*n/B to (b+1)*n/B - 1.
    """
    if is_conv and x.ndim > 2:
        x = x.movedim(1, -1)
    return x.reshape(-1, x.shape[-1])


class UnitSums:
    """Adds up one layer's units; `finish` gives its Units."""

    def __init__(self, folds: int, function: str | None) -> None:
        self.folds, self.function = folds, function
        self.counts = np.zeros(folds, dtype=np.int64)
        self.sums: dict[str, Tensor] = {}

    def add(self, post: Tensor, pre: Tensor | None, fold: Tensor | Folds) -> None:
        """Rows after the function post [n, u], before it pre [n, u] or None, the fold [n] of each.

        In a gated layer `post` is what the down-projection takes and `pre` the gate's function's
        input.
        """
        if len(post) == 0:
            return
        post, folds = post.detach(), Folds.of(fold)
        pre = None if pre is None else pre.detach()
        self.counts += folds.counts(self.folds)
        size = max(1, min(_ROWS, at_once(post.device) // (2 * post.shape[1])))
        for k, some in folds.groups(post.device, self.folds, size):
            self._add_some(post[some], None if pre is None else pre[some], k)

    def _add_some(self, post: Tensor, pre: Tensor | None, k: int) -> None:
        """A few rows of fold k, so few that every pass over them finds them in the cache."""
        wide = post.double()
        self._sum("signed", k, wide.sum(0))
        self._sum("absolute", k, wide.abs_().sum(0))
        self._count("lit", k, post != 0)
        self._count("on", k, post > 0)
        if pre is not None:
            self._count("positive", k, pre > 0)
        if self.function in SATURATION:
            low, high = SATURATION[self.function]
            # Of a gate, not of what it lets through.
            own = post if pre is None else BOUNDED[self.function](pre)
            self._count("saturated", k, (own < low) | (own > high))

    def _count(self, name: str, k: int, entries: Tensor) -> None:
        # Bytes hold the count of so few rows, and take half the time of wider integers.
        self._sum(name, k, entries.view(torch.uint8).sum(0, dtype=torch.uint8).double())

    def _sum(self, name: str, k: int, units: Tensor) -> None:
        if name not in self.sums:
            self.sums[name] = units.new_zeros(self.folds, len(units))
        self.sums[name][k] += units

    def finish(self) -> Units:
        """Means over rows. A layer that no row reached (an unrouted expert) says `not_routed`."""
        rows = counts_without_each(self.counts)
        arrays = fetched(*self.sums.values()) if self.sums else ()
        found = {name: _means(sums, rows) for name, sums in zip(self.sums, arrays, strict=True)}
        nothing = np.full((1 + self.folds, 0), np.nan)
        absolute = found.get("absolute", nothing)
        on, on_status = _activity(self.function, found)
        return Units(
            function=self.function,
            rows=int(self.counts.sum()),
            absolute=absolute,
            signed=found.get("signed", nothing),
            lit=found.get("lit", nothing),
            on=on,
            on_status=on_status,
            positive=found.get("positive"),
            saturated=found.get("saturated"),
            status=_status(absolute),
        )


def _means(sums: Floats, rows: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Floats = without_each(sums) / rows[:, None]
    return means


def _activity(function: str | None, found: dict[str, Floats]) -> tuple[Floats | None, str]:
    """Where a unit is on: its pre-activation is above 0; for the ReLU family its output will do."""
    if "positive" in found:
        return found["positive"], "ok"
    if function in RELU_FAMILY:
        return found.get("on"), "ok"
    return None, "no_pre_activation" if function else "unknown_activation"


def _status(absolute: Floats) -> str:
    if absolute.shape[1] == 0:
        return "not_routed"
    if not np.isfinite(absolute[0]).all():
        return "non_finite"
    return "layer_dead" if absolute[0].sum() == 0 else "ok"


@dataclass(frozen=True)
class UnitGradients:
    """Mean |gradient of the loss into a unit's activation| [1 + K, u] over `rows` rows."""

    absolute: Floats
    rows: int
    status: str
    replicated: ClassVar[bool] = True

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"UnitGradients": self}

    @property
    def size(self) -> tuple[int, int]:
        """Rows seen and units."""
        return self.rows, self.absolute.shape[1]


class UnitGradientSums:
    """Adds up gradients into one layer's units; `finish` gives its UnitGradients."""

    def __init__(self, folds: int) -> None:
        self.sums = UnitSums(folds, None)

    def add(self, gradients: Tensor, fold: Tensor | Folds) -> None:
        """Rows d loss / d activation [n, u] and the fold [n] of each."""
        self.sums.add(gradients, None, fold)

    def finish(self) -> UnitGradients:
        """Means over rows; status "layer_dead" where no gradient arrives at all."""
        units = self.sums.finish()
        return UnitGradients(units.absolute, units.rows, units.status)
