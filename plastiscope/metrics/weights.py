"""Metrics of a weight: its size, its distance from earlier checkpoints, from an isometry.

Axes: H heads, or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .definition import Floats, Values, metric

if TYPE_CHECKING:
    from ..observations import Magnitude, Weight

_SIZE = ("scale: proportional", "permutation: unchanged", "sign flip: unchanged")


@metric(
    unit="weight",
    range="0 to infinity",
    version=2,
    source="Dohare et al. 2024 (CIFAR code, all parameters); the LLM study (non-embedding, pooled)",
    laws=_SIZE,
)
def weight_magnitude(magnitude: Magnitude) -> Floats:
    """Mean absolute weight.

    Formula: mean |w|.
    Read: steady growth along a run is the commonest companion of lost plasticity.
    Misleads: layers followed by a normalisation can grow without any change of the function; the
    network's value depends on pooling (see its parameters: pooled or mean).
    Also called: weight magnitude.
    """
    return magnitude.absolute / magnitude.count


@metric(
    unit="weight",
    range="0 to infinity",
    version=2,
    source="Plasticine; textbook",
    laws=_SIZE,
)
def weight_rms(magnitude: Magnitude) -> Floats:
    """Root mean square weight.

    Formula: sqrt(mean w^2).
    Read: as weight_magnitude, with more regard to large weights; the ratio of both tells how heavy
    the tails are (1.25 for normal weights).
    Misleads: a few outliers move it.
    Also called: weight magnitude in Plasticine.
    """
    return np.sqrt(magnitude.square / magnitude.count)


@metric(
    unit="weight",
    range="0 to infinity",
    version=2,
    source="Dopamine (param norm)",
    laws=_SIZE,
)
def weight_l2(magnitude: Magnitude) -> Floats:
    """Euclidean norm of the weights.

    Formula: sqrt(sum w^2).
    Read: against the effective learning rate: a larger norm means relatively smaller steps.
    Misleads: grows with the number of weights: don't compare layers by it.
    Also called: param norm.
    """
    return np.sqrt(magnitude.square)


@metric(
    unit="weight",
    range="0 to infinity",
    version=2,
    source="textbook",
    laws=("scale of both: proportional", "permutation of both: unchanged"),
)
def weight_change(magnitude: Magnitude) -> Values | None:
    """How far the weights moved since the previous checkpoint.

    Formula: sqrt(mean (w_t - w_{t-1})^2).
    Read: a network that no longer moves has stopped learning, one that moves without its loss
    falling has lost its direction.
    Misleads: depends on the number of steps between two checkpoints.
    """
    return _moved(magnitude.change, magnitude)


@metric(
    unit="weight",
    range="0 to infinity",
    version=2,
    source="textbook; Kumar et al. 2023 (L2 Init penalises it)",
    laws=("scale of both: proportional", "permutation of both: unchanged"),
)
def weight_drift(magnitude: Magnitude) -> Values | None:
    """How far the weights are from the first checkpoint.

    Formula: sqrt(mean (w_t - w_first)^2).
    Read: drift from the initialisation grows along nearly every run; compare layers.
    Misleads: the first checkpoint need not be the initialisation.
    """
    return _moved(magnitude.drift, magnitude)


def _moved(square: Floats | str | None, magnitude: Magnitude) -> Values | None:
    if square is None:
        return None
    if isinstance(square, str):
        return Values(np.full(magnitude.square.shape, np.nan), status=square)
    status = np.where(magnitude.status == "non_finite", "non_finite", "ok")
    return Values(np.sqrt(square / magnitude.count), status=status)


@metric(
    unit="squared weight",
    range="0 to infinity",
    source="the AdamO regulariser R_iso (their code has an extra factor 1/2) [secondary notes]",
    laws=("rotation: unchanged",),
)
def gram_deviation(weight: Weight) -> Floats:
    """Squared distance of the weight's Gram matrix, on its smaller side, from the identity.

    Formula: ‖Gram - I‖_F^2 = sum over the smaller side of (sigma^2 - 1)^2.
    Read: 0 for a matrix that keeps lengths and angles.
    Misleads: a matrix of zeros has the value of its smaller side, not infinity; grows with size.
    """
    squares: Floats = (weight.spectrum.values**2 - 1.0) ** 2
    return np.asarray(squares.sum(-1))


@metric(
    unit="squared weight",
    range="0 to infinity",
    source="the AdamO regulariser R_iso, divided by the smaller side",
    laws=("rotation: unchanged",),
)
def gram_deviation_normalized(weight: Weight) -> Floats:
    """gram_deviation divided by the matrix's smaller side, to compare matrices of different sizes.

    Formula: mean over the smaller side of (sigma^2 - 1)^2.
    Read: 0 for an isometry, 1 for a matrix of zeros.
    Misleads: as gram_deviation.
    """
    squares: Floats = (weight.spectrum.values**2 - 1.0) ** 2
    return np.asarray(squares.sum(-1) / max(squares.shape[-1], 1))


@metric(
    unit="squared weight",
    range="0 to infinity",
    version=2,
    source="the AdamO authors' weight statistics (code)",
    laws=("rotation: unchanged", "scale: squared"),
)
def squared_singular_value(weight: Weight) -> list[Values]:
    """Largest, smallest and mean squared singular value.

    Formula: max, min and mean of sigma^2.
    Read: all near 1 for an isometry; a falling minimum is a dying direction.
    Misleads: the minimum is 0 for every matrix with one exact dependency.
    """
    square = weight.spectrum.values**2
    return [
        Values(square.max(-1), parameters="max"),
        Values(square.min(-1), parameters="min"),
        Values(square.mean(-1), parameters="mean"),
    ]
