"""The whole network's values: pooled over all entries or units, and plain means over layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import units as unit_metrics
from . import weights as weight_metrics
from .definition import Floats, Metric, Values
from .measurement import Place, rows_of, values_of
from .spectral import condition_number, effective_rank_squared

if TYPE_CHECKING:
    from ..observations import Magnitude, UnitGradients, Units, Weight
    from ..store import Row

NETWORK = "network"
_SIZES = (
    weight_metrics.weight_magnitude,
    weight_metrics.weight_rms,
    weight_metrics.weight_l2,
    weight_metrics.weight_change,
    weight_metrics.weight_drift,
)
_MATRICES = (condition_number, effective_rank_squared, weight_metrics.squared_singular_value)
_UNITS = (
    unit_metrics.dormant_fraction,
    unit_metrics.dormant_fraction_signed,
    unit_metrics.active_fraction,
    unit_metrics.dead_fraction,
    unit_metrics.rarely_active_fraction,
    unit_metrics.saturated_fraction,
    unit_metrics.unit_sign_entropy,
    unit_metrics.grama_inactive_fraction,
)


def weight_totals(
    weights: Mapping[str, Weight | Magnitude],
    types: Mapping[str, str] | None = None,
    *,
    scope: str = "",
    only: frozenset[str] | None = None,
) -> list[Row]:
    """Rows of the network's weights, parameters "pooled" and "mean".

    `weights` by the name of the tensor, so that a tied one counts once; whole tensors, not heads.
    `scope` is put into the parameters ("scope=non-embedding"). `types` gives a tensor's component:
    with it come the plain means over all matrices, and over those of each component, of the
    condition number, the squared effective rank and the squared singular values.
    """
    rows: list[Row] = []
    sums = [weight.parts["Magnitude"] for weight in weights.values()]
    for metric in _chosen(_SIZES, only):
        rows += _size_rows(metric, sums, scope)
    if types is None:
        return rows
    groups: dict[str, list[Any]] = {NETWORK: []}
    for name, weight in weights.items():
        if "Weight" in weight.parts:
            groups[NETWORK].append(weight)
            groups.setdefault(types.get(name, name), []).append(weight)
    for metric in _chosen(_MATRICES, only):
        for component, members in groups.items():
            rows += _mean_rows(metric, [m.parts[metric.needs] for m in members], component, scope)
    return rows


def unit_totals(
    layers: Sequence[Units | UnitGradients], only: frozenset[str] | None = None
) -> list[Row]:
    """Rows of the network's units, or of the gradients into them: "pooled" counts every unit once,
    "mean" every layer once.

    Layers that no row reached (unrouted experts) are left out of both, and of a metric that isn't
    for every function (saturation) the other layers.
    """
    reached = [layer for layer in layers if layer.status != "not_routed"]
    rows: list[Row] = []
    for metric in _chosen(_UNITS, only):
        own = [layer for layer in reached if type(layer).__name__ == metric.needs]
        found = [(layer, _by_parameters(values_of(metric, layer))) for layer in own]
        layers = [layer for layer, values in found if values]
        known = [values for _, values in found if values]
        for parameters in known[0] if known else ():
            rows += _unit_rows(metric, [one[parameters] for one in known], layers, parameters)
    return rows


def duplicate_totals(rows: Sequence[Row]) -> list[Row]:
    """The network's duplicate units, from the rows of its layers; empty where none has a value."""
    metric = unit_metrics.duplicate_fraction
    own = [row for row in rows if (row.metric, row.tokens) == (metric.name, "all")]
    known = [(row.value, row.columns, row.rows) for row in own if row.value is not None]
    if not known:
        return []
    shares, units, samples = (
        np.asarray(part, dtype=np.float64) for part in zip(*known, strict=True)
    )
    size = (int(samples.min()), int(units.sum()))
    pooled = float((shares * units).sum() / units.sum())
    return [
        *_network_rows(metric, pooled, ("pooled", own[0].parameters), "ok", size),
        *_network_rows(metric, float(shares.mean()), ("mean", own[0].parameters), "ok", size),
    ]


def _chosen(metrics: tuple[Metric, ...], only: frozenset[str] | None) -> list[Metric]:
    return [m for m in metrics if only is None or m.name in only]


def _size_rows(metric: Metric, sums: list[Magnitude], scope: str) -> list[Row]:
    parts = [values_of(metric, one) for one in sums]
    known = [(one, part[0]) for one, part in zip(sums, parts, strict=True) if part]
    if not known:
        return []
    status = _worst([_status(part, one) for one, part in known])
    pooled = values_of(metric, _pool([one for one, _ in known], status))
    mean = float(np.mean([np.mean(part.values) for _, part in known]))
    count = sum(one.count * one.square.size for one, _ in known)
    total = float(np.mean(pooled[0].values)) if pooled else float("nan")
    return [
        *_network_rows(metric, total, ("pooled", scope), status, (count, None)),
        *_network_rows(metric, mean, ("mean", scope), status, (count, None)),
    ]


def _pool(sums: list[Magnitude], status: str) -> Magnitude:
    def total(name: str) -> Any:
        parts = [getattr(one, name) for one in sums]
        if any(part is None or isinstance(part, str) for part in parts):
            return None if parts[0] is None else status
        return np.asarray(sum(float(part.sum()) for part in parts))

    return type(sums[0])(
        count=sum(one.count * one.square.size for one in sums),
        absolute=total("absolute"),
        square=total("square"),
        status=np.asarray("ok"),
        change=total("change"),
        drift=total("drift"),
    )


def _mean_rows(metric: Metric, given: list[Any], component: str, scope: str) -> list[Row]:
    found = [values_of(metric, one) for one in given]
    rows: list[Row] = []
    for i, first in enumerate(found[0] if found else []):
        values = [float(np.mean(one[i].values)) for one in found]
        status = _worst([_status(one[i], g) for one, g in zip(found, given, strict=True)])
        names = ("mean over matrices", first.parameters, scope)
        rows += _network_rows(
            metric, float(np.mean(values)), names, status, (len(given), None), component
        )
    return rows


def _unit_rows(
    metric: Metric,
    parts: list[Values],
    layers: Sequence[Units | UnitGradients],
    parameters: str,
) -> list[Row]:
    counts = [layer.size[1] or 0 for layer in layers]
    stacked = np.stack([np.asarray(part.values, dtype=np.float64) for part in parts])
    status = _worst([_status(part, one) for part, one in zip(parts, layers, strict=True)])
    weights = np.asarray(counts, dtype=np.float64)[:, None]
    pooled: Floats = (stacked * weights).sum(0) / weights.sum()
    size = (min(layer.rows for layer in layers), sum(counts))
    return [
        *_network_rows(metric, pooled, ("pooled", parameters), status, size),
        *_network_rows(metric, stacked.mean(0), ("mean", parameters), status, size),
    ]


def _network_rows(
    metric: Metric,
    values: Floats | float,
    names: tuple[str, ...],
    status: str,
    size: tuple[int | None, int | None],
    component: str = NETWORK,
) -> list[Row]:
    found = Values(values, parameters=", ".join(n for n in names if n), status=status)
    return rows_of(
        metric,
        found,
        Place(component, None, metric.subject or "weight"),
        size=size,
        replicated=np.ndim(values) > 0,
    )


def _by_parameters(found: list[Values]) -> dict[str, Values]:
    return {one.parameters: one for one in found}


def _status(found: Values, given: Any) -> str:
    """The status that keeps a value from counting, else ok: zero and dead layers do count."""
    statuses = np.asarray(given.status if found.status is None else found.status)
    bad = [s for s in statuses.ravel().tolist() if s not in ("ok", "zero_matrix", "layer_dead")]
    return str(bad[0]) if bad else "ok"


def _worst(statuses: list[str]) -> str:
    return next((status for status in statuses if status != "ok"), "ok")
