"""The components of a network under their canonical names, each with where it is seen."""

from __future__ import annotations

from dataclasses import replace

import torch

from plastiscope.anatomy.activations import Activation
from plastiscope.anatomy.attention import Attention
from plastiscope.anatomy.blocks import Block, Scene
from plastiscope.anatomy.experts import mixture_components
from plastiscope.anatomy.feedforward import FeedForward
from plastiscope.anatomy.linear import is_plain, with_bias
from plastiscope.anatomy.parts import Component, Matrix, Site
from plastiscope.anatomy.products import Product
from plastiscope.anatomy.record import Record
from plastiscope.anatomy.sites import Norm, channel_axis, input_site, same_values, site_of


def components_of(scene: Scene, block: Block) -> list[Component]:
    """The block's components in forward order."""
    record, k = scene.record, block.index
    parts: list[tuple[int, Component]] = []
    for name, norm in (("norm1", block.norm1), ("norm2", block.norm2)):
        if norm is not None:
            parts.append((norm.output, norm_component(scene, name, norm, k)))
    parts += _attention_components(scene, block)
    for name, residual in (("residual1", block.residual1), ("residual2", block.residual2)):
        if residual is not None:
            path = residual.call.site.module
            part = seen(scene, Component(name, k, path), residual.output)
            parts.append((residual.output, part))
    if block.feed_forward is not None:
        parts += feed_forward_components(scene, block.feed_forward, k)
    if block.mixture is not None:
        parts += mixture_components(record, block.mixture, k)
    return [component for _, component in sorted(parts, key=lambda pair: pair[0])]


def norm_component(scene: Scene, name: str, norm: Norm, block: int | None) -> Component:
    """A norm under its canonical name, with its gain as its weights."""
    weights = (Matrix(norm.weight),) if norm.weight else ()
    part = Component(name, block, norm.path, weights, offset_gain=norm.offset_gain)
    return seen(scene, part, norm.output)


def _attention_components(scene: Scene, block: Block) -> list[tuple[int, Component]]:
    attention, k = block.attention, block.index
    parts = []
    for x in "qkv":
        found = attention.projections.get(x)
        sources = attention.sources[x]
        if x in attention.apart:  # weights are parts of their own
            heads = attention.apart[x]
            parts.append((sources[0].output, Component(x, k, sources[0].path, (), heads)))
        elif found is not None:
            plain = is_plain(scene.record, found.product)
            own = (found.matrix,)
            component = Component(x, k, found.product.path, own, found.heads, linear=plain)
            parts.append((found.product.output, component))
        elif x in attention.undecided:
            own, plain = (attention.undecided[x],), is_plain(scene.record, sources[0])
            component = Component(x, k, sources[0].path, own, linear=plain)
            parts.append((sources[0].output, component))
        elif len(sources) > 1:  # its weights are parts of their own
            parts.append((sources[0].output, Component(x, k, sources[0].path)))
    if attention.output is not None:
        parts.append((attention.output.output, output_component(scene, attention, k)))
    return parts


def output_component(scene: Scene, attention: Attention, block: int | None) -> Component:
    """The output projection, with each head's columns."""
    product = attention.output
    assert product is not None
    matrix = product.matrix
    heads = tuple(
        Matrix(matrix.tensor, matrix.out_axes, matrix.rows, columns)
        for columns in attention.columns
    )
    plain = is_plain(scene.record, product)
    part = Component("attention_output", block, product.path, (matrix,), heads, linear=plain)
    return seen(scene, part, with_bias(scene.record, product))


def feed_forward_components(
    scene: Scene, ff: FeedForward, block: int | None
) -> list[tuple[int, Component]]:
    """gate, fc1, activation and fc2."""
    parts = [(ff.fc1.output, rows_seen(scene, "fc1", ff.fc1, ff.fc1_matrix, block))]
    if ff.gate is not None and ff.gate_matrix is not None:
        gate = rows_seen(scene, "gate", ff.gate, ff.gate_matrix, block)
        parts.insert(0, (ff.gate.output, gate))
    if ff.activation is not None:
        output = ff.joined if ff.joined is not None else ff.activation.output
        site = consumed_site(scene.record, output, ff.fc2)
        part = activation_component(scene, ff.activation, site, block)
        if ff.half is not None:
            before = site_of(scene.record, ff.activation.source)
            part = replace(part, pre_activation=before, before_channels=ff.half)
        parts.append((output, part))
    parts.append((ff.fc2.output, linear_component(scene, "fc2", ff.fc2, block)))
    return parts


def rows_seen(
    scene: Scene, name: str, product: Product, matrix: Matrix, block: int | None
) -> Component:
    """A linear map, or some of its rows, seen at the channels of its output that they make."""
    plain = is_plain(scene.record, product)
    part = Component(name, block, product.path, (matrix,), linear=plain)
    number = with_bias(scene.record, product)
    if matrix.rows is None:
        return seen(scene, part, number)
    if len(product.channels) != 1:
        return part
    own = torch.isin(product.rows.flatten(), torch.tensor(matrix.rows))
    channels = tuple(own.nonzero().flatten().tolist())
    return replace(seen(scene, part, number), channels=channels)


def seen(scene: Scene, part: Component, number: int) -> Component:
    """The component with the place of its output and the axis of its channels."""
    axis = channel_axis(scene.record, scene.linear, number)
    return replace(part, features=site_of(scene.record, number), channel_axis=axis)


def consumed_site(record: Record, output: int, product: Product) -> Site | None:
    """Where an activation is seen: the input of the next layer, unless something changes it."""
    if same_values(record, output, product.source):
        return input_site(record, product)
    return site_of(record, output)


def activation_component(
    scene: Scene, activation: Activation, site: Site | None, block: int | None
) -> Component:
    """The activation with the places of its input and of what the next layer consumes."""
    record = scene.record
    before = site_of(record, activation.source)
    path = before.module if before else ""
    values = [record.values[n].tensor.shape for n in (activation.source, activation.output)]
    before = before if values[0] == values[1] else None
    for part in record.modules:
        if part.inputs[:1] == (activation.source,) and part.outputs[:1] == (activation.output,):
            path = part.site.module
    return Component(
        "activation", block, path, features=site, pre_activation=before,
        function=activation.function,
        channel_axis=channel_axis(record, scene.linear, activation.output),
    )  # fmt: skip


def linear_component(scene: Scene, name: str, product: Product, block: int | None) -> Component:
    """A linear map under a name, seen at its output."""
    plain = is_plain(scene.record, product)
    part = Component(name, block, product.path, (product.matrix,), linear=plain)
    return seen(scene, part, with_bias(scene.record, product))
