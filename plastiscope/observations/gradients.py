"""Gram matrices of per-input gradients over all trainable parameters of a live network.

Axes: B inputs, C copies of each (one for every output told apart), n = B*C gradients.

One forward and C backward passes give most of it: each layer's factors are reduced as soon as the
last backward pass reaches it (`layers`, `factors`). A parameter that is used in another way gets a
copy for each input where it broadcasts over them (a CLS token, a position table), else its
gradients are taken input by input. A plan says which way each parameter goes; it is made once, on
a few inputs, where every parameter's part is compared with the plain gradients of one input after
the other.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, autograd, nn

from ..errors import UsageError
from .derivatives import Make, Names, by_input
from .factors import (
    WORK_BYTES,
    Direct,
    Factor,
    Outer,
    direct_gram,
    gram,
    joined_outputs,
    sum_of,
)
from .layers import standing_in
from .plans import Plan
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

MEMORY_LIMIT = 3 << 30
"""Bytes of activations and of gradients held at most."""


@dataclass
class _Reducer:
    """Adds each parameter's Gram to its group's as soon as all of its calls came back."""

    plan: Plan
    inputs: int
    outputs: int
    passes: int
    groups: Mapping[str, Hashable]
    grams: dict[Hashable, Tensor] = field(default_factory=dict)
    counts: Counter[Names] = field(default_factory=Counter)
    expected: Counter[str] = field(default_factory=Counter)
    waiting: dict[str, list[Factor]] = field(default_factory=dict)
    small: dict[Hashable, list[Tensor]] = field(default_factory=dict)
    bytes: Counter[Hashable] = field(default_factory=Counter)
    strange: set[str] = field(default_factory=set)
    recording: bool = True

    def call(self, names: Names, x: Tensor) -> int | None:
        if not self.plan.layered.issuperset(names):
            return None
        number = self.counts[names]
        # A checkpointed block runs again in backward; its calls were counted the first time.
        if self.recording:
            if not self.plan.expects(names, number, x, self.inputs):
                self.strange.update(names)
                return None
            self.counts[names] += 1
            self.expected.update(names)
        return number

    def spread(self, names: Names, number: int) -> int:
        return self.inputs if (names, number) in self.plan.common else 0

    def factor(self, name: str, names: Names, number: int, make: Make) -> None:
        axis = self.plan.axes[names, number]
        factor = make(lambda x: by_input(x, axis, self.inputs))
        if self.passes < self.outputs and isinstance(factor, Outer):
            factor = replace(factor, shared=factor.shared[:: self.outputs])  # Equal for all copies.
        self.waiting.setdefault(name, []).append(factor)
        calls = self.expected[name]
        if len(self.waiting[name]) == calls * self.passes:
            found = self.waiting.pop(name)
            # Backward comes to the calls in the same order in every pass.
            self.add_factors(name, [joined_outputs(found[i::calls]) for i in range(calls)])

    def add_factors(self, name: str, factors: list[Factor]) -> None:
        direct = [f for f in factors if isinstance(f, Direct)]
        if len(direct) < len(factors):
            self.add(name, gram(factors))
            return
        # The many small ones (biases, gains) wait for each other: one product serves them all.
        group = self.groups.get(name, "network")
        self.small.setdefault(group, []).append(sum_of(direct))
        self.bytes[group] += self.small[group][-1].nbytes
        if self.bytes[group] > WORK_BYTES:
            self.flush(group)

    def flush(self, group: Hashable) -> None:
        """Reduce the group's gradients that were waiting."""
        part = direct_gram(torch.cat(self.small.pop(group), 1))
        del self.bytes[group]
        self.grams[group] = self.grams[group] + part if group in self.grams else part

    def add(self, name: str, part: Tensor) -> None:
        group = self.groups.get(name, "network")
        self.grams[group] = self.grams[group] + part if group in self.grams else part


def gradient_grams(
    module: nn.Module,
    forward: Forward,
    batch: Batch,
    scalars: Scalars,
    plan: Plan,
    groups: Mapping[str, Hashable],
    *,
    outputs: int = 1,
    memory_limit: int = MEMORY_LIMIT,
) -> dict[Hashable, Tensor]:
    """Float64 Gram [n, n] of the gradients of each input's `outputs` scalars, by parameter group.

    `groups` names each parameter's group ("network" for one that it lacks). Parameters and buffers
    are left as they were. UsageError where the memory limit can't be kept, with the numbers.
    """
    refuse_train_mode(module)
    while True:
        reducer, astray = _reduced(
            module, forward, batch, scalars, plan, groups, outputs, memory_limit
        )
        if not astray:
            break
        plan = plan.looping(astray)
    parameters = trainable(module)
    _add_looped(reducer, forward, batch, scalars, parameters, memory_limit)
    nothing = torch.zeros(size_of(batch) * outputs, size_of(batch) * outputs, dtype=torch.float64)
    # What the loss doesn't reach (an expert without tokens) has gradients too: all 0.
    unreached = {groups[name]: nothing for name in parameters if name in groups}
    return {group: (part + part.mT) / 2 for group, part in {**unreached, **reducer.grams}.items()}


def _reduced(
    module: nn.Module,
    forward: Forward,
    batch: Batch,
    scalars: Scalars,
    plan: Plan,
    groups: Mapping[str, Hashable],
    outputs: int,
    memory_limit: int,
) -> tuple[_Reducer, set[str]]:
    """What all but the looped parameters give, and those that didn't go the way that was planned
    (all of it is to be thrown away if there are any)."""
    parameters = trainable(module)
    held = plan.bytes_per_input * size_of(batch)
    # The gradients of all outputs are held until the last pass; what is recomputed can't be passed
    # more than once, so under a tight limit each input is copied for each output instead.
    copied = outputs > 1 and held * (1 + outputs) > memory_limit
    given = _repeated(batch, outputs) if copied else batch
    passes, inputs = (1 if copied else outputs), size_of(given)
    reducer = _Reducer(plan, inputs, outputs, passes, groups)
    names = {id(p): name for name, p in parameters.items()}
    blocks = _blocks(module) if plan.bytes_per_input * inputs > memory_limit else []
    # Those without a gradient when the plan was made may have one now.
    rest = [n for n in parameters if n not in plan.copied and n not in plan.looped]
    with (
        copies_of(module, plan.copied, inputs) as leaves,
        standing_in(names, reducer),
        _recomputing(blocks),
        torch.enable_grad(),
    ):
        try:
            values = scalars(forward(given), given)
        except (RuntimeError, ValueError, IndexError, TypeError):
            if not plan.copied:
                raise
            return reducer, set(plan.copied)  # Cut to a length, say: a copy for each is too many.
        if reducer.strange:
            return reducer, reducer.strange
        reducer.recording = False
        totals = [_own_outputs(values).sum()] if copied else list(values.sum(0).unbind())
        found: list[tuple[Tensor | None, ...]] = []
        while totals:
            wanted = [*leaves.values(), *(parameters[name] for name in rest)]
            more = len(totals) > 1
            found += [autograd.grad(totals.pop(0), wanted, retain_graph=more, allow_unused=True)]
    astray = {
        n for part in found for n, g in zip(rest, part[len(leaves) :], strict=True) if g is not None
    }
    if reducer.waiting or astray:
        return reducer, astray | reducer.waiting.keys()
    for name, parts in zip(leaves, zip(*found, strict=True), strict=False):
        known = [Direct(g.flatten(1)) for g in parts if g is not None]
        if known:
            reducer.add_factors(name, [joined_outputs(known)])
    for group in list(reducer.small):
        reducer.flush(group)
    return reducer, set()


def _repeated(batch: Batch, outputs: int) -> Batch:
    return {key: value.repeat_interleave(outputs, 0) for key, value in batch.items()}


def _own_outputs(values: Tensor) -> Tensor:
    """Of copy c of every input the output c: [n] of [n, C]."""
    n, outputs = values.shape
    return values[torch.arange(n), torch.arange(n) % outputs]


def _add_looped(
    reducer: _Reducer,
    forward: Forward,
    batch: Batch,
    scalars: Scalars,
    parameters: Mapping[str, nn.Parameter],
    memory_limit: int,
) -> None:
    """Input by input, as many parameters at a time as the limit holds."""
    room = memory_limit
    chosen: list[str] = []
    for name in (*reducer.plan.looped, None):
        need = 0
        if name is not None:
            need = parameters[name].numel() * parameters[name].element_size()
            need *= size_of(batch) * reducer.outputs
            if need > memory_limit:
                raise UsageError(
                    f"the gradients of {name} for {size_of(batch)} inputs need "
                    f"{need / 1e6:.1f} MB, "
                    f"the limit is {memory_limit / 1e6:.1f} MB: use fewer inputs or raise the limit"
                )
        if chosen and (name is None or need > room):
            for done, part in one_by_one(forward, batch, scalars, parameters, chosen).items():
                reducer.add(done, part)
            room, chosen = memory_limit, []
        if name is not None:
            chosen.append(name)
            room -= need


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The longest list of modules of one kind: a network's repeated blocks."""
    lists = [
        list(part.children())
        for part in module.modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len({type(c) for c in part}) == 1
    ]
    return max(lists, key=len, default=[])


@contextlib.contextmanager
def _recomputing(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """While it lasts, blocks keep their input alone and run again in backward."""
    from torch.utils.checkpoint import checkpoint

    own = [(block, block.__dict__.get("forward"), block.forward) for block in blocks]
    try:
        for block, _, run in own:
            block.forward = lambda *a, run=run, **k: checkpoint(run, *a, use_reentrant=False, **k)
        yield
    finally:
        for block, before, _ in own:
            if before is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = before
