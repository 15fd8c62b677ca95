"""Which way each parameter's per-input gradients are taken, found out on a few inputs.

Every parameter's part is compared with the plain gradients of one input after the other; what
doesn't agree is left to a slower and more general way.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UsageError
from .derivatives import INNERMOST, Make, Names, by_input
from .device import Floats, fetched
from .factors import direct_gram, gram
from .layers import standing_in
from .single_inputs import (
    Batch,
    Forward,
    Scalars,
    copies_of,
    one_by_one,
    refuse_train_mode,
    size_of,
    trainable,
)

TRIAL_INPUTS = 3
AGREEMENT = 1e-3
MIXED = (
    "the network's output for one input depends on the other inputs of the batch, so per-input "
    "gradients aren't defined"
)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Which way each trainable parameter's gradients are taken.

    `axes`: the axis of the inputs in each call of a layer, by the parameters' names and the number
    of the call. `copied`: parameters that get a copy for each input, and the shape of the copies
    ("first", "new", "line" or "row"). `looped`: those taken input by input. `common`: look-ups that
    are the same for all inputs. `shapes`: what each call of a layer is given for one input.
    `bytes_per_input`: what one input keeps for backward.
    """

    axes: Mapping[tuple[Names, int], int]
    layered: frozenset[str]
    copied: Mapping[str, str]
    looped: tuple[str, ...]
    common: frozenset[tuple[Names, int]]
    shapes: Mapping[tuple[Names, int], Shape]
    bytes_per_input: int

    def expects(self, names: Names, number: int, x: Tensor, inputs: int) -> bool:
        """Whether a call is given as many rows of each input as when the plan was made."""
        call = (names, number)
        axis = None if call in self.common else self.axes.get(call)
        return call in self.axes and share_of(x, axis, inputs) == self.shapes[call]

    def looping(self, names: Collection[str]) -> Plan:
        """With these parameters, and those that share a layer with them, input by input."""
        layered = _closed(set(self.layered.difference(names)), {names for names, _ in self.axes})
        copied = {name: shape for name, shape in self.copied.items() if name not in names}
        known = {*self.looped, *layered, *copied}
        more = [n for n in (*self.layered, *self.copied, *names) if n not in known]
        looped = (*self.looped, *dict.fromkeys(more))
        return replace(self, layered=frozenset(layered), copied=copied, looped=looped)


@dataclass
class _Watcher:
    """Notes the inputs of every call and the factors that come back."""

    inputs: int
    calls: dict[tuple[Names, int], Tensor] = field(default_factory=dict)
    counts: Counter[Names] = field(default_factory=Counter)
    made: dict[str, list[tuple[Names, int, Make]]] = field(default_factory=dict)
    common: frozenset[tuple[Names, int]] = frozenset()

    def call(self, names: Names, x: Tensor) -> int | None:
        number = self.counts[names]
        self.counts[names] += 1
        self.calls[names, number] = x.detach().clone()
        return number

    def spread(self, names: Names, number: int) -> int:
        return self.inputs if (names, number) in self.common else 0

    def factor(self, name: str, names: Names, number: int, make: Make) -> None:
        self.made.setdefault(name, []).append((names, number, make))


def plan_gradients(module: nn.Module, forward: Forward, batch: Batch, scalars: Scalars) -> Plan:
    """Find out, on a few inputs, how every parameter's per-input gradients can be had.

    The network must be in eval mode and its outputs for one input independent of the others;
    UsageError otherwise (per-input gradients then aren't defined).
    """
    refuse_train_mode(module)
    few = {key: value[:TRIAL_INPUTS] for key, value in batch.items()}
    with _perturbed(module):
        return _plan(module, forward, few, scalars)


def _plan(module: nn.Module, forward: Forward, few: Batch, scalars: Scalars) -> Plan:
    inputs, parameters = size_of(few), trainable(module)
    watcher = _Watcher(inputs)
    held, left = _watch(watcher, forward, few, scalars, parameters)
    axes = _axes(watcher, _rolled(module, forward, few, inputs), inputs)
    common = _common_lookups(watcher, axes)
    if common:
        try:
            again = _Watcher(inputs, common=common)
            held, left = _watch(again, forward, few, scalars, parameters)
            watcher, axes = again, {**axes, **dict.fromkeys(common, 0)}
        except (RuntimeError, ValueError):
            common = frozenset()  # What follows doesn't take a table for each input.
    routed = _routed(module, forward, few)
    plain = one_by_one(forward, few, scalars, parameters, list(parameters))
    exact = dict(zip(plain, fetched(*plain.values()), strict=True))
    # What a softmax cancels (the key's bias) has a gradient of rounding alone.
    floor = 1e-10 * sum(float(part.diagonal().max()) for part in exact.values())
    seen = [name for name in exact if name not in left and _pattern(name) not in routed]
    found = {name: _layered_gram(watcher, axes, name, inputs) for name in seen}
    grams = {name: part for name, part in found.items() if part is not None}
    layered = {
        name
        for name, part in zip(grams, fetched(*grams.values()), strict=True)
        if _close(part, exact[name], floor)
    }
    layered = _closed(layered, watcher.counts)
    copied = {}
    for name in exact.keys() - layered:
        if _pattern(name) in routed:
            continue
        shape = _copy_that_agrees(module, forward, few, scalars, name, exact[name], floor)
        if shape is not None:
            copied[name] = shape
    looped = tuple(name for name in exact if name not in layered and name not in copied)
    shapes = {
        call: share_of(x, None if call in common else axes[call], inputs)
        for call, x in watcher.calls.items()
        if call in axes
    }
    return Plan(axes, frozenset(layered), copied, looped, common, shapes, -(-held // inputs))


def share_of(x: Tensor, axis: int | None, inputs: int) -> Shape:
    """The shape of one input's part, the axis of the inputs first; () where x can't be shared out
    equally. Axis None: x is the same for all inputs."""
    if axis is None:
        return tuple(x.shape)
    axis = max(axis, 0)
    if axis >= x.ndim or x.shape[axis] % inputs:
        return ()
    return (x.shape[axis] // inputs, *x.shape[:axis], *x.shape[axis + 1 :])


def _routed(module: nn.Module, forward: Forward, few: Batch) -> set[str]:
    """Patterns of the names of parameters whose calls differ from one input to the next: experts
    are given as many rows as tokens are sent to them, which may divide by chance.

    Refuses a network whose output for an input alone is another one than in the batch.
    """
    names = {id(p): name for name, p in trainable(module).items()}
    seen, outputs = [], []
    for i in range(size_of(few)):
        watcher = _Watcher(1)
        # With gradients on, as in the other passes: some layers take another way without.
        with standing_in(names, watcher), torch.enable_grad():
            outputs.append(forward({key: value[i : i + 1] for key, value in few.items()}).detach())
        seen.append({call: tuple(x.shape) for call, x in watcher.calls.items()})
    with torch.enable_grad():
        together = forward(few).detach()
    if not _equal(torch.cat(outputs), together):
        raise UsageError(MIXED)
    calls = {call for shapes in seen for call in shapes}
    differ = {call for call in calls if len({shapes.get(call) for shapes in seen}) > 1}
    return {_pattern(name) for used, _ in differ for name in used}


def _pattern(name: str) -> str:
    """A parameter's name without its numbers: that of all experts of all blocks."""
    return re.sub(r"\d+", "#", name)


@contextlib.contextmanager
def _perturbed(module: nn.Module) -> Iterator[None]:
    """While it lasts, parameters are a little off, so that no gradient is 0 by initialisation.

    A plan made where a projection is still zero would otherwise have compared zeros with zeros.
    """
    generator = torch.Generator().manual_seed(0)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    try:
        with torch.no_grad():
            for p in module.parameters():
                finite = torch.nan_to_num(p.detach(), posinf=0.0, neginf=0.0)
                scale = (0.1 * finite.float().square().mean().sqrt()).clamp(min=0.02)
                noise = torch.randn(p.shape, generator=generator).to(p, non_blocking=True)
                p.copy_(finite + scale * noise)
        yield
    finally:
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(before[name])


def _common_lookups(
    watcher: _Watcher, axes: Mapping[tuple[Names, int], int]
) -> frozenset[tuple[Names, int]]:
    """Look-ups in a table that are the same for all inputs: positions."""
    return frozenset(
        call
        for call, x in watcher.calls.items()
        if call not in axes and x.dtype == torch.long and (x.ndim == 2 or len(x) == 1)
    )


def _watch(
    watcher: _Watcher,
    forward: Forward,
    few: Batch,
    scalars: Scalars,
    parameters: Mapping[str, nn.Parameter],
) -> tuple[int, set[str]]:
    """Lets the layers report; gives the bytes kept for backward and who still gets a gradient."""
    held: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return x

    names = {id(p): name for name, p in parameters.items()}
    with standing_in(names, watcher), torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            total = scalars(forward(few), few).sum()
        found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    own = {p.untyped_storage().data_ptr() for p in parameters.values()}
    size = sum(n for pointer, n in held.items() if pointer not in own)
    left = {name for name, g in zip(parameters, found, strict=True) if g is not None}
    return size, left


def _rolled(module: nn.Module, forward: Forward, few: Batch, inputs: int) -> _Watcher:
    """The same calls for the inputs in another order; refuses a network that mixes inputs."""
    watcher = _Watcher(inputs)
    names = {id(p): name for name, p in trainable(module).items()}
    rolled = {key: value.roll(1, 0) for key, value in few.items()}
    # With gradients on, as in the other pass: some layers take another way without.
    with torch.enable_grad():
        expected = forward(few).detach().roll(1, 0)
        with standing_in(names, watcher):
            found = forward(rolled).detach()
    if not _equal(found, expected):
        raise UsageError(MIXED)
    return watcher


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool(_same(a, b))


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Whether two tensors of one shape are equal but for rounding, where they are."""
    if not b.numel():
        return b.new_ones((), dtype=torch.bool)
    # A half-precision product depends on the batch's size in its last digits.
    close = max(1e-4, 8 * torch.finfo(b.dtype).eps) if b.is_floating_point() else 1e-4
    bound = close * b.abs().nan_to_num(posinf=0.0).max().double() + 1e-3 * b.abs().double()
    apart = (a.double() - b.double()).abs()
    same = (a == b) | (a.isnan() & b.isnan()) | (apart.isfinite() & (apart <= bound))
    return same.all()


def _axes(first: _Watcher, second: _Watcher, inputs: int) -> dict[tuple[Names, int], int]:
    """The axis along which a call's input moved when the inputs were rolled."""
    tried: list[tuple[tuple[Names, int], int]] = []
    moved: list[Tensor] = []
    for call, x in first.calls.items():
        other = second.calls.get(call)
        if other is None or other.shape != x.shape or first.counts != second.counts:
            continue
        for axis in (*range(x.ndim - 1), *([INNERMOST] if x.ndim == 2 else [])):
            if x.shape[max(axis, 0)] % inputs == 0:
                tried.append((call, axis))
                rolled = by_input(x, axis, inputs).roll(1, 0)
                moved.append(_same(rolled, by_input(other, axis, inputs)))
    (found,) = fetched(torch.stack(moved)) if moved else ((),)
    # The first that fits of each call.
    fitting = [place for place, fits in zip(tried, found, strict=True) if fits]
    return dict(reversed(fitting))


def _layered_gram(
    watcher: _Watcher, axes: Mapping[tuple[Names, int], int], name: str, inputs: int
) -> Tensor | None:
    """The Gram that the layers' factors give, if they give one."""
    made = watcher.made.get(name, [])
    if not made or any((names, number) not in axes for names, number, _ in made):
        return None
    factors = []
    for names, number, make in made:
        axis = axes[names, number]
        factors.append(make(lambda x, axis=axis: by_input(x, axis, inputs)))  # type: ignore[misc]
    try:
        return gram(factors)
    except ValueError:
        return None


def _close(found: Floats, exact: Floats, floor: float) -> bool:
    """Whether it's the Gram of the plain gradients."""
    allowed = max(AGREEMENT * float(exact.diagonal().max()), floor)
    with np.errstate(invalid="ignore"):
        return bool(np.abs(found - exact).max() <= allowed)


def _closed(layered: set[str], calls: Collection[Names]) -> set[str]:
    """A layer is left to autograd with all of its parameters, so they go out together."""
    while True:
        out = {n for names in calls if not layered.issuperset(names) for n in names} & layered
        if not out:
            return layered
        layered = layered - out


def _copy_that_agrees(
    module: nn.Module,
    forward: Forward,
    few: Batch,
    scalars: Scalars,
    name: str,
    exact: Floats,
    floor: float,
) -> str | None:
    """A shape of copies, one for each input, that stands in for the parameter unnoticed."""
    p = trainable(module)[name]
    tried = ["first"] if p.ndim > 1 and len(p) == 1 else []
    tried += ["line", "row"] if p.ndim == 1 else ["new"]
    for shape in tried:
        try:
            with copies_of(module, {name: shape}, size_of(few)) as leaves, torch.enable_grad():
                total = scalars(forward(few), few).sum()
                (found,) = torch.autograd.grad(total, list(leaves.values()))
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue  # The parameter doesn't broadcast that way.
        if _close(fetched(direct_gram(found.flatten(1)))[0], exact, floor):
            return shape
    return None
