"""Stochastic Lanczos quadrature: a symmetric operator's spectrum from products with vectors.

Axes: B operators at once, m vectors of each, n their size, s steps, k directions taken apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .spectra import Floats

CONVERGED = 0.15
"""Residual of a direction that is taken for an eigenvector, over its eigenvalue's distance from the
mean eigenvalue. (Over the eigenvalue itself, any direction of a near-isometry would do.)"""
LEADING_ENTRIES = 1 << 23
"""Entries of all leading directions together."""

Product = Callable[[Tensor], Tensor]
"""The operators times their vectors, [B, m, n] to [B, m, n] in float64."""


@dataclass(frozen=True)
class Quadrature:
    """Square roots of the nodes [B, k + 2 * probes * s] and their weights, which sum to 1 for each
    B.

    sum_j w_j f(node_j) estimates the mean of f over the operator's n (rooted) eigenvalues.
    """

    nodes: Floats
    weights: Floats


def quadrature(
    product: Product,
    operators: int,
    size: int,
    steps: int,
    probes: int,
    leading: int,
    at_once: int,
    generator: torch.Generator,
    device: torch.device,
) -> Quadrature:
    """Of positive semi-definite operators, `at_once` probes at a time.

    The leading directions, to which a sum over few random probes owes most of its error, are found
    by one step of subspace iteration and counted one by one; probes see the rest. Each probe gives
    Gauss's rule and Gauss-Radau's with a node at 0, whose errors near 0 have opposite signs for
    functions like a square root: half of each is taken.
    """
    leading = min(leading, size // 4, LEADING_ENTRIES // (operators * size))
    top = torch.zeros(operators, 0, size, dtype=torch.float64, device=device)
    nodes = [np.zeros((operators, 0))]
    weights = [np.zeros((operators, 0))]
    if leading:
        values, top = _leading(product, top.new_empty(operators, leading, size), generator)
        nodes, weights = [np.sqrt(values)], [(values > 0) / size]
    rest = 1.0 - weights[0].sum(1)[:, None]
    for first in range(0, probes, at_once):
        count = min(at_once, probes - first)
        start = torch.randint(0, 2, (operators, count, size), generator=generator).double() * 2 - 1
        start = start.to(device)
        start = start - (start @ top.mT) @ top
        diagonal, beside = _tridiagonal(product, start, min(steps, size))
        last = diagonal if steps >= size else _with_a_node_at_zero(diagonal, beside)
        for each in (diagonal, last):
            found, vectors = np.linalg.eigh(_matrix(each, beside))
            share = vectors[..., 0, :] ** 2 * rest[..., None] / (2 * probes)
            nodes.append(np.sqrt(found.clip(min=0.0)).reshape(operators, -1))
            weights.append(share.reshape(operators, -1))
    return Quadrature(np.concatenate(nodes, 1), np.concatenate(weights, 1))


def _leading(product: Product, room: Tensor, generator: torch.Generator) -> tuple[Floats, Tensor]:
    """Eigenvalues [B, k] and vectors [B, k, n] of the leading directions; both 0 for those that
    one step doesn't find well enough."""
    start = torch.randn(room.shape, generator=generator, dtype=torch.float64).to(room.device)
    image = product(start)
    mean = ((start * image).sum((1, 2)) / start.square().sum((1, 2)))[:, None]
    basis = torch.linalg.qr(image.mT).Q.mT.contiguous()
    image = product(basis)
    small = basis @ image.mT
    values, turn = torch.linalg.eigh((small + small.mT) / 2)
    vectors, images = turn.mT @ basis, turn.mT @ image
    residuals = (images - values[..., None] * vectors).norm(dim=-1)
    found = (values > 0) & (residuals <= CONVERGED * (values - mean))
    return (values * found).cpu().numpy(), vectors * found[..., None]


def _with_a_node_at_zero(diagonal: Floats, beside: Floats) -> Floats:
    """The diagonal whose last entry makes the matrix singular; as it was where it is already."""
    pivot = diagonal[..., 0]
    with np.errstate(all="ignore"):
        for i in range(1, diagonal.shape[-1] - 1):
            pivot = diagonal[..., i] - beside[..., i - 1] ** 2 / pivot
        last = beside[..., -1] ** 2 / pivot if beside.shape[-1] else np.zeros_like(pivot)
    changed = np.array(diagonal)
    usable = np.isfinite(last) & (last >= 0.0) & (last <= diagonal[..., -1])
    changed[..., -1] = np.where(usable, last, diagonal[..., -1])
    return changed


def _tridiagonal(product: Product, start: Tensor, steps: int) -> tuple[Floats, Floats]:
    """Diagonal [B, m, s] and off-diagonal [B, m, s - 1], each vector made orthogonal to all
    before."""
    v = start / start.norm(dim=-1, keepdim=True)
    basis = v.new_empty(*v.shape[:2], steps, v.shape[-1])
    basis[:, :, 0] = v
    diagonal, beside = [], []
    for step in range(steps):
        w = product(v)
        diagonal.append((w * v).sum(-1))
        if step == steps - 1:
            break
        before = basis[:, :, : step + 1]
        for _ in range(2):
            w = w - (before.mT @ (before @ w[..., None])).squeeze(-1)
        length = w.norm(dim=-1)
        # An invariant subspace is exhausted: what follows decouples and has no weight.
        length = torch.where(length > 1e-12 * diagonal[0].abs().clamp(min=1e-300), length, 0.0)
        beside.append(length)
        v = torch.where(length > 0.0, 1.0 / length, 0.0)[..., None] * w
        basis[:, :, step + 1] = v
    off = torch.stack(beside, -1) if beside else start[..., :0]
    return torch.stack(diagonal, -1).cpu().numpy(), off.cpu().numpy()


def _matrix(diagonal: Floats, beside: Floats) -> Floats:
    s = diagonal.shape[-1]
    matrix = np.zeros((*diagonal.shape, s))
    index = np.arange(s)
    matrix[..., index, index] = diagonal
    matrix[..., index[1:], index[:-1]] = matrix[..., index[:-1], index[1:]] = beside
    return matrix
