"""Metrics of feature rows other than their ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .definition import Floats, Values, metric

if TYPE_CHECKING:
    from ..observations import Features


@metric(
    unit="activation",
    range="0 to infinity",
    source="Lyle et al. 2024; textbook",
    laws=("scale: proportional", "rotation: unchanged"),
)
def feature_norm(features: Features) -> Floats:
    """Mean Euclidean length of the feature rows.

    Formula: mean over rows of ‖x‖_2.
    Read: growth along a run goes with large logits and with saturation further on.
    Misleads: after a normalisation layer it is nearly constant by construction.
    """
    return features.norm


@metric(
    unit="ratio",
    range="0 to 1",
    source="Dong et al. 2021 (attention loses rank with depth) [not verified against code]",
    laws=("scale: unchanged", "permutation of tokens: unchanged"),
)
def rank_residual(features: Features) -> Values | None:
    """How much of an input's token matrix is left when the mean token is taken off.

    Formula: mean over inputs of ‖X - 1 mean(X)^T‖_F / ‖X‖_F, X the tokens [T, d] of one input.
    Read: 0 when all tokens of an input are equal (collapse with depth).
    Misleads: a large vector common to all tokens lowers it though the rest is as rich as before.
    """
    if features.residual is None:
        return None
    zero = features.status == "non_finite"
    return Values(np.where(zero, np.nan, features.residual), maximum=1.0)
