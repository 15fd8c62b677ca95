"""From an observation to rows: every metric that it admits, with errors, maxima and reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .definition import Floats, Found, Metric, Values

if TYPE_CHECKING:
    from ..store import Row

NO_VALUE = frozenset(
    {
        "non_finite",
        "not_converged",
        "empty",
        "not_routed",
        "no_queries",
        "no_labels",
        "unresolved",
        "positions_sampled",
        "shape_changed",
    }
)
"""Statuses that never come with a value."""


VERSION = 3
"""Of the rows made of what metrics find. Raise it with every change of a standard error, of an
attainable maximum, of the network's totals or of when a status is given, which no single metric's
version would tell."""
LACKING = 0.1
"""Share of a rank that may be missing for want of rows before the row says so."""


@dataclass(frozen=True)
class Place:
    """Where in the network an observation was made; `heads` how many heads it has, else None."""

    component: str | None
    block: int | None
    subject: str
    tokens: str | None = None
    heads: int | None = None
    tensor: str | None = None


def measure_with(
    metrics: tuple[Metric, ...], observation: Any, place: Place, only: frozenset[str] | None
) -> list[Row]:
    """The rows of those metrics that the observation and the place admit."""
    rows: list[Row] = []
    for metric in metrics:
        given = observation.parts.get(metric.needs)
        if given is None or (only is not None and metric.name not in only):
            continue
        if not _is_for(metric, place):
            continue
        for found in values_of(metric, given):
            rows += rows_of(
                metric,
                _completed(metric, found, given),
                place,
                size=given.size,
                replicated=observation.replicated,
                sample=bool(getattr(given, "sample", False)),
            )
    return rows


def rows_without(
    metrics: tuple[Metric, ...],
    needs: frozenset[str],
    place: Place,
    status: str,
    only: frozenset[str] | None,
) -> list[Row]:
    """A null row with the reason for every metric that needs what can't be observed there."""
    return [
        row
        for metric in metrics
        if metric.needs in needs and (only is None or metric.name in only)
        if _is_for(metric, place)
        for row in rows_of(
            metric,
            Values(float("nan"), status=status),
            place,
            size=(None, None),
            replicated=False,
        )
    ]


def _is_for(metric: Metric, place: Place) -> bool:
    """Whether a metric is for this component; of "expert 3 activation" the last word counts."""
    return metric.components is None or str(place.component).split(" ")[-1] in metric.components


def values_of(metric: Metric, given: Any) -> list[Values]:
    """What a metric finds, always as a list; a failure is a value with its reason."""
    try:
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            found: Found = metric(given)
    except (ArithmeticError, ValueError, IndexError) as error:
        # One bad layer must not end a run, nor vanish from its table.
        statuses = np.asarray(given.status)
        known = str(statuses.flat[0]) if statuses.size else "ok"
        reason = known if known != "ok" else f"failed: {type(error).__name__}"
        return [Values(float("nan"), status=reason)]
    if found is None:
        return []
    if isinstance(found, list):
        return found
    return [found if isinstance(found, Values) else Values(found)]


def _completed(metric: Metric, found: Values, given: Any) -> Values:
    """With the observation's own status and maximum where the metric gave none."""
    maximum, status = found.maximum, found.status
    if maximum is None and metric.rank:
        maximum = getattr(given, "attainable", None)
    if status is None:
        status = given.status
    return replace(found, maximum=maximum, status=status)


def jackknife(replicates: Floats) -> Floats:
    """Standard error [...] from leave-one-fold-out values [K, ...]; NaN for fewer than two."""
    known = np.isfinite(replicates)
    k = known.sum(0)
    mean = np.where(known, replicates, 0.0).sum(0) / np.maximum(k, 1)
    squares = np.where(known, (replicates - mean) ** 2, 0.0).sum(0)
    return np.where(k >= 2, np.sqrt((k - 1) / np.maximum(k, 1) * squares), np.nan)


def jackknife_bias(values: Floats) -> Floats:
    """How much a value [...] lacks of what endless rows would give, from itself and its
    leave-one-fold-out values [1 + K, ...], after Quenouille; NaN for fewer than two folds."""
    known = np.isfinite(values[1:])
    k = known.sum(0)
    mean = np.where(known, values[1:], 0.0).sum(0) / np.maximum(k, 1)
    enough = (k >= 2) & np.isfinite(values[0])
    return np.where(
        enough, np.maximum(k - 1, 0) * (np.where(enough, values[0], 0.0) - mean), np.nan
    )


def rows_of(
    metric: Metric,
    found: Values,
    place: Place,
    *,
    size: tuple[int | None, int | None],
    replicated: bool,
    sample: bool = False,
) -> list[Row]:
    """The row of a metric's values, or one for each head where they have an axis of heads."""
    values = np.asarray(found.values, dtype=np.float64)
    error = np.asarray(np.nan if found.standard_error is None else found.standard_error)
    maximum = np.asarray(np.nan if found.maximum is None else found.maximum, dtype=np.float64)
    lacking = np.asarray(np.nan)
    if replicated and values.ndim:
        lacking = jackknife_bias(values)
        if metric.unit == "singular values":
            # A count goes by whole steps: less than one for a fold isn't growth.
            lacking = np.where(lacking >= len(values) - 2, lacking, 0.0)
        values, error = values[0], jackknife(values[1:])
    if replicated and maximum.ndim:
        maximum = maximum[0]
    status = np.asarray("ok" if found.status is None else found.status)
    if status.ndim > values.ndim:
        status = status.reshape(-1)[0]
    rows = []
    for head in range(len(values)) if values.ndim else [None]:
        value, most = _at(values, head), _at(maximum, head)
        reason = _reason(value, str(status[head] if status.ndim else status))
        if metric.rank and sample and reason == "ok" and value is not None:
            reason = _sufficiency(value, most, _at(lacking, head), size)
        value = None if reason in NO_VALUE else value
        error_here = _at(error, head) if value is not None else None
        rows.append(_row(metric, found, place, size, head, value, most, error_here, reason))
    return rows


def _at(values: Floats, head: int | None) -> float | None:
    number = float(values[head] if values.ndim else values)
    return number if np.isfinite(number) else None


def _reason(value: float | None, status: str) -> str:
    return "undefined" if value is None and status == "ok" else status


def _sufficiency(
    value: float, maximum: float | None, lacking: float | None, size: tuple[int | None, int | None]
) -> str:
    """Whether the number of rows rather than the network sets the rank, which then is a floor.

    Two things tell. The rank is near what so few rows can have: r equal directions come out right
    to a few percent from N = 2 r rows on. Or it still grows with the rows: what it loses without
    one fold of them says how much is missing, also of a long tail of small directions
    (docs/probe-rows.md).
    """
    rows, columns = size
    if rows is None or columns is None or maximum is None:
        return "ok"
    capped = rows < columns and value > maximum / 2
    growing = lacking is not None and lacking > LACKING * value
    return "insufficient_rows" if capped or growing else "ok"


def _row(
    metric: Metric,
    found: Values,
    place: Place,
    size: tuple[int | None, int | None],
    head: int | None,
    value: float | None,
    maximum: float | None,
    error: float | None,
    status: str,
) -> Row:
    from ..store import Row  # pandas: not for `explain`

    return Row(
        metric=metric.name,
        subject=metric.subject or place.subject,
        value=value,
        component=found.component or place.component,
        block=place.block,
        head=head,
        tokens=place.tokens,
        parameters=found.parameters,
        index=found.index,
        rows=size[0],
        columns=size[1],
        maximum=maximum,
        standard_error=error,
        status=status,
        tensor=place.tensor,
        version=metric.version,
    )
