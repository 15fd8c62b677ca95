"""Every metric, by name; what is measured of an observation; what a metric means, in words.

Importing this package needs neither torch nor pandas: `explain` answers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import unknown
from . import (
    attention,
    coverage,
    features,
    jacobian,
    kernel,
    optimizer,
    outputs,
    sensitivity,
    spectral,
    units,
    weights,
)
from .definition import Explanation, Metric, explanation
from .measurement import VERSION as ROWS_VERSION
from .measurement import Place, jackknife, measure_with, rows_without
from .totals import duplicate_totals, unit_totals, weight_totals

if TYPE_CHECKING:
    from ..store import Row

METRICS: tuple[Metric, ...] = (
    spectral.effective_rank,
    spectral.effective_rank_centered,
    spectral.effective_rank_squared,
    spectral.srank,
    spectral.approximate_rank,
    spectral.stable_rank,
    spectral.participation_ratio,
    spectral.numerical_rank,
    spectral.condition_number,
    spectral.spectral_norm,
    spectral.frobenius_norm,
    weights.weight_magnitude,
    weights.weight_rms,
    weights.weight_l2,
    weights.weight_change,
    weights.weight_drift,
    weights.gram_deviation,
    weights.gram_deviation_normalized,
    weights.squared_singular_value,
    features.feature_norm,
    features.rank_residual,
    units.dormancy_score,
    units.dormant_fraction,
    units.dormant_fraction_signed,
    units.active_fraction,
    units.dead_fraction,
    units.rarely_active_fraction,
    units.saturated_fraction,
    units.unit_sign_entropy,
    units.duplicate_fraction,
    attention.attention_entropy,
    attention.attention_entropy_normalized,
    attention.lazy_head,
    attention.collapsed_head,
    attention.attention_sink_rate,
    attention.attention_column_mass,
    attention.attention_rank,
    outputs.loss,
    outputs.accuracy,
    coverage.coverage,
    kernel.ntk_trace,
    kernel.ntk_condition_number,
    kernel.ntk_effective_rank,
    kernel.ntk_srank,
    kernel.ntk_approximate_rank,
    kernel.ntk_spectrum,
    kernel.ntk_offdiagonal,
    kernel.ntk_alignment,
    kernel.ntk_drift,
    kernel.gradient_norm,
    kernel.fisher_effective_rank,
    units.grama_inactive_fraction,
    jacobian.jacobian_sigma_max,
    jacobian.jacobian_sigma_min,
    jacobian.jacobian_condition_number,
    jacobian.isometry_distance,
    jacobian.jacobian_mean_log_sigma,
    jacobian.jacobian_frobenius,
    jacobian.jacobian_sigma,
    jacobian.isometry_score,
    sensitivity.rate_of_change,
    sensitivity.rate_of_change_embedding,
    sensitivity.rate_of_change_bound,
    optimizer.update_to_weight_ratio,
    optimizer.effective_learning_rate,
    optimizer.second_moment_effective_rank,
    outputs.average_accuracy_across_tasks,
)

__all__ = [
    "METRICS",
    "ROWS_VERSION",
    "Explanation",
    "Metric",
    "Place",
    "absent",
    "default_metrics",
    "duplicate_totals",
    "explain",
    "jackknife",
    "measure",
    "metric_versions",
    "unit_totals",
    "weight_totals",
]


def measure(observation: Any, place: Place, only: frozenset[str] | None = None) -> list[Row]:
    """The rows of every metric that the observation admits, or of those in `only` alone.

    A metric that can't be computed is a row with a null value and the reason as its status.
    """
    return measure_with(METRICS, observation, place, only)


def absent(kind: str, place: Place, status: str, only: frozenset[str] | None = None) -> list[Row]:
    """Null rows for an observation that can't be made: "Features" without a CLS token, say.

    `kind` is the name of the observation's type; `status` the reason ("no_cls_token",
    "attention_not_exposed", ...).
    """
    needs = {"Features": {"Features", "Spectrum"}, "Weight": {"Weight", "Spectrum", "Magnitude"}}
    return rows_without(METRICS, frozenset(needs.get(kind, {kind})), place, status, only)


def default_metrics() -> frozenset[str]:
    """Names of the metrics that are measured unless told otherwise."""
    return frozenset(metric.name for metric in METRICS if metric.default)


def metric_versions() -> dict[str, int]:
    """Version of each metric: a change of one asks for its rows to be measured again."""
    return {metric.name: metric.version for metric in METRICS}


def explain(name: str) -> Explanation:
    """A metric in words. Raises UsageError, with the nearest name, for one that isn't known."""
    for metric in METRICS:
        if metric.name == name:
            return explanation(metric)
    raise unknown("metric", name, (metric.name for metric in METRICS))
