"""Singular values in float64, by the Gram matrix where that is as exact and by SVD where it isn't.

Axes: ... any leading axes (folds, heads), r rows, c columns, n = min(r, c).

The Gram matrix in float64 resolves singular values down to about 1e-8 of the largest, and is 2 to
10 times cheaper than an SVD. Small matrices, float64 ones, and those whose smallest singular value
comes out below 1e-5 of the largest, get a direct float64 SVD. Every result is checked: the squared
singular values must sum to the squared Frobenius norm (LAPACK has been seen to return zeros or
garbage without an error).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .device import faster, fetched
from .symmetric import eigenvalues, gram_of_columns

Floats = npt.NDArray[np.float64]
Statuses = npt.NDArray[np.str_]

DIRECT_SIDE = 32
"""Up to this smaller side a direct SVD costs little more than the Gram (measured: 1.4 times)."""
RESOLVED = 1e-5
"""Below this share of sigma_1 a Gram's relative error passes 1e-6, so the SVD is done again."""
GRAM_EPS = float(np.sqrt(np.finfo(np.float64).eps))
"""Relative resolution of a singular value that comes from a float64 Gram matrix."""
_CHUNK = 1 << 23


@dataclass(frozen=True)
class Spectrum:
    """Singular values `values` [..., n], descending; zeros after the `attainable` [...] first.

    `rows` [...] and `columns` are the matrix's shape; `eps` the relative precision of its entries;
    `square` [...] is the squared Frobenius norm. `status` (without the axis of folds, where there
    is one) is "ok", "zero_matrix", "non_finite", "not_converged" or "empty"; the values of the last
    three are NaN. `sample`: the rows are a sample, so that few of them bound every rank.
    """

    values: Floats
    rows: npt.NDArray[np.int64]
    columns: int
    attainable: npt.NDArray[np.int64]
    eps: float
    status: Statuses
    square: Floats
    sample: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the whole."""
        return int(self.rows.flat[0]) if self.rows.size else 0, self.columns


def spectra_of(matrices: Tensor, device: torch.device | None = None) -> Spectrum:
    """The spectrum of each matrix of [..., r, c] in its stored dtype, any float, any device: taken
    there (or on the `device` given) or on the CPU, where it's faster."""
    own = matrices.detach()
    place, what = (own.device, "matrices") if device is None else (device, "weights")
    return faster(
        what, place, min(own.shape[-2:]),
        lambda: _spectra_of(own.to(place)), lambda: _spectra_of(own.cpu()),
    )  # fmt: skip


def _spectra_of(matrices: Tensor) -> Spectrum:
    *batch, r, c = matrices.shape
    n = min(r, c)
    flat = matrices.detach().reshape(math.prod(batch), r, c)
    values = np.full((len(flat), n), np.nan)
    square = np.full(len(flat), np.nan)
    status = np.full(len(flat), "ok", dtype="<U16")
    if n == 0:
        status[:] = "empty"
    for start, stop in _groups(flat):
        part = slice(start, stop)
        values[part], square[part], status[part] = _solve(flat[part])
    shape = tuple(batch)
    return Spectrum(
        values=values.reshape(*shape, n),
        rows=np.full(shape, r, dtype=np.int64),
        columns=c,
        attainable=np.full(shape, n, dtype=np.int64),
        eps=float(torch.finfo(matrices.dtype).eps),
        status=status.reshape(shape),
        square=square.reshape(shape),
    )


def _groups(flat: Tensor) -> list[tuple[int, int]]:
    """Runs of equal matrices that fit the working memory together."""
    if flat.numel() == 0:
        return []
    size = max(1, _CHUNK // max(1, flat[0].numel()))
    return [(i, min(i + size, len(flat))) for i in range(0, len(flat), size)]


def _solve(matrices: Tensor) -> tuple[Floats, Floats, Statuses]:
    """Values [b, n], squared norms [b] and statuses [b] of [b, r, c]."""
    (largest,) = fetched(matrices.abs().amax((1, 2)))
    status = np.full(len(matrices), "ok", dtype="<U16")
    status[largest == 0] = "zero_matrix"
    status[~np.isfinite(largest)] = "non_finite"
    values = np.full((len(matrices), min(matrices.shape[1:])), np.nan)
    square = np.full(len(matrices), np.nan)
    values[largest == 0] = square[largest == 0] = 0.0
    good = np.flatnonzero(status == "ok")
    if len(good):
        # Powers of two are exact, and keep squares of float64 entries within range.
        exponent = np.frexp(largest[good])[1] - 1 if matrices.dtype == torch.float64 else 0
        scale = np.ldexp(np.ones(len(good)), exponent)
        chosen = matrices if len(good) == len(matrices) else matrices[torch.as_tensor(good)]
        values[good], square[good] = _values_of_scaled(chosen, scale)
        values[good] *= scale[:, None]
        with np.errstate(over="ignore"):
            square[good] *= scale**2
        status[good[np.isnan(values[good]).any(1)]] = "not_converged"
    return values, square, status


def _values_of_scaled(matrices: Tensor, scale: Floats) -> tuple[Floats, Floats]:
    r, c = matrices.shape[1:]
    n = min(r, c)
    if len(matrices) > 1 or r * c <= _CHUNK:
        scaled = matrices.double()
        if matrices.dtype == torch.float64:
            scaled = scaled / torch.as_tensor(scale, device=matrices.device)[:, None, None]
        (square,) = fetched(torch.linalg.vector_norm(scaled, dim=(1, 2)).square())
        if n <= DIRECT_SIDE or matrices.dtype == torch.float64:
            return _checked(scaled, square, _singular_values(scaled, square)), square
        gram = gram_of_columns(scaled.mT if r <= c else scaled)
        return _checked(scaled, square, values_of_gram(gram)), square
    gram, square = _chunked_gram(matrices[0], float(scale[0]))
    values = values_of_gram(gram[None])
    if not _trusted(values, square)[0] or matrices.dtype == torch.float64:
        triangle = _chunked_triangle(matrices[0], float(scale[0]))[None]
        values = _checked(triangle, square, _singular_values(triangle, square))
    return values, square


def values_of_gram(gram: Tensor) -> Floats:
    """Singular values [..., n], descending, from float64 Gram matrices; NaN where LAPACK failed."""
    if gram.device.type == "cpu":
        return roots(eigenvalues(gram.numpy()))
    return roots(*fetched(torch.linalg.eigvalsh(gram)))


def roots(eigenvalues: Floats) -> Floats:
    """Singular values [..., n], descending, from a Gram matrix's eigenvalues; what is under the
    rounding of the largest is zero, and so are negatives."""
    ordered = np.sort(eigenvalues, axis=-1)[..., ::-1]
    floor = ordered.shape[-1] * np.finfo(np.float64).eps * ordered[..., :1]
    return np.asarray(np.sqrt(np.where(ordered > floor, ordered, 0.0)), dtype=np.float64)


def _trusted(values: Floats, square: Floats) -> npt.NDArray[np.bool_]:
    """Whether the identity holds and the smallest value is one that a Gram resolves."""
    resolved = values[:, -1] >= RESOLVED * values[:, 0]
    return np.asarray(resolved & _adds_up(values, square))


def _adds_up(values: Floats, square: Floats) -> npt.NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs((values**2).sum(-1) - square) <= 1e-8 * square, dtype=np.bool_)


def _checked(scaled: Tensor, square: Floats, values: Floats) -> Floats:
    """Replaces what can't be trusted by a direct SVD."""
    bad = np.flatnonzero(~_trusted(values, square))
    if len(bad):
        values[bad] = _singular_values(scaled[torch.as_tensor(bad)], square[bad])
    return values


def _singular_values(matrices: Tensor, square: Floats) -> Floats:
    """Float64 SVD of [b, r, c]: other solvers where the first fails; NaN where all of them do."""
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    solvers: tuple[Callable[[Tensor], Any], ...] = (
        torch.linalg.svdvals,
        lambda m: torch.linalg.svdvals(m.mT.cpu()),
        lambda m: torch.linalg.svdvals(torch.linalg.qr(m.mT.cpu(), mode="r").R),
        lambda m: np.linalg.svd(m.cpu().numpy(), compute_uv=False),
    )
    values = np.full((len(wide), wide.shape[1]), np.nan)
    left = np.arange(len(wide))
    for solve in solvers:
        found = _attempt(solve, wide if len(left) == len(wide) else wide[torch.as_tensor(left)])
        good = _adds_up(found, square[left])
        values[left[good]] = found[good]
        left = left[~good]
        if not len(left):
            break
    return values


def _attempt(solve: Callable[[Tensor], Any], matrices: Tensor) -> Floats:
    try:
        (found,) = fetched(torch.as_tensor(solve(matrices)))
    except (RuntimeError, np.linalg.LinAlgError):
        found = np.full(matrices.shape[:2], np.nan)
        if len(matrices) > 1:
            found = np.concatenate([_attempt(solve, m[None]) for m in matrices])
    ordered: Floats = np.sort(np.asarray(found, dtype=np.float64), axis=-1)[:, ::-1].copy()
    return ordered


def _long_side_chunks(matrix: Tensor) -> list[Tensor]:
    long = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    return list(torch.split(long, max(1, _CHUNK // long.shape[1])))


def _chunked_gram(matrix: Tensor, scale: float) -> tuple[Tensor, Floats]:
    """Gram on the smaller side of one big matrix, never holding all of it in float64."""
    n = min(matrix.shape)
    gram = torch.zeros(n, n, dtype=torch.float64, device=matrix.device)
    square = torch.zeros(1, dtype=torch.float64, device=matrix.device)
    for chunk in _long_side_chunks(matrix):
        scaled = chunk.double() / scale
        gram += gram_of_columns(scaled)
        square += scaled.square().sum()
    return gram, fetched(square)[0]


def _chunked_triangle(matrix: Tensor, scale: float) -> Tensor:
    """R [n, n] of the QR decomposition of one big matrix's long side, chunk after chunk."""
    triangle: Tensor | None = None
    for chunk in _long_side_chunks(matrix):
        scaled = chunk.double() / scale
        stacked = scaled if triangle is None else torch.cat([triangle, scaled])
        triangle = torch.linalg.qr(stacked, mode="r").R
    assert triangle is not None
    return triangle
