"""Everything one tiny forward pass computed: its values, the functions between them, its modules.

A value is a tensor at one moment: a function that rewrites a tensor in place makes a new value,
and the old one keeps its content. Any stretch of the pass can be run again on other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plastiscope.anatomy.parts import Site
from plastiscope.anatomy.passage import Follower, Passage, tensors_in, undisturbed
from plastiscope.models.live import Batch


@dataclass(frozen=True)
class Ref:
    """Stands in for a value in a call's arguments."""

    value: int


@dataclass
class Value:
    """One tensor of the pass. `live` when it depends on the inputs, `learned` on a parameter.

    `name` is set for parameters and buffers. `ancestors` is a bit set of live values.
    """

    number: int
    tensor: Tensor
    producer: int | None = None
    name: str | None = None
    live: bool = False
    learned: bool = False
    ancestors: int = 0


@dataclass
class Call:
    """One function call, with the values in place of its tensors.

    `ports` are all its tensors in order, `inputs` those whose content it uses.
    """

    index: int
    site: Site
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    inputs: tuple[int, ...]
    ports: tuple[int, ...]
    outputs: tuple[int, ...] = ()

    @property
    def op(self) -> str:
        return self.site.op


@dataclass
class ModuleCall:
    """One call of a module: its tensors, and the calls [start, stop) made inside it."""

    site: Site
    inputs: tuple[int, ...]
    start: int
    outputs: tuple[int, ...] = ()
    stop: int = 0


@dataclass
class Record(Follower):
    """The recorded pass; fills while it follows a Passage."""

    module: nn.Module
    inputs: Tensor
    values: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    modules: list[ModuleCall] = field(default_factory=list)
    output: int = -1
    passage: Passage | None = None
    _current: dict[int, int] = field(default_factory=dict)
    _sharing: dict[int, list[int]] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)
    _open: list[ModuleCall] = field(default_factory=list)
    _effective: dict[int, str] = field(default_factory=dict)
    _consumers: dict[int, list[Call]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, parameter in self.module.named_parameters():
            self._new(parameter, name=name, learned=True)
        for name, buffer in self.module.named_buffers():
            self._new(buffer, name=name)
        self._new(self.inputs, live=True)

    # --- recording ---

    def function(
        self,
        site: Site,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        given = list(tensors_in((args, kwargs)))
        ports = tuple(self.number(t) for t in given)
        if rewrites(site.op):
            self._preserve(given[0] if given else None)
        call = Call(
            len(self.calls), site, function, self._refer(args), self._refer(kwargs),
            _carriers(site.op, ports), ports,
        )  # fmt: skip
        if self.passage is not None and self.passage.stack:
            self._name_attributes(given, self.passage.stack[-1][0])
        result = function(*args, **kwargs)
        written = list(tensors_in(args[0] if site.op == "__setitem__" else result))
        if not rewrites(site.op) and any(t is g for t in written for g in given):
            return result  # a cast or copy that wasn't needed
        self.calls.append(call)
        call.outputs = self._made(call, written)
        if rewrites(site.op) and given:
            self._write_through(given[0], call)
        return result

    def _write_through(self, view: Tensor, call: Call) -> None:
        """A view was rewritten: its base is another value from now on, made of both."""
        base = view._base
        if base is None or id(base) not in self._current or not base.is_contiguous():
            return
        old, new = self._current[id(base)], self._current[id(view)]
        place = (view.size(), view.stride(), view.storage_offset() - base.storage_offset())
        site = Site(call.site.module, call.site.call, SCATTER, -1)
        written = Call(
            len(self.calls), site, torch.as_strided_scatter,
            (Ref(old), Ref(new), *place), {}, (old, new), (old, new),
        )  # fmt: skip
        self.calls.append(written)
        written.outputs = self._made(written, [base])

    def _made(self, call: Call, written: list[Tensor]) -> tuple[int, ...]:
        sources = [self.values[n] for n in call.inputs]
        if _picks_weights(call, sources):
            sources = sources[:1]
        ancestors = 0
        for source in sources:
            if source.live:
                ancestors |= source.ancestors | (1 << source.number)
        live, learned = any(s.live for s in sources), any(s.learned for s in sources)
        return tuple(
            self._new(t, call.index, live=live, learned=learned, ancestors=ancestors).number
            for t in written
        )

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = tuple(self.number(t) for t in tensors_in((args, kwargs)))
        self._open.append(ModuleCall(site, inputs, len(self.calls)))

    def leave(self, site: Site, output: Any) -> None:
        entered = self._open.pop()
        entered.site, entered.stop = site, len(self.calls)
        entered.outputs = tuple(self.number(t) for t in tensors_in(output))
        self.modules.append(entered)
        owner, mark, name = site.module.rpartition("parametrizations.")
        if mark and "." not in name:
            self._effective.update(dict.fromkeys(entered.outputs, owner + name))

    def number(self, tensor: Tensor) -> int:
        """The value that this tensor object now is."""
        known = self._current.get(id(tensor))
        return self._new(tensor).number if known is None else known

    def _new(self, tensor: Tensor, producer: int | None = None, **facts: Any) -> Value:
        value = Value(len(self.values), tensor, producer, **facts)
        self.values.append(value)
        self._kept.append(tensor)
        self._current[id(tensor)] = value.number
        if tensor.layout == torch.strided:
            self._sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(value.number)
        return value

    def _refer(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return Ref(self.number(item))
        if isinstance(item, (tuple, list)):
            return type(item)(map(self._refer, item)) if type(item) in (tuple, list) else item
        if isinstance(item, dict):
            return {key: self._refer(value) for key, value in item.items()}
        return item

    def _preserve(self, tensor: Tensor | None) -> None:
        """Keep the content of everything that shares the storage about to be rewritten."""
        if tensor is None or tensor.layout != torch.strided:
            return
        for number in self._sharing.pop(tensor.untyped_storage().data_ptr(), []):
            value = self.values[number]
            if value.name is None:
                value.tensor = value.tensor.detach().clone()

    def _name_attributes(self, given: Sequence[Tensor], path: str) -> None:
        """A plain tensor that a hook set as an attribute (weight_norm's old form) is a weight."""
        owner = self.module.get_submodule(path)
        held = {id(v): k for k, v in vars(owner).items() if isinstance(v, Tensor)}
        for tensor in given if held else ():
            if id(tensor) in held and self.values[self.number(tensor)].learned:
                prefix = f"{path}." if path else ""
                self._effective.setdefault(self.number(tensor), prefix + held[id(tensor)])

    # --- reading ---

    def name(self, number: int) -> str | None:
        """The effective tensor's name, when the value is a parameter, buffer or resolved weight."""
        return self.values[number].name or self._effective.get(number)

    def call_of(self, number: int) -> Call | None:
        """The call that made a value, or None for a leaf."""
        producer = self.values[number].producer
        return None if producer is None else self.calls[producer]

    def precedes(self, first: int, second: int) -> bool:
        """Whether the second value was computed from the first."""
        return first < second and bool(self.values[second].ancestors >> first & 1)

    def between(self, start: int, end: int) -> list[Call]:
        """The calls, in order, through which one live value reaches another."""
        mask = self.values[end].ancestors | (1 << end)
        return [
            call
            for call in self._stretch({start}, end)
            if any(mask >> o & 1 for o in call.outputs)
            and any(i == start or self.precedes(start, i) for i in call.inputs)
        ]

    def consumers(self, number: int) -> list[Call]:
        """The calls that take a value."""
        if not self._consumers:
            for call in self.calls:
                for taken in dict.fromkeys(call.inputs):
                    self._consumers.setdefault(taken, []).append(call)
        return self._consumers.get(number, [])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a named tensor."""
        return next(tuple(v.tensor.shape) for v in self.values if self.name(v.number) == name)

    def named(self, name: str) -> int:
        """The value of a named tensor: the latest, when it is computed anew for every use."""
        return max(v.number for v in self.values if self.name(v.number) == name)

    def at(self, site: Site) -> int:
        """The value seen at a site; LookupError when this pass never reached it."""
        place = (site.module, site.call, site.op, site.ordinal)
        taken = site.port.startswith("input")
        port = int(site.port[len("input" if taken else "output") :] or 0)
        for each in self.calls if site.op else self.modules:
            s = each.site
            if (s.module, s.call, s.op, s.ordinal) == place:
                given = each.ports if isinstance(each, Call) else each.inputs
                return (given if taken else each.outputs)[port]
        raise LookupError(f"this pass never reached {site}")

    def value(self, item: Any) -> int | None:
        """The value behind an argument of a call, or None."""
        return item.value if isinstance(item, Ref) else None

    def run_again(self, given: Mapping[int, Tensor], target: int) -> Tensor:
        """Compute the target value anew, with other tensors in place of the given values."""
        new = dict(given)
        for call in self.affected(set(given), target):
            new.update(zip(call.outputs, self.outputs_with(call, new), strict=True))
        if target not in new:
            raise LookupError(f"value {target} doesn't depend on the values {sorted(given)}")
        return new[target]

    def outputs_with(
        self,
        call: Call,
        new: Mapping[int, Tensor],
        default: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        """One call's outputs with other tensors; `default` changes those that stay the same."""
        written = rewrites(call.op)

        def fill(item: Any, first: bool = False) -> Any:
            if isinstance(item, Ref):
                tensor = new.get(item.value)
                if tensor is None:
                    tensor = self.values[item.value].tensor
                    tensor = default(tensor) if default else tensor
                return tensor.clone() if written and first else tensor
            if isinstance(item, (tuple, list)):
                parts = [fill(part, first and k == 0) for k, part in enumerate(item)]
                return tuple(parts) if isinstance(item, tuple) else parts
            if isinstance(item, dict):
                return {key: fill(value) for key, value in item.items()}
            return item

        args = fill(call.args, True)
        result = call.function(*args, **fill(call.kwargs))
        return list(tensors_in(args[0] if call.op == "__setitem__" else result))

    def _stretch(self, given: set[int], target: int) -> list[Call]:
        """The calls after the given values were made, up to the one that makes the target."""
        starts = [self.values[n].producer for n in given]
        first = min([-1 if s is None else s for s in starts], default=-1)
        last = self.values[target].producer
        return self.calls[first + 1 : 0 if last is None else last + 1]

    def affected(self, given: set[int], target: int) -> list[Call]:
        """The calls, in order, that carry a change of the given values to the target."""
        needed = {target}
        changed = set(given)
        stretch = self._stretch(given, target)
        for call in stretch:
            if changed.intersection(call.inputs):
                changed.update(set(call.outputs) - set(given))
        path = []
        for call in reversed(stretch):
            if needed.intersection(call.outputs) and changed.intersection(call.inputs):
                needed.update(n for n in call.inputs if n in changed and n not in given)
                path.append(call)
        return path[::-1]


SCATTER = "as_strided_scatter"
LIKE = {"type_as", "view_as", "reshape_as", "expand_as", "to", "type"}
EMPTY = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"}
PICKS = {"__getitem__", "index_select"}


def _carriers(op: str, ports: tuple[int, ...]) -> tuple[int, ...]:
    """The tensors whose content goes into the result, not only their shape or type."""
    if op in EMPTY or op.startswith("new_"):
        return ()
    return ports[:1] if op in LIKE else ports


def _picks_weights(call: Call, sources: list[Value]) -> bool:
    """Whether whole weight matrices are picked, as a router picks experts: still weights."""
    if call.op not in PICKS or len(sources) < 2 or sources[0].live or not sources[0].learned:
        return False
    return sources[0].tensor.ndim >= 3 and not any(
        s.tensor.is_floating_point() for s in sources[1:]
    )


def rewrites(op: str) -> bool:
    """Whether a function of this name changes its first argument in place."""
    return op == "__setitem__" or (op.endswith("_") and not op.endswith("__"))


def record_pass(module: nn.Module, forward: Callable[[Batch], Tensor], batch: Batch) -> Record:
    """Run the module once, as it is, and record it."""
    inputs = batch["inputs"].clone()
    record = Record(module, inputs)
    passage = Passage(module, record)
    record.passage = passage
    with undisturbed(module), torch.no_grad(), passage:
        output = forward({**batch, "inputs": inputs})
    record.output = record.number(output)
    return record
