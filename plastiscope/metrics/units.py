"""Metrics of hidden units after their activation function. Axes: 1 + K folds, u units."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .definition import Floats, Values, metric

if TYPE_CHECKING:
    from ..observations import Features, UnitGradients, Units

Mask = npt.NDArray[np.bool_]
TAUS = (0.0, 0.01, 0.025, 0.1)
QUANTILES = (1, 5, 25, 50)
RARELY = 0.01
_UNITS = ("permutation of units: unchanged", "scale of the layer: unchanged")


def dormancy(means: Floats) -> Floats:
    """Each unit's mean over the layer's [1 + K, u]; NaN where the layer's isn't above 0."""
    if means.shape[-1] == 0:
        return means
    layer = means.mean(-1, keepdims=True)
    return np.where(layer > 0, means / np.where(layer > 0, layer, 1.0), np.nan)


def _share(condition: Mask, known: Floats) -> Floats:
    """Share of units [1 + K]; NaN where what it rests on is NaN."""
    if known.shape[-1] == 0:
        return np.full(len(known), np.nan)
    return np.where(np.isnan(known).any(-1), np.nan, condition.mean(-1))


@metric(
    unit="share of the layer's mean activation",
    range="0 to the number of units",
    source="Sokar et al. 2023 (ReDo); Dopamine labs/redo (code)",
    laws=_UNITS,
    subject="unit",
)
def dormancy_score(units: Units) -> list[Values]:
    """How active the least active units are, against the layer's mean.

    Formula: s_i = mean |h_i| / mean over units of mean |h_j|; the 1, 5, 25 and 50 % quantiles.
    Read: a low quantile near 0 means that so many units hardly contribute.
    Misleads: relative to the layer: when all units fade together nothing shows. No value for a
    layer that is dead altogether.
    """
    score = dormancy(units.absolute)
    if score.shape[-1] == 0:
        return [Values(score.sum(-1) * np.nan, parameters=f"quantile={q}") for q in QUANTILES]
    return [
        Values(np.quantile(score, q / 100, axis=-1), parameters=f"quantile={q}") for q in QUANTILES
    ]


@metric(
    unit="share of units",
    range="0 to 1",
    version=2,
    source="Sokar et al. 2023; Dopamine labs/redo (code); Plasticine (tau 0.025); LLM study (0.01)",
    laws=_UNITS,
    subject="unit",
)
def dormant_fraction(units: Units) -> list[Values]:
    """Share of units whose mean activation is at most tau times the layer's mean.

    Formula: share of units with s_i <= tau, s_i = mean |h_i| / mean over units of mean |h_j|.
    Read: units that the next layer hardly hears; growth along a run is the classic sign.
    Misleads: for GELU or SiLU units tau = 0 depends on the dtype's rounding: use tau > 0. A layer
    that is dead altogether is 1, status layer_dead.
    Also called: FDU, dormant neurons, tau-dormant.
    """
    dead = units.absolute.sum(-1) == 0
    score = np.where(dead[:, None], 0.0, dormancy(units.absolute))
    return [
        Values(_share(score <= tau, units.absolute), parameters=f"tau={tau:g}", maximum=1.0)
        for tau in TAUS
    ]


@metric(
    unit="share of units",
    range="0 to 1",
    version=2,
    source="the LLM study, possibly [secondary notes]",
    laws=_UNITS,
    subject="unit",
)
def dormant_fraction_signed(units: Units) -> list[Values]:
    """dormant_fraction without the absolute value: means of the signed activation.

    Formula: share of units with mean h_i <= tau * mean over units of mean h_j.
    Read: equal to dormant_fraction for ReLU; beside it for GELU and SiLU.
    Misleads: positive and negative activations cancel, so a busy unit may count as dormant; no
    value (status negative_mean) when the layer's mean isn't above 0.
    """
    score = dormancy(units.signed)
    status = units.status
    if status == "ok" and np.isnan(score[0]).any():
        status = "negative_mean"
    values = [_share(score <= tau, score) for tau in TAUS]
    if status == "layer_dead":
        values = [np.where(units.signed.sum(-1) == 0, 1.0, found) for found in values]
    return [
        Values(found, parameters=f"tau={tau:g}", maximum=1.0, status=status)
        for tau, found in zip(TAUS, values, strict=True)
    ]


def _unknown(units: Units) -> Values:
    status = units.on_status if units.status in ("ok", "layer_dead") else units.status
    return Values(np.full(len(units.absolute), np.nan), status=status)


@metric(
    unit="share of (row, unit) entries",
    range="0 to 1",
    version=2,
    source="Ma et al. 2023 (FAU)",
    laws=_UNITS,
    subject="unit",
)
def active_fraction(units: Units) -> Values:
    """Share of entries at which a unit is on.

    Formula: mean of [h > 0] for ReLU, of [pre-activation > 0] for smooth functions and gates.
    Read: about 0.5 at initialisation; a fall is sparser use of the layer.
    Misleads: no value where the function isn't known or its pre-activation can't be seen.
    Also called: FAU, fraction of active units.
    """
    if units.on is None:
        return _unknown(units)
    return Values(units.on.mean(-1), maximum=1.0)


@metric(
    unit="share of units",
    range="0 to 1",
    version=2,
    source="textbook (dead ReLU)",
    laws=_UNITS,
    subject="unit",
)
def dead_fraction(units: Units) -> Values:
    """Share of units that are off on every row of the probe.

    Formula: ReLU family: h = 0 on every row; smooth functions: pre-activation never above 0.
    Read: a dead ReLU unit gets no gradient from these inputs.
    Misleads: falls as the probe grows: a unit may be on for inputs that the probe lacks.
    """
    if units.on is None:
        return _unknown(units)
    from_output = units.is_relu
    known = units.lit if from_output else units.on
    return Values(_share(known == 0, known), maximum=1.0)


@metric(
    unit="share of units",
    range="0 to 1",
    version=2,
    source="Dohare et al. 2024 (CIFAR code), there called dormant",
    laws=_UNITS,
    subject="unit",
)
def rarely_active_fraction(units: Units) -> Values:
    """Share of units that are on for less than 1 % of the rows.

    Formula: share of units with P(on) < 0.01.
    Read: dead_fraction, softened so that a single row doesn't decide.
    Misleads: with fewer than 100 rows it equals dead_fraction.
    Also called: dormant units in Dohare's CIFAR code.
    """
    if units.on is None:
        return _unknown(units)
    return Values(_share(units.on < RARELY, units.on), parameters="below=0.01", maximum=1.0)


@metric(
    unit="share of (row, unit) entries",
    range="0 to 1",
    version=2,
    source="Plasticine (code)",
    laws=("permutation of units: unchanged",),
    subject="unit",
)
def saturated_fraction(units: Units) -> Values | None:
    """Share of entries at which a tanh or sigmoid is flat.

    Formula: tanh: |h| > 0.99; sigmoid: h < 0.01 or h > 0.99.
    Read: flat entries pass next to no gradient back.
    Misleads: only for tanh and sigmoid; other functions get no row.
    """
    if units.saturated is None:
        return None
    return Values(units.saturated.mean(-1), maximum=1.0)


@metric(
    unit="bits",
    range="0 to 1",
    version=2,
    source="Lewandowski et al. 2024 (2410.20634)",
    laws=_UNITS,
    subject="unit",
)
def unit_sign_entropy(units: Units) -> Values:
    """How undecided the sign of the units' pre-activations is, averaged over units.

    Formula: mean over units of H(P(pre-activation > 0)) in bits, H(p) = -p lb p - (1-p) lb (1-p).
    Read: 0 when every unit has one sign on the whole probe (the layer is linear there), 1 when
    each is on for half of the rows.
    Misleads: says nothing about how strong units are; needs the pre-activation.
    """
    if units.positive is None:
        missing = Values(np.full(len(units.absolute), np.nan), status="no_pre_activation")
        return missing if units.status in ("ok", "layer_dead") else _unknown(units)
    p = units.positive
    bits = sum(
        -np.where(q > 0, q * np.log2(np.where(q > 0, q, 1.0)), q * 0.0) for q in (p, 1.0 - p)
    )
    return Values(np.asarray(bits).mean(-1), maximum=1.0)


@metric(
    unit="share of units",
    range="0 to 1",
    source="Joudaki et al. (code)",
    laws=("permutation of units: unchanged", "scale of a unit: unchanged"),
    components=frozenset({"activation"}),
    subject="unit",
)
def duplicate_fraction(features: Features) -> Values | None:
    """Share of units that do nearly the same as another unit.

    Formula: share of units whose cosine with another unit over the probe's rows is above 0.95.
    Read: duplicates waste width and stay duplicates: their gradients are alike.
    Misleads: not centred: units with a large common mean look alike. Units that are always 0 are
    no duplicates.
    """
    if features.duplicates is None:
        return None
    return Values(features.duplicates, parameters="cosine=0.95", maximum=1.0)


@metric(
    unit="share of units",
    range="0 to 1",
    version=2,
    source="GraMa (2505.24061); exact official form not verified",
    laws=_UNITS,
    default=False,
    subject="unit",
)
def grama_inactive_fraction(gradients: UnitGradients) -> list[Values]:
    """Share of units that hardly any gradient flows into.

    Formula: G_i = mean |d loss / d h_i| / mean over units of the same; share with G_i <= tau.
    Read: units that no longer learn, whether or not they are active.
    Misleads: needs labels; relative to the layer, as dormant_fraction.
    Also called: GraMa.
    """
    dead = gradients.absolute.sum(-1) == 0
    score = np.where(dead[:, None], 0.0, dormancy(gradients.absolute))
    return [
        Values(_share(score <= tau, gradients.absolute), parameters=f"tau={tau:g}", maximum=1.0)
        for tau in TAUS
    ]
