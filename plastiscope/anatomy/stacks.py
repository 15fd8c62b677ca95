"""Plain stacks of layers, MLP or CNN: a block is one parametrised layer."""

from __future__ import annotations

from plastiscope.anatomy.activations import Activation, activation_between, first_activation
from plastiscope.anatomy.blocks import Scene
from plastiscope.anatomy.naming import (
    activation_component,
    consumed_site,
    linear_component,
    norm_component,
)
from plastiscope.anatomy.parts import Component
from plastiscope.anatomy.products import CONVOLUTIONS, TRANSPOSED, Product
from plastiscope.anatomy.record import Record
from plastiscope.anatomy.rows import feeding
from plastiscope.anatomy.sites import reaches


def stack_components(scene: Scene, head: Product | None) -> list[Component]:
    """conv or fc, norm and activation of every layer that the output depends on."""
    record = scene.record
    layers = [p for p in scene.linear if p is not head and reaches(record, p.output, record.output)]
    parts: list[Component] = []
    taken: set[int] = set()
    for index, layer in enumerate(layers):
        name = "conv" if layer.call.op in CONVOLUTIONS | TRANSPOSED else "fc"
        parts.append(linear_component(scene, name, layer, index))
        for norm in scene.norms:
            if norm.output not in taken and _belongs(scene, layer, norm.source):
                taken.add(norm.output)
                parts.append(norm_component(scene, "norm", norm, index))
                break
        parts += _activation(scene, layer, layers, head, index, taken)
    return parts


def _belongs(scene: Scene, layer: Product, number: int) -> bool:
    """Whether a value comes from a layer with no other layer in between."""
    record = scene.record
    if not reaches(record, layer.output, number):
        return False
    return not any(
        record.precedes(layer.output, p.output) and reaches(record, p.output, number)
        for p in scene.linear
    )


def _activation(
    scene: Scene,
    layer: Product,
    layers: list[Product],
    head: Product | None,
    index: int,
    taken: set[int],
) -> list[Component]:
    record = scene.record
    following = [p for p in [*layers, *([head] if head else [])] if p is not layer]
    found = _before_next(record, layer, following) or first_activation(record, layer.output)
    if found is None or found.output in taken:
        return []
    taken.add(found.output)
    later = [
        p for p in [*layers, *([head] if head else [])] if record.precedes(found.output, p.output)
    ]
    site = consumed_site(record, found.output, later[0]) if later else None
    return [activation_component(scene, found, site, index)]


def _before_next(record: Record, layer: Product, others: list[Product]) -> Activation | None:
    """The function between a layer and the next when nothing else goes into the next."""
    linear = {p.call.index: p for p in [layer, *others]}
    for following in others:
        if feeding(record, following.source, linear) == (layer,):
            found = activation_between(record, layer.output, following.source)
            return found if found is not None and found.function != "unknown" else None
    return None
