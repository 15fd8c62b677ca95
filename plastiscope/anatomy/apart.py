"""Heads that are computed one by one, each with weights and a softmax of its own, as one attention.

They are told by what becomes of them: none goes into another, and one projection takes them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from plastiscope.anatomy.attention import Attention, columns_of, head_labels
from plastiscope.anatomy.parts import AttentionSite, Matrix
from plastiscope.anatomy.record import Record
from plastiscope.anatomy.sites import Norm


def joined(record: Record, found: list[Attention], norms: Sequence[Norm]) -> list[Attention]:
    """The attentions, those whose outputs meet in one projection as one."""
    result: list[Attention] = []
    for _, each in groupby(found, key=_projection):
        group = list(each)
        together = len(group) > 1 and _side_by_side(record, group)
        result += [_one(record, group, norms)] if together else group
    return result


def _projection(attention: Attention) -> int:
    return -attention.call.index if attention.output is None else attention.output.call.index


def _side_by_side(record: Record, group: list[Attention]) -> bool:
    return not any(
        record.precedes(a.parts["output"].value, b.parts["q"].value) for a in group for b in group
    )


def _one(record: Record, group: list[Attention], norms: Sequence[Norm]) -> Attention:
    first, sites = group[0], tuple(a.site for a in group)
    notes = [note for a in group for note in a.notes if "columns don't split" not in note]
    apart = {x: _heads(group, x) for x in "qkv" if all(x in a.projections for a in group)}
    shared = list(dict.fromkeys(apart.get("k", ())))
    if "v" in apart and _order(apart["v"]) != _order(apart.get("k", apart["v"])):
        notes.append("k and v are shared among heads in different ways: no heads for v")
        del apart["v"]
    heads = sum(site.heads for site in sites)
    site = AttentionSite(
        first.site.site, heads, len(shared) or heads, first.site.head_width,
        all(s.causal for s in sites), _order(apart["k"]) if shared else (), parts=sites,
    )  # fmt: skip
    sources = {
        x: tuple({p.call.index: p for a in group for p in a.sources[x]}.values()) for x in "qkv"
    }
    columns = _columns(record, group, norms)
    if not columns:
        notes.append("the output projection's columns don't split by head")
    return replace(
        first, site=site, projections={}, sources=sources, columns=columns, undecided={},
        notes=tuple(dict.fromkeys(notes)),
        apart={x: tuple(dict.fromkeys(matrices)) for x, matrices in apart.items()},
    )  # fmt: skip


def _heads(group: list[Attention], letter: str) -> tuple[Matrix, ...]:
    """One matrix a query head, equal ones where heads share."""
    found: list[Matrix] = []
    for a in group:
        own = a.projections[letter].heads
        places = a.site.kv_of_head if letter != "q" and a.site.kv_of_head else range(a.site.heads)
        found += [own[k] for k in places]
    return tuple(found)


def _order(matrices: Sequence[Matrix]) -> tuple[int, ...]:
    distinct = list(dict.fromkeys(matrices))
    return tuple(map(distinct.index, matrices))


def _columns(
    record: Record, group: list[Attention], norms: Sequence[Norm]
) -> tuple[tuple[int, ...], ...]:
    """The columns of the common projection that each head goes into; empty when mixed."""
    product, before = group[0].output, 0
    assert product is not None
    total = torch.full(record.values[product.source].tensor.shape, -1)
    for a in group:
        operand = a.site.output
        assert operand is not None
        labels = head_labels(record, product, a.parts["output"], operand, norms)
        if labels is None or bool(((labels >= 0) & (total >= 0)).any()):
            return ()
        total = torch.where(labels >= 0, labels + before, total)
        before += a.site.heads
    return columns_of(product, total, before)
