"""What the stored optimizer says of each parameter: how far the next step goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from .checkpoints import State
from .derivatives import parameter_owners
from .metrics import Place, absent, measure
from .network import Network
from .observations import OptimizerState
from .store import Row


def optimizer_rows(network: Network, state: State, chosen: frozenset[str]) -> Iterator[Row]:
    """Of every parameter whose optimizer state is stored and can be told apart from the others';
    where there is none, null rows with the reason."""
    assert network.live is not None
    stored = state.optimizer() or {}
    parameters = dict(network.live.module.named_parameters())
    owners = parameter_owners(network)
    matched = match_optimizer(network.live.module, stored)
    for name, (entry, group) in matched.items():
        found = _optimizer_state(parameters[name], entry, group)
        if found is not None and isinstance(owner := owners.get(name), tuple):
            place = Place(owner[0], owner[1], "optimizer", tensor=network.stored_name(name))
            yield from measure(found, place, chosen)
    if not matched:
        reason = "not_matched" if stored.get("state") else "no_optimizer_state"
        place = Place("network", None, "optimizer")
        yield from absent("OptimizerState", place, reason, chosen)


def match_optimizer(
    module: nn.Module, stored: Mapping[str, Any]
) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each parameter's entry in an optimizer's state dict, and its group.

    Entries are numbered in the order in which the parameters were handed over: as the module lists
    them, or matrices before vectors (two groups, with and without weight decay). An order counts
    only when every stored shape agrees; when none does, nothing is matched.
    """
    groups, entries = stored.get("param_groups") or [], stored.get("state") or {}
    numbers = [(number, group) for group in groups for number in group.get("params", [])]
    own = list(module.named_parameters())
    matrices_first = sorted(own, key=lambda item: item[1].ndim < 2)
    orders = [own] if len(groups) == 1 else [matrices_first, own]
    named = dict(own)
    if all(isinstance(number, str) for number, _ in numbers):
        return {n: (entries[n], g) for n, g in numbers if n in named and n in entries}
    for order in orders:
        if len(order) == len(numbers) and all(
            _fits(p, entries.get(number))
            for (_, p), (number, _) in zip(order, numbers, strict=True)
        ):
            return {
                name: (entries[number], group)
                for (name, _), (number, group) in zip(order, numbers, strict=True)
                if number in entries
            }
    return {}


def _fits(parameter: Tensor, entry: Mapping[str, Any] | None) -> bool:
    tensors = [v for k, v in (entry or {}).items() if isinstance(v, Tensor) and k != "step"]
    return all(t.shape == parameter.shape for t in tensors)


def _optimizer_state(
    weight: Tensor, entry: Mapping[str, Any], group: Mapping[str, Any]
) -> OptimizerState | None:
    rate = float(group.get("lr", float("nan")))
    if "exp_avg_sq" in entry and "exp_avg" in entry:
        first, second = (float(b) for b in group.get("betas", (0.9, 0.999)))
        return OptimizerState.adam(
            weight,
            entry["exp_avg"],
            entry["exp_avg_sq"],
            float(entry.get("step", 0)),
            lr=rate,
            betas=(first, second),
            eps=float(group.get("eps", 1e-8)),
        )
    if "momentum_buffer" in entry:
        return OptimizerState.sgd(weight, entry["momentum_buffer"], lr=rate)
    return None
