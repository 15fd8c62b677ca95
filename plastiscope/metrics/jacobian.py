"""Metrics of a component's input-output Jacobian. Axes: B probe inputs, s singular values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .definition import Floats, Values, metric

if TYPE_CHECKING:
    from ..observations import Jacobian
    from ..observations.lanczos import Quadrature

QUANTILES = (5, 25, 50, 75, 95)
FLOOR = 1e-10
BOUND = 0.05
"""How well a matrix-free quantile has to be known."""
Function = Callable[[Floats], Floats]
_LAWS = ("rotation of inputs or outputs: unchanged",)


@dataclass(frozen=True)
class _PerInput:
    """A value of each input [B] and what its method doesn't know of it: by chance, of its own for
    each input, and by a rule that errs the same way for all."""

    values: Floats
    chance: Floats
    rule: Floats

    def rooted(self) -> _PerInput:
        """The square root."""

        def half_range(error: Floats) -> Floats:
            low = np.maximum(self.values - error, 0.0)
            found: Floats = (np.sqrt(self.values + error) - np.sqrt(low)) / 2
            return found

        return _PerInput(np.sqrt(self.values), half_range(self.chance), half_range(self.rule))


def _sure(values: Floats) -> _PerInput:
    return _PerInput(values, np.zeros(len(values)), np.zeros(len(values)))


def _over_inputs(
    jacobian: Jacobian, found: _PerInput, parameters: str = "", status: str | None = None
) -> list[Values]:
    """The mean over inputs with its standard error, and the quantiles over inputs."""
    method, values, n = _method(jacobian, parameters), found.values, len(found.values)
    error = None
    if n > 1 or _is_estimated(jacobian):
        over_inputs = float(np.std(values, ddof=1)) / np.sqrt(n) if n > 1 else 0.0
        chance = np.sqrt((found.chance**2).sum()) / n
        rule = np.sqrt((found.rule**2).mean())
        error = float(np.sqrt(over_inputs**2 + chance**2 + rule**2))
    mean = Values(float(values.mean()), f"mean, {method}", standard_error=error, status=status)
    return [
        mean,
        *(
            Values(float(np.quantile(values, q / 100)), f"quantile={q}, {method}", status=status)
            for q in (5, 50, 95)
        ),
    ]


def _method(jacobian: Jacobian, parameters: str = "") -> str:
    sampled = ""
    if _is_sampled(jacobian):
        sampled = f"positions={jacobian.positions} of {jacobian.all_positions}"
    return ", ".join(p for p in (f"method={jacobian.method}", sampled, parameters) if p)


def _no_value(jacobian: Jacobian, status: str, parameters: str = "") -> list[Values]:
    reason = status if jacobian.status == "ok" else None
    return [Values(float("nan"), f"mean, {_method(jacobian, parameters)}", status=reason)]


def _is_sampled(jacobian: Jacobian) -> bool:
    return jacobian.positions < jacobian.all_positions


def _is_estimated(jacobian: Jacobian) -> bool:
    return jacobian.quadrature is not None or _is_sampled(jacobian)


def _mean_of(jacobian: Jacobian, function: Function) -> _PerInput:
    """Mean over each input's singular values."""
    if jacobian.quadrature is not None:
        return _estimated_mean(jacobian.quadrature, jacobian.side, function)
    weighted = jacobian.weights * function(jacobian.nodes)
    mean: Floats = weighted.sum(1)
    if _is_sampled(jacobian):
        shape = (len(mean), jacobian.positions, -1)
        share = jacobian.weights.reshape(shape).sum(2)
        return _over_positions(jacobian, mean, weighted.reshape(shape).sum(2) / share)
    return _sure(mean)


def _estimated_mean(quadrature: Quadrature, side: int, function: Function) -> _PerInput:
    """By chance: the spread over probes, or that of Hutchinson's estimator with random signs, at
    most 2 / n times the variance of what the probes see, whichever is more (few probes may agree).
    By the rule: half of what Gauss's and Gauss-Radau's differ by, and what a leading direction's
    own spread makes of its function."""
    nodes, weights, k = quadrature.nodes, quadrature.weights, quadrature.residuals.shape[1]
    terms, probes = function(nodes), nodes.shape[1]
    parts = (weights * terms).sum(-1)
    each = parts.mean(2)
    spread = each.std(1, ddof=1) if probes > 1 else np.zeros(len(nodes))
    seen, share = terms[..., k:], weights[..., k:]
    rest = share.sum(-1).mean((1, 2))
    mean = (share * seen).sum(-1).mean((1, 2)) / np.maximum(rest, 1e-300)
    variance = (share * (seen - mean[:, None, None, None]) ** 2).sum(-1).mean((1, 2))
    chance = np.sqrt(np.maximum(spread**2, 2 * variance / side) / probes)
    square = nodes[:, 0, 0, :k] ** 2
    beside = [
        function(np.sqrt(np.maximum(square + sign * quadrature.residuals, 0.0))) for sign in (-1, 1)
    ]
    leading = (weights[:, 0, 0, :k] * (sum(beside) / 2 - terms[:, 0, 0, :k])).sum(1)
    half = np.diff(parts.mean(1), axis=1)[:, 0] / 2
    return _PerInput(each.mean(1), chance, np.hypot(half, leading))


def _over_positions(jacobian: Jacobian, values: Floats, parts: Floats) -> _PerInput:
    """With the error of a sample without replacement, from what each position [B, m] gives; the
    first stands for itself where it has a share of its own."""
    share = jacobian.weights.reshape(*parts.shape, -1).sum(2)[0]
    fixed = int(share[0] < share[-1] / (1 + 1e-9))
    some, m = parts[:, fixed:], parts.shape[1] - fixed
    if m < 2:
        return _PerInput(values, np.abs(parts[:, 0] - parts[:, -1]), 0.0 * values)
    left = 1.0 - m / (jacobian.all_positions - fixed)
    chance = share[fixed:].sum() * some.std(1, ddof=1) * np.sqrt(left / m)
    return _PerInput(values, chance, 0.0 * values)


def _lost(jacobian: Jacobian) -> str | None:
    """Why the smallest singular value isn't known: Lanczos resolves the largest one only, some
    positions don't have the extremes of all, and what a precision leaves of an exact 0 is noise
    (below the floor it makes no difference)."""
    if jacobian.quadrature is not None:
        return "unresolved"
    return "unresolved" if _is_noise(jacobian, jacobian.nodes).any() else None


def _is_noise(jacobian: Jacobian, sigma: Floats) -> npt.NDArray[np.bool_]:
    share = jacobian.side * jacobian.eps
    if jacobian.quadrature is not None:
        # Its nodes are roots of J^T J's, whose rounding is a share eps of the largest.
        share = 4.0 * jacobian.eps**0.5
    noise = share * jacobian.nodes.max(1, keepdims=True)
    found: npt.NDArray[np.bool_] = (sigma > 0.0) & (sigma < noise) & (noise > FLOOR)
    return found


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
    version=3,
    subject="jacobian",
)
def jacobian_sigma_max(jacobian: Jacobian) -> list[Values]:
    """The most that a component stretches a small change of its input.

    Formula: largest singular value of J_x, per input.
    Read: far above 1 in many components: changes explode through depth.
    Misleads: a single direction. No value (positions_sampled) where some positions were taken.
    """
    if _is_sampled(jacobian):
        return _no_value(jacobian, "positions_sampled")
    found = _sure(jacobian.nodes.max(1))
    if jacobian.quadrature is not None:
        found = replace(found, rule=jacobian.quadrature.error_of_largest())
    return _over_inputs(jacobian, found)


@metric(
    unit="ratio",
    range="0 to infinity",
    source="Pennington et al. 2017; textbook",
    laws=_LAWS,
    default=False,
    version=3,
    subject="jacobian",
)
def jacobian_sigma_min(jacobian: Jacobian) -> list[Values]:
    """The least that a component stretches a small change of its input.

    Formula: smallest singular value of J_x on its smaller side, per input.
    Read: near 0: changes in some directions are lost here.
    Misleads: layer norms have an exact 0. No value (unresolved) for matrix-free Jacobians and below
    what the precision resolves, nor (positions_sampled) where some positions were taken.
    """
    lost = "positions_sampled" if _is_sampled(jacobian) else _lost(jacobian)
    if lost:
        return _no_value(jacobian, lost)
    return _over_inputs(jacobian, _sure(jacobian.nodes.min(1)))


@metric(
    unit="ratio",
    range="1 to 1e10 times sigma_max",
    source="textbook; the AdamO authors' floor",
    laws=_LAWS,
    default=False,
    version=3,
    subject="jacobian",
)
def jacobian_condition_number(jacobian: Jacobian) -> list[Values]:
    """Largest over smallest singular value of a component's Jacobian.

    Formula: sigma_max / max(sigma_min, 1e-10), per input.
    Read: 1 for an isometry.
    Misleads: as jacobian_sigma_min: set by one direction, and by the floor where that is dead.
    """
    lost = "positions_sampled" if _is_sampled(jacobian) else _lost(jacobian)
    if lost:
        return _no_value(jacobian, lost)
    ratio = jacobian.nodes.max(1) / np.maximum(jacobian.nodes.min(1), FLOOR)
    return _over_inputs(jacobian, _sure(ratio))


@metric(
    unit="ratio",
    range="0 to infinity",
    source="dynamical isometry (Saxe et al. 2014; Pennington et al. 2017)",
    laws=_LAWS,
    default=False,
    version=3,
    subject="jacobian",
)
def isometry_distance(jacobian: Jacobian) -> list[Values]:
    """Root mean square distance of the singular values from 1.

    Formula: sqrt(mean over i of (sigma_i - 1)^2), per input.
    Read: 0 for an isometry, 1 for a component that passes nothing on.
    Misleads: a large sigma_max dominates it.
    """
    return _over_inputs(jacobian, _mean_of(jacobian, lambda s: (s - 1.0) ** 2).rooted())


@metric(
    unit="nats",
    range="ln 1e-10 to infinity",
    source="Lyapunov-type mean log gain; textbook",
    laws=_LAWS,
    default=False,
    version=3,
    subject="jacobian",
)
def jacobian_mean_log_sigma(jacobian: Jacobian) -> list[Values]:
    """Mean logarithm of the singular values.

    Formula: mean over i of ln max(sigma_i, 1e-10), per input.
    Read: 0 for an isometry; below 0 volumes shrink.
    Misleads: every exactly dead direction counts -23; no value (unresolved) for matrix-free
    Jacobians with singular values near 0, and where some are below what the precision resolves.
    """
    if _lost(jacobian) and not (jacobian.quadrature and _away_from_zero(jacobian)):
        return _no_value(jacobian, "unresolved")
    logarithm = _mean_of(jacobian, lambda s: np.log(np.maximum(s, FLOOR)))
    return _over_inputs(jacobian, logarithm)


@metric(
    unit="ratio",
    range="0 to infinity",
    source="textbook",
    laws=_LAWS,
    default=False,
    version=3,
    subject="jacobian",
)
def jacobian_frobenius(jacobian: Jacobian) -> list[Values]:
    """Frobenius norm of a component's Jacobian (of one position, where positions don't mix).

    Formula: ‖J_x‖_F = sqrt(sum sigma_i^2), per input.
    Read: divided by the root of the smaller side, the mean gain of a random change.
    Misleads: grows with the size of the component.
    """
    square = _mean_of(jacobian, lambda s: s**2 * jacobian.side)
    return _over_inputs(jacobian, square.rooted())


@metric(
    unit="ratio",
    range="0 to infinity",
    source="textbook",
    laws=_LAWS,
    default=False,
    version=3,
    subject="jacobian",
)
def jacobian_sigma(jacobian: Jacobian) -> list[Values]:
    """Quantiles of a component's singular values, averaged over inputs.

    Formula: the 5, 25, 50, 75 and 95 % quantiles of sigma, per input, then the mean.
    Read: all near 1 for an isometry.
    Misleads: no value (unresolved) where a matrix-free estimate isn't known to 5 %: between two
    clusters, and near 0.
    """
    found = []
    for q in QUANTILES:
        parameters = f"sigma quantile={q}"
        values = _quantile(jacobian.nodes, jacobian.weights, q / 100)
        per_input, known = _sure(values), not _is_noise(jacobian, values[:, None]).any()
        if jacobian.quadrature is not None:
            known &= _is_bounded(jacobian.quadrature, jacobian.side, values, q / 100)
            # Bounds at three standard errors.
            per_input = replace(per_input, rule=BOUND / 3 * values)
        if _is_sampled(jacobian):
            shape = (len(values) * jacobian.positions, -1)
            nodes, equal = jacobian.nodes.reshape(shape), np.full((1, 1), 1 / jacobian.side)
            parts = _quantile(nodes, np.broadcast_to(equal, nodes.shape), q / 100)
            per_input = _over_positions(jacobian, values, parts.reshape(len(values), -1))
        if known:
            found.append(_over_inputs(jacobian, per_input, parameters)[0])
        else:
            found += _no_value(jacobian, "unresolved", parameters)
    return found


def _quantile(nodes: Floats, weights: Floats, q: float) -> Floats:
    """The smallest node [B] up to which the weights sum to q."""
    order = np.argsort(nodes, axis=1)
    below = np.take_along_axis(weights, order, 1).cumsum(1)
    at = np.minimum((below < q - 1e-12).sum(1), nodes.shape[1] - 1)
    found: Floats = np.take_along_axis(np.take_along_axis(nodes, order, 1), at[:, None], 1)[:, 0]
    return found


def _is_bounded(quadrature: Quadrature, side: int, values: Floats, q: float) -> bool:
    """Whether every input's quantile lies within BOUND of what the quadrature gives.

    Of `side` singular values a probe's share below x varies by at most 2 q (1 - q) / side
    (Hutchinson's estimator with random signs, of a projection).
    """
    off = 3 * np.sqrt(2 * q * (1 - q) / (side * quadrature.nodes.shape[1]))
    most = quadrature.shares_below(values / (1 + BOUND))[1]
    least = quadrature.shares_below(values * (1 + BOUND))[0]
    return bool((values > 0).all() and (most < q - off).all() and (least >= q + off).all())


@metric(
    unit="score",
    range="0 to 1",
    source="this project",
    laws=(*_LAWS, "inversion of every sigma: unchanged"),
    default=False,
    version=3,
    subject="jacobian",
)
def isometry_score(jacobian: Jacobian) -> list[Values]:
    """How nearly a component keeps lengths: 1 when every singular value is 1.

    Formula: mean over i of 2 sigma_i / (1 + sigma_i^2), per input; each term is 1 at sigma = 1,
    0 at 0 and infinity, and the same for sigma and 1 / sigma.
    Read: a fall along a run is lost dynamical isometry.
    Misleads: a mean: some dead directions hide among many good ones (see jacobian_sigma).
    """
    score = _mean_of(jacobian, lambda s: 2.0 * s / (1.0 + s**2))
    return [
        Values(v.values, v.parameters, maximum=1.0, standard_error=v.standard_error)
        for v in _over_inputs(jacobian, score)
    ]
