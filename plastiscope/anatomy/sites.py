"""Where a value of a pass can be seen again on later passes, and which norms and sums there are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plastiscope.anatomy.flow import ACTIVATIONS, CASTS, NORMS, RESHAPES
from plastiscope.anatomy.parts import Site
from plastiscope.anatomy.products import PRODUCTS, Product
from plastiscope.anatomy.record import Call, ModuleCall, Record

SUMS = {"add", "add_", "__radd__", "__add__"}
SCALINGS = {"mul", "mul_", "div", "div_", "__truediv__", "true_divide", "multiply", "divide"}
STATISTICS = {"rsqrt", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "sqrt"}


@dataclass(frozen=True)
class Norm:
    """A normalising layer: module or function. `weight` is its gain's name, if it has one."""

    path: str
    source: int
    output: int
    weight: str | None
    offset_gain: bool


@dataclass(frozen=True)
class Residual:
    """A sum of a value and something computed from it. `linear` are the products in between."""

    call: Call
    skip: int
    branch: int
    output: int
    linear: tuple[Product, ...]


def site_of(record: Record, number: int) -> Site | None:
    """A module's output where there is one, else a function's, else somebody's input."""
    for part in record.modules:
        if part.outputs and part.outputs[0] == number:
            return part.site
    call = record.call_of(number)
    if call is not None and len(call.outputs) == 1 and call.site.ordinal >= 0:
        return call.site
    for part in record.modules:
        if part.inputs and part.inputs[0] == number:
            return _port(part.site, 0)
    takers = [c for c in record.consumers(number) if c.site.ordinal >= 0]
    return _port(takers[0].site, takers[0].ports.index(number)) if takers else None


def input_site(record: Record, product: Product) -> Site:
    """Where a linear map's own input is seen: its module's, when the module takes it as it is."""
    call = product.call
    for part in record.modules:
        inside = part.start <= call.index < part.stop
        if inside and part.site.module == product.path and part.inputs[:1] == (product.source,):
            return _port(part.site, 0)
    return _port(call.site, call.ports.index(product.source))


def _port(site: Site, position: int) -> Site:
    return Site(site.module, site.call, site.op, site.ordinal, f"input{position or ''}")


def norms(record: Record) -> list[Norm]:
    """Every normalising module or function of the live values, in order."""
    found: list[Norm] = []
    inside: set[int] = set()
    for part in record.modules:
        norm = _module_norm(record, part)
        if norm is not None and not inside.intersection(range(part.start, part.stop)):
            found.append(norm)
            inside.update(range(part.start, part.stop))
    for call in record.calls:
        if call.index in inside or not call.inputs or not record.values[call.inputs[0]].live:
            continue
        if call.op in NORMS:
            found.append(_function_norm(record, call))
        elif call.op in STATISTICS and (norm := _written_norm(record, call)) is not None:
            found.append(norm)
    return sorted(found, key=lambda n: n.output)


def _module_norm(record: Record, part: ModuleCall) -> Norm | None:
    calls = record.calls[part.start : part.stop]
    ops = {c.op for c in calls}
    if not part.inputs or not part.outputs or not part.site.module or len(calls) > 40:
        return None
    source, output = part.inputs[0], part.outputs[0]
    a, b = record.values[source], record.values[output]
    if not a.live or a.tensor.shape != b.tensor.shape or not record.precedes(source, output):
        return None
    if ops & (PRODUCTS | ACTIVATIONS | {"softmax"}) or not ops & (NORMS | STATISTICS):
        return None  # a norm joined with its activation is found as a function
    names = [n for c in calls for n in c.inputs if record.name(n) and record.values[n].learned]
    prefix = part.site.module + "."
    gains = [record.name(n) for n in names if str(record.name(n)).endswith("weight")]
    gains = gains or [n for n in map(record.name, names) if str(n).startswith(prefix)]
    offset = any(_adds_one(record, c) for c in calls)
    return Norm(part.site.module, source, output, gains[0] if gains else None, offset)


def _adds_one(record: Record, call: Call) -> bool:
    named = any(record.name(n) and record.values[n].learned for n in call.inputs)
    return (
        call.op in SUMS
        and named
        and any(a in (1, 1.0) for a in call.args if isinstance(a, (int, float)))
    )


def _function_norm(record: Record, call: Call) -> Norm:
    names = [record.name(n) for n in call.inputs[1:] if record.values[n].learned]
    weight = next((n for n in names if n), None)
    path = weight.rpartition(".")[0] if weight else call.site.module
    return Norm(path, call.inputs[0], call.outputs[0], weight, False)


def _written_norm(record: Record, call: Call) -> Norm | None:
    """A norm in arithmetic: values scaled by a statistic of themselves, then gain and shift."""
    statistic, size = call.outputs[0], record.values[call.inputs[0]].tensor.numel()
    for _ in range(6):
        takers = record.consumers(statistic)
        if len(takers) != 1 or not takers[0].outputs:
            return None
        step = takers[0]
        others = [n for n in step.inputs if n != statistic and record.values[n].live]
        if step.op in SCALINGS and others:
            return _with_gain(record, others[0], step.outputs[0], call.inputs[0])
        statistic = step.outputs[0]
        if record.values[statistic].tensor.numel() > size:
            return None
    return None


def _with_gain(record: Record, scaled: int, output: int, measured: int) -> Norm | None:
    """The norm from its input, less the mean if it was taken off, to its gain and shift."""
    source, made = scaled, record.call_of(scaled)
    if made is not None and made.op in {"sub", "sub_", "__sub__"}:
        source = made.inputs[0]
    if not reaches(record, source, measured):
        return None
    weight: str | None = None
    while len(takers := record.consumers(output)) == 1 and takers[0].op in SCALINGS | SUMS:
        names = [record.name(n) for n in takers[0].inputs if record.values[n].learned]
        names = [n for n in names if n is not None and not _is_live(record, n)]
        if len(names) != 1:
            break
        weight = weight or (names[0] if takers[0].op in SCALINGS else None)
        output = takers[0].outputs[0]
    path = weight.rpartition(".")[0] if weight else takers[0].site.module if takers else ""
    return Norm(path, source, output, weight, False)


def _is_live(record: Record, name: str) -> bool:
    return record.values[record.named(name)].live


def residuals(record: Record, linear: list[Product]) -> list[Residual]:
    """Every sum of a value with what a branch of linear maps made of it, in order.

    With `x + f(x) + g(x)` both sums have x as their skip.
    """
    found: dict[int, Residual] = {}
    for call in record.calls:
        pair = [n for n in call.inputs if record.values[n].live]
        if call.op not in SUMS or len(pair) != 2:
            continue
        if record.values[pair[0]].tensor.shape != record.values[pair[1]].tensor.shape:
            continue
        ends = _skip_and_branch(record, pair, found)
        if ends is not None:
            inner = tuple(p for p in linear if within(record, p, *ends))
            if inner:
                found[call.outputs[0]] = Residual(call, *ends, call.outputs[0], inner)
    return list(found.values())


def _skip_and_branch(
    record: Record, pair: list[int], found: dict[int, Residual]
) -> tuple[int, int] | None:
    for first, second in (pair, pair[::-1]):
        if record.precedes(first, second):
            return first, second
    for first, second in (pair, pair[::-1]):
        if first in found and record.precedes(found[first].skip, second):
            return found[first].skip, second
    for first, second in (pair, pair[::-1]):
        unscaled = _unscaled(record, first)
        if unscaled != first and record.precedes(unscaled, second):
            return unscaled, second
    return None


def _unscaled(record: Record, number: int) -> int:
    """The value before it was multiplied by a constant or a learned factor, as skips may be."""
    call = record.call_of(number)
    while call is not None and call.op in SCALINGS:
        live = [n for n in call.inputs if record.values[n].live]
        if len(live) != 1:
            break
        number = live[0]
        call = record.call_of(number)
    return number


def reaches(record: Record, first: int, second: int) -> bool:
    """Whether a value is the other one or goes into it."""
    return first == second or record.precedes(first, second)


def within(record: Record, product: Product, start: int, end: int) -> bool:
    """Whether a linear map lies on the way from one value to another."""
    return reaches(record, start, product.source) and reaches(record, product.output, end)


def channel_axis(record: Record, linear: list[Product], number: int) -> int:
    """The axis of a value that holds channels: as the next linear map, or the last one, has it."""
    tensor = record.values[number].tensor
    if tensor.ndim < 3:
        return -1
    for product in linear:
        if product.source == number and len(product.summed) == 1:
            return _from_end(product.summed[0], tensor)
    before = [p for p in linear if reaches(record, p.output, number)]
    if before and before[-1].output == number:
        return _from_end(before[-1].channels[0], tensor) if len(before[-1].channels) == 1 else -1
    if not before or len(before[-1].channels) != 1:
        return -1
    return _followed_axis(record, before[-1], number)


def _followed_axis(record: Record, product: Product, number: int) -> int:
    """Where the channels of a linear map's output are after permutations, seen in the sizes."""
    tensor, axis = record.values[number].tensor, product.channels[0]
    made = record.values[product.output].tensor
    if tensor.ndim != made.ndim:
        return -1
    for call in record.between(product.output, number):
        if call.op in {"permute", "transpose", "movedim", "moveaxis", "swapaxes"}:
            return -1
    return _from_end(axis, tensor) if tensor.shape[axis] == made.shape[axis] else -1


def _from_end(axis: int, tensor: Tensor) -> int:
    return -1 if axis in (-1, tensor.ndim - 1) else axis % tensor.ndim


def same_values(record: Record, start: int, end: int, squeezed: bool = False) -> bool:
    """Whether a value is handed on unchanged: through nothing, or calls that copy it; squeezed:
    axes of one entry may come or go."""
    first, last = record.values[start].tensor, record.values[end].tensor
    if squeezed:
        first, last = first.squeeze(), last.squeeze()
    if first.shape != last.shape or not reaches(record, start, end):
        return False
    ops = {c.op for c in record.between(start, end)}
    return ops <= CASTS | RESHAPES | {"dropout"} and bool(torch.equal(first, last))
