"""Metrics of component sensitivity. Axes: B inputs, S pairings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .definition import Floats, Values, metric

if TYPE_CHECKING:
    from ..observations import ChangeBound, RateOfChange


def _mean(rates: RateOfChange) -> Values:
    known = np.isfinite(rates.ratios)
    if not known.any():
        return Values(float("nan"))
    return Values(float(rates.ratios[known].mean()), standard_error=_error(rates))


def _error(rates: RateOfChange) -> float | None:
    """Jackknife over inputs: without one input, all pairs that it is in are left out.

    Pairs that share an input move together: as if independent, they'd give about half of this.
    """
    known = np.isfinite(rates.ratios)
    ratios, pairs = np.where(known, rates.ratios, 0.0), _by_input(known, rates.shifts)
    rest, used = known.sum() - pairs, pairs > 0
    if (rest[used] <= 0).any():
        return None
    means = (ratios.sum() - _by_input(ratios, rates.shifts))[used] / rest[used]
    n = len(means)
    return float(np.sqrt((n - 1) / n * np.square(means - means.mean()).sum())) if n > 1 else None


def _by_input(terms: Floats, shifts: tuple[int, ...]) -> Floats:
    """Sum [B] of the terms [B, S] of all pairs that an input is in, as either of the two."""
    total: Floats = terms.sum(1)
    for column, shift in enumerate(shifts):
        total = total + np.roll(terms[:, column], -shift)
    return total


@metric(
    unit="ratio",
    range="0 to infinity",
    version=2,
    source="the ViT plasticity study (2602.06883), on propagated inputs",
    laws=("scale of input and output: unchanged",),
    default=False,
    subject="sensitivity",
)
def rate_of_change(rates: RateOfChange) -> Values | None:
    """How much a component's output moves for how much its input moves.

    Formula: mean over pairs of inputs of ‖f(x) - f(y)‖_F / ‖x - y‖_F, x and y what the component
    itself is given; pairs within the probe, or (parameter second) input i of the probe with input i
    of a second data set, as in the source.
    Read: the source ranks MHA > FC1 > FC2 > LN2 > LN1; the most sensitive fine-tune best.
    Misleads: not comparable with rate_of_change_embedding, which feeds other inputs.
    Also called: plasticity of a component.
    """
    return _mean(rates) if rates.protocol == "own" else None


@metric(
    unit="ratio",
    range="0 to infinity",
    version=2,
    source="the ViT plasticity study (2602.06883, code)",
    laws=("scale of input and output: unchanged",),
    default=False,
    subject="sensitivity",
)
def rate_of_change_embedding(rates: RateOfChange) -> Values | None:
    """rate_of_change by the source's own protocol: every component gets the embedding's output.

    Formula: as rate_of_change, x and y embedding outputs; attention with its output projection and
    no residual, FC1 before its activation, FC2 on [x, 0, ...] padded to its fan-in.
    Read: as rate_of_change.
    Misleads: components deep in the network never see such inputs.
    """
    return _mean(rates) if rates.protocol == "embedding" else None


@metric(
    unit="ratio",
    range="0 to infinity",
    source="the ViT plasticity study (2602.06883, code; there max gamma, no absolute value)",
    laws=(),
    default=False,
    subject="sensitivity",
)
def rate_of_change_bound(bound: ChangeBound) -> Values:
    """Upper bound of a component's rate of change, from its weights.

    Formula: norm: max |gamma|; linear: sigma_1; attention: sum_h ‖O_h‖ ‖V_h‖
    sqrt(3n + (12n+3) r^4 ‖A_h‖^2), A_h = Q_h^T K_h / sqrt(dh), n tokens of radius r.
    Read: ranks components as the measured rates do, in the source.
    Misleads: the norm's bound takes the normalised inputs' variance as 1; attention's is far from
    tight.
    """
    return Values(bound.value, parameters=bound.formula)
