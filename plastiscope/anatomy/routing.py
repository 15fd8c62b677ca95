"""Which tokens' units an expert computes, told from the weights it multiplies.

However experts are called (a module each, a loop over slices of one tensor, one grouped product),
the rows that meet an expert's own weights are those of its tokens. They carry no number, so each is
found again among the router's tokens by its content: rows of one content have the same units.

Axes: N tokens, d width, n rows of one expert, u units, E experts.
"""

from __future__ import annotations

import math
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
    [n, u] or None, and the number [n] of each row's token, of `tokens` in all."""

    units: Tensor
    before: Tensor | None
    numbers: Tensor
    tokens: int


OnExpert = Callable[[Any, int, "Routed | None"], None]


@dataclass
class _Block:
    """One block in the current pass: a mark [N] for each token, whether it goes to each expert
    [N, E], what waits for its down-projection, and how many rows were found again."""

    marks: Tensor | None = None
    goes: Tensor | None = None
    waiting: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    found: Counter[int] = field(default_factory=Counter)
    strange: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Weight:
    """A parameter that holds experts' matrices, in some block and role."""

    block: Hashable
    role: str
    tensor: Tensor
    matrices: Mapping[int, Matrix]


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

    def __post_init__(self) -> None:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for block, site in self.experts.items():
            self.sites[f"the router's tokens in block {block}"] = site.tokens
            self.sites[f"the router's choice in block {block}"] = site.choice
            for role, matrices in (("first", site.first), ("down", site.down)):
                for name in dict.fromkeys(m.tensor for m in matrices if m.tensor in parameters):
                    tensor = parameters[name].detach()
                    own = {k: m for k, m in enumerate(matrices) if m.tensor == name}
                    held = self._weights.setdefault(tensor.untyped_storage().data_ptr(), [])
                    held.append(_Weight(block, role, tensor, own))

    def see(self, site: Site, tensor: Tensor) -> None:
        """One of the sites was reached."""
        for block, own in self.experts.items():
            if site == own.tokens:
                self._latest = block
                self._blocks[block] = _Block(marks=_marks(tensor))
            elif site == own.choice:
                self._blocks[block].goes = _membership(tensor, self._blocks[block], len(own.down))

    def product(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that multiplies, and look whether it does so with an expert's weights."""
        result = function(*args, **kwargs)
        given = [t for t in tensors_in((args, kwargs)) if t.layout == torch.strided]
        for weight in given:
            held = self._weights.get(weight.untyped_storage().data_ptr(), [])
            for own in held:
                if own.block == self._latest:
                    with torch._C.DisableTorchFunction():
                        self._multiplied(own, weight, [t for t in given if t is not weight], result)
        return result

    def _multiplied(self, own: _Weight, weight: Tensor, others: list[Tensor], out: Tensor) -> None:
        state = self._blocks[own.block]
        sources = [t for t in others if t.is_floating_point() and t.ndim > 1]
        if not sources or state.goes is None:
            return
        groups = [t for t in others if not t.is_floating_point() and t.ndim == 1]
        for number, rows, made in _by_expert(own, weight, sources[-1], out, groups):
            if own.role == "first":
                columns = _columns(own, number)
                before = made[:, columns] if self.experts[own.block].is_before else None
                state.waiting[number] = (_marks(rows), None if before is None else before.clone())
            elif number in state.waiting:
                self._report(own.block, state, number, rows)

    def _report(self, block: Hashable, state: _Block, number: int, units: Tensor) -> None:
        marks, before = state.waiting.pop(number)
        assert state.marks is not None and state.goes is not None
        if len(marks) != len(units):
            return
        numbers = _numbers(marks, state.marks, state.goes[:, number])
        if bool((~torch.isin(marks, state.marks) & (marks != 0)).any()):
            state.strange.add(number)
        kept = numbers >= 0
        state.found[number] += int(kept.sum())
        before = None if before is None else before[kept]
        routed = Routed(units[kept].detach(), before, numbers[kept], len(state.marks))
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
    experts = len(own.matrices)
    flat, made = source.reshape(-1, source.shape[-1]), out.reshape(-1, out.shape[-1])
    if experts == 1:
        yield next(iter(own.matrices)), flat, made
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


def _columns(own: _Weight, number: int) -> list[int]:
    """The columns of the product that a matrix's rows make, counted within the expert."""
    matrix = own.matrices[number]
    axes = matrix.out_axes[1:] if len(own.matrices) > 1 else matrix.out_axes
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
