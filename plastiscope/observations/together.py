"""The spectra of all choices of folds, taken at once on a device that isn't the CPU.

As on the CPU, the rows' mean (or the vector of ones) is brought to the first axis by a reflection,
so that one large value doesn't cost the small ones their digits.

Axes: N rows, d width, H heads, K folds, n the side of a Gram matrix (N or d).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .device import Floats, fetched

Counts = npt.NDArray[np.int64]
Pair = tuple[tuple[Floats, float], tuple[Floats, float]]
"""Eigenvalues and trace, plain and centred."""
Solve = Callable[[list[int], int], Pair]
"""The pair of a choice of folds and a head."""
_ENTRIES = 1 << 27
"""Entries of matrices that are solved at once."""
_TINY = 1e-300


def choices(counts: Counts) -> dict[int, list[int]]:
    """Folds that have rows: all (0), then all but one (its number and 1)."""
    present = [k for k in range(len(counts)) if counts[k]]
    without = {1 + k: [j for j in present if j != k] for k in present}
    return {i: kept for i, kept in {0: present, **without}.items() if kept}


def solved_together(matrices: Callable[[list[int]], Tensor], counts: Counts) -> Solve:
    """From the Gram matrices [2, H, n, n], plain and centred, of a choice of folds."""
    every = list(choices(counts).values())
    found = [matrices(kept) for kept in every]
    size = max(1, _ENTRIES // found[0].numel())
    some = [found[i : i + size] for i in range(0, len(found), size)]
    solved = torch.cat([torch.linalg.eigvalsh(torch.stack(part)) for part in some])
    traces = torch.stack([m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in found])
    values, squares = fetched(solved, traces)

    def solve(kept: list[int], head: int) -> Pair:
        at = every.index(kept)
        plain, centered = values[at, :, head]
        return (plain, float(squares[at, 0, head])), (centered, float(squares[at, 1, head]))

    return solve


def grams_of_moments(
    parts: Tensor, totals: Tensor, origin: Tensor, counts: Counts, kept: list[int]
) -> Tensor:
    """[2, H, d, d] of some folds, from moments [K, H, d, d] and sums [K, H, d] about [H, d]."""
    n = int(counts[kept].sum())
    total = torch.stack([totals[k] for k in kept]).sum(0)
    moment = torch.stack([parts[k] for k in kept]).sum(0)
    moment -= total[..., None] * (total / n)[..., None, :]
    mean = math.sqrt(n) * (origin + total / n)
    centered = _reflected(moment, _normal(mean))
    plain = centered.clone()
    plain[:, 0, 0] += mean.square().sum(-1)
    return torch.stack([plain, centered])


def grams_of_rows(
    grams: Tensor, crosses: Tensor, squares: Tensor, fold: Tensor, kept: list[int]
) -> Tensor:
    """[2, H, N, N] of the rows of some folds, from all rows' Gram matrix [H, N, N] about a pivot,
    their products [H, N] with it and its square [H]. Other rows are 0, and add eigenvalues of 0."""
    own = torch.stack([fold == k for k in kept]).any(0).double()
    normal = _normal(own[None])
    plain = _reflected(grams * own[:, None] * own, normal)
    centered = plain.clone()
    centered[:, 0], centered[:, :, 0] = 0.0, 0.0
    one = _reflect(own[None], normal)[:, :1]
    cross = one * _reflect(crosses * own, normal)
    plain[:, 0] += cross
    plain[:, :, 0] += cross
    plain[:, 0, 0] += own.sum() * squares
    return torch.stack([plain, centered])


def _normal(vectors: Tensor) -> Tensor:
    """The n [H, n] for which I - n n^T takes each vector onto the first axis; 0 for a zero."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    normal = vectors.div(length.clamp(min=_TINY))
    first = torch.copysign(torch.ones_like(length), vectors[:, :1])
    normal[:, :1] += torch.where(length > 0, first, 0.0)
    square = normal.square().sum(-1, keepdim=True).clamp(min=_TINY)
    return normal.mul(torch.rsqrt(square / 2.0))


def _reflect(vectors: Tensor, normal: Tensor) -> Tensor:
    return vectors - (vectors * normal).sum(-1, keepdim=True) * normal


def _reflected(symmetric: Tensor, normal: Tensor) -> Tensor:
    """(I - n n^T) A (I - n n^T)."""
    product = (symmetric @ normal[..., None]).squeeze(-1)
    product = product - 0.5 * (product * normal).sum(-1, keepdim=True) * normal
    outer = product[..., None] * normal[..., None, :]
    return symmetric - outer - outer.mT
