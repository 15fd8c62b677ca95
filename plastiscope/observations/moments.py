"""Spectra of feature rows, all of them and all but a fold's, from moments or from held rows.

Axes: N rows, d width, H heads, K folds; results [1 + K] or [1 + K, H].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .spectra import GRAM_EPS, Floats, Spectrum, values_of_gram

_WORKING = 1 << 22
"""Entries of the Gram matrices that are solved at once."""
Counts = npt.NDArray[np.int64]
Grams = tuple[Tensor, Tensor]


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

    def grams(kept: list[list[int]]) -> Grams:
        chosen = moments.new_zeros(len(kept), len(counts))
        for i, folds in enumerate(kept):
            chosen[i, folds] = 1.0
        moment, total = _combine(chosen, moments), _combine(chosen, sums)
        n = torch.as_tensor(counts, device=moments.device).double() @ chosen.mT
        n = n.reshape(-1, *(1 for _ in moments.shape[1:]))
        cross = total[..., :, None] * pivot[..., None, :]
        square = pivot[..., :, None] * pivot[..., None, :]
        plain = moment + cross + cross.mT + n * square
        centered = moment - total[..., :, None] * total[..., None, :] / n.clamp(min=1)
        return plain, centered

    return _spectra(grams, counts, tuple(sums.shape[1:-1]), sums.shape[-1], eps)


def _combine(chosen: Tensor, parts: Tensor) -> Tensor:
    """Sums over the chosen folds: [n, K] and [K, ...] give [n, ...]."""
    return (chosen @ parts.flatten(1)).reshape(-1, *parts.shape[1:])


def row_spectra(
    rows: Tensor, fold: Tensor, folds: int, pivot: Tensor, eps: float
) -> tuple[Spectrum, Spectrum]:
    """From rows [N, (H,) d] fewer than they are wide, by their N x N Gram matrix."""
    by_head = rows if rows.ndim == 2 else rows.transpose(0, 1)
    raw = _gram(by_head, None)
    shifted = _gram(by_head, pivot if rows.ndim == 2 else pivot[:, None])
    counts = np.bincount(fold.numpy(), minlength=folds)

    def grams(kept: list[list[int]]) -> Grams:
        (folds,) = kept
        where = torch.isin(fold, torch.tensor(folds)).nonzero().squeeze(1).to(raw.device)
        plain = raw.index_select(-1, where).index_select(-2, where)
        part = shifted.index_select(-1, where).index_select(-2, where)
        mean = part.mean(-1, keepdim=True)
        return plain[None], (part - mean - mean.mT + mean.mean(-2, keepdim=True))[None]

    return _spectra(grams, counts, tuple(rows.shape[1:-1]), rows.shape[-1], eps, at_once=1)


def _gram(rows: Tensor, pivot: Tensor | None) -> Tensor:
    """[..., N, N] in float64, a slice of the width at a time."""
    n, d = rows.shape[-2:]
    gram = torch.zeros(*rows.shape[:-1], n, dtype=torch.float64, device=rows.device)
    size = max(1, (1 << 22) // max(1, rows.shape[:-1].numel()))
    for start in range(0, d, size):
        part = rows[..., start : start + size].double()
        if pivot is not None:
            part = part - pivot[..., start : start + size]
        gram += part @ part.mT
    return gram


def _spectra(
    grams: Callable[[list[list[int]]], Grams],
    counts: Counts,
    heads: tuple[int, ...],
    d: int,
    eps: float,
    at_once: int | None = None,
) -> tuple[Spectrum, Spectrum]:
    """Spectra for all folds, then without each; `grams` takes `at_once` choices of folds, None as
    many as the working memory holds."""
    folds = len(counts)
    n = int(min(counts.sum(), d))
    present = [k for k in range(folds) if counts[k]]
    every = [present, *([j for j in present if j != k] for k in range(folds))]
    values = np.full((2, 1 + folds, *heads, n), np.nan)
    square = np.full((2, 1 + folds, *heads), np.nan)
    known = [i for i, kept in enumerate(every) if kept and (i == 0 or i - 1 in present)]
    size = at_once or max(1, _WORKING // (d * d * max(1, int(np.prod(heads)))))
    for start in range(0, len(known), size):
        some = known[start : start + size]
        for which, gram in enumerate(grams([every[i] for i in some])):
            found, total = _values(gram)
            values[which, some] = _fit(found, n)
            square[which, some] = total
    rows = np.stack([counts.sum(), *(counts.sum() - counts)]).reshape(-1, *(1 for _ in heads))
    rows = np.broadcast_to(rows, (1 + folds, *heads)).astype(np.int64)
    return (
        _spectrum(values[0], square[0], rows, d, eps),
        _spectrum(*_without_rounding(values[1], square, eps), rows, d, eps, lost=1),
    )


def _values(gram: Tensor) -> tuple[Floats, Floats]:
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).cpu().numpy()
    if not np.isfinite(trace).all():
        bad = ~np.isfinite(trace)
        gram = torch.where(torch.as_tensor(bad, device=gram.device)[..., None, None], 0.0, gram)
        values = values_of_gram(gram)
        values[bad] = np.nan
        return values, trace
    values = values_of_gram(gram)
    with np.errstate(invalid="ignore"):
        values[np.abs((values**2).sum(-1) - trace) > 1e-8 * np.abs(trace)] = np.nan
    return values, trace


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
