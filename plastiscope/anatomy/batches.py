"""Which axis of a value holds the inputs: found by changing one input and seeing what changes.

Most networks keep inputs first; a stream [T, B, d] is as common in older ones.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import Tensor

from plastiscope.anatomy.parts import INNERMOST, UNTOLD, Component
from plastiscope.anatomy.record import Record


def placed_by_input(record: Record, parts: list[Component]) -> list[Component]:
    """The components with the axis of the inputs in what is seen of each."""
    numbers = {c.features: record.at(c.features) for c in parts if c.features is not None}
    before = {c.pre_activation: record.at(c.pre_activation) for c in parts if c.pre_activation}
    axes = input_axes(record, {*numbers.values(), *before.values()})
    found = []
    for c in parts:
        axis = axes.get(numbers[c.features], 0) if c.features is not None else 0
        alike = c.pre_activation is None or axes.get(before[c.pre_activation], 0) == axis
        found.append(
            replace(c, input_axis=axis, pre_activation=c.pre_activation if alike else None)
        )
    return found


def input_axes(record: Record, wanted: Collection[int]) -> dict[int, int]:
    """The `input_axis` of each of these values; none for a value that no input changes."""
    count = len(record.inputs)
    changed = _other_inputs(record.inputs)
    if changed is None:
        return {}
    axes: dict[int, int] = {}
    new = {record.number(record.inputs): changed}
    uses = {n: call.index for call in record.calls for n in call.inputs}
    for call in record.calls:
        if not any(n in new for n in call.inputs):
            continue
        try:
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


def _other_inputs(inputs: Tensor) -> Tensor | None:
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
    differs = (own - value).abs() > 1e-5 * own.abs().max()
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
