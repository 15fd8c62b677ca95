"""What a module is given in a forward pass, kept so that it can be called again by itself."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import unknown

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Called:
    """A module by its path ("" is the network), and which of its calls in one forward pass.

    With `calls`, a module that is called another number of times isn't the one that was meant.
    `then` is a function that the model calls on the module's output: it is meant, not the module.
    `channel_axis` is that of its output's channels where it's known; `mixes`: its positions are
    known to see each other.
    """

    path: str
    number: int = 0
    calls: int | None = None
    then: nn.Module | None = None
    channel_axis: int | None = None
    mixes: bool = False


@dataclass(frozen=True)
class Capture:
    """One call of a module: its first tensor argument x [B, ...], the rest, and the output;
    `channel_axis` and `mixes` as of `Called`."""

    module: nn.Module
    x: Tensor
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    output: Tensor
    channel_axis: int | None = None
    mixes: bool = False

    @property
    def others(self) -> list[Tensor]:
        """The tensors that it is given beside x."""
        given = _given(self.arguments, self.options)[0]
        every = (*self.arguments, *self.options.values())
        return [a for a in every if isinstance(a, Tensor) and a is not given]

    def again(self, x: Tensor) -> Tensor:
        """The module's output for another x, wherever it was given; everything else as it was.

        Attention is often given the same tensor three times.
        """
        given = _given(self.arguments, self.options)[0]
        arguments = [x if a is given else _fresh(a) for a in self.arguments]
        options = {name: x if a is given else _fresh(a) for name, a in self.options.items()}
        return first_tensor(self.module(*arguments, **options))


def _fresh(value: Any) -> Any:
    """A copy of what a module may write to, such as a cache of keys: each call has to find it as
    the first one did, or it would attend to what earlier calls left there."""
    if value is None or isinstance(value, (Tensor, nn.Module, tuple, str, int, float)):
        return value
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError):
        return value


def first_tensor(value: Any) -> Tensor:
    """The first tensor of a module's output (attention often gives its weights beside it)."""
    if isinstance(value, Tensor):
        return value
    parts = value.values() if isinstance(value, Mapping) else value
    return first_tensor(next(iter(parts)))


def _given(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among a module's first argument and its named ones."""
    return [a for a in (*arguments[:1], *options.values()) if isinstance(a, Tensor)]


def capture(
    module: nn.Module,
    forward: Callable[[Batch], Tensor],
    batch: Batch,
    paths: Mapping[Hashable, str | Called],
) -> dict[Hashable, Capture]:
    """A call of each module named by path ("" is the network), by its key: the first unless told.

    What the forward pass doesn't call, or calls without a floating tensor, is left out.
    Raises UsageError for a path that isn't in the network.
    """
    modules = dict(module.named_modules())
    keepers: dict[Hashable, _Keeper] = {}
    hooks = []
    try:
        for key, place in paths.items():
            called = Called(place) if isinstance(place, str) else place
            if called.path not in modules:
                raise unknown("module", called.path, modules)
            keeper = keepers[key] = _Keeper(called)
            part = modules[called.path]
            hooks.append(part.register_forward_pre_hook(keeper.before, with_kwargs=True))
            hooks.append(part.register_forward_hook(keeper.after, with_kwargs=True))
        with torch.no_grad():
            forward(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {key: keeper.found for key, keeper in keepers.items() if keeper.found is not None}


class _Keeper:
    """Keeps one call of one module; x as it was before the module, which may change it."""

    def __init__(self, called: Called) -> None:
        self.called = called
        self.seen = 0
        self.x: Tensor | None = None
        self.kept: Capture | None = None

    @property
    def found(self) -> Capture | None:
        return self.kept if self.called.calls in (None, self.seen) else None

    def before(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        tensors = _given(arguments, options)
        if self.seen == self.called.number and tensors and tensors[0].is_floating_point():
            self.x = tensors[0].detach().clone()
            self.arguments = tuple(map(_fresh, arguments))
            self.options = {name: _fresh(value) for name, value in options.items()}

    def after(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any
    ) -> None:
        if self.seen == self.called.number and self.x is not None:
            result, then = first_tensor(output).detach().clone(), self.called.then
            known = (self.called.channel_axis, self.called.mixes)
            self.kept = (
                Capture(module, self.x, self.arguments, self.options, result, *known)
                if then is None
                else Capture(then, result, (result,), {}, then(result), *known)
            )
        self.seen += 1


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
