"""What a module is given in a forward pass, kept so that it can be called again by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import unknown

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Capture:
    """One call of a module: its first tensor argument x [B, ...], the rest, and the output."""

    module: nn.Module
    x: Tensor
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    output: Tensor

    def again(self, x: Tensor) -> Tensor:
        """The module's output for another x, everything else as it was."""
        if self.arguments and isinstance(self.arguments[0], Tensor):
            return first_tensor(self.module(x, *self.arguments[1:], **self.options))
        name = _first_name(self.options)
        return first_tensor(self.module(*self.arguments, **{**self.options, name: x}))


def first_tensor(value: Any) -> Tensor:
    """The first tensor of a module's output (attention often gives its weights beside it)."""
    if isinstance(value, Tensor):
        return value
    parts = value.values() if isinstance(value, Mapping) else value
    return first_tensor(next(iter(parts)))


def _first_name(options: Mapping[str, Any]) -> str:
    return next(name for name, value in options.items() if isinstance(value, Tensor))


def capture(
    module: nn.Module,
    forward: Callable[[Batch], Tensor],
    batch: Batch,
    paths: Mapping[Hashable, str],
) -> dict[Hashable, Capture]:
    """The first call of each module named by path ("" is the network), by its key.

    A module that the forward pass doesn't call, or calls without a floating tensor, is left out.
    Raises UsageError for a path that isn't in the network.
    """
    modules = dict(module.named_modules())
    found: dict[Hashable, Capture] = {}
    hooks = []
    try:
        for key, path in paths.items():
            if path not in modules:
                raise unknown("module", path, modules)
            keeper = _Keeper(found, key)
            hooks.append(modules[path].register_forward_pre_hook(keeper.before, with_kwargs=True))
            hooks.append(modules[path].register_forward_hook(keeper.after, with_kwargs=True))
        with torch.no_grad():
            forward(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class _Keeper:
    """Keeps the first call of one module; x as it was before the module, which may change it."""

    def __init__(self, found: dict[Hashable, Capture], key: Hashable) -> None:
        self.found, self.key = found, key
        self.x: Tensor | None = None

    def before(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        tensors = [a for a in (*arguments[:1], *options.values()) if isinstance(a, Tensor)]
        if self.x is None and tensors and tensors[0].is_floating_point():
            self.x = tensors[0].detach().clone()

    def after(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any
    ) -> None:
        if self.x is not None and self.key not in self.found:
            result = first_tensor(output).detach().clone()
            self.found[self.key] = Capture(module, self.x, arguments, options, result)


@contextlib.contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """While it lasts, no parameter asks for a gradient; attention is computed step by step."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    asked = [p for p in module.parameters() if p.requires_grad]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        for p in asked:
            p.requires_grad_(False)
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for p in asked:
            p.requires_grad_(True)
