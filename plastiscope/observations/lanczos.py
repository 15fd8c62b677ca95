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
    """Of p probes, Gauss's rule and Gauss-Radau's: square roots of the nodes [B, p, 2, k + s] and
    their weights, which sum to 1 over the last axis.

    sum_j w_j f(node_j) of each estimates the mean of f over the operator's n (rooted) eigenvalues;
    the first k are the leading directions, the same in all, with `residuals` [B, k] in the unit of
    the eigenvalues. `diagonal` [B, p, s] and `beside` [B, p, s - 1] are what the rules come from.
    """

    nodes: Floats
    weights: Floats
    residuals: Floats
    diagonal: Floats
    beside: Floats

    def shares_below(self, x: Floats) -> tuple[Floats, Floats]:
        """The least and the most [B] of all (rooted) eigenvalues that may be up to x [B]: what
        Chebyshev, Markov and Stieltjes say of the rule with a node at x, the mean of the probes."""
        at = (x**2)[:, None, None]
        changed = _with_a_node_at(self.diagonal, self.beside, at[..., 0])
        found, share = _rule(changed, self.beside)
        k = self.residuals.shape[1]
        share = share * self.weights[:, :, 0, k:].sum(-1, keepdims=True)
        least = (share * (found < at * (1 - 1e-6))).sum(-1).mean(1)
        most = (share * (found <= at * (1 + 1e-6))).sum(-1).mean(1)
        # A direction's mass has a mean and a variance: Cantelli's inequality.
        weight = self.weights[:, 0, 0, :k]
        off = at[..., 0] - self.nodes[:, 0, 0, :k] ** 2
        square = self.residuals**2
        beyond = square / np.maximum(square + off**2, 1e-300)
        least = least + (weight * np.where(off > 0, 1 - beyond, 0.0)).sum(1)
        most = most + (weight * np.where(off < 0, beyond, 1.0)).sum(1)
        return least, most

    def error_of_largest(self) -> Floats:
        """By how much [B] the largest rooted eigenvalue may exceed the largest node."""
        largest = self.nodes.max((1, 2, 3))
        k = self.residuals.shape[1]
        seen = self.nodes[:, :, 0, k:].max(-1)
        spread = seen.std(1, ddof=1) if seen.shape[1] > 1 else np.zeros(len(seen))
        leading = self.nodes[:, 0, 0, :k]
        square = np.maximum(largest[:, None], leading) ** 2
        top = np.where(leading >= largest[:, None], self.residuals, 0.0)
        beyond = np.sqrt(square + top) - np.sqrt(square)
        return np.where((top > 0).any(1), beyond.max(1, initial=0.0), spread)


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
    top = torch.zeros(operators, leading, size, dtype=torch.float64, device=device)
    values = residuals = np.zeros((operators, leading))
    if leading:
        values, residuals, top = _leading(product, top, generator)
    diagonals, besides = [], []
    for first in range(0, probes, at_once):
        count = min(at_once, probes - first)
        start = torch.randint(0, 2, (operators, count, size), generator=generator).double() * 2 - 1
        start = start.to(device)
        start = start - (start @ top.mT) @ top
        diagonal, beside = _tridiagonal(product, start, min(steps, size))
        diagonals.append(diagonal)
        besides.append(beside)
    diagonal, beside = np.concatenate(diagonals, 1), np.concatenate(besides, 1)
    last = diagonal if steps >= size else _with_a_node_at(diagonal, beside, np.zeros((1, 1)))
    found, shares = _rule(np.stack([diagonal, last], 2), np.stack([beside, beside], 2))
    each = np.broadcast_to(((values > 0) / size)[:, None, None], (*found.shape[:3], leading))
    rest = 1.0 - each.sum(-1, keepdims=True)
    nodes = np.broadcast_to(np.sqrt(values)[:, None, None], each.shape)
    return Quadrature(
        np.concatenate([nodes, np.sqrt(found.clip(min=0.0))], -1),
        np.concatenate([each, shares * rest], -1),
        residuals,
        diagonal,
        beside,
    )


def _leading(
    product: Product, room: Tensor, generator: torch.Generator
) -> tuple[Floats, Floats, Tensor]:
    """Eigenvalues and residuals [B, k] and vectors [B, k, n] of the leading directions; all 0 for
    those that one step doesn't find well enough."""
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
    kept = (values * found).cpu().numpy(), (residuals * found).cpu().numpy()
    return *kept, vectors * found[..., None]


def _with_a_node_at(diagonal: Floats, beside: Floats, at: Floats) -> Floats:
    """The diagonal whose last entry makes `at` [B, 1] (up to the spectrum's end) an eigenvalue; as
    it was where it is one already."""
    pivot = diagonal[..., 0] - at
    with np.errstate(all="ignore"):
        for i in range(1, diagonal.shape[-1] - 1):
            pivot = diagonal[..., i] - at - beside[..., i - 1] ** 2 / pivot
        last = at + (beside[..., -1] ** 2 / pivot if beside.shape[-1] else np.zeros_like(pivot))
    changed = np.array(diagonal)
    usable = np.isfinite(last) & ((at > 0) | ((last >= 0.0) & (last <= diagonal[..., -1])))
    changed[..., -1] = np.where(usable, last, diagonal[..., -1])
    return changed


def _rule(diagonal: Floats, beside: Floats) -> tuple[Floats, Floats]:
    """Nodes and weights [..., s], which sum to 1."""
    found, vectors = np.linalg.eigh(_matrix(diagonal, beside))
    return found, vectors[..., 0, :] ** 2


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
