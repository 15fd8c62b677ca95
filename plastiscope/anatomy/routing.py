"""Which tokens an expert computes, and what it makes of them, told from the weights it multiplies.

However experts are called (a module each, a loop over slices of one tensor, one grouped product,
weights picked for each token), the rows that meet an expert's own weights are those of its tokens.
They carry no number, so each is found again among the router's tokens by its content: rows of one
content have the same units.

Axes: N tokens, d width, n rows of one expert, u units, E experts.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plastiscope.anatomy.parts import ExpertSite, Matrix, Site
from plastiscope.anatomy.passage import tensors_in


@dataclass(frozen=True)
class Routed:
    """Some rows of one expert: units [n, u] as the down-projection takes them, pre-activations
    [n, u] or None, the outputs [n, ...] of the parts that are seen whole ("gate", "fc1", "fc2"),
    and the number [n] of each row's token, of `tokens` in all."""

    units: Tensor
    before: Tensor | None
    outputs: Mapping[str, Tensor]
    numbers: Tensor
    tokens: int


OnExpert = Callable[[Any, int, "Routed | None"], None]
LAST = "fc2"


@dataclass(frozen=True)
class _Waiting:
    """Rows of one expert on their way to its down-projection: their marks [n], and what each part
    has made of them."""

    marks: Tensor
    made: dict[str, Tensor]


@dataclass
class _Block:
    """One block in the current pass: a mark [N] for each token, whether it goes to each expert
    [N, E], what waits for its down-projection, and how many rows were found again."""

    marks: Tensor | None = None
    goes: Tensor | None = None
    waiting: dict[int, _Waiting] = field(default_factory=dict)
    found: Counter[int] = field(default_factory=Counter)
    strange: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Weight:
    """A parameter that holds experts' matrices of some block, by part and expert."""

    block: Hashable
    tensor: Tensor
    parts: Mapping[str, Mapping[int, Matrix]]

    @property
    def experts(self) -> tuple[int, ...]:
        return tuple(next(iter(self.parts.values())))


@dataclass
class Routing:
    """Calls `on_expert(block, number, Routed)` as experts run; with None, at the end of a pass,
    for an expert of which not all rows were found."""

    module: nn.Module
    experts: Mapping[Hashable, ExpertSite]
    on_expert: OnExpert
    sites: dict[Hashable, Site] = field(default_factory=dict)
    _weights: dict[int, list[_Weight]] = field(default_factory=dict)
    _blocks: dict[Hashable, _Block] = field(default_factory=lambda: defaultdict(_Block))
    _latest: Hashable = None
    _picked: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for block, site in self.experts.items():
            self.sites[f"the router's tokens in block {block}"] = site.tokens
            self.sites[f"the router's choice in block {block}"] = site.choice
            every = (m.tensor for matrices in site.parts.values() for m in matrices)
            for name in dict.fromkeys(name for name in every if name in parameters):
                tensor = parameters[name].detach()
                parts = {
                    part: {k: m for k, m in enumerate(matrices) if m.tensor == name}
                    for part, matrices in site.parts.items()
                }
                held = self._weights.setdefault(_place(tensor), [])
                held.append(_Weight(block, tensor, {p: own for p, own in parts.items() if own}))

    def see(self, site: Site, tensor: Tensor) -> None:
        """One of the sites was reached."""
        for block, own in self.experts.items():
            if site == own.tokens:
                self._latest = block
                self._blocks[block] = _Block(marks=_marks(tensor))
            elif site == own.choice:
                self._blocks[block].goes = _membership(tensor, self._blocks[block], own.count)

    def pick(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that picks, and remember which expert's weights it picks for each row."""
        result = function(*args, **kwargs)
        given = [t for t in tensors_in((args, kwargs)) if t.layout == torch.strided]
        if len(given) == 2 and _place(given[0]) in self._weights:
            weight, numbers = given
            if numbers.ndim == 1 and result.shape == (len(numbers), *weight.shape[1:]):
                self._picked[_place(result)] = weakref.ref(result), _place(weight), numbers
        return result

    def product(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that multiplies, and look whether it does so with an expert's weights."""
        result = function(*args, **kwargs)
        given = [t for t in tensors_in((args, kwargs)) if t.layout == torch.strided]
        for weight in given:
            place, picks = _place(weight), None
            if place in self._picked:
                picked, place, picks = self._picked.pop(place)
                place = place if picked() is not None else -1
            for own in self._weights.get(place, []):
                if own.block == self._latest:
                    others = [t for t in given if t is not weight]
                    with torch._C.DisableTorchFunction():
                        self._multiplied(own, weight, others, result, picks)
        return result

    def _multiplied(
        self, own: _Weight, weight: Tensor, others: list[Tensor], out: Tensor, picks: Tensor | None
    ) -> None:
        state = self._blocks[own.block]
        sources = [t for t in others if t.is_floating_point() and t.ndim > 1]
        if not sources or state.goes is None:
            return
        groups = [t for t in others if not t.is_floating_point() and t.ndim == 1]
        by_expert = _by_expert(own, weight, sources[-1], out, groups)
        if picks is not None:
            by_expert = _by_pick(picks, sources[-1], out)
        for number, rows, made in by_expert:
            parts = {part: made[:, _columns(own, part, number)] for part in own.parts}
            if LAST in parts:
                self._report(own.block, state, number, rows, parts[LAST])
                continue
            marks, held = _marks(rows), state.waiting.get(number)
            if held is None or not torch.equal(held.marks, marks):
                held = state.waiting[number] = _Waiting(marks, {})
            held.made.update(parts)

    def _report(
        self, block: Hashable, state: _Block, number: int, units: Tensor, made: Tensor
    ) -> None:
        waiting, site = state.waiting.pop(number, None), self.experts[block]
        if waiting is None or len(waiting.marks) != len(units):
            return
        assert state.marks is not None and state.goes is not None
        marks = waiting.marks
        numbers = _numbers(marks, state.marks, state.goes[:, number])
        if bool((~torch.isin(marks, state.marks) & (marks != 0)).any()):
            state.strange.add(number)
        kept = numbers >= 0
        state.found[number] += int(kept.sum())
        every = {part: x[kept] for part, x in {**waiting.made, LAST: made.detach()}.items()}
        before = None if site.before is None else every.get(site.before)
        outputs = {part: x for part, x in every.items() if part in site.whole}
        routed = Routed(units[kept].detach(), before, outputs, numbers[kept], len(state.marks))
        self.on_expert(block, number, routed)

    def end(self) -> None:
        """A pass has ended: says of which experts not all rows were found."""
        for block, state in self._blocks.items():
            if state.goes is None:
                continue
            for number, count in enumerate(state.goes.sum(0).tolist()):
                found = state.found[number]
                if count and (not found or (found < count and number in state.strange)):
                    self.on_expert(block, number, None)
        self._blocks.clear()
        self._picked.clear()


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _marks(rows: Tensor) -> Tensor:
    """A number [N] for the content of each row, the same whatever rows stand around it; 0: zeros.

    Integer sums, since those of floats depend on the order in which they are taken.
    """
    bits = rows.detach().reshape(-1, rows.shape[-1]).double().add(0.0).contiguous()
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (rows.shape[-1],), generator=generator)
    return (bits.view(torch.int64) * (2 * factors + 1).to(rows.device)).sum(-1)


def _membership(choice: Tensor, state: _Block, experts: int) -> Tensor | None:
    """Which tokens go to which expert [N, E]; None when the choice isn't one for each token."""
    if state.marks is None or choice.numel() % len(state.marks):
        return None
    choice = choice.reshape(len(state.marks), -1)
    goes = torch.zeros(len(choice), experts, dtype=torch.bool, device=choice.device)
    return goes.scatter_(1, choice.long().clamp(0, experts - 1), True)


def _by_expert(
    own: _Weight, weight: Tensor, source: Tensor, out: Tensor, groups: list[Tensor]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, its rows [n, d], what they became [n, out]) in one product."""
    experts = len(own.experts)
    flat, made = source.reshape(-1, source.shape[-1]), out.reshape(-1, out.shape[-1])
    if experts == 1:
        yield own.experts[0], flat, made
    elif weight.numel() * experts == own.tensor.numel():
        step = own.tensor.stride(0) * own.tensor.element_size()
        yield (weight.data_ptr() - own.tensor.data_ptr()) // step, flat, made
    elif groups and len(groups[-1]) == experts:
        ends = groups[-1].tolist()
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if start < end:
                yield number, flat[start:end], made[start:end]
    elif source.ndim == 3 and len(source) == experts == len(out):
        yield from ((k, source[k], out[k]) for k in range(experts))


def _by_pick(picks: Tensor, source: Tensor, out: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The same where each row [d] of the source meets the weights picked for it."""
    flat, made = source.reshape(len(picks), -1), out.reshape(len(picks), -1)
    for number in torch.unique(picks).tolist():
        yield number, flat[picks == number], made[picks == number]


def _columns(own: _Weight, part: str, number: int) -> list[int]:
    """The columns of the product that a matrix's rows make, counted within the expert."""
    matrix = own.parts[part][number]
    axes = matrix.out_axes[1:] if len(own.experts) > 1 else matrix.out_axes
    height = math.prod(own.tensor.shape[a] for a in axes)
    return [r % height for r in (range(height) if matrix.rows is None else matrix.rows)]


def _numbers(marks: Tensor, tokens: Tensor, goes: Tensor) -> Tensor:
    """For each row's mark the number of the token that it is, among those that go there; or -1.

    Of several tokens with the same content the first row is the first.
    """
    known = goes.nonzero().flatten()
    _, ids = torch.unique(torch.cat([tokens[known], marks]), return_inverse=True)
    ranked = _ranked(ids[: len(known)]), _ranked(ids[len(known) :])
    order = ranked[0].argsort()
    place = torch.searchsorted(ranked[0][order], ranked[1]).clamp(max=max(0, len(known) - 1))
    if not len(known):
        return torch.full_like(marks, -1)
    hit = ranked[0][order][place] == ranked[1]
    return torch.where(hit, known[order][place], -1)


def _ranked(ids: Tensor) -> Tensor:
    """A number for each id that also counts which of its equals it is."""
    order = torch.argsort(ids, stable=True)
    sorted_ids = ids[order]
    place = torch.arange(len(ids), device=ids.device)
    rank = place - torch.searchsorted(sorted_ids, sorted_ids)
    ranked = torch.empty_like(ids)
    ranked[order] = sorted_ids * (1 << 31) + rank
    return ranked
