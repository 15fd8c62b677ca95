"""Spectra of feature rows, all of them and all but a fold's, from moments or from held rows.

On the CPU both spectra of a choice of folds come from one reduction to tridiagonal form. Another
device takes those of all choices together, where that is faster.

Axes: N rows, d width, H heads, K folds; results [1 + K] or [1 + K, H].
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .device import faster, fetched
from .spectra import GRAM_EPS, Floats, Spectrum, roots
from .symmetric import (
    eigenvalues_of_tridiagonal,
    gram_of_columns,
    reflect,
    reflected,
    reflection,
    tridiagonal,
)
from .together import (
    Counts,
    Pair,
    Solve,
    choices,
    grams_of_moments,
    grams_of_rows,
    solved_together,
)

_WORKING = 1 << 22
"""Entries of rows that are taken to float64 at once."""


def without_each(folds: Floats | Counts) -> Floats:
    """[1 + K, ...] sums over all folds, then over all but one, from [K, ...].

    Summed anew each time: subtracting a fold that holds nearly everything would cancel.
    """
    parts = np.asarray(folds)
    rest = [np.delete(parts, k, axis=0).sum(0) for k in range(len(parts))]
    return np.stack([parts.sum(0), *rest]).astype(np.float64)


def counts_without_each(counts: Counts | Floats) -> Floats:
    """The same of row counts [K, ...], to divide by: NaN for a fold without rows.

    Leaving out a fold that holds nothing isn't a replicate.
    """
    total = without_each(counts)
    total[1:][np.asarray(counts) == 0] = np.nan
    return total


def moment_spectra(
    moments: Tensor, sums: Tensor, counts: Counts, pivot: Tensor, eps: float
) -> tuple[Spectrum, Spectrum]:
    """From moments [K, (H,) d, d] and sums [K, (H,) d] about the pivot [(H,) d], float64."""
    heads, d = tuple(sums.shape[1:-1]), sums.shape[-1]
    parts = moments.reshape(len(counts), -1, d, d)
    totals, origin = sums.reshape(len(counts), -1, d), pivot.reshape(-1, d)

    def spectra(solve: Solve) -> tuple[Spectrum, Spectrum]:
        return spectra_without_each(solve, counts, heads, d, eps)

    def there() -> Solve:
        return solved_together(
            lambda kept: grams_of_moments(parts, totals, origin, counts, kept), counts
        )

    def here() -> Solve:
        return _by_moments(fetched(parts, totals, origin), counts)

    return faster("moments", parts.device, d, lambda: spectra(there()), lambda: spectra(here()))


def _by_moments(found: tuple[Floats, ...], counts: Counts) -> Solve:
    parts, totals, origin = found

    def solve(folds: list[int], head: int) -> Pair:
        n = int(counts[folds].sum())
        # Summed anew each time: subtracting a fold that holds nearly everything would cancel.
        moment = parts[folds[0], head].copy()
        for k in folds[1:]:
            moment += parts[k, head]
        return _about_mean(moment, totals[folds, head].sum(0), n, origin[head])

    return solve


def _about_mean(moment: Floats, total: Floats, n: int, pivot: Floats) -> Pair:
    """From the moment [d, d] (overwritten) and sum [d] of n rows about the pivot [d].

    The plain Gram matrix is the centred one plus n mu mu^T. Where mu lies on the first axis that is
    one entry, so both spectra come from one reduction to tridiagonal form.
    """
    moment -= np.outer(total, total / n)
    centered_square = float(np.trace(moment))
    mean = np.sqrt(n) * (pivot + total / n)
    diagonal, off = tridiagonal(reflected(moment, reflection(mean)))
    centered = eigenvalues_of_tridiagonal(diagonal, off)
    diagonal[0] += mean @ mean
    plain = eigenvalues_of_tridiagonal(diagonal, off)
    return (plain, centered_square + float(mean @ mean)), (centered, centered_square)


def row_spectra(
    rows: Tensor, fold: Tensor, folds: int, pivot: Tensor, eps: float
) -> tuple[Spectrum, Spectrum]:
    """From rows [N, (H,) d] fewer than they are wide, by their N x N Gram matrix."""
    heads, d = tuple(rows.shape[1:-1]), rows.shape[-1]
    by_head = rows[None] if rows.ndim == 2 else rows.transpose(0, 1)
    origin = pivot.reshape(-1, 1, d)
    grams, crosses = _shifted_grams(by_head, origin)
    squares, counts = origin.square().sum((1, 2)), np.bincount(fold.numpy(), minlength=folds)

    def spectra(solve: Solve) -> tuple[Spectrum, Spectrum]:
        return spectra_without_each(solve, counts, heads, d, eps)

    def there() -> Solve:
        own = fold.to(rows.device, non_blocking=True)
        return solved_together(lambda k: grams_of_rows(grams, crosses, squares, own, k), counts)

    def here() -> Solve:
        return _by_rows(fetched(grams, crosses, squares), fold)

    n, device = len(rows), rows.device
    return faster("rows", device, n, lambda: spectra(there()), lambda: spectra(here()))


def _by_rows(found: tuple[Floats, ...], fold: Tensor) -> Solve:
    grams, crosses, squares = found

    def solve(kept: list[int], head: int) -> Pair:
        where = np.flatnonzero(np.isin(fold.numpy(), kept))
        gram = grams[head][np.ix_(where, where)]
        return _of_rows(gram, crosses[head][where], float(squares[head]))

    return solve


def _of_rows(gram: Floats, cross: Floats, square: float) -> Pair:
    """From the Gram matrix [n, n] (overwritten) of rows about a pivot p, their products [n] with p
    and p's square.

    Where 1 lies on the first axis, taking the mean off is to leave out the first row and column,
    and the pivot is in these alone.
    """
    n = len(gram)
    whole = float(np.trace(gram) + 2.0 * cross.sum() + n * square)
    normal = reflection(np.ones(n))
    lower = reflected(gram, normal)
    centered_square = float(np.trace(lower) - lower[0, 0])
    one, cross = reflect(np.ones(n), normal)[0], reflect(cross, normal)
    lower[:, 0] += one * cross
    lower[0, 0] += one * cross[0] + n * square
    diagonal, off = tridiagonal(lower)
    plain = eigenvalues_of_tridiagonal(diagonal, off)
    centered = np.append(eigenvalues_of_tridiagonal(diagonal[1:], off[1:]), 0.0)
    return (plain, whole), (centered, centered_square)


def _shifted_grams(rows: Tensor, pivot: Tensor) -> tuple[Tensor, Tensor]:
    """[H, N, N] of rows [H, N, d] about the pivot [H, 1, d], and their products with it [H, N]; a
    slice of the width at a time."""
    h, n, d = rows.shape
    gram = torch.zeros(h, n, n, dtype=torch.float64, device=rows.device)
    cross = torch.zeros(h, n, dtype=torch.float64, device=rows.device)
    size = max(1, _WORKING // max(1, h * n))
    for start in range(0, d, size):
        origin = pivot[..., start : start + size]
        part = rows[..., start : start + size].double() - origin
        gram += gram_of_columns(part.mT)
        cross += (part * origin).sum(-1)
    return gram, cross


def spectra_without_each(
    solve: Solve,
    counts: Counts,
    heads: tuple[int, ...],
    d: int,
    eps: float,
) -> tuple[Spectrum, Spectrum]:
    """Spectra for all folds, then without each; `solve` takes a choice of folds and a head."""
    folds = len(counts)
    n = int(min(counts.sum(), d))
    values = np.full((2, 1 + folds, math.prod(heads), n), np.nan)
    square = np.full((2, 1 + folds, math.prod(heads)), np.nan)
    for i, kept in choices(counts).items():
        for head in range(math.prod(heads)):
            with np.errstate(invalid="ignore", over="ignore"):
                pair = solve(kept, head)
            for which, (found, total) in enumerate(pair):
                values[which, i, head] = _fit(_checked(found, total), n)
                square[which, i, head] = total
    rows = np.stack([counts.sum(), *(counts.sum() - counts)]).reshape(-1, *(1 for _ in heads))
    rows = np.broadcast_to(rows, (1 + folds, *heads)).astype(np.int64)
    values, square = values.reshape(2, -1, *heads, n), square.reshape(2, -1, *heads)
    return (
        _spectrum(values[0], square[0], rows, d, eps),
        _spectrum(*_without_rounding(values[1], square, eps), rows, d, eps, lost=1),
    )


def _checked(eigenvalues: Floats, trace: float) -> Floats:
    """Singular values, descending; NaN where they don't add up to the trace."""
    values = roots(eigenvalues)
    with np.errstate(invalid="ignore"):
        good = abs(float((values**2).sum()) - trace) <= 1e-8 * abs(trace)
    return values if good else np.full_like(values, np.nan)


def _fit(values: Floats, n: int) -> Floats:
    short = n - values.shape[-1]
    if short <= 0:
        return values[..., :n]
    return np.concatenate([values, np.zeros((*values.shape[:-1], short))], axis=-1)


def _without_rounding(values: Floats, square: Floats, eps: float) -> tuple[Floats, Floats]:
    """Centred values; all zero where the rows vary by no more than the rounding of their dtype."""
    plain, centered = square
    with np.errstate(invalid="ignore"):
        rounding = centered <= eps**2 * plain
    return np.where(rounding[..., None], 0.0, values), np.where(rounding, 0.0, centered)


def _spectrum(
    values: Floats, square: Floats, rows: Counts, d: int, eps: float, lost: int = 0
) -> Spectrum:
    status = np.full(square.shape[1:], "ok", dtype="<U20")
    status[square[0] == 0] = "zero_matrix"
    status[np.isnan(values[0]).any(-1)] = "not_converged"
    status[~np.isfinite(square[0])] = "non_finite"
    status[rows[0] <= lost] = "insufficient_rows"
    values = np.where((rows <= lost)[..., None], np.nan, values)
    attainable = np.clip(np.minimum(rows - lost, d), 0, values.shape[-1])
    resolution = max(eps, GRAM_EPS)
    attainable = attainable.astype(np.int64)
    return Spectrum(values, rows, d, attainable, resolution, status, square, sample=True)
