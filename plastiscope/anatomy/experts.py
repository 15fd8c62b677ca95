"""Mixtures of experts: the router, and every expert's matrices, also those no token was sent to.

Axes: E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from plastiscope.anatomy.feedforward import FeedForward, feed_forward
from plastiscope.anatomy.linear import adds_weights
from plastiscope.anatomy.parts import Component, ExpertSite, Matrix, Site, expert_part
from plastiscope.anatomy.products import CONVOLUTIONS, TRANSPOSED, Product
from plastiscope.anatomy.record import Call, Record
from plastiscope.anatomy.sites import input_site, reaches, same_values, site_of

CHOICES = {"topk", "argmax", "max"}


@dataclass(frozen=True)
class Mixture:
    """A router, the call that chooses from its output, and what one expert computes.

    `expert` has the products of one expert that ran, as if it were alone: of a tensor that holds
    all experts, the axes and rows of one. `shared` is what every token passes through besides.
    """

    router: Product
    choice: Call
    output: int
    experts: int
    expert: FeedForward | None
    products: tuple[Product, ...]
    shared: FeedForward | None


def mixture(record: Record, linear: tuple[Product, ...], output: int) -> Mixture | None:
    """The mixture among the linear maps of a branch, or None when nothing is chosen there."""
    found = _router(record, linear, output)
    if found is None:
        return None
    router, choice = found
    groups: dict[int, list[Product]] = {}
    for product in linear:
        number = _expert_of(record, product, router)
        if number is not None:
            groups.setdefault(number, []).append(product)
    if not groups:
        return None
    own = {p.call.index for group in groups.values() for p in group}
    rest = tuple(p for p in linear if p is not router and p.call.index not in own and p.height > 1)
    first = max(groups, key=lambda number: (len(groups[number]), -number))
    products = tuple(_single(p, router.height) for p in groups[first])
    expert = feed_forward(record, products)
    return Mixture(
        router, choice, output, router.height, expert, products, feed_forward(record, rest)
    )


def _router(
    record: Record, linear: tuple[Product, ...], output: int
) -> tuple[Product, Call] | None:
    """The linear map from which experts are chosen, one output each, and the last such choice."""
    found = None
    for call in record.calls:
        if call.op not in CHOICES or not call.inputs or _chosen(record, call) is None:
            continue
        scores = call.inputs[0]
        if not reaches(record, scores, output):
            continue
        for product in linear:
            last = record.values[scores].tensor.shape[-1:]
            if last == (product.height,) and _only_way(record, product, scores, linear):
                found = product, call
    return found


def _chosen(record: Record, call: Call) -> int | None:
    """Which of a call's outputs holds numbers, or None."""
    for position, number in enumerate(call.outputs):
        if record.values[number].tensor.dtype in (torch.int64, torch.int32):
            return position
    return None


def _only_way(record: Record, product: Product, choice: int, linear: tuple[Product, ...]) -> bool:
    """Whether a choice is made from this linear map with no other in between."""
    return reaches(record, product.output, choice) and not any(
        record.precedes(product.output, q.output) and reaches(record, q.output, choice)
        for q in linear
    )


def _expert_of(record: Record, product: Product, router: Product) -> int | None:
    """The number of the expert a linear map belongs to; None when it is no expert's."""
    if product is router:
        return None
    count = router.height
    if len(product.shape) > 2 and product.shape[0] == count and product.matrix.out_axes[0] == 0:
        numbers = torch.unique(product.rows // (product.height // count)).tolist()
        return numbers[0] if len(numbers) == 1 else -1
    place = _number(record, product.tensor, count)
    return None if place is None else int(product.tensor[place[0] : place[1]])


def _number(record: Record, tensor: str, count: int) -> tuple[int, int] | None:
    """Where in a name the expert's number is: that which goes from 0 to E - 1."""
    known = {name for name, _ in record.module.named_parameters()}
    for match in re.finditer(r"(?<!\d)\d+(?=\.)", tensor):
        start, end = match.span()
        alike = [f"{tensor[:start]}{k}{tensor[end:]}" in known for k in range(count + 1)]
        if all(alike[:count]) and not alike[count]:
            return start, end
    return None


def _single(product: Product, count: int) -> Product:
    """The product of one expert alone, where one tensor holds them all."""
    if len(product.shape) <= 2 or product.shape[0] != count:
        return product
    axes = tuple(a - 1 for a in product.matrix.out_axes[1:])
    rows = product.rows % (product.height // count)
    together = len(product.channels) > len(axes)  # one call for all experts
    return replace(
        product,
        matrix=Matrix(product.tensor, axes),
        channels=product.channels[1:] if together else product.channels,
        rows=rows[0] if together else rows,
        shape=product.shape[1:],
    )


def mixture_components(
    record: Record, found: Mixture, block: int | None
) -> list[tuple[int, Component]]:
    """The router, every expert's parts in order, and the sum of what the experts made."""
    router = found.router
    first = Component("router", block, router.path, (router.matrix,), (), _site(record, router))
    parts = [(router.output, first)]
    for number in range(found.experts):
        parts += [(found.output, c) for c in _expert_components(record, found, number, block)]
    seen = site_of(record, found.output)
    last = Component("experts", block, seen.module if seen else "", features=seen)
    return [*parts, (found.output, last)]


def _site(record: Record, product: Product) -> Site | None:
    return site_of(record, product.output)


def _expert_components(
    record: Record, found: Mixture, number: int, block: int | None
) -> Iterator[Component]:
    ff = found.expert
    if ff is None:
        weights = tuple(_of(record, p.matrix, number, found) for p in found.products)
        yield Component(f"expert {number}", block, _owner(weights[0]), weights)
        return
    for name, (product, matrix) in _linear(ff).items():
        if name == "fc2" and ff.activation is not None:
            path = _owner(_of(record, ff.fc2.matrix, number, found))
            function = ff.activation.function
            yield Component(expert_part(number, "activation"), block, path, function=function)
        own = _of(record, matrix, number, found)
        plain = product.call.op not in CONVOLUTIONS | TRANSPOSED
        yield Component(expert_part(number, name), block, _owner(own), (own,), linear=plain)


def _linear(ff: FeedForward) -> dict[str, tuple[Product, Matrix]]:
    """The linear maps of an expert, in order."""
    found = {"fc1": (ff.fc1, ff.fc1_matrix), "fc2": (ff.fc2, ff.fc2.matrix)}
    if ff.gate is None or ff.gate_matrix is None:
        return found
    return {"gate": (ff.gate, ff.gate_matrix), **found}


def _owner(matrix: Matrix) -> str:
    return matrix.tensor.rpartition(".")[0]


def _of(record: Record, matrix: Matrix, number: int, found: Mixture) -> Matrix:
    """The matrix of another expert, given one expert's own."""
    place = _number(record, matrix.tensor, found.experts)
    shape = record.shape(matrix.tensor)
    if len(shape) > 2 and shape[0] == found.experts:
        axes = tuple(a + 1 for a in matrix.out_axes)
        height = 1
        for axis in axes:
            height *= shape[axis]
        rows = matrix.rows if matrix.rows is not None else range(height)
        return Matrix(matrix.tensor, (0, *axes), tuple(number * height + r for r in rows))
    assert place is not None
    name = f"{matrix.tensor[: place[0]]}{number}{matrix.tensor[place[1] :]}"
    return replace(matrix, tensor=name)


def expert_site(record: Record, found: Mixture) -> ExpertSite | None:
    """Where the experts' units and outputs can be seen; None when they can't."""
    ff = found.expert
    if ff is None or ff.activation is None:
        return None
    units = ff.joined if ff.joined is not None else ff.activation.output
    position = _chosen(record, found.choice)
    if not same_values(record, units, ff.fc2.source, squeezed=True) or position is None:
        return None
    linear = _linear(ff)
    first = "gate" if "gate" in linear else "fc1"
    return ExpertSite(
        input_site(record, found.router),
        replace(found.choice.site, port=f"output{position or ''}"),
        {
            name: tuple(_of(record, matrix, k, found) for k in range(found.experts))
            for name, (_, matrix) in linear.items()
        },
        frozenset(name for name, (p, _) in linear.items() if not adds_weights(record, p)),
        first if _is_before(record, *linear[first], ff.activation.source) else None,
    )


def _is_before(record: Record, product: Product, matrix: Matrix, number: int) -> bool:
    """Whether the rows of a matrix make the activation's input as it is, nothing added."""
    made = record.values[product.output].tensor
    if len(product.channels) != 1:
        return False
    rows = list(matrix.rows) if matrix.rows is not None else list(range(product.height))
    made = made.index_select(product.channels[0], torch.tensor(rows, device=made.device))
    return torch.equal(made.squeeze(), record.values[number].tensor.squeeze())
