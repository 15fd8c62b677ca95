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
import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, autograd, nn

from ..errors import UsageError
from .derivatives import Make, Names, by_input
from .factors import Direct, Factor, gram, of_copies, room_for, sum_of
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
from .symmetric import in_threads

MEMORY_LIMIT = 3 << 30
"""Bytes of activations and of gradients held at most."""
HELD_BYTES = 1 << 23
"""Bytes of factors that one pass holds until they are reduced together."""


@dataclass
class _Reducer:
    """Adds each parameter's Gram to its group's once all of its calls came back in every pass.

    After one pass that happens during backward, some megabytes at a time. Several passes, which run
    at once, hold all factors till the end.
    """

    plan: Plan
    inputs: int
    outputs: int
    passes: int
    groups: Mapping[str, Hashable]
    grams: dict[Hashable, Tensor] = field(default_factory=dict)
    counts: Counter[Names] = field(default_factory=Counter)
    expected: Counter[str] = field(default_factory=Counter)
    strange: set[str] = field(default_factory=set)
    recording: bool = True
    running: dict[int, int] = field(default_factory=dict)
    """The pass that each thread makes."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    arrived: Counter[str] = field(default_factory=Counter)
    waiting: dict[str, dict[tuple[Names, int], Factor]] = field(default_factory=dict)
    ready: list[tuple[Hashable, list[Factor]]] = field(default_factory=list)

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
        call = names, number
        axis = self.plan.axes[call]
        factor = make(lambda x: by_input(x, axis, self.inputs))
        with self.lock:
            calls = self.waiting.setdefault(name, {})
            if self.passes == 1:
                calls[call] = of_copies(factor, self.outputs)
            elif call not in calls:
                calls[call] = room_for(factor, self.outputs)
        if self.passes > 1:
            calls[call].varying[:, self.pass_now()] = factor.varying.squeeze(1)
        with self.lock:
            self.arrived[name] += 1
            if self.arrived[name] < self.expected[name] * self.passes:
                return
            self.add_factors(name, [*self.waiting.pop(name).values()])
        if self.passes == 1 and _bytes(self.ready) > HELD_BYTES:
            self.reduce()

    def pass_now(self) -> int:
        """Backward has a thread of its own on a GPU, where passes come one after the other."""
        own = threading.get_ident()
        return self.running[own] if own in self.running else next(iter(self.running.values()))

    def add_factors(self, name: str, factors: list[Factor]) -> None:
        self.ready.append((self.groups.get(name, "network"), factors))

    def reduce(self) -> None:
        """Add the Grams of what is ready: a thread for each where there are many, else one by one
        with all threads."""
        jobs = _jobs(self.ready)
        self.ready = []
        many = self.outputs > 1 or len(jobs) > 4 * torch.get_num_threads()
        parts = in_threads(_gram_of, jobs) if many else [_gram_of(job) for job in jobs]
        for (group, _), part in zip(jobs, parts, strict=True):
            self.add(group, part)

    def add(self, group: Hashable, part: Tensor) -> None:
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
        del values
        wanted = [*leaves.values(), *(parameters[name] for name in rest)]
        found = _passed_back(reducer, totals, wanted)
    astray = {
        n for part in found for n, g in zip(rest, part[len(leaves) :], strict=True) if g is not None
    }
    if reducer.waiting or astray:
        return reducer, astray | reducer.waiting.keys()
    for (name, leaf), parts in zip(leaves.items(), zip(*found, strict=True), strict=False):
        if any(g is not None for g in parts):
            known = [torch.zeros_like(leaf) if g is None else g for g in parts]
            # Copies of the inputs for every output lie as [B, C] already.
            varying = torch.stack(known, 1).reshape(-1, outputs, leaf[0].numel())
            reducer.add_factors(name, [Direct(varying)])
    reducer.reduce()
    return reducer, set()


def _passed_back(
    reducer: _Reducer, totals: list[Tensor], wanted: list[Tensor]
) -> list[tuple[Tensor | None, ...]]:
    """The gradients of every total, on a CPU as many at a time as there are threads."""
    if len(totals) == 1:
        return [autograd.grad(totals.pop(), wanted, allow_unused=True)]

    def gradients(index: int) -> tuple[Tensor | None, ...]:
        reducer.running[threading.get_ident()] = index
        try:
            return autograd.grad(totals[index], wanted, retain_graph=True, allow_unused=True)
        finally:
            del reducer.running[threading.get_ident()]

    if totals[0].device.type == "cpu":
        return in_threads(gradients, range(len(totals)))
    return [gradients(index) for index in range(len(totals))]


def _bytes(ready: list[tuple[Hashable, list[Factor]]]) -> int:
    return sum(f.varying.nbytes for _, factors in ready for f in factors)


def _gram_of(job: tuple[Hashable, list[Factor]]) -> Tensor:
    with torch.no_grad():  # A thread has a mode of its own.
        return gram(job[1])


def _jobs(ready: list[tuple[Hashable, list[Factor]]]) -> list[tuple[Hashable, list[Factor]]]:
    """A group's many small gradients (biases, gains) together: one product serves them all."""
    jobs, small = [], dict[Hashable, list[Tensor]]()
    for group, factors in ready:
        direct = [f for f in factors if isinstance(f, Direct)]
        if len(direct) < len(factors):
            jobs.append((group, factors))
        else:
            small.setdefault(group, []).append(sum_of(direct))
    for group, parts in small.items():
        jobs.append((group, [Direct(torch.cat(parts, 1)[:, None])]))
    return jobs


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
                reducer.add(reducer.groups.get(done, "network"), part)
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
