"""What costs a backward pass or more, measured on request: the tangent kernel, Jacobians, component
sensitivity.

Axes: B probe inputs, H heads, dh head width, d width.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .alone import Alone, Where, attentions_alone, blocks_alone, components_alone
from .anatomy import watch
from .anatomy.parts import Component
from .metrics import METRICS, Place, absent, measure
from .models.live import Batch
from .network import Network
from .observations import (
    Called,
    UnitGradientSums,
    attention_bound,
    capture,
    linear_bound,
    norm_bound,
    observe_jacobians,
    observe_ntk,
    observe_rate_of_change,
    observe_rate_of_change_embedding,
    token_radius,
)
from .observations.kernel import Kernel
from .store import Row

FAMILIES: Mapping[str, frozenset[str]] = {
    "ntk": frozenset({"Kernel"}),
    "jacobian": frozenset({"Jacobian"}),
    "sensitivity": frozenset({"RateOfChange", "ChangeBound"}),
    "gradients": frozenset({"UnitGradients"}),
    "optimizer": frozenset({"OptimizerState"}),
}
"""Names that stand for several metrics: all that need these observations."""
VERSION = 2
"""Of the measures on request. Raise it with every change after which the same network gives other
kernels, Jacobians, rates of change or gradients, or gives them for other components."""
NORMS = ("norm1", "norm2", "final_norm", "norm")
LINEARS = ("fc1", "fc2", "gate", "fc", "head")
LOSS_METRICS = frozenset({"fisher_effective_rank", "gradient_norm"})
"""Metrics of the loss's kernel alone."""
ALIGNMENT = frozenset({"ntk_alignment"})
WHOLE = ("network", None)
FED = ("norm1", "attention", "norm2", "fc1", "fc2")
"""What is measured in the embedding protocol."""


def family(name: str) -> frozenset[str]:
    """The metrics of a family."""
    return frozenset(m.name for m in METRICS if m.needs in FAMILIES[name])


def wants(name: str, chosen: frozenset[str]) -> bool:
    """Whether any metric of the family is chosen."""
    return bool(family(name) & chosen)


def first_inputs(batch: Batch, count: int) -> Batch:
    """The first inputs of a probe: these measures grow with their number."""
    return {name: tensor[:count] for name, tensor in batch.items()}


# --- the tangent kernel ---


def kernels(
    network: Network, batch: Batch, chosen: frozenset[str], asked: Sequence[str], seed: int
) -> dict[tuple[str, Hashable], Kernel]:
    """The kernels of the functions asked for, and with labels that of the loss where a metric needs
    it; whole and by component."""
    assert network.live is not None
    live = network.live
    functions = [f for f in asked if f != "loss" or "labels" in batch]
    if "labels" in batch and LOSS_METRICS & chosen and "loss" not in functions:
        functions.append("loss")
    owners = parameter_owners(network)
    return {
        (function, key): kernel
        for function in functions
        for key, kernel in observe_ntk(
            live.module, live.forward, batch, function=function, components=owners, seed=seed
        ).items()
    }


def parameter_owners(network: Network) -> dict[str, Hashable]:
    """The component (and block) of each parameter; of a fused one all of them, as "q+k+v"."""
    found: dict[str, list[Component]] = {}
    for component in network.anatomy.components:
        for matrix in component.weights:
            found.setdefault(matrix.tensor, []).append(component)
    return {
        name: ("+".join(dict.fromkeys(c.name for c in parts)), parts[0].block)
        for name, parts in found.items()
    }


def kernel_rows(
    found: Mapping[tuple[str, Hashable], Kernel], chosen: frozenset[str]
) -> Iterator[Row]:
    """The rows of every kernel. Keys are those of `kernels`."""
    for (_, key), kernel in found.items():
        yield from measure(kernel, place_of(key), chosen)


def unlabelled_rows(batch: Batch, chosen: frozenset[str]) -> Iterator[Row]:
    """Null rows of what needs labels, and of what needs one label an input (tokens have many)."""
    place, labels = Place("network", None, "ntk"), batch.get("labels")
    if labels is None:
        yield from absent("Kernel", place, "no_labels", (LOSS_METRICS | ALIGNMENT) & chosen)
    elif labels.ndim != 1:
        yield from absent("Kernel", place, "many_labels_an_input", ALIGNMENT & chosen)


def place_of(key: Hashable) -> Place:
    """Where the kernel of a key of `kernels` (without its function) belongs."""
    component, block = key if isinstance(key, tuple) else (str(key), None)
    return Place(component, block, "ntk")


# --- Jacobians ---


def jacobian_rows(
    network: Network, batch: Batch, chosen: frozenset[str], seed: int
) -> Iterator[Row]:
    """Of every component that is a module, of every block and of the whole network."""
    assert network.live is not None
    live, places = network.live, jacobian_places(network)
    found = observe_jacobians(live.module, live.forward, batch, places, seed=seed)
    yield from _rows(found, "jacobian", chosen)
    for alone in (components_alone(network), blocks_alone(network)):
        yield from _absent(alone, found, "Jacobian", "jacobian", chosen)
    if WHOLE not in found:
        yield from absent("Jacobian", Place(*WHOLE, "jacobian"), "takes_ids", chosen)


def jacobian_places(network: Network) -> dict[Hashable, Called]:
    """The calls of all modules whose Jacobian is taken, by component and block."""
    calls = {**components_alone(network).calls, **blocks_alone(network).calls}
    return _keyed({**calls, WHOLE: Called("")})


def _absent(
    alone: Alone, found: Collection[Hashable], kind: str, subject: str, chosen: frozenset[str]
) -> Iterator[Row]:
    """Null rows, with the reason, of what can't be called alone or was called otherwise."""
    missed = {key: "called_otherwise" for key in alone.calls if key not in found}
    for (component, block), status in {**alone.obstacles, **missed}.items():
        yield from absent(kind, Place(component, block, subject), status, chosen)


# --- component sensitivity ---


def sensitivity_rows(network: Network, batch: Batch, chosen: frozenset[str]) -> Iterator[Row]:
    """Rates of change at the components' own inputs, in the embedding protocol, and bounds."""
    assert network.live is not None
    live = network.live
    own = components_alone(network) | attentions_alone(network)
    found = observe_rate_of_change(live.module, live.forward, batch, _keyed(own.calls))
    yield from _rows(found, "sensitivity", chosen)
    yield from _absent(own, found, "RateOfChange", "sensitivity", chosen & {"rate_of_change"})
    yield from _rows(dict(_layer_bounds(network)), "sensitivity", chosen)
    blocks = blocks_alone(network).calls
    if not blocks:
        return
    fed = own.named(FED)
    first = blocks[min(blocks, key=lambda key: key[1] or 0)]
    only = chosen & {"rate_of_change_embedding"}
    given = capture(live.module, live.forward, batch, {0: first})
    if given:
        places = {key: call for key, call in fed.calls.items() if key in found}
        yield from _embedding_rows(network, batch, places, first, chosen)
        yield from _rows(dict(_attention_bounds(network, given[0].x)), "sensitivity", chosen)
    yield from _absent(fed, found if given else (), "RateOfChange", "sensitivity", only)


def _embedding_rows(
    network: Network,
    batch: Batch,
    places: Mapping[Where, Called],
    embedded: Called,
    chosen: frozenset[str],
) -> Iterator[Row]:
    """In the embedding protocol; a component that can't take the embedding's output (windows, a
    deeper stage's width) is a null row."""
    assert network.live is not None
    live = network.live

    def observe(some: Mapping[Where, Called]) -> Iterator[Row]:
        keyed = _keyed(some)
        found = observe_rate_of_change_embedding(live.module, live.forward, batch, keyed, embedded)
        return _rows(found, "sensitivity", chosen)

    try:
        yield from observe(places)
    except RuntimeError:
        for key, call in places.items():
            try:
                yield from observe({key: call})
            except RuntimeError:
                place = Place(key[0], key[1], "sensitivity")
                rows = absent("RateOfChange", place, "embedding_does_not_fit", chosen)
                yield from (r for r in rows if r.metric == "rate_of_change_embedding")


def _keyed(places: Mapping[Where, Called]) -> dict[Hashable, Called]:
    return {key: call for key, call in places.items()}  # noqa: C416  (a wider type of key)


def _rows(found: Mapping[Hashable, Any], subject: str, chosen: frozenset[str]) -> Iterator[Row]:
    """The rows of observations keyed by component and block."""
    for key, observation in found.items():
        if isinstance(key, tuple):
            yield from measure(observation, Place(key[0], key[1], subject), chosen)


def _layer_bounds(network: Network) -> Iterator[tuple[Hashable, Any]]:
    assert network.live is not None
    tensors = dict(network.live.module.named_parameters())
    for c in network.anatomy.components:
        if not c.weights or c.weights[0].tensor not in tensors:
            continue
        weight = c.weights[0].of(tensors[c.weights[0].tensor])
        if c.name in NORMS:
            yield (c.name, c.block), norm_bound(weight + 1.0 if c.offset_gain else weight)
        elif c.name in LINEARS:
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


# --- gradients into units ---


def gradient_rows(
    network: Network, batch: Batch, chosen: frozenset[str], folds: int
) -> Iterator[Row]:
    """Of every activation: the loss's gradients into its units, on a labelled probe."""
    parts = network.anatomy.components
    activations = {i: c for i, c in enumerate(parts) if c.name == "activation" and c.features}
    places = {i: Place(c.name, c.block, "gradient", "all") for i, c in activations.items()}
    if "labels" not in batch:
        for place in places.values():
            yield from absent("UnitGradients", place, "no_labels", chosen)
        return
    seen = _gradients_at(network, batch, {i: c.features for i, c in activations.items()})
    for i, place in places.items():
        gradient = seen.get(i)
        if gradient is None:
            yield from absent("UnitGradients", place, "no_gradient", chosen)
            continue
        if activations[i].input_axis >= 0 and gradient.ndim > 2:
            axes = (activations[i].input_axis, activations[i].channel_axis)
            gradient = gradient.movedim(axes, (0, -1))
        if activations[i].input_axis < 0 or len(gradient) % len(batch["inputs"]):
            yield from absent("UnitGradients", place, "inputs_not_told_apart", chosen)
            continue
        per_input = gradient.reshape(len(batch["inputs"]), -1, gradient.shape[-1])
        fold = torch.arange(len(per_input)) % folds
        counted = torch.ones(per_input.shape[:2], dtype=torch.bool)
        if "mask" in batch and batch["mask"].shape == counted.shape:
            counted = batch["mask"].bool().cpu()
        sums = UnitGradientSums(folds)
        sums.add(per_input[counted.to(per_input.device)], fold.repeat_interleave(counted.sum(1)))
        yield from measure(sums.finish(), place, chosen)


def _gradients_at(
    network: Network, batch: Batch, sites: Mapping[int, Any]
) -> dict[int, Tensor | None]:
    """The gradient of the summed loss at each site."""
    assert network.live is not None
    live, seen = network.live, dict[int, Tensor]()

    def keep(key: Any, x: Tensor) -> None:
        x.retain_grad()
        seen[key] = x

    keyed: dict[Hashable, Any] = {}
    keyed.update(sites.items())
    with (
        torch.enable_grad(),
        watch(live.module, keyed, {}, keep, _ignore, clone=False, detach=False) as recorder,
    ):
        logits = live.forward(batch)
        recorder.check()
        flat, labels = logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1)
        loss = nn.functional.cross_entropy(flat, labels, ignore_index=-100, reduction="sum")
        torch.autograd.backward(loss)
    live.module.zero_grad(set_to_none=True)
    return {key: x.grad for key, x in seen.items()}


def _ignore(*_: Any) -> None: ...
