"""The weights of one checkpoint, measured matrix by matrix, one tensor in memory at a time.

Axes: matrices are [out, in]; a component's heads are stacked as [H, dh, in].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch

from .anatomy.parts import Anatomy, Component, Matrix
from .metrics import Place, measure
from .observations import Weight
from .store import Row

VECTOR_METRICS = frozenset(
    {"weight_magnitude", "weight_rms", "weight_l2", "weight_change", "weight_drift"}
)
"""What is meant for a vector (a gain, a bias, a CLS token); a spectrum of one isn't."""

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Earlier:
    """The same tensors in the previous and the first checkpoint, where the sequence joins."""

    previous: Read | None = None
    first: Read | None = None


def cover(anatomy: Anatomy, names: Collection[str]) -> Anatomy:
    """The anatomy with a component, under its own path, for every weight that none claims."""
    claimed = {m.tensor for c in anatomy.components for m in (*c.weights, *c.heads)}
    rest = tuple(
        Component(name, None, name, weights=(Matrix(name),))
        for name in names
        if name not in claimed
    )
    return replace(anatomy, components=anatomy.components + rest)


def weigh(
    anatomy: Anatomy, read: Read, only: Collection[str], earlier: Earlier | None = None
) -> Iterator[Row]:
    """The rows of every component's matrices and heads, in the network's order.

    `read` gives an effective tensor by the name that the anatomy uses. Raises what `read` raises.
    """
    earlier = earlier or Earlier()
    chosen = frozenset(only)
    for component in anatomy.components:
        for matrix in component.weights:
            yield from _rows(component, (matrix,), read, chosen, earlier, heads=None)
        if component.heads:
            heads = len(component.heads)
            yield from _rows(component, component.heads, read, chosen, earlier, heads=heads)


def _rows(
    component: Component,
    matrices: tuple[Matrix, ...],
    read: Read,
    only: frozenset[str],
    earlier: Earlier,
    heads: int | None,
) -> list[Row]:
    cut = _cut(matrices, read, component.offset_gain, stacked=heads is not None)
    place = Place(component.name, component.block, "weight", heads=heads, tensor=matrices[0].tensor)
    weight = Weight.of(
        cut,
        previous=_cut_earlier(matrices, earlier.previous, component, heads),
        first=_cut_earlier(matrices, earlier.first, component, heads),
    )
    if 1 in cut.shape[-2:]:
        only = only & VECTOR_METRICS
    return measure(weight, place, only)


def _cut(
    matrices: tuple[Matrix, ...], read: Read, offset_gain: bool, stacked: bool
) -> torch.Tensor:
    tensors = {name: read(name) for name in {m.tensor for m in matrices}}
    parts = [m.of(tensors[m.tensor]) for m in matrices]
    cut = torch.stack(parts) if stacked else parts[0]
    return cut.to(torch.float64) + 1.0 if offset_gain else cut


def _cut_earlier(
    matrices: tuple[Matrix, ...], read: Read | None, component: Component, heads: int | None
) -> torch.Tensor | None:
    if read is None:
        return None
    try:
        return _cut(matrices, read, component.offset_gain, stacked=heads is not None)
    except (KeyError, IndexError):
        return None
