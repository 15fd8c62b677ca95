"""Prove a map: from the canonical slices alone, compute what the model's attention computed.

For each head everything but its own rows is left out of the projection, and the model's own steps
from there to the attention (norms, rotary positions) are run again. A wrong layout leaves out what
the head needs, so the result differs.

Axes: B inputs, H heads, T tokens, dh head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor, nn

from plastiscope.anatomy.flow import NORMS
from plastiscope.anatomy.operands import SDPA
from plastiscope.anatomy.parts import Anatomy, AttentionSite, Component, Matrix, Operand
from plastiscope.anatomy.products import Product, operands_of, products
from plastiscope.anatomy.record import Call, Record, record_pass
from plastiscope.anatomy.rows import feeding, following, reached
from plastiscope.anatomy.sites import Norm, norms, reaches
from plastiscope.anatomy.watch import AttentionCall, explicit_call, fused_call
from plastiscope.models.live import Batch

TOLERANCE = {torch.float64: 1e-6}
"""Largest error, relative to the largest value, that still proves a map; 1e-5 below float64."""


@dataclass(frozen=True)
class Proof:
    """Whether one block's map is right, as far as it claims heads.

    `error` is the largest difference of q, k, v, attention probabilities, mixed values and the
    projected output from the model's own, each relative to its largest value; `reason` says what
    failed first.
    """

    block: int
    ok: bool
    error: float
    tolerance: float
    reason: str = ""


def verify(
    module: nn.Module,
    forward: Callable[[Batch], Tensor],
    batch: Batch,
    anatomy: Anatomy,
    tensors: Mapping[str, Tensor],
) -> tuple[Proof, ...]:
    """One proof for every attention of the anatomy, on the module's present weights.

    A part without heads claims nothing, and the model's own values stand in for it; a block in
    which neither q, k nor v has heads isn't proved.

    `tensors` gives the effective weights by the anatomy's names: the checkpoint's own.
    """
    record = record_pass(module, forward, batch)
    linear = {p.call.index: p for p in products(record) if not p.is_depthwise}
    scene = _Scene(record, linear, norms(record), tensors)
    parts = {(c.name, c.block): c for c in anatomy.components}
    return tuple(
        _proof(scene, block, site, {x: parts.get((x, block)) for x in (*"qkv", "attention_output")})
        for block, site in anatomy.attention.items()
    )


@dataclass(frozen=True)
class _Scene:
    record: Record
    linear: dict[int, Product]
    norms: Sequence[Norm]
    tensors: Mapping[str, Tensor]


class RefutedError(Exception):
    """The map can't be right, and why."""


def _proof(
    scene: _Scene, block: int, site: AttentionSite, parts: Mapping[str, Component | None]
) -> Proof:
    record, pieces = scene.record, _pieces(site, parts)
    errors: dict[str, float] = {}
    tolerance = 1e-5
    try:
        for own, split in pieces:
            dtype = record.values[record.at(_operand(own, "q").site)].tensor.dtype
            tolerance = TOLERANCE.get(dtype, 1e-5)
            for name, error in _errors(scene, own, split, tolerance).items():
                errors[name] = max(errors.get(name, 0.0), error, key=_size)
        output = parts["attention_output"]
        if output is not None and output.heads:
            errors["attention_output"] = _projected(scene, [own for own, _ in pieces], output)
    except (RefutedError, LookupError) as refuted:
        return Proof(block, False, math.inf, tolerance, str(refuted))
    wrong = [x for x, error in errors.items() if not error <= tolerance]
    worst = max(errors.values(), key=_size)
    reason = f"{wrong[0]} rebuilt from the slices differs from the model's own" if wrong else ""
    return Proof(block, not wrong, worst, tolerance, reason)


def _size(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _pieces(
    site: AttentionSite, parts: Mapping[str, Component | None]
) -> list[tuple[AttentionSite, dict[str, Component]]]:
    """Each attention call with the parts that have heads, and those that it computes."""
    split = {x: part for x in "qkv" if (part := parts[x]) is not None and part.heads}
    if not site.parts:
        return [(site, split)]
    pieces, first = [], 0
    for own in site.parts:
        queries = range(first, first + own.heads)
        shared = dict.fromkeys(site.kv_of_head[h] if site.kv_of_head else h for h in queries)
        chosen = {"q": list(queries), "k": list(shared), "v": list(shared)}
        cut = {
            x: replace(part, heads=tuple(part.heads[k] for k in chosen[x]))
            for x, part in split.items()
        }
        pieces.append((own, cut))
        first += own.heads
    return pieces


def _errors(
    scene: _Scene, site: AttentionSite, split: Mapping[str, Component], tolerance: float
) -> dict[str, float]:
    """The errors of one attention call up to its mixed values."""
    record = scene.record
    if not split:
        raise RefutedError("neither q, k nor v has heads")
    rebuilt = {x: _rebuilt(scene, site, x, part) for x, part in split.items()}
    errors = {
        x: _error(value, record.values[record.at(_operand(site, x).site)].tensor)
        for x, value in rebuilt.items()
    }
    own, new = _attention(record, site, {}), _attention(record, site, rebuilt)
    errors["probabilities"] = _error(new.probabilities, own.probabilities)
    # Where heads are mixed after the softmax, the model's own steps mix them again.
    plain = _error(_mixed(own, site), own.output) <= tolerance
    errors["mixed values"] = _error(_mixed(new, site) if plain else new.output, own.output)
    return errors


def _operand(site: AttentionSite, name: str) -> Operand:
    operand: Operand | None = getattr(site, name)
    if operand is None:
        raise RefutedError(f"where {name} lies in the attention isn't known")
    return operand


def _error(new: Tensor, own: Tensor) -> float:
    scale = own.abs().max().double().clamp(min=1e-30)
    return ((new - own).abs().max() / scale).item()


# --- q, k and v ---


def _rebuilt(scene: _Scene, site: AttentionSite, letter: str, part: Component) -> Tensor:
    """q, k or v as it arrives at the attention, each head from its own slice alone."""
    record, operand = scene.record, _operand(site, letter)
    number = record.at(operand.site)
    sources = feeding(record, number, scene.linear)
    if len(sources) != 1 or any(h.tensor != sources[0].tensor for h in part.heads):
        raise RefutedError(f"{letter} doesn't come from {part.heads[0].tensor} alone")
    product = sources[0]
    _refuse_overlap(
        part.heads, product, letter, record.values[number].tensor.shape[operand.axes[-1]]
    )
    made = _product_output(scene, product, part.heads)
    value = _by_head(scene, site, letter, part.heads, product, made, product.output)
    own = record.values[number].tensor
    for norm in reversed(scene.norms):
        if _error(value, own) <= TOLERANCE.get(own.dtype, 1e-5):
            break
        if reaches(record, product.output, norm.source) and reaches(record, norm.output, number):
            normed = record.run_again({product.output: made}, norm.output)
            value = _by_head(scene, site, letter, part.heads, product, normed, norm.output)
    return value


def _refuse_overlap(heads: Sequence[Matrix], product: Product, letter: str, width: int) -> None:
    """Heads that share rows, or have more than they are wide, would be proved by excess."""
    rows = [_rows(head, product) for head in heads]
    count = len(set(torch.cat(rows).tolist()))
    if count != sum(map(len, rows)) or len({len(r) for r in rows}) != 1:
        raise RefutedError(f"heads of {letter} share rows or differ in size")
    if len(rows[0]) > width:
        raise RefutedError(f"a head of {letter} has {len(rows[0])} rows for a width of {width}")


def _product_output(scene: _Scene, product: Product, heads: Sequence[Matrix]) -> Tensor:
    """The projection's output with a weight that holds the heads' slices and zeros elsewhere."""
    record = scene.record
    weight = torch.zeros_like(record.values[record.named(product.tensor)].tensor)
    weight = _filled(weight, heads, scene.tensors[product.tensor])
    return _with_weight(record, product, weight, record.values[product.source].tensor)


def _with_weight(record: Record, product: Product, weight: Tensor, source: Tensor) -> Tensor:
    pair = operands_of(record, product.call)
    assert pair is not None
    operand = pair[0] if pair[1] == product.source else pair[1]
    base = record.named(product.tensor)
    if operand != base:
        weight = record.run_again({base: weight}, operand)
    return record.outputs_with(product.call, {operand: weight, product.source: source})[0]


def _filled(weight: Tensor, matrices: Sequence[Matrix], source: Tensor) -> Tensor:
    """A weight with the matrices' elements copied from the source tensor."""
    place = torch.arange(weight.numel(), device=weight.device).reshape(weight.shape)
    places = torch.cat([m.of(place).flatten() for m in matrices])
    filled = weight.flatten().clone()
    filled[places] = source.to(weight).flatten()[places]
    return filled.reshape(weight.shape)


def _by_head(
    scene: _Scene,
    site: AttentionSite,
    letter: str,
    heads: Sequence[Matrix],
    product: Product,
    made: Tensor,
    start: int,
) -> Tensor:
    """The value at the attention, each head computed with all rows but its own set to zero."""
    record, operand = scene.record, _operand(site, letter)
    number = record.at(operand.site)
    rows = _row_numbers(scene, product, start)
    value = torch.zeros_like(record.values[number].tensor)
    arriving = _arriving(site, letter, value, operand)
    owner = torch.full((product.height + 1,), -1)
    for k, head in enumerate(heads):
        owner[_rows(head, product)] = k
    owners = owner[rows].to(made.device)  # -1, made from no row, is the last entry
    for k in range(len(heads)):
        masked = torch.where(owners == k, made, torch.zeros_like(made))
        new = masked if start == number else record.run_again({start: masked}, number)
        value = torch.where(arriving == k, new, value)
    return value


def _row_numbers(scene: _Scene, product: Product, start: int) -> Tensor:
    shortcuts = {n.output: n.source for n in scene.norms}
    rows = reached(scene.record, product, start, frozenset(NORMS), shortcuts)
    if rows is None:
        raise RefutedError("a norm moves the projection's rows")
    return rows


def _rows(head: Matrix, product: Product) -> Tensor:
    if head.columns is not None or head.out_axes != product.matrix.out_axes:
        raise RefutedError(f"a head isn't rows of {head.tensor} as the model uses it")
    return torch.tensor(head.rows if head.rows is not None else range(product.height))


def _arriving(site: AttentionSite, letter: str, value: Tensor, operand: Operand) -> Tensor:
    """For each element of an operand the head whose it is; grouped heads may arrive repeated."""
    axis = operand.axes[-3] if len(operand.axes) > 2 else None
    if axis is None or operand.folded == 1:
        return torch.zeros(value.shape, dtype=torch.int64, device=value.device)
    count = operand.folded or value.shape[axis]
    head = torch.arange(value.shape[axis]) % count
    if letter != "q" and count == site.heads and len(site.kv_of_head) == site.heads:
        head = torch.tensor(site.kv_of_head)[head]
    head = head.reshape([-1 if a == axis else 1 for a in range(value.ndim)])
    return head.expand(value.shape).to(value.device)


# --- the attention and what follows ---


def _attention(record: Record, site: AttentionSite, new: Mapping[str, Tensor]) -> AttentionCall:
    """The attention with some operands replaced: by the model's own explicit steps, or anew."""
    given = {record.at(_operand(site, x).site): value for x, value in new.items()}
    if site.site.op == SDPA:
        call = _call_at(record, site)
        args = tuple(_fill(record, a, given) for a in call.args)
        kwargs = {k: _fill(record, a, given) for k, a in call.kwargs.items()}
        return fused_call(site, args, kwargs, record.values[call.outputs[0]].tensor)
    held = {}
    for name in ("q", "k", "v", "scores", "probabilities", "output"):
        number = record.at(_operand(site, name).site)
        fixed = given.get(number, record.values[number].tensor)
        late = name in ("scores", "probabilities", "output") and given
        held[name] = record.run_again(given, number) if late else fixed
    return explicit_call(site, held)


def _call_at(record: Record, site: AttentionSite) -> Call:
    call = record.call_of(record.at(site.site))
    if call is None:
        raise RefutedError("the attention wasn't reached")
    return call


def _fill(record: Record, item: object, given: Mapping[int, Tensor]) -> object:
    number = record.value(item)
    return item if number is None else given.get(number, record.values[number].tensor)


def _mixed(call: AttentionCall, site: AttentionSite) -> Tensor:
    """Probabilities times v: [B, H, T, dh]."""
    v = call.v
    if v.shape[1] != call.q.shape[1]:
        v = v[:, list(site.kv_of_head)]
    return call.probabilities.to(v) @ v


def _projected(scene: _Scene, sites: Sequence[AttentionSite], part: Component) -> float:
    """The error of the output projection as a sum over heads, each through its own columns."""
    record = scene.record
    product = _projection(scene, record.at(_operand(sites[0], "output").site), part)
    weight = record.values[record.named(product.tensor)].tensor
    nothing = torch.zeros_like(record.values[product.source].tensor)
    bias = _with_weight(record, product, torch.zeros_like(weight), nothing)
    total, heads = bias.clone(), iter(part.heads)
    for site in sites:
        operand = _operand(site, "output")
        start = record.at(operand.site)
        if any(
            record.precedes(start, n.output) and reaches(record, n.output, product.source)
            for n in scene.norms
        ):
            return 0.0  # a norm over all heads stands between: no head passes through it alone
        mixed = record.values[start].tensor
        arriving = _arriving(site, "q", mixed, operand)
        for k, head in enumerate(islice(heads, site.heads)):
            own = torch.where(arriving == k, mixed, torch.zeros_like(mixed))
            if start != product.source:
                own = _alone(record, start, own, product.source)
            slices = _filled(torch.zeros_like(weight), [head], scene.tensors[head.tensor])
            total = total + _with_weight(record, product, slices, own) - bias
    return _error(total, record.values[product.output].tensor)


def _alone(record: Record, start: int, value: Tensor, end: int) -> Tensor:
    """What becomes of one head's values; others' that join it don't matter to its columns."""
    return record.run_again({start: value}, end)


def _projection(scene: _Scene, start: int, part: Component) -> Product:
    after = following(scene.record, start, scene.linear)
    if not after or after[0].tensor != part.heads[0].tensor:
        raise RefutedError(f"the attention output doesn't go into {part.heads[0].tensor}")
    return after[0]
