"""Metrics of a component's input-output Jacobian. Axes: B probe inputs, s singular values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .definition import Floats, Values, metric

if TYPE_CHECKING:
    from ..observations import Jacobian

QUANTILES = (5, 25, 50, 75, 95)
FLOOR = 1e-10
_LAWS = ("rotation of inputs or outputs: unchanged",)


def _over_inputs(
    jacobian: Jacobian, values: Floats, parameters: str = "", status: str | None = None
) -> list[Values]:
    """The mean over inputs with its standard error, and the quantiles over inputs."""
    method = ", ".join(p for p in (f"method={jacobian.method}", parameters) if p)
    n = len(values)
    error = float(np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else None
    mean = Values(float(values.mean()), f"mean, {method}", standard_error=error, status=status)
    return [
        mean,
        *(
            Values(float(np.quantile(values, q / 100)), f"quantile={q}, {method}", status=status)
            for q in (5, 50, 95)
        ),
    ]


def _mean_of(jacobian: Jacobian, terms: Floats) -> Floats:
    """Mean over each input's singular values [B]."""
    mean: Floats = (jacobian.weights * terms).sum(1)
    return mean


def _lost(jacobian: Jacobian) -> bool:
    """Lanczos resolves the largest singular value but not the smallest."""
    return jacobian.method == "lanczos"


def _away_from_zero(jacobian: Jacobian) -> bool:
    """Whether a quadrature tells the mean logarithm to 0.01.

    Gauss's rule gives too much of a logarithm and Gauss-Radau's, with its node at 0, too little;
    of both, half each, only what lies at 0 makes a difference.
    """
    largest = jacobian.nodes.max(1, keepdims=True)
    at_zero = (jacobian.weights * (jacobian.nodes <= 1e-6 * largest)).sum(1)
    return bool((at_zero * -np.log(FLOOR) <= 0.01).all())


@metric(
    unit="ratio",
    range="0 to infinity",
    source="Pennington et al. 2017; textbook",
    laws=_LAWS,
    default=False,
    version=2,
    subject="jacobian",
)
def jacobian_sigma_max(jacobian: Jacobian) -> list[Values]:
    """The most that a component stretches a small change of its input.

    Formula: largest singular value of J_x, per input.
    Read: far above 1 in many components: changes explode through depth.
    Misleads: a single direction.
    """
    return _over_inputs(jacobian, jacobian.nodes.max(1))


@metric(
    unit="ratio",
    range="0 to infinity",
    source="Pennington et al. 2017; textbook",
    laws=_LAWS,
    default=False,
    version=2,
    subject="jacobian",
)
def jacobian_sigma_min(jacobian: Jacobian) -> list[Values]:
    """The least that a component stretches a small change of its input.

    Formula: smallest singular value of J_x on its smaller side, per input.
    Read: near 0: changes in some directions are lost here.
    Misleads: layer norms have an exact 0. No value (unresolved) for matrix-free Jacobians.
    """
    values = jacobian.nodes.min(1)
    if _lost(jacobian):
        return [Values(float("nan"), "mean, method=lanczos", status="unresolved")]
    return _over_inputs(jacobian, values)


@metric(
    unit="ratio",
    range="1 to 1e10 times sigma_max",
    source="textbook; the AdamO authors' floor",
    laws=_LAWS,
    default=False,
    version=2,
    subject="jacobian",
)
def jacobian_condition_number(jacobian: Jacobian) -> list[Values]:
    """Largest over smallest singular value of a component's Jacobian.

    Formula: sigma_max / max(sigma_min, 1e-10), per input.
    Read: 1 for an isometry.
    Misleads: as jacobian_sigma_min: set by one direction, and by the floor where that is dead.
    """
    if _lost(jacobian):
        return [Values(float("nan"), "mean, method=lanczos", status="unresolved")]
    ratio = jacobian.nodes.max(1) / np.maximum(jacobian.nodes.min(1), FLOOR)
    return _over_inputs(jacobian, ratio)


@metric(
    unit="ratio",
    range="0 to infinity",
    source="dynamical isometry (Saxe et al. 2014; Pennington et al. 2017)",
    laws=_LAWS,
    default=False,
    version=2,
    subject="jacobian",
)
def isometry_distance(jacobian: Jacobian) -> list[Values]:
    """Root mean square distance of the singular values from 1.

    Formula: sqrt(mean over i of (sigma_i - 1)^2), per input.
    Read: 0 for an isometry, 1 for a component that passes nothing on.
    Misleads: a large sigma_max dominates it.
    """
    square = (jacobian.nodes - 1.0) ** 2
    return _over_inputs(jacobian, np.sqrt(_mean_of(jacobian, square)))


@metric(
    unit="nats",
    range="ln 1e-10 to infinity",
    source="Lyapunov-type mean log gain; textbook",
    laws=_LAWS,
    default=False,
    version=2,
    subject="jacobian",
)
def jacobian_mean_log_sigma(jacobian: Jacobian) -> list[Values]:
    """Mean logarithm of the singular values.

    Formula: mean over i of ln max(sigma_i, 1e-10), per input.
    Read: 0 for an isometry; below 0 volumes shrink.
    Misleads: every exactly dead direction counts -23; no value (unresolved) for matrix-free
    Jacobians with singular values near 0.
    """
    if _lost(jacobian) and not _away_from_zero(jacobian):
        return [Values(float("nan"), "mean, method=lanczos", status="unresolved")]
    return _over_inputs(jacobian, _mean_of(jacobian, np.log(np.maximum(jacobian.nodes, FLOOR))))


@metric(
    unit="ratio",
    range="0 to infinity",
    source="textbook",
    laws=_LAWS,
    default=False,
    version=2,
    subject="jacobian",
)
def jacobian_frobenius(jacobian: Jacobian) -> list[Values]:
    """Frobenius norm of a component's Jacobian (of one position, where positions don't mix).

    Formula: ‖J_x‖_F = sqrt(sum sigma_i^2), per input.
    Read: divided by the root of the smaller side, the mean gain of a random change.
    Misleads: grows with the size of the component.
    """
    square = _mean_of(jacobian, jacobian.nodes**2) * jacobian.side
    return _over_inputs(jacobian, np.sqrt(square))


@metric(
    unit="ratio",
    range="0 to infinity",
    source="textbook",
    laws=_LAWS,
    default=False,
    version=2,
    subject="jacobian",
)
def jacobian_sigma(jacobian: Jacobian) -> list[Values]:
    """Quantiles of a component's singular values, averaged over inputs.

    Formula: the 5, 25, 50, 75 and 95 % quantiles of sigma, per input, then the mean.
    Read: all near 1 for an isometry.
    Misleads: matrix-free quantiles below the median are estimates of a smoothed spectrum.
    """
    order = np.argsort(jacobian.nodes, axis=1)
    nodes = np.take_along_axis(jacobian.nodes, order, 1)
    below = np.take_along_axis(jacobian.weights, order, 1).cumsum(1)
    found = []
    for q in QUANTILES:
        at = np.minimum((below < q / 100 - 1e-12).sum(1), nodes.shape[1] - 1)
        values = np.take_along_axis(nodes, at[:, None], 1)[:, 0]
        found.append(_over_inputs(jacobian, values, f"sigma quantile={q}")[0])
    return found


@metric(
    unit="score",
    range="0 to 1",
    source="this project",
    laws=(*_LAWS, "inversion of every sigma: unchanged"),
    default=False,
    version=2,
    subject="jacobian",
)
def isometry_score(jacobian: Jacobian) -> list[Values]:
    """How nearly a component keeps lengths: 1 when every singular value is 1.

    Formula: mean over i of 2 sigma_i / (1 + sigma_i^2), per input; each term is 1 at sigma = 1,
    0 at 0 and infinity, and the same for sigma and 1 / sigma.
    Read: a fall along a run is lost dynamical isometry.
    Misleads: a mean: some dead directions hide among many good ones (see jacobian_sigma).
    """
    terms = 2.0 * jacobian.nodes / (1.0 + jacobian.nodes**2)
    return [
        Values(v.values, v.parameters, maximum=1.0, standard_error=v.standard_error)
        for v in _over_inputs(jacobian, _mean_of(jacobian, terms))
    ]
