"""Which axis of a value holds the inputs: found by changing one input and seeing what changes.

Most networks keep inputs first; a stream [T, B, d] is as common in older ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from plastiscope.anatomy.parts import INNERMOST, UNTOLD, AttentionSite, Component, Operand, Site
from plastiscope.anatomy.record import Record

OPERANDS = ("q", "k", "v", "output", "scores", "probabilities")


def untold(axes: Mapping[int, int]) -> bool:
    """Whether the inputs couldn't be told apart in some value."""
    return UNTOLD in axes.values()


def told_again(record: Record, again: Record, sites: Collection[Site]) -> dict[int, int]:
    """The `input_axis` of the values at these sites, from a pass of its own over other inputs: it
    may take another path, as a mixture of experts does."""
    axes: dict[int, int] = {}
    for site in sites:
        try:
            number, other = record.at(site), again.values[again.at(site)].tensor
        except LookupError:
            continue  # The model took another path here.
        if (axis := _axis(record, number, other, len(record.inputs))) is not None:
            axes[number] = axis
    return axes


def placed_by_input(
    record: Record, parts: list[Component], axes: Mapping[int, int]
) -> list[Component]:
    """The components with the axis of the inputs in what is seen of each."""
    found = []
    for c in parts:
        axis = axes.get(record.at(c.features), 0) if c.features is not None else 0
        before = c.pre_activation
        if before is not None and axes.get(record.at(before), 0) != axis:
            before = None
        found.append(replace(c, input_axis=axis, pre_activation=before))
    return found


def attention_by_input(
    record: Record, site: AttentionSite, axes: Mapping[int, int]
) -> AttentionSite:
    """The attention with the axis of the inputs before its other batch axes (windows)."""
    parts = tuple(attention_by_input(record, part, axes) for part in site.parts)
    changed: dict[str, Operand] = {}
    for name in OPERANDS:
        operand: Operand | None = getattr(site, name)
        if operand is None:
            continue
        axis, heads = axes.get(record.at(operand.site), 0), -2 if operand.folded else -3
        leading = operand.axes[:heads]
        if axis in leading[1:]:
            others = tuple(a for a in leading if a != axis)
            changed[name] = replace(operand, axes=(axis, *others, *operand.axes[heads:]))
    return replace(site, parts=parts, **changed)  # type: ignore[arg-type]


def operand_values(record: Record, sites: Collection[AttentionSite]) -> set[int]:
    """The values at the attentions' operands."""
    every = [part for site in sites for part in (site, *site.parts)]
    operands = [getattr(site, name) for site in every for name in OPERANDS]
    return {record.at(operand.site) for operand in operands if operand is not None}


def seen_values(record: Record, parts: list[Component]) -> set[int]:
    """The values at the components' sites."""
    return {record.at(site) for site in sites_of(parts)}


def sites_of(parts: list[Component]) -> list[Site]:
    """Where the components are seen."""
    return [site for c in parts for site in (c.features, c.pre_activation) if site is not None]


def input_axes(record: Record, wanted: Collection[int]) -> dict[int, int]:
    """The `input_axis` of each of these values; none for a value that no input changes."""
    count = len(record.inputs)
    changed = other_inputs(record.inputs)
    if changed is None:
        return {}
    axes: dict[int, int] = {}
    new = {record.number(record.inputs): changed}
    uses = {n: call.index for call in record.calls for n in call.inputs}
    for call in record.calls:
        if not any(n in new for n in call.inputs):
            continue
        try:
            with torch.no_grad():
                made = record.outputs_with(call, new)
        except (RuntimeError, IndexError, ValueError):
            continue  # the model would take another path
        new.update(zip(call.outputs, made, strict=False))
        for number, value in zip(call.outputs, made, strict=False):
            if number in wanted and (axis := _axis(record, number, value, count)) is not None:
                axes[number] = axis
        for number in [n for n in call.inputs if n in new and uses[n] <= call.index]:
            del new[number]
    return axes


def other_inputs(inputs: Tensor) -> Tensor | None:
    """The same inputs but for the first, all of which is another; None when that can't be."""
    other = inputs.clone()
    if inputs.is_floating_point():
        other[0] = other[0] + 1.0 + other[0].abs()
        return other
    most = int(inputs.max())
    other[0] = (other[0] + 1) % (most + 1)
    return other if most > 0 else None


def _axis(record: Record, number: int, value: Tensor, count: int) -> int | None:
    own = record.values[number].tensor
    if own.shape != value.shape:
        return None
    differs = ((own - value).abs() > 1e-5 * own.abs().max()).cpu()
    if not bool(differs.any()):
        return None
    for axis, size in enumerate(own.shape):
        along = differs.movedim(axis, 0).flatten(1).any(1)
        share = size // count
        if size % count == 0 and bool(along[:share].any()) and not bool(along[share:].any()):
            return axis
    rows = differs.flatten(1).any(1)
    if len(rows) % count == 0 and not bool(rows.reshape(-1, count)[:, 1:].any()):
        return INNERMOST
    return UNTOLD
