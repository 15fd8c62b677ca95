"""The attentions of a pass: where they happen, and which weights make which head.

Axes: B inputs, H heads, T tokens (Tq queries, Tk keys), dh head width, R rows of a weight matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plastiscope.anatomy.flow import NORMS, POINTWISE, RESHAPES, places
from plastiscope.anatomy.parts import AttentionSite, Matrix, Operand, Site
from plastiscope.anatomy.products import PRODUCTS, Product, letters, operands_of
from plastiscope.anatomy.record import Call, Record
from plastiscope.anatomy.sites import Norm, reaches

SDPA = "scaled_dot_product_attention"
SOFTMAXES = {"softmax", "_softmax", "_safe_softmax", "special_softmax"}
CAPS = {"tanh", "tanh_", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"}
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


@dataclass(frozen=True)
class Projection:
    """The weights behind q, k or v: the product, and its rows for each arriving head."""

    product: Product
    rows: tuple[tuple[int, ...], ...]

    @property
    def matrix(self) -> Matrix:
        """All rows of the heads, in order; None when that is the whole matrix."""
        every = sorted(set().union(*map(set, self.rows)))
        return _rows_of(self.product, tuple(every))

    @property
    def heads(self) -> tuple[Matrix, ...]:
        """One matrix a distinct head, in the order in which heads arrive."""
        return tuple(_rows_of(self.product, rows, True) for rows in dict.fromkeys(self.rows))


@dataclass(frozen=True)
class Attention:
    """One attention call of a pass.

    `undecided` are the rows of q, k or v whose heads could not be told apart; `notes` say why.
    """

    call: Call
    parts: dict[str, Part]
    site: AttentionSite
    projections: dict[str, Projection]
    sources: dict[str, tuple[Product, ...]]
    output: Product | None
    columns: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...] = ()
    undecided: Mapping[str, Matrix] = field(default_factory=dict)


def _rows_of(product: Product, rows: tuple[int, ...], keep: bool = False) -> Matrix:
    whole = not keep and len(rows) == product.height
    return Matrix(product.tensor, product.matrix.out_axes, None if whole else rows)


def attentions(
    record: Record, linear: list[Product], norms: Sequence[Norm] = ()
) -> list[Attention]:
    """Every attention of the pass whose queries depend on the inputs, in order."""
    by_call = {p.call.index: p for p in linear}
    found = []
    for call in record.calls:
        if call.op == SDPA:
            parts = _fused_parts(record, call)
        elif call.op in SOFTMAXES:
            parts = _explicit_parts(record, call, by_call)
        else:
            continue
        if parts is not None and record.values[parts["q"].value].live:
            found.append(_described(record, call, parts, by_call, norms))
    return found


def _fused_parts(record: Record, call: Call) -> dict[str, Part] | None:
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


def _last_two(record: Record, number: int, site: Site, swapped: bool = False) -> Part:
    ndim = record.values[number].tensor.ndim
    token, width = (ndim - 1, ndim - 2) if swapped else (ndim - 2, ndim - 1)
    return Part(number, site, tuple(range(ndim - 2)), token, width)


def _port(site: Site, port: str) -> Site:
    return Site(site.module, site.call, site.op, site.ordinal, port)


def _explicit_parts(
    record: Record, call: Call, linear: dict[int, Product]
) -> dict[str, Part] | None:
    if not call.inputs or not record.values[call.inputs[0]].live:
        return None
    scores = _back_to_product(record, call.inputs[0], linear)
    mix = _on_to_product(record, call.outputs[0], linear)
    if scores is None or mix is None:
        return None
    ndim = record.values[call.outputs[0]].tensor.ndim
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else -1)
    if not isinstance(dim, int):
        return None
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
        "scores": Part(call.inputs[0], _port(call.site, "input"), leading, query, key),
        "probabilities": seen,
    }
    return {**found, **mixed, **maps}


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
            if call.index not in linear and pair and all(record.values[n].live for n in pair):
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
            if call.op in PRODUCTS and call.index not in linear:
                pair = operands_of(record, call)
                if pair and all(record.values[n].live for n in pair):
                    found[call.index] = call
            elif call.op in RESHAPES | POINTWISE:
                waiting.extend(call.outputs)
    return next(iter(found.values())) if len(found) == 1 else None


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


# --- heads ---


def feeding(record: Record, number: int, linear: dict[int, Product]) -> tuple[Product, ...]:
    """The nearest linear maps behind a value, in order."""
    found: dict[int, Product] = {}
    waiting, seen = [number], set()
    while waiting:
        current = waiting.pop()
        call = record.call_of(current)
        if current in seen or call is None or not record.values[current].live:
            continue
        seen.add(current)
        if call.index in linear:
            found[call.index] = linear[call.index]
        else:
            waiting.extend(call.inputs)
    return tuple(found[k] for k in sorted(found))


def reached(
    record: Record,
    product: Product,
    number: int,
    through: frozenset[str] = frozenset(),
    shortcuts: Mapping[int, int] | None = None,
) -> Tensor | None:
    """For each element of a value the row that made it; None when rows were mixed on the way."""
    labels = _spread(record, product)
    return places(record, product.output, number, through, shortcuts, labels)


def rows_by_slice(
    record: Record, product: Product, number: int, axis: int, norms: Sequence[Norm] = ()
) -> Tensor:
    """Which rows make each slice of a value along one axis: bool [slices, R].

    By following elements where they only move; else by the gradient. A norm over all heads makes
    every head depend on every row: then its statistics are left out, and only its gain counts.
    """
    direct = reached(record, product, number)
    if direct is not None:
        return _used(direct.movedim(axis, 0).flatten(1), product)
    used = _by_gradient(record, product.output, number, axis, _spread(record, product), product)
    if bool((used.sum(0) <= 1).all()):
        return used
    shortcuts = {n.output: n.source for n in norms}
    for norm in norms:
        if record.precedes(product.output, norm.output) and reaches(record, norm.output, number):
            rows = reached(record, product, norm.output, frozenset(NORMS), shortcuts)
            if rows is None or bool((rows < 0).any()):
                continue
            if norm.output == number:
                return _used(rows.movedim(axis, 0).flatten(1), product)
            return _by_gradient(record, norm.output, number, axis, rows, product)
    return used


def _used(rows: Tensor, product: Product) -> Tensor:
    """Row numbers [slices, n] (-1: none) as bool [slices, R]."""
    height = product.height
    used = torch.zeros(len(rows), height + 1, dtype=torch.bool)
    used.scatter_(1, rows % (height + 1), True)
    return used[:, :-1]


def _spread(record: Record, product: Product) -> Tensor:
    """The row number of every element of the product's output."""
    shape = record.values[product.output].tensor.shape
    order = sorted(range(len(product.channels)), key=lambda k: product.channels[k])
    sizes = [n if a in product.channels else 1 for a, n in enumerate(shape)]
    return product.rows.permute(order).reshape(sizes).expand(shape)


def _by_gradient(
    record: Record, start: int, number: int, axis: int, rows: Tensor, product: Product
) -> Tensor:
    """bool [slices, R]: the rows at the elements of `start` that each slice has a gradient for."""
    leaf = record.values[start].tensor.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        value = record.run_again({start: leaf}, number).movedim(axis, 0)
    drawn = torch.rand(value[0].shape, generator=torch.Generator().manual_seed(0)) + 0.5
    used = torch.zeros(len(value), product.height, dtype=torch.bool)
    if not value.requires_grad:
        return ~used  # no gradient tells anything: every row may matter
    for k, piece in enumerate(value):
        (gradient,) = torch.autograd.grad(piece, leaf, drawn.to(piece), retain_graph=True)
        used[k, rows[gradient != 0]] = True
    return used


def _described(
    record: Record,
    call: Call,
    parts: dict[str, Part],
    linear: dict[int, Product],
    norms: Sequence[Norm],
) -> Attention:
    notes: list[str] = []
    sources = {x: feeding(record, parts[x].value, linear) for x in "qkv"}
    axes: dict[str, tuple[int | None, int]] = {}
    used: dict[str, Tensor] = {}
    batch = len(record.inputs)
    for x in "qkv":
        if len(sources[x]) == 1:
            axes[x], used[x] = _heads_of(record, sources[x][0], parts[x], batch, norms)
        else:
            axes[x] = _assumed_heads(parts[x])
            notes.append(f"{x} comes from {len(sources[x])} weights, not one: no heads")
    heads = _count(record, parts["q"], axes["q"], batch)
    groups, projections = _groups(used, sources, heads, notes)
    kv_heads = len(set(groups)) if groups else heads
    operands = {x: _operand(part, axes.get(x, axes["q"]), heads) for x, part in parts.items()}
    output = next(iter(following(record, parts["output"].value, linear)), None)
    site = AttentionSite(
        call.site, heads, kv_heads, record.values[parts["q"].value].tensor.shape[parts["q"].width],
        _is_causal(record, call, parts), groups, **operands,
    )  # fmt: skip
    columns: tuple[tuple[int, ...], ...] = ()
    if output is not None:
        columns = _columns(record, output, parts["output"], operands["output"], heads, norms)
    if output is not None and not columns:
        notes.append("the output projection's columns don't split by head")
    whole = _undecided(used, sources, projections)
    return Attention(call, parts, site, projections, sources, output, columns, tuple(notes), whole)


def _heads_of(
    record: Record, product: Product, part: Part, batch: int, norms: Sequence[Norm]
) -> tuple[tuple[int | None, int], Tensor]:
    """((head axis or None, heads folded in the batch axis), rows used by each head)."""
    sizes = record.values[part.value].tensor.shape
    for axis in reversed(part.leading):
        if sizes[axis] == 1:
            continue
        used = rows_by_slice(record, product, part.value, axis, norms)
        if bool((used == used[0]).all()):
            continue
        heads = sizes[axis] // batch
        folded = axis == part.leading[0] and len(part.leading) == 1 and heads * batch == sizes[axis]
        if folded and batch > 1 and bool((used == used[:heads].repeat(batch, 1)).all()):
            return (None, heads), used[:heads]
        return (axis, 0), used
    whole = rows_by_slice(record, product, part.value, part.token, norms).any(0)
    return _assumed_heads(part), whole[None]


def _assumed_heads(part: Part) -> tuple[int | None, int]:
    """With nothing to tell heads by: the axis next to the tokens when there are two or more."""
    return (part.leading[-1], 0) if len(part.leading) > 1 else (None, 1)


def _count(record: Record, part: Part, axes: tuple[int | None, int], batch: int) -> int:
    axis, folded = axes
    return folded if axis is None else record.values[part.value].tensor.shape[axis]


def _groups(
    used: dict[str, Tensor],
    sources: dict[str, tuple[Product, ...]],
    heads: int,
    notes: list[str],
) -> tuple[tuple[int, ...], dict[str, Projection]]:
    """The key/value head of each query head, and the projections whose heads are apart."""
    projections = {}
    for x, mask in used.items():
        if not _apart(mask) or (x == "q" and len(torch.unique(mask, dim=0)) != heads):
            notes.append(f"heads of {x} share weight rows: no heads")
            continue
        rows = tuple(tuple(row.nonzero().flatten().tolist()) for row in mask)
        projections[x] = Projection(sources[x][0], rows)
    if "k" not in projections:
        return (), projections
    arriving = _distinct(projections["k"].rows)
    if "v" in projections and _distinct(projections["v"].rows) != arriving:
        notes.append("k and v are shared among heads in different ways: no heads for v")
        del projections["v"]
    if heads % len(arriving):
        notes.append(f"{heads} query heads can't share {len(arriving)} key heads")
        return (), projections
    repeat = heads // len(arriving)
    return tuple(g for g in arriving for _ in range(repeat)), projections


def _distinct(rows: tuple[tuple[int, ...], ...]) -> list[int]:
    """For each arriving head which distinct one it is, in order of arrival."""
    order = list(dict.fromkeys(rows))
    return [order.index(each) for each in rows]


def _undecided(
    used: dict[str, Tensor],
    sources: dict[str, tuple[Product, ...]],
    projections: dict[str, Projection],
) -> dict[str, Matrix]:
    """The rows of q, k or v as a whole where the heads are mixed but the three are apart."""
    found = {}
    for x, mask in used.items():
        others = [m.any(0) for y, m in used.items() if y != x and sources[y][0] is sources[x][0]]
        own = mask.any(0)
        if x not in projections and not any(bool((own & other).any()) for other in others):
            rows = tuple(own.nonzero().flatten().tolist())
            found[x] = _rows_of(sources[x][0], rows)
    return found


def _apart(mask: Tensor) -> bool:
    """Whether the heads' row sets are equal or disjoint, none empty, all of one size."""
    distinct = torch.unique(mask, dim=0)
    sizes = distinct.sum(1)
    return bool((distinct.sum(0) <= 1).all() and (sizes == sizes[0]).all() and sizes[0] > 0)


def _operand(part: Part, axes: tuple[int | None, int], heads: int) -> Operand:
    axis, folded = axes
    if axis is None:
        return Operand(part.site, (*part.leading, part.token, part.width), folded)
    place = axis if axis in part.leading else part.leading[-1]
    others = tuple(a for a in part.leading if a != place)
    return Operand(part.site, (*others, place, part.token, part.width))


def following(record: Record, number: int, linear: dict[int, Product]) -> list[Product]:
    """The nearest linear maps that a value goes into, in order."""
    found: dict[int, Product] = {}
    waiting, seen = [number], set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for call in record.consumers(current):
            if call.index in linear:
                found[call.index] = linear[call.index]
            elif call.op in RESHAPES | POINTWISE | NORMS:
                waiting.extend(call.outputs)
    return [found[k] for k in sorted(found)]


def _columns(
    record: Record,
    product: Product,
    part: Part,
    operand: Operand,
    heads: int,
    norms: Sequence[Norm],
) -> tuple[tuple[int, ...], ...]:
    """The columns of the output projection that each head goes into; empty when mixed."""
    shape = record.values[part.value].tensor.shape
    axis = operand.axes[-3] if operand.folded != 1 or len(operand.axes) > 2 else 0
    label = torch.arange(shape[axis]) % (operand.folded or shape[axis])
    label = label.reshape([-1 if a == axis else 1 for a in range(len(shape))]).expand(shape)
    shortcuts = {n.output: n.source for n in norms}
    head = places(record, part.value, product.source, frozenset(NORMS), shortcuts, label)
    if head is None or bool((head < 0).any()):
        return ()
    others = [a for a in range(head.ndim) if a not in product.summed]
    head = head.permute(*others, *product.summed)
    head = head.flatten(0, len(others) - 1) if others else head[None]
    if not bool((head == head[0]).all()):
        return ()
    columns = [product.columns[head[0] == h].flatten().sort().values.tolist() for h in range(heads)]
    return tuple(map(tuple, columns))


def _is_causal(record: Record, call: Call, parts: dict[str, Part]) -> bool:
    if call.op == SDPA:
        return bool(sdpa_argument(call.args, call.kwargs, "is_causal")) or _mask_is_causal(
            record, call
        )
    maps = record.values[parts["probabilities"].value].tensor
    p = parts["probabilities"]
    maps = maps.permute(*p.leading, p.token, p.width)
    return _lower_triangular(maps > 0)


def _mask_is_causal(record: Record, call: Call) -> bool:
    number = record.value(sdpa_argument(call.args, call.kwargs, "attn_mask"))
    if number is None:
        return False
    mask = record.values[number].tensor
    return _lower_triangular(mask if mask.dtype == torch.bool else mask > HIDDEN)


def _lower_triangular(visible: Tensor) -> bool:
    if visible.shape[-1] != visible.shape[-2] or visible.shape[-1] < 2:
        return False
    return not bool(visible.triu(1).any())


SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def sdpa_argument(args: tuple[object, ...], kwargs: dict[str, object], name: str) -> object:
    """One argument of scaled_dot_product_attention, by position or keyword."""
    if name in kwargs:
        return kwargs[name]
    position = SDPA_ARGUMENTS.index(name) if name in SDPA_ARGUMENTS else len(args)
    return args[position] if position < len(args) else None
