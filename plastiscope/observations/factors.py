"""Gram matrices of per-input parameter gradients, from the factors that backward passes by.

Axes: B inputs, n = B*C gradients (C outputs are told apart for every input), T places (tokens,
positions, calls), p and q the two sides of a parameter. A matrix parameter's gradient for input i
is sum_t V[i, t] S[i, t]^T, where V varies with the output asked for and S (the layer's input)
doesn't. No gradient of the size inputs times parameters is ever held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .symmetric import multiply

WORK_BYTES = 1 << 26


@dataclass(frozen=True)
class Outer:
    """Factors of a matrix's gradient: varying [n, T, p], shared [B, T, q].

    `transposed`: the parameter's first axis is q rather than p.
    """

    varying: Tensor
    shared: Tensor
    transposed: bool = False


@dataclass(frozen=True)
class Indexed:
    """Factors of a table's gradient: rows [n, T] of the table, gradients [n, T, q] of each."""

    rows: Tensor
    gradients: Tensor


@dataclass(frozen=True)
class Direct:
    """The gradients themselves, [n, size]."""

    gradients: Tensor


Factor = Outer | Indexed | Direct


def joined_outputs(factors: Sequence[Factor]) -> Factor:
    """One call's factors for every output, from those of each."""
    first, c = factors[0], len(factors)
    if c == 1:
        return first
    if isinstance(first, Outer):
        varying = torch.stack([f.varying for f in factors if isinstance(f, Outer)], 1).flatten(0, 1)
        return Outer(varying, first.shared, first.transposed)
    gradients = torch.stack([f.gradients for f in factors if not isinstance(f, Outer)], 1)
    if isinstance(first, Indexed):
        return Indexed(first.rows.repeat_interleave(c, 0), gradients.flatten(0, 1))
    return Direct(gradients.flatten(0, 1))


def gram(factors: list[Factor]) -> Tensor:
    """Float64 Gram [n, n] of the gradient that all calls of one parameter make together."""
    outer = [f for f in factors if isinstance(f, Outer)]
    indexed = [f for f in factors if isinstance(f, Indexed)]
    direct = [f for f in factors if isinstance(f, Direct)]
    if direct and not outer and not indexed:
        return direct_gram(sum_of(direct))
    if direct or (outer and len({f.transposed for f in outer}) > 1):
        raise ValueError("calls of one parameter in ways that don't add up")
    parts = []
    if outer:
        joined = _joined_outer(outer)
        parts.append(outer_gram(joined.varying, joined.shared))
    if indexed:
        table = _joined_indexed(indexed)
        parts.append(_indexed_gram(table))
        if outer:
            cross = _cross_gram(table, joined)
            parts += [cross, cross.mT]
    return torch.stack(parts).sum(0)


def sum_of(direct: list[Direct]) -> Tensor:
    """[n, size]: the sum over calls."""
    if len(direct) == 1:
        return direct[0].gradients
    return torch.stack([f.gradients for f in direct]).sum(0)


def direct_gram(gradients: Tensor) -> Tensor:
    """Float64 [n, n] of gradients [n, size], a slice of the size at a time."""
    total = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    total = total.to(gradients.device)
    size = max(1, WORK_BYTES // (8 * len(gradients)))
    for part in torch.split(gradients, size, dim=1):
        wide = part.double()
        total += wide @ wide.mT
    return total


def outer_gram(varying: Tensor, shared: Tensor) -> Tensor:
    """Float64 Gram [n, n] of sum_t V[i, t] S[i, t]^T by the cheapest of three exact ways."""
    n, t, p = varying.shape
    b, _, q = shared.shape
    explicit = 2 * n * t * p * q + n * n * p * q
    pairs = (b * t) ** 2 * (q + n // b * p) + n * n * t * p
    if explicit <= pairs:
        return _explicit(varying, shared)
    return _by_pairs(varying, shared) if n == b else _by_outputs(varying, shared)


def _explicit(varying: Tensor, shared: Tensor) -> Tensor:
    """The per-input gradients, some rows of the parameter at a time."""
    n, _, p = varying.shape
    b, _, q = shared.shape
    by_input = varying.reshape(b, n // b, *varying.shape[1:])
    total = varying.new_zeros(n, n, dtype=torch.float64)
    size = max(1, WORK_BYTES // (n * q * varying.element_size()))
    for start in range(0, p, size):
        rows = by_input[..., start : start + size].mT @ shared[:, None]
        flat = rows.reshape(n, -1)
        total += flat @ flat.mT
    return total


def _by_pairs(varying: Tensor, shared: Tensor) -> Tensor:
    """Products of places, (v . v') (s . s'), summed over pairs of places of a pair of inputs."""
    n, t, _ = varying.shape
    all_v, all_s = varying.flatten(0, 1), shared.flatten(0, 1)
    total = varying.new_zeros(n, n, dtype=torch.float64)
    size = max(1, min(-(-n // 4), WORK_BYTES // (n * t * t * varying.element_size())))
    for start in range(0, n, size):
        part, rest = slice(start, start + size), slice(start * t, None)
        products = varying[part].flatten(0, 1) @ all_v[rest].mT
        products *= shared[part].flatten(0, 1) @ all_s[rest].mT
        found = products.reshape(-1, t, n - start, t).sum(3).sum(1).double()
        # From these inputs on: the rest is the mirror image.
        total[part, start:] = found
        total[start:, part] = found.mT
    return total


def _by_outputs(varying: Tensor, shared: Tensor) -> Tensor:
    """As by pairs, with the products of the shared factor taken once for all outputs."""
    n, t, p = varying.shape
    b = len(shared)
    c = n // b
    by_input = varying.reshape(b, c, t, p)
    weighted = varying.new_empty(b, c, t, p)
    total = varying.new_zeros(n, n, dtype=torch.float64)
    for i in range(b):
        # From input i on: the rest is the mirror image.
        products = shared[i] @ shared[i:].mT
        multiply(products[:, None], by_input[i:], weighted[i:])
        found = (by_input[i].reshape(c, -1) @ weighted[i:].reshape(-1, t * p).mT).double()
        rows, columns = slice(i * c, (i + 1) * c), slice(i * c, n)
        total[rows, columns] = found
        total[columns, rows] = found.mT
    return total


def _joined_outer(outer: list[Outer]) -> Outer:
    """Calls add up like further places."""
    if len(outer) == 1:
        return outer[0]
    return Outer(
        torch.cat([f.varying for f in outer], 1),
        torch.cat([f.shared for f in outer], 1),
        outer[0].transposed,
    )


def _joined_indexed(indexed: list[Indexed]) -> Indexed:
    if len(indexed) == 1:
        return indexed[0]
    return Indexed(
        torch.cat([f.rows for f in indexed], 1), torch.cat([f.gradients for f in indexed], 1)
    )


def _indexed_gram(table: Indexed) -> Tensor:
    n, t = table.rows.shape
    rows, gradients = table.rows.flatten(), table.gradients.flatten(0, 1)
    total = gradients.new_zeros(n, n, dtype=torch.float64)
    for i in range(n):
        products = table.gradients[i] @ gradients.mT
        products = products * (table.rows[i][:, None] == rows[None])
        total[i] = products.reshape(t, n, t).double().sum((0, 2))
    return total


def _cross_gram(table: Indexed, outer: Outer) -> Tensor:
    """<table's gradient of i, matrix's gradient of j>: the matrix [rows of the table, q]."""
    outputs = len(outer.varying) // len(outer.shared)
    by_row, by_column = outer.varying, outer.shared.repeat_interleave(outputs, 0)
    if outer.transposed:
        by_row, by_column = by_column, by_row
    n, t = table.rows.shape
    flat = by_row.flatten(0, 1)
    total = by_row.new_zeros(n, n, dtype=torch.float64)
    for i in range(n):
        products = table.gradients[i] @ by_column.flatten(0, 1).mT
        products = products * flat[:, table.rows[i]].mT
        total[i] = products.reshape(t, n, -1).double().sum((0, 2))
    return total
