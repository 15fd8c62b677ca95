"""The blocks of a transformer: what stands around each attention."""

from __future__ import annotations

from dataclasses import dataclass, field

from plastiscope.anatomy.attention import Attention
from plastiscope.anatomy.experts import Mixture, expert_site, mixture
from plastiscope.anatomy.feedforward import FeedForward, feed_forward
from plastiscope.anatomy.parts import ExpertSite
from plastiscope.anatomy.products import Product
from plastiscope.anatomy.record import Record
from plastiscope.anatomy.sites import Norm, Residual, reaches, within


@dataclass
class Block:
    """One attention and what belongs to it. `start` and `end` are the stream's values."""

    index: int
    attention: Attention
    start: int
    end: int
    residual1: Residual | None = None
    residual2: Residual | None = None
    norm1: Norm | None = None
    norm2: Norm | None = None
    linear: tuple[Product, ...] = ()
    feed_forward: FeedForward | None = None
    mixture: Mixture | None = None
    experts: ExpertSite | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Scene:
    """What the pass holds, found once and shared by everything that names parts."""

    record: Record
    linear: list[Product]
    attention: list[Attention]
    norms: list[Norm]
    residuals: list[Residual]
    head: Product | None = None


def blocks(scene: Scene) -> list[Block]:
    """One block an attention, in order."""
    found: list[Block] = []
    for k in range(len(scene.attention)):
        found.append(_block(scene, k, {b.residual2.call.index for b in found if b.residual2}))
    _leave_final_norm(scene, found)
    return found


def _leave_final_norm(scene: Scene, found: list[Block]) -> None:
    """A norm after the last sum alone, where no other part has its norm there, is the network's."""
    last = found[-1] if found else None
    if last is None or last.norm1 is not None or last.norm2 is None or last.residual2 is None:
        return
    if last.norm2.source == last.residual2.output and not any(b.norm2 for b in found[:-1]):
        last.norm2 = None


def _block(scene: Scene, index: int, taken: set[int]) -> Block:
    """The block of one attention; `taken` are the sums of earlier blocks' feed-forward parts."""
    record, attention = scene.record, scene.attention[index]
    mixed = attention.parts["output"].value
    first = _around_attention(scene, attention)
    own = [p for side in attention.sources.values() for p in side]
    inside = [p for p in first.linear if not _serves(record, p, attention)] if first else []
    block = Block(index, attention, first.skip if first else -1, mixed)
    out = attention.output.output if attention.output else mixed
    partner = _parallel(scene, first) if first else None
    if inside and first:
        block.residual2, block.linear = first, tuple(inside)
    elif partner is not None and first is not None:
        block.residual2 = max(first, partner, key=lambda r: r.output)
        block.linear = partner.linear
    else:
        block.residual1 = first
        anchor = first.output if first else out
        _find_feed_forward(scene, block, anchor, taken)
    if block.residual2 is not None:
        block.mixture = mixture(record, block.linear, block.residual2.branch)
    if block.mixture is not None:
        block.experts = expert_site(record, block.mixture)
        block.feed_forward = block.mixture.shared
        if block.experts is None:
            block.notes.append("what the experts compute can't be told: their units aren't seen")
    elif block.linear:
        block.feed_forward = feed_forward(record, block.linear)
    sums = [r.output for r in (block.residual1, block.residual2) if r is not None]
    block.end = max(sums) if sums else max([out, *(p.output for p in block.linear)])
    _find_norms(scene, block)
    if attention.sources["k"] and not _from_stream(record, block, attention.sources["k"][0]):
        block.notes.append("queries and keys come from different streams: cross-attention")
    if block.start < 0:
        source = own[0].source if own else attention.parts["q"].value
        block.start = block.norm1.source if block.norm1 else source
    return block


def _from_stream(record: Record, block: Block, product: Product) -> bool:
    return block.start < 0 or reaches(record, block.start, product.source)


def _around_attention(scene: Scene, attention: Attention) -> Residual | None:
    """The nearest sum that adds what this attention made to what it was made from."""
    record, mixed = scene.record, attention.parts["output"].value
    query = attention.parts["q"].value
    fitting = [
        r
        for r in scene.residuals
        if reaches(record, r.skip, query) and reaches(record, mixed, r.branch)
    ]
    return min(fitting, key=lambda r: (len(r.linear), r.call.index), default=None)


def _parallel(scene: Scene, residual: Residual) -> Residual | None:
    """The sum next to this one that adds another part made from the same values."""
    for other in scene.residuals:
        touching = other.output in residual.call.inputs or residual.output in other.call.inputs
        if touching and other.skip == residual.skip and len(other.linear) >= 2:
            return other
    return None


def _serves(record: Record, product: Product, attention: Attention) -> bool:
    """Whether a linear map is part of the attention: before it, its gate, or its projection."""
    mixed = attention.parts["output"].value
    if attention.output is None:
        return record.precedes(product.output, mixed)
    return product is attention.output or record.precedes(product.output, attention.output.output)


def _find_feed_forward(scene: Scene, block: Block, anchor: int, taken: set[int]) -> None:
    record = scene.record
    later = [
        a
        for a in scene.attention[block.index + 1 :]
        if record.precedes(anchor, a.parts["output"].value)
    ]
    limit = later[0].parts["output"].value if later else record.output
    busy = {p.call.index for a in later[:1] for side in a.sources.values() for p in side}
    fitting = [
        r
        for r in scene.residuals
        if reaches(record, anchor, r.skip)
        and reaches(record, r.output, limit)
        and _is_feed_forward(record, r, later)
    ]
    if not fitting or not _with_attention(scene, block, fitting[0]):
        before = [r for r in _inside_before(scene, block) if r.call.index not in taken]
        fitting = before or fitting
    if fitting:
        block.residual2, block.linear = fitting[0], fitting[0].linear
        return
    if later or block.residual1 is None:
        region = [
            p
            for p in scene.linear
            if within(record, p, anchor, limit)
            and p.call.index not in busy
            and p is not scene.head
            and reaches(record, p.output, record.output)
        ]
        found = feed_forward(record, tuple(region)) if 2 <= len(region) <= 3 else None
        block.linear = tuple(region) if found is not None and found.activation else ()


def _is_feed_forward(record: Record, residual: Residual, others: list[Attention]) -> bool:
    """Whether a branch is a part of its own, of linear maps that mix channels."""
    mixing = [p for p in residual.linear if not p.is_depthwise]
    return len(mixing) >= 2 and not _holds_attention(record, residual, others)


def _inside_before(scene: Scene, block: Block) -> list[Residual]:
    """Feed-forward parts before the attention in the same module: the block has them first."""
    record, query = scene.record, block.attention.parts["q"].value
    taken = {p.call.index for a in scene.attention for side in a.sources.values() for p in side}
    return [
        r
        for r in scene.residuals
        if reaches(record, r.output, query)
        and _is_feed_forward(record, r, scene.attention)
        and not any(p.call.index in taken for p in r.linear)
        and _with_attention(scene, block, r)
    ]


def _with_attention(scene: Scene, block: Block, residual: Residual) -> bool:
    """Whether the smallest module around an attention and its sum also holds another sum."""
    record, call = scene.record, block.attention.call.index
    first = block.residual1.call.index if block.residual1 else call
    around = [
        (m.stop - m.start, m.start, m.stop)
        for m in record.modules
        if m.start <= call < m.stop and m.start <= first < m.stop
    ]
    for _, start, stop in sorted(around):
        inside = [
            r
            for r in scene.residuals
            if start <= r.call.index < stop and _is_feed_forward(record, r, scene.attention)
        ]
        if inside:
            return residual in inside
    return True


def _holds_attention(record: Record, residual: Residual, later: list[Attention]) -> bool:
    return any(
        record.precedes(residual.skip, a.parts["q"].value)
        and reaches(record, a.parts["output"].value, residual.branch)
        for a in later
    )


def _find_norms(scene: Scene, block: Block) -> None:
    """norm1 and norm2: before the part; else on what it made; else after the sum."""
    sources, ff = block.attention.sources["q"], block.feed_forward
    out = block.attention.output
    if sources:
        block.norm1 = _norm_before(scene, sources[0], block.start)
    first = block.linear[0] if block.linear else None
    if first is not None:
        middle = block.residual2.skip if block.residual2 else out.output if out else block.start
        block.norm2 = _norm_before(scene, ff.gate or ff.fc1 if ff else first, middle)
    if block.norm1 is not None:
        block.norm2 = None if block.norm1 is block.norm2 else block.norm2
        return
    if block.residual1 is not None and out is not None:
        block.norm1 = _norm_after(scene, block.residual1, out.output)
    if block.residual2 is not None and block.norm2 is None and block.linear:
        block.norm2 = _norm_after(scene, block.residual2, block.linear[-1].output)


def _norm_before(scene: Scene, product: Product, start: int) -> Norm | None:
    """The last norm between the stream and a linear map that no other linear map comes before.

    With no stream known, the last one with no linear map after it.
    """
    record, known = scene.record, start >= 0
    fitting = [
        n
        for n in scene.norms
        if (not known or reaches(record, start, n.source))
        and reaches(record, n.output, product.source)
        and not any(
            within(record, p, start, n.source)
            if known
            else within(record, p, n.output, product.source)
            for p in scene.linear
        )
    ]
    return fitting[-1] if fitting else None


def _norm_after(scene: Scene, residual: Residual, made: int) -> Norm | None:
    """The norm of what a part made before it is added, or of the sum when nothing else uses it."""
    record = scene.record
    takers = record.consumers(residual.output)
    for norm in scene.norms:
        if reaches(record, made, norm.source) and reaches(record, norm.output, residual.branch):
            return norm
        if norm.source == residual.output and all(_inside(record, c.index, norm) for c in takers):
            return norm
    return None


def _inside(record: Record, index: int, norm: Norm) -> bool:
    outputs = record.calls[index].outputs
    return any(reaches(record, o, norm.output) for o in outputs)
