"""What both the plan and the pass itself need: parameters, copies of them, single inputs.

Axes: B inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .factors import direct_gram

Batch = Mapping[str, Tensor]
Forward = Callable[[Batch], Tensor]
Scalars = Callable[[Tensor, Batch], Tensor]
"""C numbers for each input, [B, C], from the outputs."""


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name, a tied one once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def refuse_train_mode(module: nn.Module) -> None:
    if any(part.training for part in module.modules()):
        raise UsageError(
            "per-input gradients aren't defined in train mode, where batch statistics and dropout "
            "tie inputs together: call .eval() on the model first"
        )


def size_of(batch: Batch) -> int:
    return len(batch["inputs"])


def one_by_one(
    forward: Forward,
    batch: Batch,
    scalars: Scalars,
    parameters: Mapping[str, nn.Parameter],
    names: Sequence[str],
) -> dict[str, Tensor]:
    """Grams [n, n] by plain autograd, one input after the other; not of unused parameters."""
    wanted = [parameters[name] for name in names]
    found: dict[str, list[Tensor | None]] = {name: [] for name in names}
    for i in range(size_of(batch)):
        single = {key: value[i : i + 1] for key, value in batch.items()}
        with torch.enable_grad():
            values = scalars(forward(single), single)[0]
            for value in values:
                gradients = torch.autograd.grad(
                    value, wanted, retain_graph=len(values) > 1, allow_unused=True
                )
                for name, g in zip(names, gradients, strict=True):
                    found[name].append(g if g is None else g.flatten())
    return {
        name: direct_gram(
            torch.stack([p.new_zeros(p.numel()) if g is None else g for g in found[name]])
        )
        for name, p in zip(names, wanted, strict=True)
        if any(g is not None for g in found[name])
    }


_SHAPES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "first": lambda p, n: p.expand(n, *p.shape[1:]),
    "new": lambda p, n: p[None].expand(n, *p.shape),
    "line": lambda p, n: p[None, None].expand(n, 1, *p.shape),
    "row": lambda p, n: p[None].expand(n, *p.shape),
}


@contextlib.contextmanager
def copies_of(
    module: nn.Module, shapes: Mapping[str, str], inputs: int
) -> Iterator[dict[str, Tensor]]:
    """While it lasts, these parameters are leaves with one copy for each input."""
    parameters = trainable(module)
    leaves = {
        name: _SHAPES[shape](parameters[name].detach(), inputs).clone().requires_grad_()
        for name, shape in shapes.items()
    }
    by_id = {id(parameters[name]): leaf for name, leaf in leaves.items()}
    places = [
        (part, key, p)
        for part in module.modules()
        for key, p in part._parameters.items()
        if id(p) in by_id
    ]
    try:
        for part, key, p in places:
            part._parameters[key] = cast(nn.Parameter, by_id[id(p)])
        yield leaves
    finally:
        for part, key, p in places:
            part._parameters[key] = p
