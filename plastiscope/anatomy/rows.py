"""Which rows of a weight make which part of a later value.

Axes: R rows of a weight matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plastiscope.anatomy.flow import ACTIVATIONS, NORMS, POINTWISE, RESHAPES, places
from plastiscope.anatomy.products import Product
from plastiscope.anatomy.record import Record
from plastiscope.anatomy.sites import Norm, reaches


def feeding(record: Record, number: int, linear: dict[int, Product]) -> tuple[Product, ...]:
    """The nearest linear maps behind a value, in order."""
    found: dict[int, Product] = {}
    waiting, seen = [number], set()
    while waiting:
        current = waiting.pop()
        call = record.call_of(current)
        if current in seen or call is None or not record.values[current].live:
            continue
        seen.add(current)
        if call.index in linear:
            found[call.index] = linear[call.index]
        else:
            waiting.extend(call.inputs)
    return tuple(found[k] for k in sorted(found))


def following(record: Record, number: int, linear: dict[int, Product]) -> list[Product]:
    """The nearest linear maps that a value goes into, in order."""
    found: dict[int, Product] = {}
    waiting, seen = [number], set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for call in record.consumers(current):
            if call.index in linear:
                found[call.index] = linear[call.index]
            elif call.op in RESHAPES | POINTWISE | NORMS | ACTIVATIONS:
                waiting.extend(call.outputs)
    return [found[k] for k in sorted(found)]


def reached(
    record: Record,
    product: Product,
    number: int,
    through: frozenset[str] = frozenset(),
    shortcuts: Mapping[int, int] | None = None,
) -> Tensor | None:
    """For each element of a value the row that made it; None when rows were mixed on the way."""
    labels = _spread(record, product)
    return places(record, product.output, number, through, shortcuts, labels)


def rows_by_slice(
    record: Record, product: Product, number: int, axis: int | None, norms: Sequence[Norm] = ()
) -> Tensor:
    """Which rows make each slice of a value along one axis (None: the whole): bool [slices, R].

    By following elements where they only move; else by the gradient. A norm over all heads makes
    every head depend on every row: then its statistics are left out, and only its gain counts.
    """
    direct = reached(record, product, number)
    if direct is not None:
        return _used(_slices(direct, axis).flatten(1), product)
    used = _by_gradient(record, product.output, number, axis, _spread(record, product), product)
    if bool((used.sum(0) <= 1).all()):
        return used
    shortcuts = {n.output: n.source for n in norms}
    for norm in norms:
        if record.precedes(product.output, norm.output) and reaches(record, norm.output, number):
            rows = reached(record, product, norm.output, frozenset(NORMS), shortcuts)
            if rows is None or bool((rows < 0).any()):
                continue
            if norm.output == number:
                return _used(_slices(rows, axis).flatten(1), product)
            return _by_gradient(record, norm.output, number, axis, rows, product)
    return used


def _slices(value: Tensor, axis: int | None) -> Tensor:
    return value[None] if axis is None else value.movedim(axis, 0)


def _used(rows: Tensor, product: Product) -> Tensor:
    """Row numbers [slices, n] (-1: none) as bool [slices, R]."""
    height = product.height
    used = torch.zeros(len(rows), height + 1, dtype=torch.bool)
    used.scatter_(1, rows % (height + 1), True)
    return used[:, :-1]


def _spread(record: Record, product: Product) -> Tensor:
    """The row number of every element of the product's output."""
    shape = record.values[product.output].tensor.shape
    order = sorted(range(len(product.channels)), key=lambda k: product.channels[k])
    sizes = [n if a in product.channels else 1 for a, n in enumerate(shape)]
    return product.rows.permute(order).reshape(sizes).expand(shape)


def _by_gradient(
    record: Record, start: int, number: int, axis: int | None, rows: Tensor, product: Product
) -> Tensor:
    """bool [slices, R]: the rows at the elements of `start` that each slice has a gradient for."""
    leaf = record.values[start].tensor.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        value = _slices(record.run_again({start: leaf}, number), axis)
    drawn = torch.rand(value[0].shape, generator=torch.Generator().manual_seed(0)) + 0.5
    used = torch.zeros(len(value), product.height, dtype=torch.bool)
    if not value.requires_grad:
        return ~used  # no gradient tells anything: every row may matter
    for k, piece in enumerate(value):
        (gradient,) = torch.autograd.grad(piece, leaf, drawn.to(piece), retain_graph=True)
        used[k, rows[(gradient != 0).cpu()]] = True
    return used
