"""Whether a module makes each position of its output of that position alone, and of no other.

Axes: B probe inputs, T positions, N single positions, o and i the widths of output and input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .captures import Capture

OTHERS = 2
"""Positions besides the first and the last that are changed to see whether positions mix."""
ANY_ERROR: tuple[type[Exception], ...] = (Exception,)
"""What a model's own code may raise when a part of it is called alone: no other part is lost."""


def is_position_wise(call: Capture) -> bool:
    """Whether each position of the output is what the module makes of that position alone.

    That is what a block a position stands for: some positions are changed, which may change no
    other, and all are given one by one, which must give the same (a gain or a table by position
    doesn't). What can't be called with a single position mixes them.
    """
    if call.mixes or call.others or call.x.ndim < 3 or call.output.ndim != call.x.ndim:
        return False
    x, output = in_line(call, call.x), in_line(call, call.output)
    if x.shape[:2] != output.shape[:2]:
        return False
    try:
        with torch.no_grad():
            return _stays_in_place(call, x) and _is_itself_alone(call, x, output)
    except torch.cuda.OutOfMemoryError:
        raise
    except ANY_ERROR:
        return False


def _stays_in_place(call: Capture, x: Tensor) -> bool:
    """Whether a change at the first, the last and some other positions changes nothing else."""
    count = x.shape[1]
    others = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:OTHERS].tolist()
    before = in_line(call, call.again(call.x.clone()))
    largest = 0.0
    for position in sorted({0, count - 1, *others}):
        changed = x.clone()
        changed[:, position] = changed[:, position].roll(1, -1) * 1.5 + 1.0
        moved = (in_line(call, call.again(_as_given(call, changed))) - before).abs()
        here = float(moved[:, position].max())
        moved[:, position] = 0
        if not float(moved.max()) <= 1e-6 * here:
            return False
        largest = max(largest, here)
    return largest > 0


def _is_itself_alone(call: Capture, x: Tensor, output: Tensor) -> bool:
    """Whether every position alone gives what it gave among the others, to rounding."""
    alone = of_rows(call, x.flatten(0, 1).clone())  # which the module may change
    if alone.shape != output.flatten(0, 1).shape:
        return False
    alone = alone.reshape(output.shape)
    rounding = max(1e-4, 4 * torch.finfo(output.dtype).eps)
    scale = output.abs().amax((0, 2))
    return bool(((alone - output).abs().amax((0, 2)) <= rounding * scale).all())


def _channels(call: Capture) -> int:
    """The axis of channels; unless it's known the last of [B, T, d], the first of maps."""
    ndim = call.x.ndim
    axis = call.channel_axis if call.channel_axis is not None else (1 if ndim > 3 else -1)
    return axis % ndim


def in_line(call: Capture, tensor: Tensor) -> Tensor:
    """Maps of any order of axes as [B, T, d]."""
    return tensor.movedim(_channels(call), -1).flatten(1, -2)


def _as_given(call: Capture, line: Tensor) -> Tensor:
    """[B, T, d] in the order of axes that the module is given."""
    places = [n for a, n in enumerate(call.x.shape) if a not in (0, _channels(call))]
    return line.reshape(len(line), *places, line.shape[-1]).movedim(-1, _channels(call))


def of_rows(call: Capture, rows: Tensor) -> Tensor:
    """The output [N, o] of the module for single positions [N, i]."""
    ones = (1,) * (call.x.ndim - 2)
    alone = rows.reshape(len(rows), *ones, rows.shape[-1]).movedim(-1, _channels(call))
    output = call.again(alone).movedim(_channels(call), -1)
    if output.shape[:-1] != (len(rows), *ones):
        raise ValueError("a single position made several")
    return output.flatten(1)
