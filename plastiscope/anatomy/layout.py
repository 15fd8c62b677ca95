"""How a stored tensor is laid out, written as the left side of an einops pattern.

Names of axes: `rows` (outputs), `i` (inputs), `heads`, `groups` (of query heads that share a key
and value head), `width` (of a head), `expert`, `into` (which part of a fused tensor), `...` (a
kernel). "(into heads width) i" stores [Q | K | V], "(heads into width) i" a q, k and v for each
head in turn, "(groups into width) i" the q's, the k and the v of each group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from plastiscope.anatomy.parts import Matrix
from plastiscope.errors import UsageError

ROWS = {"rows", "heads", "groups", "width", "into", "expert"}
KNOWN = ROWS | {"i", "..."}


@dataclass(frozen=True)
class Heads:
    """How many query heads and key/value heads there are; None when it isn't known."""

    queries: int | None
    shared: int | None

    def of(self, part: str) -> int | None:
        """The number of heads of q, k or v."""
        return self.queries if part in ("q", "attention_output") else self.shared


@dataclass(frozen=True)
class Layout:
    """One parsed pattern: for each stored axis the names that make it up, outermost first."""

    axes: tuple[tuple[str, ...], ...]

    @property
    def out_axes(self) -> tuple[int, ...]:
        """The stored axes that are rows of the matrix."""
        if any("rows" in names for names in self.axes):
            names = {"rows", "expert"}
        elif any("i" in names for names in self.axes):
            names = ROWS
        else:
            names = {"rows"}
        return tuple(k for k, axis in enumerate(self.axes) if names.intersection(axis))

    @property
    def fused(self) -> tuple[str, ...] | None:
        """The axis that holds several parts, if there is one."""
        return next((axis for axis in self.axes if "into" in axis), None)


def parse(pattern: str) -> Layout:
    """A pattern as a layout; UsageError names what isn't known in it."""
    groups = re.findall(r"\(([^)]*)\)|(\S+)", pattern)
    axes = tuple(tuple(grouped.split()) if grouped else (alone,) for grouped, alone in groups)
    unknown = {name for axis in axes for name in axis} - KNOWN
    if unknown:
        raise UsageError(
            f"layout {pattern!r}: unknown axis {', '.join(sorted(unknown))}; "
            f"known: {', '.join(sorted(KNOWN))}"
        )
    return Layout(axes)


def cut(
    tensor: str, layout: Layout, shape: Sequence[int], part: str, into: Sequence[str], heads: Heads
) -> tuple[Matrix, tuple[Matrix, ...]] | None:
    """A part's whole matrix and its heads; None when the fused tensor can't be split.

    Heads are empty when their number isn't known or doesn't divide the rows.
    """
    out_axes = layout.out_axes
    height = 1
    for axis in out_axes:
        height *= shape[axis]
    if part == "attention_output":
        columns = _equal(_count(shape) // height, heads.queries)
        whole = Matrix(tensor, out_axes)
        return whole, tuple(Matrix(tensor, out_axes, None, c) for c in columns)
    if layout.fused is None:
        count = heads.of(part) if any("heads" in axis for axis in layout.axes) else None
        rows = _equal(height, count)
        return Matrix(tensor, out_axes), tuple(Matrix(tensor, out_axes, r) for r in rows)
    found = _fused(layout.fused, height, part, into, heads)
    if found is None:
        return None
    every = tuple(sorted(r for group in found for r in group))
    whole = Matrix(tensor, out_axes, every)
    known = part in ("q", "k", "v") and heads.of(part) == len(found)
    return whole, tuple(Matrix(tensor, out_axes, g) for g in found) if known else ()


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _equal(length: int, parts: int | None) -> tuple[tuple[int, ...], ...]:
    """A length cut in equal consecutive runs; nothing when it doesn't divide."""
    if not parts or length % parts:
        return ()
    size = length // parts
    return tuple(tuple(range(k * size, (k + 1) * size)) for k in range(parts))


def _fused(
    axis: tuple[str, ...], height: int, part: str, into: Sequence[str], heads: Heads
) -> tuple[tuple[int, ...], ...] | None:
    """The rows of each head of a part (or of the whole part) in a fused tensor."""
    if axis[0] == "into":
        return _section(height, part, into, heads)
    count = heads.queries if axis[0] == "heads" else heads.shared
    if count is None or heads.queries is None or height % count:
        return None
    repeat = heads.queries // count if axis[0] == "groups" else 1
    sizes = [repeat if name == "q" else 1 for name in into]
    block = height // count
    if block % sum(sizes):
        return None
    width = block // sum(sizes)
    before = sum(sizes[: list(into).index(part)]) * width
    own = sizes[list(into).index(part)]
    return tuple(
        tuple(range(k * block + before + j * width, k * block + before + (j + 1) * width))
        for k in range(count)
        for j in range(own)
    )


def _section(
    height: int, part: str, into: Sequence[str], heads: Heads
) -> tuple[tuple[int, ...], ...] | None:
    """A part's rows when the parts are stored one after the other, each of its own size."""
    queries, shared = heads.queries, heads.shared
    attention = set(into) <= {"q", "k", "v"}
    if attention and queries and shared and queries != shared:
        sizes = [queries if name == "q" else shared for name in into]
    else:
        sizes = [1] * len(into)
    if height % sum(sizes):
        return None
    unit = height // sum(sizes)
    place = list(into).index(part)
    start, length = sum(sizes[:place]) * unit, sizes[place] * unit
    cuts = _equal(length, heads.of(part)) if attention else ()
    cuts = cuts or (tuple(range(length)),)
    return tuple(tuple(start + r for r in run) for run in cuts)
