"""One forward pass, seen from outside: where each module begins and ends and which functions run.

The functions that a model calls are seen by a TorchFunctionMode. Composite functions of
torch.nn.functional (multi_head_attention_forward, relu ...) would hide what they call, so their
own check for overrides is switched off and the mode sees the tensor operations inside them.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plastiscope.anatomy.parts import Site

SILENT = {
    "size",
    "dim",
    "stride",
    "numel",
    "is_floating_point",
    "_set_grad_enabled",
    "item",
    "tolist",
}
"""Functions that give no tensor: never a site."""


class Follower:
    """What a passage tells of: override what is needed. A returned value replaces the real one."""

    def function(
        self,
        site: Site,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A function is called at `site`; has to call it and to give its result."""
        return function(*args, **kwargs)

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module's forward begins."""

    def leave(self, site: Site, output: Any) -> None:
        """A module's forward has ended."""


class Passage(TorchFunctionMode):
    """Tells a follower of every module and function of the forward passes run inside it."""

    def __init__(self, module: nn.Module, follower: Follower) -> None:
        super().__init__()
        self.module = module
        self.follower = follower
        self.stack: list[tuple[str, int]] = []
        self.counts: Counter[tuple[str, int, str]] = Counter()
        self.hooks: list[Any] = []

    def __enter__(self) -> Passage:
        for path, part in self.module.named_modules():
            self.hooks.append(
                part.register_forward_pre_hook(self._entering(path), prepend=True, with_kwargs=True)
            )
            self.hooks.append(
                part.register_forward_hook(self._leaving(path), with_kwargs=True, always_call=True)
            )
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def start_again(self) -> None:
        """Forget what was counted: the next forward is a new pass."""
        self.stack.clear()
        self.counts.clear()

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not path and not self.stack:
                self.start_again()
            call = self.counts[path, -1, ""]
            self.counts[path, -1, ""] += 1
            self.stack.append((path, call))
            self.follower.enter(Site(path, call, port="input"), args, kwargs)

        return enter

    def _leaving(self, path: str) -> Callable[..., None]:
        def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self.stack and self.stack[-1][0] == path:
                self.follower.leave(Site(*self.stack.pop()), output)

        return leave

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = function_name(func)
        if name in SILENT:
            return func(*args, **(kwargs or {}))
        path, call = self.stack[-1] if self.stack else ("", 0)
        ordinal = self.counts[path, call, name]
        self.counts[path, call, name] += 1
        site = Site(path, call, name, ordinal)
        return self.follower.function(site, func, args, kwargs or {})


def function_name(function: Callable[..., Any]) -> str:
    """The plain name: "add" for torch.add, Tensor.__add__ and aten.add.Tensor; "T" for x.T."""
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        return attribute if attribute in {"T", "mT", "H", "mH", "real", "imag", "data"} else "size"
    return name if name.startswith("__") else name.split(".")[0]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument or result, in order, through tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Eval mode, and everything put back afterwards: flags, buffers, random state, switches.

    Inside, attention is computed by visible functions: the fused encoder path is off, gradient
    checkpoints run their function directly, compiled modules run eagerly.
    """
    flags = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in module.buffers()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=_devices(module)))
        stack.enter_context(_visible_functions())
        stack.enter_context(_plain_checkpoints())
        # Nothing is compiled before torch._dynamo is loaded, which takes seconds: so not by us.
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for part, _ in flags:
            part.training = False  # not eval(): some modules merge weights there
        try:
            yield
        finally:
            for part, training in flags:
                part.training = training
            with torch.no_grad():
                for buffer, version, content in buffers:
                    if buffer._version != version:
                        buffer.copy_(content)


def _devices(module: nn.Module) -> list[int]:
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    return sorted(d.index for d in devices if d.index is not None)


@contextlib.contextmanager
def _visible_functions() -> Iterator[None]:
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    saved = {name: getattr(torch.nn.functional, name) for name in names}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        for name in names:
            setattr(torch.nn.functional, name, lambda *_: False)
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        for name, function in saved.items():
            setattr(torch.nn.functional, name, function)
        torch.backends.mha.set_fastpath_enabled(fast)


class _Direct:
    """Stands in for the checkpoint function of autograd: no recomputation, the same values."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)


def _no_recomputation(*_: Any, **__: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _plain_checkpoints() -> Iterator[None]:
    module = torch.utils.checkpoint
    replacements = {
        "CheckpointFunction": _Direct,
        "_checkpoint_without_reentrant_generator": _no_recomputation,
        "_checkpoint_without_reentrant_generator_impl": _no_recomputation,
    }
    saved = {name: getattr(module, name) for name in replacements if hasattr(module, name)}
    try:
        for name in saved:
            setattr(module, name, replacements[name])
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)
