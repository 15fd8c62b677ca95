"""The tensors that one attention multiplies, and which of their axes are which.

Axes: B inputs, H heads, T tokens (Tq queries, Tk keys), dh head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plastiscope.anatomy.flow import POINTWISE, RESHAPES
from plastiscope.anatomy.parts import Site
from plastiscope.anatomy.products import PRODUCTS, Product, letters, operands_of
from plastiscope.anatomy.record import Call, Record
from plastiscope.anatomy.sites import reaches

SDPA = "scaled_dot_product_attention"
SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
SOFTMAXES = {"softmax", "_softmax", "_safe_softmax", "special_softmax"}
DIVISIONS = {"div", "div_", "__truediv__", "true_divide", "divide"}
CAPS = {"tanh", "tanh_", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"}
MOST_HEADS = 128
HIDDEN = -9e3
"""A score below this was masked: masks add -1e4, the dtype's minimum or minus infinity."""


@dataclass(frozen=True)
class Part:
    """One operand of an attention: the value, where it is seen, and its axes."""

    value: int
    site: Site
    leading: tuple[int, ...]
    token: int
    width: int


def fused_parts(record: Record, call: Call) -> dict[str, Part] | None:
    """q, k, v and the output of one scaled_dot_product_attention; None when one isn't a tensor."""
    names = ("query", "key", "value")
    given = list(call.args[:3]) + [call.kwargs[n] for n in names if n in call.kwargs]
    numbers = [record.value(item) for item in given[:3]]
    if len(numbers) < 3 or None in numbers:
        return None
    parts = {}
    ports = ("input", "input1", "input2")
    for letter, number, port in zip("qkv", numbers, ports, strict=True):
        assert number is not None
        parts[letter] = _last_two(record, number, _port(call.site, port))
    parts["output"] = _last_two(record, call.outputs[0], call.site)
    return parts


def sdpa_argument(args: Sequence[object], kwargs: Mapping[str, object], name: str) -> object:
    """One argument of scaled_dot_product_attention, by position or keyword."""
    if name in kwargs:
        return kwargs[name]
    position = SDPA_ARGUMENTS.index(name) if name in SDPA_ARGUMENTS else len(args)
    return args[position] if position < len(args) else None


def explicit_parts(
    record: Record, call: Call, linear: dict[int, Product]
) -> dict[str, Part] | None:
    """q, k, v, scores, probabilities and output around a softmax; None: it isn't an attention."""
    softmax = _softmax(record, call)
    if softmax is None or not record.values[softmax[0]].live:
        return None
    given, site, dim = softmax
    scores = _back_to_product(record, given, linear)
    mix = _on_to_product(record, call.outputs[0], linear)
    if scores is None or mix is None:
        return None
    ndim = record.values[call.outputs[0]].tensor.ndim
    key = dim % ndim
    same = record.values[scores.outputs[0]].tensor.ndim == ndim
    found = _score_parts(record, scores, key - ndim if same else -1)
    mixed = _mix_parts(record, mix, call.outputs[0])
    if found is None or mixed is None:
        return None
    query = _query_axis(record, scores, key, ndim) if same else ndim - 2
    leading = tuple(a for a in range(ndim) if a not in (query, key))
    used = _operand_from(record, mix, call.outputs[0])
    narrowed = record.values[used].tensor
    shape = record.values[call.outputs[0]].tensor.shape
    if narrowed.ndim == ndim and narrowed.shape[key] < shape[key]:  # a sink column is dropped
        seen = Part(used, _site_of_operand(mix, used), leading, query, key)
    else:
        seen = Part(call.outputs[0], call.site, leading, query, key)
    maps = {
        "scores": Part(given, site, leading, query, key),
        "probabilities": seen,
    }
    return {**found, **mixed, **maps}


def _softmax(record: Record, call: Call) -> tuple[int, Site, int] | None:
    """(what it takes, where that is seen, along which axis) of a softmax: a function, or exp(x)
    divided by its sum."""
    over, taking = call, call
    if call.op not in SOFTMAXES:
        makers = [record.call_of(n) for n in call.inputs]
        if len(makers) != 2 or makers[0] is None or makers[1] is None:
            return None
        taking, over = makers[0], makers[1]
        if (taking.op, over.op) != ("exp", "sum") or over.inputs[:1] != call.inputs[:1]:
            return None
    dim = over.kwargs.get("dim", over.args[1] if len(over.args) > 1 else -1)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not isinstance(dim, int) or not taking.inputs:
        return None
    return taking.inputs[0], _port(taking.site, "input"), dim


def _back_to_product(record: Record, number: int, linear: dict[int, Product]) -> Call | None:
    """The one product of two live values that the softmax's input comes from."""
    found: dict[int, Call] = {}
    waiting, seen = [number], set()
    while waiting:
        current = waiting.pop()
        call = record.call_of(current)
        if current in seen or call is None or not record.values[current].live:
            continue
        seen.add(current)
        if call.op in PRODUCTS:
            pair = operands_of(record, call)
            if call.index in linear and _mixes_heads(record, linear[call.index]):
                waiting.append(linear[call.index].source)
            elif call.index not in linear and pair and all(record.values[n].live for n in pair):
                found[call.index] = call
        elif call.op in RESHAPES | POINTWISE | CAPS:
            waiting.extend(call.inputs)
    return next(iter(found.values())) if len(found) == 1 else None


def _on_to_product(record: Record, number: int, linear: dict[int, Product]) -> Call | None:
    """The one product with another live value that consumes the probabilities."""
    found: dict[int, Call] = {}
    waiting, seen = [number], set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for call in record.consumers(current):
            if call.index in linear and _mixes_heads(record, linear[call.index]):
                waiting.extend(call.outputs)
            elif call.op in PRODUCTS and call.index not in linear:
                pair = operands_of(record, call)
                if pair and all(record.values[n].live for n in pair):
                    found[call.index] = call
            elif call.op in RESHAPES | POINTWISE:
                waiting.extend(call.outputs)
    return next(iter(found.values())) if len(found) == 1 else None


def _mixes_heads(record: Record, product: Product) -> bool:
    """Whether a linear map makes each head's scores of all heads' ("talking heads")."""
    source, made = (record.values[n].tensor for n in (product.source, product.output))
    square = product.height == math.prod(product.shape) // product.height
    few = product.height <= min(source.numel() // product.height, MOST_HEADS)
    return square and few and source.ndim == 4 and made.shape == source.shape


def _operand_from(record: Record, call: Call, number: int) -> int:
    """The operand of a product that comes from a value."""
    pair = operands_of(record, call)
    assert pair is not None
    return pair[0] if reaches(record, number, pair[0]) else pair[1]


def _site_of_operand(call: Call, number: int) -> Site:
    position = call.ports.index(number)
    return _port(call.site, f"input{position or ''}")


def _score_parts(record: Record, call: Call, key: int) -> dict[str, Part] | None:
    """q and k of the product that makes the scores; `key` is the key axis, from the end."""
    pair = operands_of(record, call)
    if pair is None:
        return None
    sites = [_site_of_operand(call, n) for n in pair]
    if call.op == "einsum":
        ranks = tuple(record.values[n].tensor.ndim for n in pair)
        terms, right = letters(call.args[0], ranks)
        letter = right[key]
        order = (0, 1) if letter in terms[1] else (1, 0)
        parts = [_by_letters(pair[k], sites[k], terms[k], terms[1 - k], right) for k in order]
        return None if None in parts else {"q": parts[0], "k": parts[1]}  # type: ignore[dict-item]
    left = _last_two(record, pair[0], sites[0])
    other = _last_two(record, pair[1], sites[1], swapped=True)
    return {"q": left, "k": other} if key == -1 else {"q": other, "k": left}


def _by_letters(number: int, site: Site, own: str, other: str, right: str) -> Part | None:
    """Leading axes are shared and kept, the width is summed, the token axis is its own."""
    width = [k for k, c in enumerate(own) if c in other and c not in right]
    token = [k for k, c in enumerate(own) if c not in other and c in right]
    leading = tuple(k for k, c in enumerate(own) if c in other and c in right)
    if len(width) != 1 or len(token) != 1 or len(leading) + 2 != len(own):
        return None
    return Part(number, site, leading, token[0], width[0])


def _query_axis(record: Record, call: Call, key: int, ndim: int) -> int:
    if call.op != "einsum":
        return ndim - 2 if key == ndim - 1 else ndim - 1
    pair = operands_of(record, call)
    assert pair is not None
    terms, right = letters(call.args[0], tuple(record.values[n].tensor.ndim for n in pair))
    queries = terms[0] if right[key] in terms[1] else terms[1]
    keys = terms[1] if right[key] in terms[1] else terms[0]
    return next(k for k, c in enumerate(right) if c in queries and c not in keys)


def _mix_parts(record: Record, call: Call, probabilities: int) -> dict[str, Part] | None:
    """v and the output of the product that takes the probabilities."""
    pair = operands_of(record, call)
    if pair is None:
        return None
    side = 0 if pair[0] == probabilities or record.precedes(probabilities, pair[0]) else 1
    value = pair[1 - side]
    site = _site_of_operand(call, value)
    if call.op != "einsum":
        swapped = side == 1
        v = _last_two(record, value, site, swapped)
        return {"v": v, "output": _last_two(record, call.outputs[0], call.site, swapped)}
    terms, right = letters(call.args[0], tuple(record.values[n].tensor.ndim for n in pair))
    maps, own = terms[side], terms[1 - side]
    key = [k for k, c in enumerate(own) if c in maps and c not in right]
    width = [k for k, c in enumerate(own) if c not in maps and c in right]
    if len(key) != 1 or len(width) != 1:
        return None
    shared = [c for c in own if c in maps and c in right]
    query = [k for k, c in enumerate(right) if c in maps and c not in own]
    v = Part(value, site, tuple(own.index(c) for c in shared), key[0], width[0])
    leading = tuple(right.index(c) for c in shared)
    out = Part(call.outputs[0], call.site, leading, query[0], right.index(own[width[0]]))
    return {"v": v, "output": out}


def _last_two(record: Record, number: int, site: Site, swapped: bool = False) -> Part:
    ndim = record.values[number].tensor.ndim
    token, width = (ndim - 1, ndim - 2) if swapped else (ndim - 2, ndim - 1)
    return Part(number, site, tuple(range(ndim - 2)), token, width)


def _port(site: Site, port: str) -> Site:
    return Site(site.module, site.call, site.op, site.ordinal, port)
