"""Metrics of optimizer state, when the checkpoint holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .definition import Values, metric
from .spectral import entropy_rank

if TYPE_CHECKING:
    from ..observations import OptimizerState


@metric(
    unit="ratio",
    range="0 to infinity",
    source="textbook (rule of thumb: 1e-3)",
    laws=(),
    subject="optimizer",
)
def update_to_weight_ratio(optimizer: OptimizerState) -> Values:
    """Size of the next step against the size of the weights.

    Formula: rms(lr m_hat / (sqrt(v_hat) + eps)) / rms(w) for Adam, rms(lr momentum) / rms(w) for
    SGD with momentum.
    Read: a fall along a run at a constant learning rate: weights outgrew their steps.
    Misleads: a large second moment left over from an earlier task lowers it for many steps.
    """
    if optimizer.weight == 0:
        return Values(float("nan"), status="zero_matrix")
    return Values(optimizer.update / optimizer.weight)


@metric(
    unit="per step",
    range="0 to infinity",
    source="van Laarhoven 2017; textbook [not verified against code]",
    laws=(),
    subject="optimizer",
)
def effective_learning_rate(optimizer: OptimizerState) -> Values:
    """How far a step turns a weight whose scale doesn't matter (one followed by a normalisation).

    Formula: lr / ‖w‖ for Adam-like updates, lr / ‖w‖^2 for SGD.
    Read: it falls as norms grow, though lr stays.
    Misleads: means nothing for layers that aren't scale-invariant.
    """
    power = 1 if optimizer.kind == "adam" else 2
    value = optimizer.learning_rate / optimizer.norm**power if optimizer.norm else np.nan
    status = "ok" if optimizer.norm else "zero_matrix"
    return Values(float(value), parameters=f"updates={optimizer.kind}", status=status)


@metric(
    unit="directions",
    range="1 to the smaller side; 0 for a zero matrix",
    source="effective_rank of Adam's second moment",
    laws=("scale: unchanged",),
    subject="optimizer",
)
def second_moment_effective_rank(optimizer: OptimizerState) -> Values | None:
    """Effective rank of Adam's second moment as a matrix.

    Formula: exp(-sum p ln p), p = sigma / sum sigma of v [out, in].
    Read: near 1 for v = row times column (what factored optimizers assume).
    Misleads: v has no negative entry, so one singular value always dominates.
    """
    spectrum = optimizer.second_moment
    if spectrum is None:
        return None
    return Values(
        entropy_rank(spectrum.values),
        maximum=spectrum.attainable.astype(np.float64),
        status=spectrum.status,
    )
