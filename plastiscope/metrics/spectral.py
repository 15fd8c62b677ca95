"""Metrics of a list of singular values: of a weight, a head's slice, features, CLS tokens.

Axes: ... folds and heads, n singular values, descending. Everything is float64; natural logarithms;
0 ln 0 = 0. A zero matrix has every rank 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .definition import Floats, Values, metric

if TYPE_CHECKING:
    from ..observations import Features, Spectrum

ENERGY = 0.99
_SCALE = ("scale: unchanged", "rotation: unchanged", "permutation: unchanged")


def relative(values: Floats) -> Floats:
    """Singular values [..., n] over the largest, so that no square overflows; 0 where it is 0."""
    top = values[..., :1]
    return np.where(top > 0, values / np.where(top > 0, top, 1.0), values * 0.0)


def shares(terms: Floats) -> Floats:
    """Terms [..., n] divided by their sum; 0 where the sum is 0."""
    total = terms.sum(-1, keepdims=True)
    return np.where(total > 0, terms / np.where(total > 0, total, 1.0), terms * 0.0)


def entropy_rank(terms: Floats, floor: float = 0.0) -> Floats:
    """Exp of the entropy of the shares [...]; 0 where all are 0; shares <= `floor` are dropped."""
    p = shares(terms)
    kept = np.where(p > floor, p, 1.0)
    entropy = -np.where(p > floor, p * np.log(kept), p * 0.0).sum(-1)
    return np.where(terms.sum(-1) == 0, 0.0, np.exp(entropy))


def count_rank(terms: Floats, energy: float = ENERGY) -> Floats:
    """Fewest leading terms that hold the share `energy` of the sum [...]; 0 where all are 0."""
    total: Floats = terms.sum(-1, keepdims=True)
    # Rounding must not ask for one more term where the share is reached exactly.
    short = terms.cumsum(-1) < energy * total * (1 - 1e-12)
    return np.where(
        np.isfinite(total[..., 0]) & (total[..., 0] > 0), short.sum(-1) + 1, total[..., 0]
    )


def smallest(spectrum: Spectrum) -> Floats:
    """The last attainable singular value [...]; NaN when there is none."""
    at = np.maximum(spectrum.attainable - 1, 0)[..., None]
    last = np.take_along_axis(spectrum.values, at, -1)[..., 0]
    return np.where(spectrum.attainable > 0, last, np.nan)


@metric(
    unit="directions",
    range="1 to min(rows, columns); 0 for a zero matrix",
    source="Roy & Vetterli 2007; Dohare et al. 2024; Kumar et al. 2023 (L2 Init); Plasticine",
    laws=_SCALE,
    rank=True,
)
def effective_rank(spectrum: Spectrum) -> Floats:
    """Number of directions that the singular values are spread over. Features are not centred.

    Formula: exp(-sum p ln p), p = sigma / sum sigma.
    Read: a fall along a run means that fewer directions carry the weights or features; read it
    against the attainable maximum in the same row.
    Misleads: a large mean of the features is one huge singular value and pushes the value towards
    1 (see effective_rank_centered); with fewer rows than columns the sample bounds the value, and
    the row says insufficient_rows.
    Also called: effective rank, erank.
    """
    return entropy_rank(spectrum.values)


@metric(
    unit="directions",
    range="1 to min(rows - 1, columns); 0 when all rows are equal",
    source="this project: effective_rank after the mean row is taken off",
    laws=(*_SCALE, "shift of all rows: unchanged"),
    rank=True,
)
def effective_rank_centered(features: Features) -> Values:
    """Effective rank of the features' variation: the mean row is subtracted first.

    Formula: effective_rank of X - 1 mean(X)^T.
    Read: beside effective_rank: a low plain and a high centred value is a large mean, not a loss
    of directions.
    Misleads: rows that vary only by the rounding of their dtype count as equal, value 0.
    """
    centered = features.centered
    return Values(
        entropy_rank(centered.values),
        maximum=centered.attainable.astype(np.float64),
        status=centered.status,
    )


@metric(
    unit="directions",
    range="1 to min(rows, columns); 0 for a zero matrix",
    version=2,
    source="the AdamO authors' weight statistics (code)",
    laws=_SCALE,
    rank=True,
)
def effective_rank_squared(spectrum: Spectrum) -> Floats:
    """Effective rank with squared singular values as weights, so that the largest count for more.

    Formula: exp(-sum p ln p), p = sigma^2 / sum sigma^2, terms with p <= 1e-10 dropped.
    Read: as effective_rank; never above it.
    Misleads: not comparable with effective_rank: for one matrix it is much lower.
    """
    return entropy_rank(relative(spectrum.values) ** 2, floor=1e-10)


@metric(
    unit="singular values",
    range="1 to min(rows, columns); 0 for a zero matrix",
    source="Kumar et al. 2021 (Implicit Under-Parameterization)",
    laws=_SCALE,
    rank=True,
)
def srank(spectrum: Spectrum) -> Values:
    """How many of the largest singular values make up 99 % of their sum.

    Formula: min k with sum_{i<=k} sigma_i / sum sigma >= 0.99.
    Read: a fall means that the tail of small directions is dying out.
    Misleads: not the textbook stable rank (see stable_rank): on one matrix they differ by an order
    of magnitude.
    Also called: "stable rank" in Plasticine and in Dohare's loss-of-plasticity code.
    """
    return Values(count_rank(spectrum.values), parameters="delta=0.01")


@metric(
    unit="singular values",
    range="1 to min(rows, columns); 0 for a zero matrix",
    source="Yang et al. 2019; Dohare et al. 2024",
    laws=_SCALE,
    rank=True,
)
def approximate_rank(spectrum: Spectrum) -> Values:
    """How many of the largest singular values make up 99 % of the squared Frobenius norm.

    Formula: min k with sum_{i<=k} sigma_i^2 / sum sigma^2 >= 0.99.
    Read: the number of principal directions that reproduce the matrix to 1 % of its energy.
    Misleads: blind to small directions, however many; features with a large mean give 1.
    """
    return Values(count_rank(relative(spectrum.values) ** 2), parameters="delta=0.01")


@metric(
    unit="directions",
    range="1 to min(rows, columns); 0 for a zero matrix",
    source="textbook; WeightWatcher",
    laws=_SCALE,
    rank=True,
)
def stable_rank(spectrum: Spectrum) -> Floats:
    """Squared Frobenius norm over squared spectral norm.

    Formula: sum sigma^2 / sigma_1^2.
    Read: how many directions are as strong as the strongest.
    Misleads: set by the largest singular value alone: one outlier direction lowers it while all
    others are healthy. Other codes call srank or participation_ratio "stable rank".
    """
    return np.asarray((relative(spectrum.values) ** 2).sum(-1))


@metric(
    unit="directions",
    range="1 to min(rows - 1, columns); 0 when all rows are equal",
    source="textbook; Joudaki et al. (code)",
    laws=(*_SCALE, "shift of all rows: unchanged"),
    rank=True,
)
def participation_ratio(features: Features) -> Values:
    """Number of directions that share the features' variance.

    Formula: (sum lambda)^2 / sum lambda^2, lambda = eigenvalues of the (centred) covariance.
    Read: d for equal variances in all directions, 1 when one direction has all of it.
    Misleads: dominated by the largest variances, like stable_rank.
    Also called: "stable rank" in Joudaki's code.
    """
    centered = features.centered
    p = shares(relative(centered.values) ** 2)
    squares = (p**2).sum(-1)
    ratio = np.where(squares > 0, 1.0 / np.where(squares > 0, squares, 1.0), squares)
    return Values(ratio, maximum=centered.attainable.astype(np.float64), status=centered.status)


@metric(
    unit="singular values",
    range="0 to min(rows, columns)",
    source="textbook (the tolerance of numpy.linalg.matrix_rank)",
    laws=_SCALE,
    rank=True,
)
def numerical_rank(spectrum: Spectrum) -> Values:
    """How many singular values stand above the rounding of the stored dtype.

    Formula: count of sigma > max(rows, columns) * eps * sigma_1; the factor is in the row.
    Read: full but for exact dependencies: a dead unit, a low-rank factor, equal rows.
    Misleads: depends on the stored dtype: bfloat16's eps is 0.0078. Features are summed as second
    moments, whose resolution (1.5e-8) is the smallest eps used for them.
    """
    rows, columns = spectrum.size
    factor = max(rows, columns) * spectrum.eps
    values = spectrum.values
    above = (values > factor * values[..., :1]).sum(-1) + values[..., 0] * 0.0
    return Values(above, parameters=f"tolerance={factor:.3g}")


@metric(
    unit="ratio",
    range="1 to infinity",
    version=2,
    source="the AdamO authors (code)",
    laws=("scale: unchanged while sigma_min > 1e-10", "rotation: unchanged"),
)
def condition_number(spectrum: Spectrum) -> Values:
    """Largest over smallest singular value.

    Formula: sigma_1 / max(sigma_min, 1e-10).
    Read: a rise means that some directions are hardly passed on any more.
    Misleads: one dead direction sets it, at a height that the floor 1e-10 decides. Features whose
    smallest direction is below what a second moment resolves (1e-6 of the largest) get no value
    but the status `unresolved`; so does a zero matrix.
    """
    top, last = spectrum.values[..., 0], smallest(spectrum)
    ratio = np.where(top > 0, top / np.maximum(last, 1e-10), np.nan)
    status = spectrum.status
    if spectrum.sample:
        lost = last < 1e-6 * top
        ratio = np.where(lost, np.nan, ratio)
        status = np.where((status == "ok") & lost[0], "unresolved", status)
    return Values(ratio, status=status)


@metric(
    unit="weight or activation",
    range="0 to infinity",
    source="textbook; WeightWatcher",
    laws=("scale: proportional", "rotation: unchanged"),
)
def spectral_norm(spectrum: Spectrum) -> Floats:
    """The largest singular value: the most that the matrix stretches any vector.

    Formula: sigma_1.
    Read: growth along a run goes with a growing sensitivity to inputs.
    Misleads: of features it grows with the square root of the number of rows: compare only equal
    probes.
    """
    return np.asarray(spectrum.values[..., 0])


@metric(
    unit="weight or activation",
    range="0 to infinity",
    source="textbook",
    laws=("scale: proportional", "rotation: unchanged"),
)
def frobenius_norm(spectrum: Spectrum) -> Floats:
    """Square root of the sum of the squared entries.

    Formula: sqrt(sum sigma^2).
    Read: the size of the whole matrix; see weight_rms for a value that doesn't grow with its shape.
    Misleads: of features it grows with the square root of the number of rows.
    """
    squares = (relative(spectrum.values) ** 2).sum(-1)
    return np.asarray(spectrum.values[..., 0] * np.sqrt(squares))
