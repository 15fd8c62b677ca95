"""Gram matrices of per-input parameter gradients, from the factors that backward passes by.

Axes: B inputs, C outputs told apart for every input, n = B*C gradients (entry i*C + c is input i's
output c), T places (tokens, positions, calls), p and q the two sides of a parameter. A matrix
parameter's gradient for input i and output c is sum_t V[i, c, t] S[i, t]^T, where V varies with the
output asked for and S (the layer's input) doesn't. No gradient of the size inputs times parameters
is ever held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .symmetric import at_once, gram_of_columns, one_blas_thread

WORK_BYTES = 1 << 25
"""Bytes worked on at a time, where there is a choice."""


@dataclass(frozen=True)
class Factor:
    """What depends on the output asked for, [B, C, ...]."""

    varying: Tensor


@dataclass(frozen=True)
class Outer(Factor):
    """Factors of a matrix's gradient: varying [B, C, T, p], shared [B, T, q].

    `transposed`: the parameter's first axis is q rather than p.
    """

    shared: Tensor
    transposed: bool = False


@dataclass(frozen=True)
class Indexed(Factor):
    """Factors of a table's gradient: that of each row looked up, [B, C, T, q]; the rows [B, T]."""

    rows: Tensor


@dataclass(frozen=True)
class Direct(Factor):
    """The gradients themselves, [B, C, size]."""


def room_for(factor: Factor, outputs: int) -> Factor:
    """A factor of one output, with room for those of all of them."""
    shape = (len(factor.varying), outputs, *factor.varying.shape[2:])
    return replace(factor, varying=factor.varying.new_empty(shape))


def of_copies(factor: Factor, outputs: int) -> Factor:
    """The factor of inputs that were copied for every output, [B*C, 1, ...], told apart."""
    varying = factor.varying.reshape(-1, outputs, *factor.varying.shape[2:])
    if isinstance(factor, Outer):
        return replace(factor, varying=varying, shared=factor.shared[::outputs])
    if isinstance(factor, Indexed):
        return replace(factor, varying=varying, rows=factor.rows[::outputs])
    return replace(factor, varying=varying)


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
        parts.append(outer_gram(joined))
    if indexed:
        table = _joined_indexed(indexed)
        parts.append(_indexed_gram(table))
        if outer:
            cross = _cross_gram(table, joined)
            parts += [cross, cross.mT]
    return torch.stack(parts).sum(0)


def sum_of(direct: list[Direct]) -> Tensor:
    """[n, size]: the sum over calls."""
    total = direct[0].varying
    for factor in direct[1:]:
        total = total + factor.varying
    return total.flatten(0, 1)


def direct_gram(gradients: Tensor) -> Tensor:
    """Float64 [n, n] of gradients [n, size], a slice of the size at a time."""
    total = gradients.new_zeros(len(gradients), len(gradients), dtype=torch.float64)
    size = max(1, WORK_BYTES // (8 * len(gradients)))
    for part in torch.split(gradients, size, dim=1):
        total += gram_of_columns(part.double().mT)
    return total


def outer_gram(outer: Outer) -> Tensor:
    """Float64 Gram [n, n] by the cheapest of three exact ways."""
    outer = _without_idle_places(outer)
    varying, shared = outer.varying, outer.shared
    if shared.element_size() < 4:
        varying, shared = varying.float(), shared.float()
    (b, c, t, p), q = varying.shape, shared.shape[-1]
    n = b * c
    explicit = 2 * n * t * p * q + n * n * p * q
    pairs = (b * t) ** 2 * (q + c * p) + n * n * t * p
    if explicit <= pairs:
        return _explicit(varying, shared)
    return _by_pairs(varying.squeeze(1), shared) if c == 1 else _by_outputs(varying, shared)


def _without_idle_places(outer: Outer) -> Outer:
    """Less the places that no gradient comes to: all but the CLS token in a ViT's last block."""
    first = outer.varying[0, 0]
    # To ask a GPU would be to wait for it.
    if outer.shared.device.type != "cpu" or first[:, 0].all() or first.any(-1).all():
        return outer
    busy = outer.varying.any(-1).flatten(0, 1).any(0)
    if not busy.any() or not torch.isfinite(outer.shared[:, ~busy]).all():
        return outer  # 0 times infinity is no zero.
    return replace(outer, varying=outer.varying[:, :, busy], shared=outer.shared[:, busy])


def _explicit(varying: Tensor, shared: Tensor) -> Tensor:
    """The per-input gradients, some rows of the parameter at a time."""
    (b, c, _, p), q = varying.shape, shared.shape[-1]
    total = varying.new_zeros(b * c, b * c, dtype=torch.float64)
    size = max(1, WORK_BYTES // (b * c * q * varying.element_size()))
    for start in range(0, p, size):
        rows = varying[..., start : start + size].mT @ shared[:, None]
        total += gram_of_columns(rows.reshape(b * c, -1).mT)
    return total


def _by_pairs(varying: Tensor, shared: Tensor) -> Tensor:
    """Products of places, (v . v') (s . s'), summed over pairs of places of a pair of inputs."""
    n, t, _ = varying.shape
    all_v, all_s = varying.flatten(0, 1), shared.flatten(0, 1)
    if (n * t) ** 2 <= 4 * at_once(shared.device):
        # Small enough to be had as Grams, at half the operations.
        products = gram_of_columns(all_v.mT)
        products *= gram_of_columns(all_s.mT)
        return products.reshape(n * t, n, t).sum(2).reshape(n, t, n).sum(1).double()
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
    """As by pairs, with the products of the shared factor taken once for all outputs.

    The gradients of one input are weighted with them, then multiplied with those of the others: as
    many places and inputs at a time as stay in a CPU's cache between the two. There NumPy's BLAS
    takes less than half the time of torch's, whose many small products have more to set up.
    """
    b, c, t, p = varying.shape
    entries = at_once(shared.device) // 2
    height = -(-t // -(-2 * c * t * p // entries))
    size = max(1, entries // (c * height * p))
    v: Any = varying.flatten(2)
    places: Any = shared.flatten(0, 1)
    room: Any = shared.new_empty(size * c * height * p)
    found: Any = shared.new_zeros(-(-t // height), b, b, c, c)
    multiply: Any = torch.matmul
    parts = found
    if shared.device.type == "cpu":
        v, places, room, parts = v.numpy(), places.numpy(), room.numpy(), parts.numpy()
        multiply = np.matmul
    with one_blas_thread(), np.errstate(invalid="ignore"):
        for i in range(b):
            # From input i on: the rest is the mirror image.
            weights = multiply(places[i * t :], places[i * t : (i + 1) * t].T)
            weights = weights.reshape(b - i, 1, t, t)
            for k, top in enumerate(range(0, t, height)):
                rows = min(height, t - top)
                for start in range(i, b, size):
                    count = min(size, b - start)
                    weighted = room[: count * c * rows * p].reshape(count, c, rows, p)
                    some = weights[start - i : start - i + count, :, top : top + rows]
                    multiply(some, v[i].reshape(c, t, p), out=weighted)
                    others = v[start : start + count, :, top * p : (top + rows) * p]
                    weighted = weighted.reshape(count, c, -1)
                    products = parts[k, i, start : start + count]
                    multiply(weighted, others.swapaxes(1, 2), out=products)
    total: Tensor = found.sum(0, dtype=torch.float64)
    total.diagonal(dim1=0, dim2=1).mul_(0.5)
    return (total + total.permute(1, 0, 3, 2)).transpose(1, 2).reshape(b * c, b * c)


def _joined_outer(outer: list[Outer]) -> Outer:
    """Calls add up like further places."""
    if len(outer) == 1:
        return outer[0]
    varying = torch.cat([f.varying for f in outer], 2)
    return Outer(varying, torch.cat([f.shared for f in outer], 1), outer[0].transposed)


def _joined_indexed(indexed: list[Indexed]) -> Indexed:
    if len(indexed) == 1:
        return indexed[0]
    varying = torch.cat([f.varying for f in indexed], 2)
    return Indexed(varying, torch.cat([f.rows for f in indexed], 1))


def _indexed_gram(table: Indexed) -> Tensor:
    gradients = table.varying.flatten(0, 1)
    n, t, _ = gradients.shape
    places = gradients.flatten(0, 1)
    rows = table.rows.repeat_interleave(n // len(table.rows), 0)
    total = gradients.new_zeros(n, n, dtype=torch.float64)
    for i in range(n):
        products = gradients[i] @ places.mT
        products = products * (rows[i][:, None] == rows.flatten()[None])
        total[i] = products.reshape(t, n, t).double().sum((0, 2))
    return total


def _cross_gram(table: Indexed, outer: Outer) -> Tensor:
    """<table's gradient of i, matrix's gradient of j>: the matrix [rows of the table, q]."""
    gradients = table.varying.flatten(0, 1)
    n, t, _ = gradients.shape
    outputs = table.varying.shape[1]
    by_row, by_column = outer.varying.flatten(0, 1), outer.shared.repeat_interleave(outputs, 0)
    if outer.transposed:
        by_row, by_column = by_column, by_row
    rows = table.rows.repeat_interleave(outputs, 0)
    flat = by_row.flatten(0, 1)
    total = by_row.new_zeros(n, n, dtype=torch.float64)
    for i in range(n):
        products = gradients[i] @ by_column.flatten(0, 1).mT
        products = products * flat[:, rows[i]].mT
        total[i] = products.reshape(t, n, -1).double().sum((0, 2))
    return total
