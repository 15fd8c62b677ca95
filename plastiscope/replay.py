"""One replay of a probe batch through a checkpoint's network, reduced while it runs.

Axes: B inputs, P positions of an input (tokens, or h*w), d width, H heads, dh head width.

Every component's output is reduced to sums inside the hooks; no activation outlives its batch.
The probe's inputs are dealt to K folds in turn, so that each sum exists per fold and every value
gets a jackknife standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from .anatomy import AttentionCall, Routed, watch
from .anatomy.parts import (
    INNERMOST,
    PROJECTIONS,
    UNTOLD,
    Anatomy,
    AttentionSite,
    Component,
    ExpertSite,
    Site,
    expert_part,
)
from .models.live import Batch, Live
from .observations import AttentionSums, FeatureSums, Folds, OutputSums, UnitSums
from .replayed import rows_of
from .store import Row

VERSION = 4
"""Of what is reduced from a replay. Raise it with every change after which the same components give
other observations: which rows, tokens, experts and folds count, and how they are summed."""


@dataclass(frozen=True)
class Sampling:
    """How the probe is cut: batches, folds, the rows that a feature matrix may take, and of how
    many inputs the attention maps' own rank is taken."""

    folds: int
    probe_rows: int
    batch_size: int
    seed: int
    maps: int = 0


@dataclass(frozen=True)
class _Chunk:
    """One batch on its way: which inputs of the probe, their folds, which tokens count [B, T]; and
    what was chosen, the same for all components of so many positions."""

    first: int
    fold: torch.Tensor
    mask: torch.Tensor | None
    chosen: dict[tuple[int, bool], tuple[torch.Tensor | None, Folds]] = field(default_factory=dict)
    kept: dict[tuple[int, bool], torch.Tensor] = field(default_factory=dict)
    windowed: dict[int, Folds] = field(default_factory=dict)

    def folds(self, windows: int = 1) -> Folds:
        """Of the inputs, each in so many windows."""
        if windows not in self.windowed:
            self.windowed[windows] = Folds(self.fold.repeat_interleave(windows))
        return self.windowed[windows]


@dataclass
class Replay:
    """Sums over the probe for every component of one network."""

    anatomy: Anatomy
    inputs: int
    sampling: Sampling
    features: dict[tuple[int, str], FeatureSums] = field(default_factory=dict)
    per_head: dict[int, FeatureSums] = field(default_factory=dict)
    units: dict[int, UnitSums] = field(default_factory=dict)
    attention: dict[int, AttentionSums] = field(default_factory=dict)
    unplaced: set[int] = field(default_factory=set)
    outputs: OutputSums | None = None
    _before: dict[int, torch.Tensor] = field(default_factory=dict)
    _chunk: _Chunk | None = None

    def rows(self, only: Collection[str]) -> list[Row]:
        """The rows of every metric in `only`, in the network's order; once, since it uses up what
        was summed."""
        return rows_of(self, frozenset(only))

    def run(self, live: Live, batch: Batch, device: torch.device) -> None:
        """Replay the whole batch; raises when a component that should be seen wasn't."""
        with torch.no_grad(), self._watch(live) as recorder:
            for chunk, part in self._chunks(batch, device):
                self._chunk = chunk
                logits = live.forward(part)
                recorder.check()
                self._before.clear()
                self._add_outputs(logits, part)

    def _watch(self, live: Live) -> Any:
        attention: dict[Hashable, AttentionSite] = {}
        attention.update(self.anatomy.attention.items())
        experts: dict[Hashable, ExpertSite] = {}
        experts.update(self.anatomy.experts.items())
        for block, site in self.anatomy.experts.items():
            for number in range(site.count):
                self._add_expert(block, number)
        return watch(
            live.module,
            sites_of(self.anatomy),
            attention,
            _unwatched(self._on_tensor),
            _unwatched(self._on_attention),
            experts=experts,
            on_expert=_unwatched(self._on_expert),
        )

    def _chunks(self, batch: Batch, device: torch.device) -> Iterator[tuple[_Chunk, Batch]]:
        for first in range(0, self.inputs, self.sampling.batch_size):
            rows = slice(first, min(first + self.sampling.batch_size, self.inputs))
            part = {name: tensor[rows].to(device) for name, tensor in batch.items()}
            fold = torch.arange(rows.start, rows.stop) % self.sampling.folds
            mask = part.get("mask")
            yield _Chunk(first, fold, None if mask is None else mask.bool()), part

    def _on_tensor(self, key: Any, x: torch.Tensor) -> None:
        index, port = key
        component = self.anatomy.components[index]
        own = component.before_channels if port == "before" else component.channels
        assert self._chunk is not None
        x = _positions_first(x, component, own, len(self._chunk.fold))
        placed = self._by_input(x) if component.input_axis != UNTOLD else None
        if placed is None:
            self.unplaced.add(index)
            return
        x = placed
        if port == "before":
            self._before[index] = x
            return
        self._add_features(index, x)
        if component.name == "activation":
            self._add_units(index, component, x, self._before.pop(index, None))

    def _by_input(self, x: torch.Tensor) -> torch.Tensor | None:
        """x as [B, d] or [B, P, d], where it comes as [B*P, d] or in windows [B*n, P, d]; None
        when its rows can't be told apart by input."""
        assert self._chunk is not None
        inputs = len(self._chunk.fold)
        if len(x) == inputs:
            return x
        return x.reshape(inputs, -1, x.shape[-1]) if len(x) % inputs == 0 else None

    def _on_attention(self, block: Any, call: AttentionCall) -> None:
        assert self._chunk is not None
        windows = call.q.shape[0] // len(self._chunk.fold)
        for name, heads in zip(PROJECTIONS, (call.q, call.k, call.v), strict=True):
            index = self.places.get((block, name))
            if index is None:
                continue
            x = heads.transpose(1, 2)
            x = x.reshape(-1, windows * x.shape[1], *x.shape[2:])
            self._add_features(index, x.flatten(2))
            self._add_heads(index, x)
        sums = self._maps(block)
        queries = self._chunk.mask if windows == 1 else None
        if queries is not None and queries.shape[1] != call.q.shape[2]:
            queries = None
        sums.add(call.probabilities, call.visible, self._chunk.folds(windows), queries)

    def _add_expert(self, block: int, number: int) -> None:
        """The sums of an expert's units, which are there before any token goes to it."""
        index = self.places[block, expert_part(number, "activation")]
        function = self.anatomy.components[index].function
        self.units.setdefault(index, UnitSums(self.sampling.folds, function))

    def _on_expert(self, block: Any, number: int, routed: Routed | None) -> None:
        assert self._chunk is not None
        inputs = len(self._chunk.fold)
        parts = {*self.anatomy.experts[block].parts, "activation"}
        places = {part: self.places[block, expert_part(number, part)] for part in parts}
        if routed is None or routed.tokens % inputs:
            self.unplaced.update(places.values())
            return
        positions = routed.tokens // inputs
        numbers = routed.numbers.cpu()
        keep = self._keep(self._chunk, positions, False).flatten()[numbers]
        fold = self._chunk.fold[numbers // positions]
        before = None if routed.before is None else routed.before[keep]
        self.units[places["activation"]].add(routed.units[keep], before, fold[keep])
        some = self._keep(self._chunk, positions, True).flatten()[numbers]
        cls = numbers % positions == self.anatomy.cls
        for part, x in {**routed.outputs, "activation": routed.units}.items():
            self._sums(places[part], "all").add(x[some], fold[some])
            if self.anatomy.cls is not None:
                self._sums(places[part], "cls").add(x[cls], fold[cls])

    def _maps(self, block: int) -> AttentionSums:
        if block not in self.attention:
            causal = self.anatomy.attention[block].causal
            maps = self.sampling.maps
            self.attention[block] = AttentionSums(self.sampling.folds, causal=causal, maps=maps)
        return self.attention[block]

    @cached_property
    def places(self) -> dict[tuple[int | None, str], int]:
        """The number of each component by its block and name, the first where several share one."""
        numbered = reversed(list(enumerate(self.anatomy.components)))
        return {(c.block, c.name): index for index, c in numbered}

    def _add_features(self, index: int, x: torch.Tensor) -> None:
        """x [B, P, d] or [B, d]."""
        assert self._chunk is not None
        self._sums(index, "all").add(*self._rows(x, self._chunk, bounded=True))
        cls = None if self.anatomy.components[index].before_cls else self.anatomy.cls
        if cls is not None and (x.ndim == 2 or x.shape[1] > cls):
            self._sums(index, "cls").add(x if x.ndim == 2 else x[:, cls], self._chunk.folds())

    def _sums(self, index: int, tokens: str) -> FeatureSums:
        return self.features.setdefault((index, tokens), self._new_sums())

    def _new_sums(self) -> FeatureSums:
        assert self._chunk is not None
        return FeatureSums(self.sampling.folds, self.inputs / len(self._chunk.fold))

    def _add_heads(self, index: int, x: torch.Tensor) -> None:
        """x [B, P, H, dh]."""
        assert self._chunk is not None
        sums = self.per_head.setdefault(index, self._new_sums())
        sums.add(*self._rows(x, self._chunk, bounded=True))

    def _add_units(
        self, index: int, component: Component, x: torch.Tensor, before: torch.Tensor | None
    ) -> None:
        assert self._chunk is not None
        sums = self.units.setdefault(index, UnitSums(self.sampling.folds, component.function))
        rows, folds = self._rows(x, self._chunk)
        if before is not None and before.shape == x.shape:
            sums.add(rows, self._rows(before, self._chunk)[0], folds)
        else:
            sums.add(rows, None, folds)

    def _rows(
        self, x: torch.Tensor, chunk: _Chunk, bounded: bool = False
    ) -> tuple[torch.Tensor, Folds]:
        """The rows [n, ...] of x [B, P, ...] that count; the fold and the input of each [n], the
        input where there are several rows of one."""
        if x.ndim == 2:
            return x, chunk.folds()
        key = (x.shape[1], bounded)
        if key not in chunk.chosen:
            keep = self._keep(chunk, *key)
            numbers = torch.arange(len(x))[:, None].expand(keep.shape)[keep]
            chosen = None if keep.all() else keep.flatten().nonzero().squeeze(1).to(x.device)
            chunk.chosen[key] = chosen, Folds(chunk.fold[numbers], numbers)
        chosen, folds = chunk.chosen[key]
        flat = x.flatten(0, 1)
        return flat if chosen is None else flat[chosen], folds

    def _keep(self, chunk: _Chunk, positions: int, bounded: bool) -> torch.Tensor:
        """Which positions count [B, P], on the CPU; bounded: at most so many of each input."""
        if (positions, bounded) not in chunk.kept:
            chunk.kept[positions, bounded] = self._draw(chunk, positions, bounded)
        return chunk.kept[positions, bounded]

    def _draw(self, chunk: _Chunk, positions: int, bounded: bool) -> torch.Tensor:
        """Drawn by the input's own seed: neither the batch size nor the component changes which."""
        keep = np.ones((len(chunk.fold), positions), dtype=bool)
        if chunk.mask is not None and chunk.mask.shape[1] == positions:
            keep &= chunk.mask.cpu().numpy()
        limit = max(1, self.sampling.probe_rows // self.inputs)
        if bounded and limit < positions:
            for i, row in enumerate(keep):
                random = np.random.default_rng((self.sampling.seed, chunk.first + i, positions))
                row[random.permutation(np.flatnonzero(row))[limit:]] = False
        return torch.from_numpy(keep)

    def _add_outputs(self, logits: torch.Tensor, part: Batch) -> None:
        if "labels" in part:
            assert self._chunk is not None
            self.outputs = self.outputs or OutputSums(self.sampling.folds)
            self.outputs.add(logits, part["labels"], self._chunk.fold)


def _unwatched(reduce: Callable[..., None]) -> Callable[..., None]:
    """The reduction itself, with its own tensor functions hidden from the watch, which would
    otherwise look at each of the thousands that it calls."""

    def call(*args: Any) -> None:
        with torch._C.DisableTorchFunction():
            reduce(*args)

    return call


def sites_of(anatomy: Anatomy) -> dict[Hashable, Site]:
    """Where each component is seen: its features, and what comes before an activation."""
    sites: dict[Hashable, Site] = {}
    for index, component in enumerate(anatomy.components):
        if component.features is not None:
            sites[index, "features"] = component.features
        if component.pre_activation is not None:
            sites[index, "before"] = component.pre_activation
    return sites


def _positions_first(
    x: torch.Tensor, component: Component, channels: tuple[int, ...] | None, inputs: int
) -> torch.Tensor:
    """Maps [B, C, h, w] (channels at `channel_axis`) as [B, h*w, C], streams [T, B, d] with inputs
    first; vectors as they are; of all channels or of some."""
    if component.input_axis == INNERMOST:
        x = x.reshape(-1, inputs, x.shape[-1]).movedim(1, 0)
    elif x.ndim > 2 and component.input_axis >= 0:
        x = x.movedim((component.input_axis, component.channel_axis), (0, -1)).flatten(1, -2)
    return x if channels is None else x[..., list(channels)]
