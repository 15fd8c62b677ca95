"""Component sensitivity, on request: how much each component's output moves for how much its input
does, at its own inputs and in the embedding protocol, beside its bounds.

Axes: B probe inputs, H heads, dh head width, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .alone import Where, attentions_alone, blocks_alone, components_alone
from .anatomy.parts import plain_name
from .derivatives import absent_rows, first_inputs, keyed, rows_at
from .metrics import Place, absent
from .models.live import Batch
from .network import Network
from .observations import (
    Called,
    RateOfChange,
    attention_bound,
    capture,
    joined_rates,
    linear_bound,
    norm_bound,
    observe_rate_of_change,
    observe_rate_of_change_embedding,
    token_radius,
)
from .store import Row

NORMS = ("norm1", "norm2", "final_norm", "norm")
LINEARS = ("fc1", "fc2", "gate", "fc", "head")
FED = ("norm1", "attention", "norm2", "fc1", "fc2")
"""What is measured in the embedding protocol."""
SUBJECT = "sensitivity"
Rates = dict[Hashable, RateOfChange]


@dataclass(frozen=True)
class Pairing:
    """Two data sets of as many inputs, of which those of one index make a pair; `size` of them go
    through the network at once."""

    first: Batch
    second: Batch
    size: int

    def chunks(self) -> Iterator[tuple[Batch, Batch]]:
        for start in range(0, len(self.first["inputs"]), self.size):
            part = slice(start, start + self.size)
            yield (
                {name: tensor[part] for name, tensor in self.first.items()},
                {name: tensor[part] for name, tensor in self.second.items()},
            )


def pairing(first: Batch, second: Batch, most: int, size: int) -> Pairing:
    """Of the first `most` inputs that both have."""
    count = min(most, len(first["inputs"]), len(second["inputs"]))
    return Pairing(first_inputs(first, count), first_inputs(second, count), size)


def sensitivity_rows(
    network: Network, batch: Batch, chosen: frozenset[str], across: Pairing | None = None
) -> Iterator[Row]:
    """Rates of change at the components' own inputs, in the embedding protocol, and bounds.

    Pairs are of inputs of the batch, or `across` two data sets.
    """
    assert network.live is not None
    live = network.live
    own = components_alone(network) | attentions_alone(network)

    def observe(first: Batch, second: Batch | None) -> Rates:
        return observe_rate_of_change(live.module, live.forward, first, keyed(own.calls), second)

    found = _observed(network, batch, across, observe)
    yield from rows_at(found, SUBJECT, chosen)
    yield from absent_rows(own, found, "RateOfChange", SUBJECT, chosen & {"rate_of_change"})
    yield from rows_at(dict(_layer_bounds(network)), SUBJECT, chosen)
    blocks = blocks_alone(network).calls
    only = chosen & {"rate_of_change_embedding"}
    if not blocks:
        reason = "no_module_of_its_own" if network.anatomy.attention else "no_attention"
        yield from absent("RateOfChange", Place("network", None, SUBJECT), reason, only)
        return
    fed = own.named(FED)
    first = blocks[min(blocks, key=lambda key: key[1] or 0)]
    given = capture(live.module, live.forward, batch, {0: first})
    if given:
        places = {key: call for key, call in fed.calls.items() if key in found}
        yield from _embedding_rows(network, batch, across, places, first, chosen)
        yield from rows_at(dict(_attention_bounds(network, given[0].x)), SUBJECT, chosen)
    yield from absent_rows(fed, found if given else (), "RateOfChange", SUBJECT, only)


def _observed(
    network: Network,
    batch: Batch,
    across: Pairing | None,
    observe: Callable[[Batch, Batch | None], Rates],
) -> Rates:
    """What is observed of the batch, or of all pairs across two data sets, some at a time."""
    if across is None:
        return observe(batch, None)
    parts = [
        observe(network.on_device(first), network.on_device(second))
        for first, second in across.chunks()
    ]
    return {key: joined_rates([part[key] for part in parts]) for key in parts[0]}


def _embedding_rows(
    network: Network,
    batch: Batch,
    across: Pairing | None,
    places: Mapping[Where, Called],
    embedded: Called,
    chosen: frozenset[str],
) -> Iterator[Row]:
    """In the embedding protocol; a component that can't take the embedding's output (windows, a
    deeper stage's width) is a null row."""
    assert network.live is not None
    live = network.live

    def observe(some: Mapping[Where, Called]) -> Iterator[Row]:
        def at(first: Batch, second: Batch | None) -> Rates:
            return observe_rate_of_change_embedding(
                live.module, live.forward, first, keyed(some), embedded, second
            )

        return rows_at(_observed(network, batch, across, at), SUBJECT, chosen)

    try:
        yield from observe(places)
    except (RuntimeError, ValueError) as error:
        _demand_memory(error)
        for key, call in places.items():
            try:
                yield from observe({key: call})
            except (RuntimeError, ValueError) as error:
                _demand_memory(error)
                place = Place(key[0], key[1], SUBJECT)
                rows = absent("RateOfChange", place, "embedding_does_not_fit", chosen)
                yield from (r for r in rows if r.metric == "rate_of_change_embedding")


def _demand_memory(error: Exception) -> None:
    """Raise the error where memory was wanting, which says nothing about what fits."""
    if isinstance(error, torch.cuda.OutOfMemoryError) or "allocate memory" in str(error):
        raise error


def _layer_bounds(network: Network) -> Iterator[tuple[Hashable, Any]]:
    assert network.live is not None
    tensors = dict(network.live.module.named_parameters())
    for c in network.anatomy.components:
        if not c.weights or c.weights[0].tensor not in tensors:
            continue
        weight = c.weights[0].of(tensors[c.weights[0].tensor])
        if c.name in NORMS:
            yield (c.name, c.block), norm_bound(weight + 1.0 if c.offset_gain else weight)
        elif plain_name(c.name) in LINEARS:
            yield (c.name, c.block), linear_bound(weight)


def _attention_bounds(network: Network, x: Tensor) -> Iterator[tuple[Hashable, Any]]:
    assert network.live is not None
    tensors = dict(network.live.module.named_parameters())
    parts = {(c.name, c.block): c for c in network.anatomy.components}
    for block, site in network.anatomy.attention.items():
        some = [parts.get((name, block)) for name in ("q", "k", "v", "attention_output")]
        if x.ndim != 3 or not all(c and c.heads for c in some):
            continue
        q, k, v, output = (
            torch.stack([h.of(tensors[h.tensor]) for h in c.heads]) for c in some if c
        )
        group = site.heads // site.kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        bound = attention_bound(q, k, v, output, x.shape[1], token_radius(x))
        yield ("attention", block), bound
