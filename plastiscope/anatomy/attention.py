"""The attentions of a pass: where they happen, and which weights make which head.

Axes: B inputs, H heads, T tokens (Tq queries, Tk keys), dh head width, R rows of a weight matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plastiscope.anatomy.flow import NORMS, places
from plastiscope.anatomy.operands import (
    DIVISIONS,
    HIDDEN,
    SDPA,
    SOFTMAXES,
    Part,
    explicit_parts,
    fused_parts,
    sdpa_argument,
)
from plastiscope.anatomy.parts import AttentionSite, Matrix, Operand
from plastiscope.anatomy.products import Product
from plastiscope.anatomy.record import Call, Record
from plastiscope.anatomy.rows import feeding, following, reached, rows_by_slice
from plastiscope.anatomy.sites import Norm


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
    `apart` are the heads of q, k and v when each has a weight of its own.
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
    apart: Mapping[str, tuple[Matrix, ...]] = field(default_factory=dict)


def _rows_of(product: Product, rows: tuple[int, ...], keep: bool = False) -> Matrix:
    whole = not keep and len(rows) == product.height
    return Matrix(product.tensor, product.matrix.out_axes, None if whole else rows)


def attentions(
    record: Record, linear: list[Product], norms: Sequence[Norm], unread: dict[str, str]
) -> list[Attention]:
    """Every attention of the pass whose queries depend on the inputs, in order.

    Others are left out, as are those whose maps are over channels, not tokens: their modules are
    put into `unread`, with the reason.
    """
    by_call = {p.call.index: p for p in linear if not p.is_depthwise}
    found = []
    for call in record.calls:
        if call.op == SDPA:
            parts = fused_parts(record, call)
        elif call.op in SOFTMAXES | DIVISIONS:
            parts = explicit_parts(record, call, by_call)
        else:
            continue
        if parts is None:
            continue
        if not record.values[parts["q"].value].live:
            unread[call.site.module] = "same_queries"
        elif _over_channels(record, parts["q"], by_call, norms):
            unread[call.site.module] = "over_channels"
        else:
            found.append(_described(record, call, parts, by_call, norms))
    return found


def _over_channels(
    record: Record, part: Part, linear: dict[int, Product], norms: Sequence[Norm]
) -> bool:
    """Whether what stands for the tokens of q are rows of its weight."""
    sources = feeding(record, part.value, linear)
    if len(sources) != 1:
        return False
    shortcuts = {n.output: n.source for n in norms}
    rows = reached(record, sources[0], part.value, frozenset(NORMS), shortcuts)
    if rows is None or rows.shape[part.width] < 2:
        return False
    alike = rows.movedim(part.width, 0)
    others = rows.movedim(part.token, 0)
    return bool((alike == alike[0]).all()) and not bool((others == others[0]).all())


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
            found, used[x] = _heads_of(record, sources[x][0], parts[x], batch, norms)
            axes[x] = found or _joint_heads(record, parts[x], axes.get("q"), used[x])
        else:
            axes[x] = _assumed_heads(parts[x])
            notes.append(f"{x} comes from {len(sources[x])} weights, not one: no heads")
    heads = _count(record, parts["q"], axes["q"], batch)
    widths = {x: record.values[part.value].tensor.shape[part.width] for x, part in parts.items()}
    groups, projections = _groups(used, widths, sources, heads, notes)
    kv_heads = len(set(groups)) if groups else heads
    operands = {x: _operand(part, axes.get(x, axes["q"]), heads) for x, part in parts.items()}
    output = next(iter(following(record, parts["output"].value, linear)), None)
    site = AttentionSite(
        call.site, heads, kv_heads, record.values[parts["q"].value].tensor.shape[parts["q"].width],
        _is_causal(record, call, parts), groups,
        operands["q"], operands["k"], operands["v"], operands["output"],
        operands.get("scores"), operands.get("probabilities"),
    )  # fmt: skip
    columns: tuple[tuple[int, ...], ...] = ()
    if output is not None:
        labels = head_labels(record, output, parts["output"], operands["output"], norms)
        columns = columns_of(output, labels, heads)
    if output is not None and not columns:
        notes.append("the output projection's columns don't split by head")
    whole = _undecided(used, sources, projections)
    return Attention(call, parts, site, projections, sources, output, columns, tuple(notes), whole)


def _heads_of(
    record: Record, product: Product, part: Part, batch: int, norms: Sequence[Norm]
) -> tuple[tuple[int | None, int] | None, Tensor]:
    """((head axis or None, heads folded in the batch axis), rows used by each head).

    With None in place of the axes, and the rows of all heads, when no axis tells heads apart.
    """
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
    return None, rows_by_slice(record, product, part.value, None, norms)


def _joint_heads(
    record: Record, part: Part, queries: tuple[int | None, int] | None, used: Tensor
) -> tuple[int | None, int]:
    """The heads' axis where the same rows make everything: the queries' own, for shared keys.

    Queries that one head's rows make are one head, whatever windows there are.
    """
    sizes = record.values[part.value].tensor.shape
    if queries is not None:
        own = queries[0] in part.leading or queries == (None, 1)
        return queries if own else _assumed_heads(part)
    if int(used.sum()) > sizes[part.width]:
        return _assumed_heads(part)
    single = [axis for axis in part.leading[1:] if sizes[axis] == 1]
    return (single[-1], 0) if single else (None, 1)


def _assumed_heads(part: Part) -> tuple[int | None, int]:
    """With nothing to tell heads by: the axis next to the tokens when there are two or more."""
    return (part.leading[-1], 0) if len(part.leading) > 1 else (None, 1)


def _count(record: Record, part: Part, axes: tuple[int | None, int], batch: int) -> int:
    axis, folded = axes
    return folded if axis is None else record.values[part.value].tensor.shape[axis]


def _groups(
    used: dict[str, Tensor],
    widths: Mapping[str, int],
    sources: dict[str, tuple[Product, ...]],
    heads: int,
    notes: list[str],
) -> tuple[tuple[int, ...], dict[str, Projection]]:
    """The key/value head of each query head, and the projections whose heads are apart."""
    projections = {}
    for x, mask in used.items():
        few = len(torch.unique(mask, dim=0)) != heads if x == "q" else False
        if not _apart(mask) or few or int(mask[0].sum()) > widths[x]:
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


def head_labels(
    record: Record, product: Product, part: Part, operand: Operand, norms: Sequence[Norm]
) -> Tensor | None:
    """Of each element that a projection takes the head it comes from, -1: from none of these."""
    shape = record.values[part.value].tensor.shape
    axis = operand.axes[-3] if operand.folded != 1 or len(operand.axes) > 2 else 0
    label = torch.arange(shape[axis]) % (operand.folded or shape[axis])
    label = label.reshape([-1 if a == axis else 1 for a in range(len(shape))]).expand(shape)
    shortcuts = {n.output: n.source for n in norms}
    return places(record, part.value, product.source, frozenset(NORMS), shortcuts, label)


def columns_of(product: Product, head: Tensor | None, heads: int) -> tuple[tuple[int, ...], ...]:
    """The columns of a projection that each head goes into; empty when mixed."""
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
