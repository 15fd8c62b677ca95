"""Coverage: how much of the network the other rows speak of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .definition import Values, metric

if TYPE_CHECKING:
    from ..observations import Coverage


@metric(
    unit="share",
    range="0 to 1",
    source="this project",
    laws=("scale: unchanged",),
    subject="network",
)
def coverage(found: Coverage) -> list[Values]:
    """Share of the network that was measured.

    Formula: parameters measured / all parameters of the checkpoint (tied ones once, buffers not
    counted); components seen in the replay / all components that have an output.
    Read: 1 is everything. Anything less says how much the other rows leave out; the components
    that weren't seen have rows with the status not_observed.
    Misleads: it counts, it doesn't weigh: one unseen component may be the one that matters.
    """
    counts = {
        "of=parameters": (found.parameters, found.all_parameters),
        "of=components": (found.components, found.all_components),
    }
    return [Values(part / whole, parameters=of) for of, (part, whole) in counts.items() if whole]
