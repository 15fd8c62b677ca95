"""What costs a backward pass or more, measured on request: the tangent kernel, Jacobians, gradients
into units.

Axes: B probe inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .alone import Alone, attentions_alone, blocks_alone, components_alone, matrices
from .anatomy import watch
from .anatomy.parts import Component, is_expert, plain_name
from .metrics import METRICS, Place, absent, measure, unit_totals
from .models.live import Batch
from .network import Network
from .observations import (
    Called,
    UnitGradients,
    UnitGradientSums,
    observe_jacobians,
    observe_ntk,
)
from .observations.jacobian import jacobian_of_weight
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
VERSION = 9
"""Of the measures on request. Raise it with every change after which the same network gives other
kernels, Jacobians, rates of change or gradients, or gives them for other components."""
LOSS_METRICS = frozenset({"fisher_effective_rank", "gradient_norm"})
"""Metrics of the loss's kernel alone."""
ALIGNMENT = frozenset({"ntk_alignment"})
WHOLE = ("network", None)


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
    """The component (and block) of each parameter; of a fused one all of them, as "q+k+v", and as
    "experts gate+fc1" where it holds all experts'."""
    found: dict[str, list[Component]] = {}
    for component in network.anatomy.components:
        for matrix in component.weights:
            found.setdefault(matrix.tensor, []).append(component)
    return {name: (_joint_name(parts), parts[0].block) for name, parts in found.items()}


def _joint_name(parts: Sequence[Component]) -> str:
    names = list(dict.fromkeys(c.name for c in parts))
    plain = list(dict.fromkeys(map(plain_name, names)))
    fused = len(names) > 1 and all(map(is_expert, names))
    return f"experts {'+'.join(plain)}" if fused else "+".join(names)


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
    """Of every component that is a module or a matrix alone, of every attention, every block and
    the network."""
    assert network.live is not None
    live, places = network.live, jacobian_places(network)
    found = observe_jacobians(live.module, live.forward, batch, places, seed=seed)
    for where, weight in matrices(network):
        if where not in found or found[where].reason:
            found[where] = jacobian_of_weight(weight, len(batch["inputs"]))
    yield from rows_at({k: j for k, j in found.items() if not j.reason}, "jacobian", chosen)
    for key, jacobian in found.items():
        if jacobian.reason and isinstance(key, tuple):
            place = Place(key[0], key[1], "jacobian")
            yield from absent("Jacobian", place, jacobian.reason, chosen)
    for alone in (components_alone(network), attentions_alone(network), blocks_alone(network)):
        yield from absent_rows(alone, found, "Jacobian", "jacobian", chosen)
    if WHOLE not in found:
        yield from absent("Jacobian", Place(*WHOLE, "jacobian"), "takes_ids", chosen)


def jacobian_places(network: Network) -> dict[Hashable, Called]:
    """The calls of all modules whose Jacobian is taken, by component and block."""
    calls = {**components_alone(network).calls, **attentions_alone(network).calls}
    return keyed({**calls, **blocks_alone(network).calls, WHOLE: Called("")})


def absent_rows(
    alone: Alone, found: Collection[Hashable], kind: str, subject: str, chosen: frozenset[str]
) -> Iterator[Row]:
    """Null rows, with the reason, of what can't be called alone or was called otherwise."""
    reasons = {**alone.obstacles, **dict.fromkeys(alone.calls, "called_otherwise")}
    for key, status in reasons.items():
        if key not in found:
            yield from absent(kind, Place(*key, subject), status, chosen)


def keyed(places: Mapping[tuple[str, int | None], Called]) -> dict[Hashable, Called]:
    return {key: call for key, call in places.items()}  # noqa: C416  (a wider type of key)


def rows_at(found: Mapping[Hashable, Any], subject: str, chosen: frozenset[str]) -> Iterator[Row]:
    """The rows of observations keyed by component and block."""
    for key, observation in found.items():
        if isinstance(key, tuple):
            yield from measure(observation, Place(key[0], key[1], subject), chosen)


# --- gradients into units ---


def gradient_rows(
    network: Network, batch: Batch, chosen: frozenset[str], folds: int
) -> Iterator[Row]:
    """Of every activation: the loss's gradients into its units, on a labelled probe."""
    parts = network.anatomy.components
    units = {i: c for i, c in enumerate(parts) if plain_name(c.name) == "activation"}
    places = {i: Place(c.name, c.block, "gradient", "all") for i, c in units.items()}
    activations = {i: c for i, c in units.items() if c.features}
    if "labels" not in batch:
        for place in places.values():
            yield from absent("UnitGradients", place, "no_labels", chosen)
        return
    layers: list[UnitGradients] = []
    seen = _gradients_at(network, batch, {i: c.features for i, c in activations.items()})
    mask = batch["mask"].bool().cpu() if "mask" in batch else None
    for i, place in places.items():
        gradient = seen.get(i)
        if gradient is None:
            reason = "no_gradient" if i in activations else _why_unseen(units[i])
            yield from absent("UnitGradients", place, reason, chosen)
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
        if mask is not None and mask.shape == counted.shape:
            counted = mask
        rows = counted.flatten().nonzero().squeeze(1)
        some = per_input.flatten(0, 1)[rows.to(per_input.device, non_blocking=True)]
        sums = UnitGradientSums(folds)
        sums.add(some, fold.repeat_interleave(counted.sum(1)))
        layers.append(sums.finish())
        yield from measure(layers[-1], place, chosen)
    yield from unit_totals(layers, chosen)


def _why_unseen(activation: Component) -> str:
    return "output_not_seen" if activation.name == "activation" else "part_of_experts"


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
