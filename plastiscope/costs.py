"""About how long the measures on request would take, from forward passes that were timed.

Calibrated on the sample runs; what is linear in a pass follows the machine and the network, the
rest (eigenvalues, the work between two passes) is seconds of one CPU core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config import Settings
from .derivatives import first_inputs, jacobian_places
from .models.live import Batch
from .network import Network
from .observations.jacobian import AT_ONCE, DENSE_SIDE, LEADING, POSITIONS, PROBES, ROWS, STEPS
from .observations.lanczos import LEADING_ENTRIES

PER_KERNEL = 5e-3
"""Seconds for the rows of one component's kernel: the eigenvalues of all its replicates."""
PER_TENSOR = 1.3e-3
"""Seconds to find out how one parameter's per-input gradients are taken."""
KERNEL_PASSES = 6.0
"""A kernel in forward passes of its inputs."""
PER_PAIR = 1e-7
"""Seconds for a pair of token positions, where an embedding's gradient is a look-up."""
PER_PRODUCT = 2e-4
"""Seconds between two products with a Jacobian."""
PRODUCT_PASSES = 1.6
"""A product with a Jacobian in forward passes of its component."""
SHARED = 4
"""A product with many small vectors at once, over one with each of them."""
PER_CUBE = 3e-10
"""Seconds for the singular values of a matrix, over the cube of its smaller side."""
PER_PLACE = 1.5e-3
"""Seconds to compare the outputs of one component."""
SENSITIVITY_PASSES = 12.0
"""Both protocols of sensitivity in forward passes of their inputs."""


@dataclass(frozen=True)
class Call:
    """One call of a component: the seconds of its forward pass, the products with its Jacobian
    that its singular values take, and how many matrices of which smaller side they come from."""

    seconds: float
    products: int
    matrices: int
    side: int


@dataclass(frozen=True)
class Work:
    """What one checkpoint would take.

    `forward` is the seconds of a pass of all inputs of a kernel; `functions` how many kernels there
    are (mean logit, loss), `tensors` the parameters, `groups` the components that have any,
    `tokens` the positions where inputs are ids (else 0); `calls` the Jacobian's components.
    """

    forward: float
    functions: int
    tensors: int
    groups: int
    tokens: int
    calls: tuple[Call, ...]


def estimate(work: Work) -> dict[str, float]:
    """Seconds of each family of measures for one checkpoint."""
    each = KERNEL_PASSES * work.forward + PER_TENSOR * work.tensors + PER_PAIR * work.tokens**2
    return {
        "ntk": work.functions * (each + PER_KERNEL * (work.groups + 1)),
        "jacobian": sum(
            c.products * (PER_PRODUCT + PRODUCT_PASSES * c.seconds)
            + PER_CUBE * c.matrices * c.side**3
            for c in work.calls
        ),
        "sensitivity": SENSITIVITY_PASSES * work.forward + PER_PLACE * len(work.calls),
    }


def costs(network: Network, settings: Settings) -> dict[str, float]:
    """Seconds that each family of measures would take for one checkpoint of the network."""
    live = network.live
    if live is None:
        return {}
    total = dict.fromkeys(("ntk", "jacobian", "sensitivity"), 0.0)
    for probe in network.probes:
        inputs = first_inputs(probe.batch, settings.gradient_inputs)
        part = network.on_device(first_inputs(inputs, settings.batch_size))
        many, some = len(inputs["inputs"]), len(part["inputs"])
        few = first_inputs(part, settings.jacobian_inputs)
        paths = {key: call.path for key, call in jacobian_places(network).items()}
        work = Work(
            forward=timed(live.forward, part) * many / some,
            functions=len(settings.kernel) + ("labels" in part and "loss" not in settings.kernel),
            tensors=sum(1 for _ in live.module.parameters()),
            groups=sum(bool(c.weights) for c in network.anatomy.components),
            tokens=0 if part["inputs"].is_floating_point() else inputs["inputs"].numel(),
            calls=timed_calls(live.module, live.forward, few, paths),
        )
        for name, seconds in estimate(work).items():
            total[name] += seconds
    return total


def timed(forward: Callable[[Batch], Tensor], batch: Batch) -> float:
    """Seconds of a forward pass, its outputs brought back from the device."""
    with torch.no_grad():
        started = time.perf_counter()
        forward(batch)[:1].cpu()
    return time.perf_counter() - started


def timed_calls(
    module: nn.Module,
    forward: Callable[[Batch], Tensor],
    batch: Batch,
    paths: Mapping[Hashable, str],
) -> tuple[Call, ...]:
    """The quickest call, in two passes, of each module named by path that is given floating
    numbers: a busy machine may hold up any one. Nothing but sizes and times is kept."""
    modules = dict(module.named_modules())
    found: dict[Hashable, Call] = {}
    hooks = []
    try:
        for key, path in paths.items():
            watcher = _Watcher(found, key)
            hooks.append(modules[path].register_forward_pre_hook(watcher.before, with_kwargs=True))
            hooks.append(modules[path].register_forward_hook(watcher.after))
        with torch.no_grad():
            for _ in range(2):
                forward(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(found.values())


class _Watcher:
    """Times a module's calls; the quickest one stays."""

    def __init__(self, found: dict[Hashable, Call], key: Hashable) -> None:
        self.found, self.key, self.started = found, key, 0.0
        self.x: torch.Size | None = None

    def before(self, module: nn.Module, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        tensors = [a for a in (*given[:1], *options.values()) if isinstance(a, Tensor)]
        if tensors and tensors[0].is_floating_point():
            self.x, self.started = tensors[0].shape, time.perf_counter()

    def after(self, module: nn.Module, _: Any, output: Any) -> None:
        seconds = time.perf_counter() - self.started
        shape = _shape(output)
        if self.x is None or shape is None:
            return
        before = self.found.get(self.key)
        if before is None or seconds < before.seconds:
            self.found[self.key] = Call(seconds, *_products(module, self.x, shape))


def _shape(output: Any) -> torch.Size | None:
    """Of the first tensor in a module's output; None where there is none."""
    if isinstance(output, Tensor):
        return output.shape
    if isinstance(output, Mapping):
        output = tuple(output.values())
    shapes = [_shape(part) for part in output] if isinstance(output, (tuple, list)) else []
    return next((shape for shape in shapes if shape is not None), None)


def _products(module: nn.Module, x: torch.Size, y: torch.Size) -> tuple[int, int, int]:
    """How many products a Jacobian takes, and its matrices and their smaller side.

    A linear layer's is its weight; a norm's or an activation's is taken position by position;
    others exactly while they are small, else without a matrix.
    """
    if isinstance(module, nn.Linear):
        return 0, 1, min(x[-1], y[-1])
    leaf = not any(True for _ in module.children())
    if leaf and x == y and len(x) > 2:
        side = x[1] if len(x) == 4 else x[-1]
        places = x[1:].numel() // side
        taken = places if places * side <= ROWS else min(places, POSITIONS)
        return side, taken * x[0], side
    side = min(x[1:].numel(), y[1:].numel())
    if side <= DENSE_SIDE:
        return side, x[0], side
    leading = min(LEADING, side // 4, LEADING_ENTRIES // (x[0] * side))
    products = 2 * (2 * leading + STEPS * PROBES)
    return products // (SHARED if x.numel() * SHARED <= AT_ONCE else 1), 0, 0
