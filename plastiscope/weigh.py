"""The weights of one checkpoint, measured matrix by matrix, one tensor in memory at a time.

Axes: matrices are [out, in]; a component's heads are stacked as [H, dh, in].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

import torch

from .anatomy.parts import Anatomy, Component, Matrix
from .metrics import Place, measure, weight_totals
from .observations import Magnitude, Weight, in_threads
from .store import Row

Read = Callable[[str], torch.Tensor]
Broken = Callable[[str], bool]
VERSION = 3
"""Of what is read of the weights. Raise it with every change of which tensors, heads and scopes are
measured, and of how an effective weight is made."""
ACROSS = "across_break"
EMBEDDING = "embedding"


@dataclass(frozen=True)
class Earlier:
    """The same tensors in the previous and the first checkpoint, where the sequence joins.

    `since_previous` and `since_first` say whether a break lies between, for a stored name.
    """

    previous: Read | None = None
    first: Read | None = None
    since_previous: Broken = lambda _: False
    since_first: Broken = lambda _: False


@dataclass
class Scales:
    """Measures weights: reads by the anatomy's names, and keeps what the totals need.

    `stored` gives the checkpoint's own name of a tensor (of a tied one, that which is counted), so
    that the two ends of a tie count once. Spectra may be taken on the `device`.
    """

    read: Read
    stored: Callable[[str], str]
    only: frozenset[str]
    earlier: Earlier = field(default_factory=Earlier)
    device: torch.device | None = None
    seen: dict[str, Weight | Magnitude] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    embedding: set[str] = field(default_factory=set)

    def weigh(self, anatomy: Anatomy) -> list[Row]:
        """The rows of every component's matrices and heads, then of the whole network."""
        parts = list(_measured(anatomy))
        found = in_threads(lambda part: self._observe(*part), parts)
        rows: list[Row] = []
        for part, weight in zip(parts, found, strict=True):
            rows += self._rows(*part, weight)
        return rows + self._totals()

    def _rows(
        self,
        component: Component,
        matrices: tuple[Matrix, ...],
        stacked: bool,
        found: Weight | Magnitude,
    ) -> list[Row]:
        tensor = self.stored(matrices[0].tensor)
        if not stacked:
            key = f"{tensor} {matrices[0].rows} {matrices[0].columns}"
            self.seen.setdefault(key, found)
            if component.embeds or component.name == EMBEDDING:
                self.embedding.add(key)
            self.types.setdefault(key, component.name)
        heads = len(matrices) if stacked else None
        several = len({m.tensor for m in matrices}) > 1
        named = None if several else tensor
        place = Place(component.name, component.block, "weight", heads=heads, tensor=named)
        return measure(found, place, self.only)

    def _observe(
        self, component: Component, matrices: tuple[Matrix, ...], stacked: bool
    ) -> Weight | Magnitude:
        whole = self.read(matrices[0].tensor)
        cut = self._cut(component, matrices, stacked, self.read)
        previous = self._cut_earlier(component, matrices, stacked, self.earlier.previous)
        first = self._cut_earlier(component, matrices, stacked, self.earlier.first)
        # A spectrum is meant for a matrix, not for a gain, a bias or a CLS token.
        vector = whole.ndim < 2 or (not stacked and 1 in cut.shape)
        if vector:
            return self._unjoined(Magnitude.of(cut, previous=previous, first=first), matrices)
        weight = Weight.of(cut, previous=previous, first=first, device=self.device)
        return replace(weight, magnitude=self._unjoined(weight.magnitude, matrices))

    def _unjoined(self, found: Magnitude, matrices: tuple[Matrix, ...]) -> Magnitude:
        """With no difference, and the reason, where a break lies between."""
        name = self.stored(matrices[0].tensor)
        if self.earlier.since_previous(name):
            found = replace(found, change=ACROSS)
        return replace(found, drift=ACROSS) if self.earlier.since_first(name) else found

    def _cut(
        self, component: Component, matrices: tuple[Matrix, ...], stacked: bool, read: Read
    ) -> torch.Tensor:
        tensors = {name: read(name) for name in {m.tensor for m in matrices}}
        parts = [m.of(tensors[m.tensor]) for m in matrices]
        cut = torch.stack(parts) if stacked else parts[0]
        return cut.to(torch.float64) + 1.0 if component.offset_gain else cut

    def _cut_earlier(
        self,
        component: Component,
        matrices: tuple[Matrix, ...],
        stacked: bool,
        read: Read | None,
    ) -> torch.Tensor | None:
        if read is None:
            return None
        try:
            return self._cut(component, matrices, stacked, read)
        except (KeyError, IndexError):
            return None

    def entries(self) -> int:
        """How many entries were measured, tied ones once."""
        sums = [weight.parts["Magnitude"] for weight in self.seen.values()]
        return sum(one.count * one.square.size for one in sums)

    def _totals(self) -> list[Row]:
        rows = weight_totals(self.seen, self.types, only=self.only)
        inner = {k: w for k, w in self.seen.items() if k not in self.embedding}
        if 0 < len(inner) < len(self.seen):
            rows += weight_totals(inner, scope="scope=non-embedding", only=self.only)
        return rows


def _measured(anatomy: Anatomy) -> Iterator[tuple[Component, tuple[Matrix, ...], bool]]:
    """What is measured: (component, matrix or heads, whether it's heads). Of weights that several
    blocks share, the first block's alone."""
    known: set[tuple[str, tuple[Matrix, ...]]] = set()
    for component in anatomy.components:
        cuts = [((matrix,), False) for matrix in component.weights]
        for matrices, stacked in [*cuts, (component.heads, True)]:
            if matrices and (component.name, matrices) not in known:
                known.add((component.name, matrices))
                yield component, matrices, stacked


def cover(anatomy: Anatomy, names: Collection[str]) -> Anatomy:
    """The anatomy with a component for every weight that none claims: a bias beside its matrix
    ("fc1.bias" in the same block, cut as the matrix is), anything else under its own path."""
    owners: dict[str, list[tuple[Component, Matrix]]] = {}
    for component in anatomy.components:
        for matrix in (*component.weights, *component.heads):
            owners.setdefault(matrix.tensor, []).append((component, matrix))
    rest: list[Component] = []
    for name in names:
        if name in owners:
            continue
        beside = owners.get(f"{name.removesuffix('bias')}weight", []) if "bias" in name else []
        whole = [(c, m) for c, m in beside if m in c.weights]
        rest += [
            Component(f"{c.name}.bias", c.block, name, weights=(Matrix(name, rows=m.rows),))
            for c, m in whole
        ] or [Component(name, None, name, weights=(Matrix(name),))]
    return replace(anatomy, components=(*anatomy.components, *rest))
