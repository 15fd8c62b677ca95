"""Stochastic Lanczos quadrature: a symmetric operator's spectrum from products with vectors.

Axes: B operators at once, n their size, s steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .device import fetched
from .spectra import Floats


@dataclass(frozen=True)
class Quadrature:
    """Square roots of the nodes [B, probes * s] and their weights, which sum to 1 for each B.

    sum_j w_j f(node_j) estimates the mean of f over the operator's n (rooted) eigenvalues.
    """

    nodes: Floats
    weights: Floats


def quadrature(
    product: Callable[[Tensor], Tensor],
    operators: int,
    size: int,
    steps: int,
    probes: int,
    generator: torch.Generator,
    device: torch.device,
) -> Quadrature:
    """Of positive semi-definite operators, `product` mapping [B, n] to [B, n] in float64."""
    nodes, weights = [], []
    for _ in range(probes):
        start = torch.randint(0, 2, (operators, size), generator=generator).double() * 2 - 1
        diagonal, beside = _tridiagonal(product, start.to(device), min(steps, size))
        values, vectors = np.linalg.eigh(_matrix(diagonal, beside))
        nodes.append(np.sqrt(values.clip(min=0.0)))
        weights.append(vectors[:, 0, :] ** 2 / probes)
    return Quadrature(np.concatenate(nodes, 1), np.concatenate(weights, 1))


def _tridiagonal(
    product: Callable[[Tensor], Tensor], start: Tensor, steps: int
) -> tuple[Floats, Floats]:
    """Diagonal [B, s] and off-diagonal [B, s - 1], each vector made orthogonal to all before."""
    v = start / start.norm(dim=1, keepdim=True)
    basis, diagonal, beside = [v], [], []
    for step in range(steps):
        w = product(v)
        diagonal.append((w * v).sum(1))
        if step == steps - 1:
            break
        before = torch.stack(basis, 1)
        for _ in range(2):
            w = w - (before.mT @ (before @ w[..., None])).squeeze(-1)
        length = w.norm(dim=1)
        # An invariant subspace is exhausted: what follows decouples and has no weight.
        length = torch.where(length > 1e-12 * diagonal[0].abs().clamp(min=1e-300), length, 0.0)
        beside.append(length)
        v = w / length.clamp(min=1e-300)[:, None]
        basis.append(v)
    off = torch.stack(beside, 1) if beside else start[:, :0]
    found, other = fetched(torch.stack(diagonal, 1), off)
    return found, other


def _matrix(diagonal: Floats, beside: Floats) -> Floats:
    s = diagonal.shape[1]
    matrix = np.zeros((len(diagonal), s, s))
    index = np.arange(s)
    matrix[:, index, index] = diagonal
    matrix[:, index[1:], index[:-1]] = matrix[:, index[:-1], index[1:]] = beside
    return matrix
