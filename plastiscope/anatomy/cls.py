"""Which token is the CLS token, and which components' outputs hold it.

Axes: B inputs, T tokens, d width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plastiscope.anatomy.blocks import Block, Scene
from plastiscope.anatomy.parts import PROJECTIONS, AttentionSite, Component
from plastiscope.anatomy.record import Record
from plastiscope.anatomy.sites import reaches


def prefix_tokens(
    scene: Scene, found: list[Block], axes: Mapping[int, int]
) -> tuple[int | None, int, list[str]]:
    """(position of the CLS token or None, leading tokens that aren't patches, notes)."""
    record = scene.record
    if not found or not record.values[record.output].tensor.is_floating_point():
        return None, 0, []
    first, end = found[0].start, found[-1].end
    start = record.values[first].tensor.movedim(max(0, axes.get(first, 0)), 0)
    if start.ndim != 3 or record.values[end].tensor.ndim != 3 or len(start) != len(record.inputs):
        return None, 0, []
    fixed: list[bool] = [False] * start.shape[1]
    if record.inputs.is_floating_point() and len(start) > 1:
        fixed = (start[0] == start[1]).all(-1).tolist()
    fixed = [False] * len(fixed) if all(fixed) else fixed
    prefix = fixed.index(False)
    try:
        used = _tokens_used(record, end, max(0, axes.get(end, 0)))
    except (RuntimeError, LookupError):
        return None, prefix, ["which tokens the head reads can't be found: no CLS token"]
    return _cls(used, prefix, [k for k, same in enumerate(fixed) if same])


def _cls(used: Tensor, prefix: int, fixed: list[int]) -> tuple[int | None, int, list[str]]:
    """The token that is the same for all inputs and that the head reads; behind the patches it is
    counted from the end."""
    read = used.any(-1).nonzero().flatten().tolist()
    if fixed:
        own = [t for t in read if t in fixed]
        pooled = len(read) == len(used) and bool(torch.allclose(used[0], used[-1]))
        if not own or pooled:
            return None, prefix, ["the CLS token isn't read by the head"]
        return own[0] if own[0] < prefix else own[0] - len(used), prefix, []
    if read == [0] and len(used) > 1:
        return 0, max(prefix, 1), []
    return None, prefix, []


def _tokens_used(record: Record, end: int, axis: int) -> Tensor:
    """The gradient of the output for each token of the last block's stream: [T, d]."""
    leaf = record.values[end].tensor.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        output = leaf if end == record.output else record.run_again({end: leaf}, record.output)
    drawn = torch.rand(output[:1].shape, generator=torch.Generator().manual_seed(0)).to(output)
    (gradient,) = torch.autograd.grad(output[:1], leaf, drawn)
    return gradient.movedim(axis, 0)[0]


@dataclass(frozen=True)
class Holders:
    """Which values of a pass may hold the CLS token: made of the stream's `start`, and with as many
    positions of each input as a stream that has it, or with one."""

    record: Record
    start: int
    sites: Mapping[int, AttentionSite]
    positions: frozenset[int]

    def lacks(self, part: Component) -> bool:
        """Whether a component's output has no CLS token: the patches before it joins them, or the
        patches alone later on. A vector may be what was pooled from it."""
        site = self.sites.get(part.block) if part.block is not None else None
        if part.features is not None:
            number = self.record.at(part.features)
            width = self.record.values[number].tensor.shape[part.channel_axis]
        elif part.name in PROJECTIONS and site is not None:
            operand = getattr(site.parts[0] if site.parts else site, part.name)
            number = self.record.at(operand.site)
            shape = self.record.values[number].tensor.shape
            width = shape[operand.axes[-1]] * (operand.folded or shape[operand.axes[-3]])
        else:
            return False
        positions = _positions(self.record, number, width)
        return not reaches(self.record, self.start, number) or positions not in self.positions


def holders(
    record: Record,
    found: list[Block],
    sites: Mapping[int, AttentionSite],
    axes: Mapping[int, int],
    cls: int,
) -> Holders:
    """Of a network with a CLS token: the last block's stream has it, the first one's where that
    token is the same for all inputs there."""
    first, streams = found[0].start, [found[-1].end]
    start = record.values[first].tensor.movedim(max(0, axes.get(first, 0)), 0)
    there = -start.shape[1] <= cls < start.shape[1]
    if there and torch.equal(start[0, cls], start[1, cls]):
        streams.append(first)
    counts = (_positions(record, n, record.values[n].tensor.shape[-1]) for n in streams)
    return Holders(record, first, sites, frozenset({1, *counts}))


def _positions(record: Record, number: int, width: int) -> int:
    """How many positions of each input a value has."""
    return record.values[number].tensor.numel() // (width * len(record.inputs))
