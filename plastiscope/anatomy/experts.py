"""Mixtures of experts: the router, and every expert's matrices, also those no token was sent to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from plastiscope.anatomy.parts import Component, Matrix
from plastiscope.anatomy.products import Product
from plastiscope.anatomy.record import Record
from plastiscope.anatomy.sites import reaches, site_of

CHOICES = {"topk", "argmax"}
EXPERT_NUMBER = re.compile(r"expert\w*\.(?P<number>\d+)\.")


@dataclass(frozen=True)
class Mixture:
    """The router's linear map and the linear maps of the experts that ran."""

    router: Product
    experts: tuple[Product, ...]
    output: int


def mixture(record: Record, linear: tuple[Product, ...], output: int) -> Mixture | None:
    """The mixture among the linear maps of a branch, or None when nothing is chosen there."""
    choices = [
        call.inputs[0]
        for call in record.calls
        if call.op in CHOICES and call.inputs and reaches(record, call.inputs[0], output)
    ]
    routers = [p for p in linear if any(_only_way(record, p, n, linear) for n in choices)]
    if not routers:
        return None
    first = {p.tensor: p for p in reversed(linear) if p is not routers[0]}
    chosen = [p for p in linear if first.get(p.tensor) is p and _is_expert(p)]
    return Mixture(routers[0], tuple(chosen), output) if chosen else None


def _only_way(record: Record, product: Product, choice: int, linear: tuple[Product, ...]) -> bool:
    """Whether a choice is made from this linear map with no other in between."""
    return reaches(record, product.output, choice) and not any(
        record.precedes(product.output, q.output) and reaches(record, q.output, choice)
        for q in linear
    )


def _is_expert(product: Product) -> bool:
    stacked = len(product.shape) > 2 and product.matrix.out_axes[0] == 0
    return stacked or EXPERT_NUMBER.search(product.tensor) is not None


def mixture_components(
    record: Record, found: Mixture, block: int | None
) -> list[tuple[int, Component]]:
    """router and experts; an expert's matrices stand next to each other, experts in order."""
    router = found.router
    site = site_of(record, router.output)
    first = Component("router", block, router.path, (router.matrix,), (), site)
    stored = [p for p in found.experts if len(p.shape) > 2]
    weights = _stacked(stored) if stored else _listed(record, found.experts)
    path = _common([w.tensor for w in weights])
    last = Component("experts", block, path, weights, (), site_of(record, found.output))
    return [(router.output, first), (found.output, last)]


def _stacked(products: list[Product]) -> tuple[Matrix, ...]:
    """One tensor for all experts, its first axis the expert."""
    weights = []
    for expert in range(products[0].shape[0]):
        for product in products:
            height = product.height // product.shape[0]
            rows = tuple(range(expert * height, (expert + 1) * height))
            weights.append(Matrix(product.tensor, product.matrix.out_axes, rows))
    return tuple(weights)


def _listed(record: Record, products: tuple[Product, ...]) -> tuple[Matrix, ...]:
    """One tensor an expert: all parameters whose names differ in the expert's number alone."""
    numbers: dict[int, list[Matrix]] = {}
    seen: set[str] = set()
    for product in products:
        start, end = EXPERT_NUMBER.search(product.tensor).span("number")  # type: ignore[union-attr]
        head, tail = product.tensor[:start], product.tensor[end:]
        for name, _ in record.module.named_parameters():
            number = name[len(head) : len(name) - len(tail)]
            alike = name.startswith(head) and name.endswith(tail) and number.isdecimal()
            if alike and name not in seen:
                seen.add(name)
                matrix = Matrix(name, product.matrix.out_axes)
                numbers.setdefault(int(number), []).append(matrix)
    return tuple(m for k in sorted(numbers) for m in numbers[k])


def _common(names: list[str]) -> str:
    parts = [name.split(".")[:-1] for name in names]
    common = parts[0] if parts else []
    for other in parts[1:]:
        agree = [a == b for a, b in zip(common, other, strict=False)]
        common = common[: agree.index(False) if False in agree else len(agree)]
    return ".".join(common)
