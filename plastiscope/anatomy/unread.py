"""What may be an attention and isn't read as one: said, never silently left out."""

from __future__ import annotations

from collections.abc import Sequence

from plastiscope.anatomy.blocks import Block
from plastiscope.anatomy.products import PRODUCTS, operands_of
from plastiscope.anatomy.record import Call, Record
from plastiscope.anatomy.sites import reaches

NO_SOFTMAX = "no_softmax"
SAID = {
    "same_queries": "has the same queries for all inputs: it isn't read as attention",
    "over_channels": "attends over channels, not tokens: its maps aren't measured",
    NO_SOFTMAX: "multiplies activations with each other, with no softmax between two products: it "
    "isn't read as attention",
}
"""What a module does, by the status of its rows."""


def add_products(record: Record, found: Sequence[Block], unread: dict[str, str]) -> None:
    """Add the modules that take matrix products of two values of the inputs (linear attention,
    state spaces), where nothing is known of them: no attention is read there, and it isn't how a
    mixture sends tokens to its experts."""
    known = [*unread, *(b.attention.call.site.module for b in found)]
    for call in record.calls:
        path = call.site.module
        pair = operands_of(record, call) if call.op in PRODUCTS else None
        if pair is None or not all(record.values[n].live for n in pair):
            continue
        if not any(_overlap(path, other) for other in known) and not _sends(record, found, call):
            unread[path] = NO_SOFTMAX
            known.append(path)


def _overlap(a: str, b: str) -> bool:
    """Whether one of two modules is the other one or lies in it."""
    a, b = (f"{path}." if path else "" for path in (a, b))
    return a.startswith(b) or b.startswith(a)


def _sends(record: Record, found: Sequence[Block], call: Call) -> bool:
    mixtures = [b.mixture for b in found if b.mixture is not None]
    return any(
        reaches(record, m.router.output, call.outputs[0])
        and reaches(record, call.outputs[0], m.output)
        for m in mixtures
    )


def notes_of(unread: dict[str, str]) -> list[str]:
    """A line for each."""
    return [f"{path or 'the network'} {SAID[status]}" for path, status in unread.items()]
