"""Find every part of a live network from one tiny forward pass, with no table of architectures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from plastiscope.anatomy.apart import joined
from plastiscope.anatomy.attention import Attention, attentions
from plastiscope.anatomy.batches import (
    attention_by_input,
    input_axes,
    operand_values,
    other_inputs,
    placed_by_input,
    seen_values,
    sites_of,
    told_again,
    untold,
)
from plastiscope.anatomy.blocks import Block, Scene, blocks
from plastiscope.anatomy.cls import holders, prefix_tokens
from plastiscope.anatomy.naming import (
    components_of,
    linear_component,
    norm_component,
    rows_seen,
    seen,
)
from plastiscope.anatomy.parts import Anatomy, Component, Matrix, own_name
from plastiscope.anatomy.products import Product, products
from plastiscope.anatomy.random_weights import random_parameters
from plastiscope.anatomy.record import Record, record_pass
from plastiscope.anatomy.sites import norms, reaches, residuals, within
from plastiscope.anatomy.stacks import stack_components
from plastiscope.anatomy.unread import add_products, notes_of
from plastiscope.models.live import Batch


def trace(module: nn.Module, forward: Callable[[Batch], Tensor], batch: Batch) -> Anatomy:
    """Every part of the network, from one pass over a batch of two or three inputs.

    The pass runs in eval mode with random parameters (nothing depends on the checkpoint's values)
    and, for images and vectors, random inputs; the module is left as it was. Head slices are the
    rows of a weight from which a head's q, k or v is computed; where they can't be told apart
    the component has no heads and a note says why.
    """
    batch = _tried(batch)
    with random_parameters(module):
        return _anatomy(
            record_pass(module, forward, batch),
            lambda other: record_pass(module, forward, {**batch, "inputs": other}),
        )


def _tried(batch: Batch) -> Batch:
    """The batch with random inputs, and two of them when there is one.

    With a single input heads folded into the batch axis couldn't be told from inputs.
    """
    inputs = batch["inputs"]
    times = 2 if len(inputs) == 1 else 1
    inputs = torch.cat([inputs] * times)
    if inputs.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(inputs.shape, generator=generator).to(inputs)
    others = {name: torch.cat([tensor] * times) for name, tensor in batch.items()}
    return {**others, "inputs": inputs}


def _anatomy(record: Record, run: Callable[[Tensor], Record]) -> Anatomy:
    """The anatomy of a pass; `run` makes another one over other inputs."""
    linear = products(record)
    normalised = norms(record)
    unread: dict[str, str] = {}
    attention = joined(record, attentions(record, linear, normalised, unread), normalised)
    head = _head(record, linear, attention)
    scene = Scene(record, linear, attention, normalised, residuals(record, linear), head)
    found = blocks(scene)
    add_products(record, found, unread)
    parts = _embedding(scene, found)
    for block in found:
        parts += components_of(scene, block)
    if not found:
        parts += stack_components(scene, head)
    else:
        parts += _final_norm(scene, found, head)
    if head is not None:
        parts.append(linear_component(scene, "head", head, None))
    parts += _others(scene, parts, found)
    ends = {found[0].start, found[-1].end} if found else set()
    sites = {b.index: b.attention.site for b in found}
    ends |= operand_values(record, sites.values())
    axes = input_axes(record, seen_values(record, parts) | ends)
    if untold(axes) and (other := other_inputs(record.inputs)) is not None:
        axes |= told_again(record, run(other), sites_of(parts))
    sites = {block: attention_by_input(record, site, axes) for block, site in sites.items()}
    parts = placed_by_input(record, parts, axes)
    cls, prefix, more = prefix_tokens(scene, found, axes)
    if cls is not None:
        having = holders(record, found, sites, axes, cls)
        parts = [replace(c, before_cls=having.lacks(c)) for c in parts]
    notes = [*notes_of(unread), *more]
    for block in found:
        every = (*block.attention.notes, *block.notes)
        notes += [f"block {block.index}: {note}" for note in every]
    return Anatomy(
        tuple(parts), sites, cls, prefix, "trace",
        _unused(record), tuple(notes), {b.index: b.experts for b in found if b.experts}, unread,
    )  # fmt: skip


def _head(record: Record, linear: list[Product], attention: list[Attention]) -> Product | None:
    """The linear map that makes the output."""
    ends = [
        p
        for p in linear
        if reaches(record, p.output, record.output)
        and not any(record.precedes(p.output, q.output) for q in linear)
    ]
    after = [a.output for a in attention]
    return ends[0] if ends and ends[0] not in after else None


def _embedding(scene: Scene, found: list[Block]) -> list[Component]:
    """What makes the stream that enters the first block."""
    if not found:
        return []
    record, start = scene.record, found[0].start
    tables = [
        call
        for call in record.calls
        if call.op == "embedding" and record.values[call.outputs[0]].live
    ]
    names = [record.name(n) for call in tables[:1] for n in call.inputs if record.values[n].learned]
    tokens = [Matrix(n, (1,)) for n in names if n]
    makers = _before(scene, start)
    weights = (tokens or [p.matrix for p in makers[-1:]])[:1]
    path = weights[0].tensor.rpartition(".")[0] if weights else ""
    return [seen(scene, Component("embedding", None, path, tuple(weights)), start)]


def _before(scene: Scene, start: int) -> list[Product]:
    """The linear maps that every value of a stream's beginning has passed, in order: no branches
    beside a sum, which are parts of something deeper."""
    record = scene.record
    beside = {
        p.call.index for r in scene.residuals if reaches(record, r.output, start) for p in r.linear
    }
    return [
        p for p in scene.linear if reaches(record, p.output, start) and p.call.index not in beside
    ]


def _final_norm(scene: Scene, found: list[Block], head: Product | None) -> list[Component]:
    record, used = scene.record, {id(n) for b in found for n in (b.norm1, b.norm2)}
    end = head.source if head else record.output
    fitting = [
        n
        for n in scene.norms
        if id(n) not in used
        and reaches(record, found[-1].end, n.source)
        and reaches(record, n.output, end)
        and not any(within(record, p, found[-1].end, n.source) for p in scene.linear)
    ]
    return [norm_component(scene, "final_norm", fitting[-1], None)] if fitting else []


def _others(scene: Scene, parts: list[Component], found: list[Block]) -> list[Component]:
    """Everything that has no canonical name, under its own path."""
    record = scene.record
    claimed = {m.tensor for c in parts for m in c.weights}
    owners = {c.path for c in parts if c.weights}
    stems = {p.tensor for p in _before(scene, found[0].start)} if found else set()
    extra: list[Component] = []
    for product in {p.tensor: p for p in reversed(scene.linear)}.values():
        name, block = own_name(product.tensor), _block_of(found, product.tensor)
        if product.tensor not in claimed:
            part = linear_component(scene, name, product, block)
            extra.insert(0, replace(part, embeds=product.tensor in stems))
        elif (rest := _rest(product, parts)) is not None:
            extra.insert(0, rows_seen(scene, name, product, rest, block))
        claimed.add(product.tensor)
    for norm in scene.norms:
        if norm.weight and norm.weight not in claimed:
            claimed.add(norm.weight)
            name, block = own_name(norm.weight), _block_of(found, norm.weight)
            extra.append(norm_component(scene, name, norm, block))
    owners |= {c.path for c in extra}
    embedded = _embedded(record, found)
    for name, parameter in record.module.named_parameters():
        owner = name.rpartition(".")[0]
        if (
            name.rpartition("_")[0] in claimed
            or name in claimed
            or (owner in owners and parameter.ndim == 1)
            or "parametrizations." in name
        ):
            continue
        part = Component(own_name(name), _block_of(found, name), owner, (Matrix(name),))
        extra.append(replace(part, embeds=name in embedded))
    return extra


def _rest(product: Product, parts: list[Component]) -> Matrix | None:
    """The rows of a linear map that no part claims, when parts claim others."""
    own = [m for c in parts for m in c.weights if m.tensor == product.tensor]
    if any(m.rows is None or m.out_axes != product.matrix.out_axes for m in own):
        return None
    rows = sorted(set(range(product.height)) - {r for m in own for r in m.rows or ()})
    return Matrix(product.tensor, product.matrix.out_axes, tuple(rows)) if rows else None


def _embedded(record: Record, found: list[Block]) -> set[str]:
    """The names of what goes into a stream where it begins: tables of positions, CLS tokens."""
    ends = [-1, *(b.end for b in found)]
    waiting = [
        b.start
        for b, end in zip(found, ends, strict=False)
        if end < 0 or not reaches(record, end, b.start)
    ]
    names, seen = set[str](), set[int]()
    while waiting:
        number = waiting.pop()
        call = record.call_of(number)
        if number in seen:
            continue
        seen.add(number)
        names.add(record.name(number) or "")
        waiting += call.inputs if call is not None else ()
    return names


def _block_of(found: list[Block], path: str) -> int | None:
    """The block in whose modules a path lies, when the blocks' modules are apart."""
    prefixes = {b.index: _prefix(b) for b in found}
    fitting = [
        k for k, prefix in prefixes.items() if prefix and (path + ".").startswith(prefix + ".")
    ]
    return fitting[0] if len(fitting) == 1 else None


def _prefix(block: Block) -> str:
    paths = [p.path for side in block.attention.sources.values() for p in side]
    paths += [p.path for p in block.linear]
    common = paths[0].split(".") if paths else []
    for path in paths[1:]:
        parts = path.split(".")
        agree = [a == b for a, b in zip(common, parts, strict=False)]
        common = common[: agree.index(False) if False in agree else len(agree)]
    return ".".join(common)


def _unused(record: Record) -> tuple[str, ...]:
    """Parameters that the pass never touched."""
    used = {n for call in record.calls for n in call.inputs}
    return tuple(v.name for v in record.values if v.name and v.learned and v.number not in used)
