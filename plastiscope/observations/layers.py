"""Stand-ins for PyTorch's layer functions that hand out gradient factors while backward runs.

A stand-in computes what the function computes; in backward it passes the input's gradient on,
gives the factors of the parameter's gradient away and returns no gradient for the parameter. So a
parameter whose autograd gradient is None afterwards was seen completely, and one that still gets
a gradient was also used in another way: it isn't lost, but left to a general path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input

from .factors import Direct, Factor, Indexed, Outer

Names = tuple[str, ...]
Make = Callable[[Callable[[Tensor], Tensor]], Factor]


class Listener(Protocol):
    """Who takes the calls: `call` says whether it wants the call, `factor` is given the result."""

    def call(self, names: Names, x: Tensor) -> int | None:
        """The number of this call of these parameters, or None to leave them to autograd."""

    def spread(self, names: Names, number: int) -> int:
        """How many copies to make of a call that is the same for every input; 0 for none."""

    def factor(self, name: str, names: Names, number: int, make: Make) -> None:
        """The factor, made by a function that brings a tensor [..., d] to [inputs, places, d]."""


@dataclass(frozen=True)
class Asked:
    """One call of a layer: its parameters' names (None: not one that counts), and its number."""

    listener: Listener
    number: int
    weight: str | None
    bias: str | None

    @property
    def names(self) -> Names:
        """Those that count."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    def give(self, which: str | None, make: Make) -> None:
        """Hand a factor over, for the parameter if it is one that counts."""
        if which is not None:
            self.listener.factor(which, self.names, self.number, make)


INNERMOST = -1


def by_input(x: Tensor, axis: int, inputs: int) -> Tensor:
    """[inputs, places, d] of a tensor [..., d] whose `axis` holds the inputs, outermost.

    INNERMOST: the rows [places * inputs, d] of attention that works on [T, B, d].
    """
    if axis == INNERMOST:
        return x.reshape(-1, inputs, x.shape[-1]).transpose(0, 1)
    return x.movedim(axis, 0).reshape(inputs, -1, x.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, asked: Asked
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.asked = transposed, asked
        return functional_linear(x, weight.mT if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.asked.give(ctx.asked.weight, _outer(gradient, x, ctx.transposed))
        ctx.asked.give(ctx.asked.bias, _sums(gradient))
        passed = None
        if ctx.needs_input_grad[0]:
            passed = gradient @ (weight.mT if ctx.transposed else weight)
        return passed, None, None, None, None


def _outer(gradient: Tensor, x: Tensor, transposed: bool) -> Make:
    return lambda at: Outer(at(gradient), at(x), transposed)


def _sums(gradient: Tensor) -> Make:
    return lambda at: Direct(at(gradient).sum(1))


class _Affine(torch.autograd.Function):
    """x * weight + bias along the last axis, or along axis 1 of a convolution's output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, channels: bool, asked: Asked
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.channels, ctx.asked = channels, asked
        shape = (-1, *(1 for _ in x.shape[2:])) if channels else (-1,)
        y = x * weight.reshape(shape)
        return y if bias is None else y + bias.reshape(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.channels:
            x, gradient = x.movedim(1, -1), gradient.movedim(1, -1)
        ctx.asked.give(ctx.asked.weight, _sums(gradient * x))
        ctx.asked.give(ctx.asked.bias, _sums(gradient))
        passed = gradient * weight
        return passed.movedim(-1, 1) if ctx.channels else passed, None, None, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, asked: Asked
    ) -> Tensor:
        y, mean, scale = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.asked = asked
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        ctx.asked.give(ctx.asked.weight, _sums(gradient * ((x - mean) * scale)))
        ctx.asked.give(ctx.asked.bias, _sums(gradient))
        passed = torch.ops.aten.native_layer_norm_backward(
            gradient.contiguous(), x, weight.shape, mean, scale, weight, None, [True, False, False]
        )[0]
        return passed, None, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int, asked: Asked) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.asked = padding, asked
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        kept = gradient * (ids != ctx.padding)[..., None]
        ctx.asked.give(
            ctx.asked.weight, lambda at: Indexed(at(ids[..., None]).squeeze(-1), at(kept))
        )
        return None, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: Any, asked: Asked
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.asked = options, asked
        stride, padding, dilation = options
        return functional_conv2d(x, weight, bias, stride, padding, dilation)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.options
        patches = functional.unfold(x, weight.shape[2:], dilation, padding, stride).mT
        places = gradient.flatten(2).mT
        ctx.asked.give(ctx.asked.weight, _outer(places, patches, False))
        ctx.asked.give(ctx.asked.bias, _sums(places))
        passed = None
        if ctx.needs_input_grad[0]:
            passed = conv2d_input(  # type: ignore[no-untyped-call]
                x.shape, weight, gradient, stride, padding, dilation
            )
        return passed, None, None, None, None


functional_linear = functional.linear
functional_conv2d = functional.conv2d


@contextlib.contextmanager
def standing_in(names: dict[int, str], listener: Listener) -> Iterator[None]:
    """While it lasts, layer functions on the parameters of these ids report to the listener."""
    made = _stand_ins(names, listener)
    owners = {"addmm": torch}
    real = {name: getattr(owners.get(name, functional), name) for name in made}
    try:
        for name, function in made.items():
            setattr(owners.get(name, functional), name, function)
        yield
    finally:
        for name, function in real.items():
            setattr(owners.get(name, functional), name, function)


def _stand_ins(names: dict[int, str], listener: Listener) -> dict[str, Callable[..., Tensor]]:
    def asked(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Asked | None:
        """None when any of the parameters must be left to autograd."""
        known = [names.get(id(p)) if p is not None else None for p in (weight, bias)]
        strangers = [p for p, name in zip((weight, bias), known, strict=True) if name is None]
        if known == [None, None] or any(p is not None and p.requires_grad for p in strangers):
            return None
        number = listener.call(tuple(name for name in known if name is not None), x)
        return None if number is None else Asked(listener, number, known[0], known[1])

    return {
        "linear": _linear_for(asked),
        "addmm": _addmm_for(asked),
        "conv2d": _conv2d_for(asked),
        "embedding": _embedding_for(asked),
        "layer_norm": _layer_norm_for(asked),
        "batch_norm": _batch_norm_for(asked),
        "group_norm": _group_norm_for(asked),
        "rms_norm": _rms_norm_for(asked),
    }


Ask = Callable[[Tensor, "Tensor | None", "Tensor | None"], "Asked | None"]
Layer = Callable[..., Tensor]


def _linear_for(ask: Ask) -> Layer:
    real = functional.linear

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        asked = ask(input, weight, bias)
        if asked is None:
            return real(input, weight, bias)
        return _applied(_Linear, input, weight, bias, False, asked)

    return linear


def _addmm_for(ask: Ask) -> Layer:
    """The linear layer of GPT-2's Conv1D: bias + x @ weight."""
    real = torch.addmm

    def addmm(bias: Tensor, x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        asked = None if options else ask(x, weight, bias)
        if asked is None:
            return real(bias, x, weight, **options)
        return _applied(_Linear, x, weight, bias, True, asked)

    return addmm


def _conv2d_for(ask: Ask) -> Layer:
    real = functional.conv2d

    def conv2d(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        plain = groups == 1 and not isinstance(padding, str) and input.ndim == 4
        # The inputs of a convolution lie along axis 0 alone; ask with that axis last but one.
        asked = ask(input.flatten(1), weight, bias) if plain else None
        if asked is None:
            return real(input, weight, bias, stride, padding, dilation, groups)
        return _applied(_Convolution, input, weight, bias, (stride, padding, dilation), asked)

    return conv2d


def _embedding_for(ask: Ask) -> Layer:
    real = functional.embedding

    def embedding(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        plain = max_norm is None and not scale_grad_by_freq and not sparse
        asked = ask(input[..., None], weight, None) if plain else None
        if asked is None:
            return real(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        padding = -1 if padding_idx is None else padding_idx % len(weight)
        copies = asked.listener.spread(asked.names, asked.number)
        if copies:
            # A position table is looked up once for all inputs: now once for each.
            places = input if input.ndim == 1 else input[0]
            input = places.expand(copies, *places.shape)
        return _applied(_Embedding, input, weight, padding, asked)

    return embedding


def _layer_norm_for(ask: Ask) -> Layer:
    real = functional.layer_norm

    def layer_norm(
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        plain = weight is not None and weight.ndim == 1
        asked = ask(input, weight, bias) if plain else None
        if asked is None:
            return real(input, normalized_shape, weight, bias, eps)
        return _applied(_LayerNorm, input, weight, bias, eps, asked)

    return layer_norm


def _batch_norm_for(ask: Ask) -> Layer:
    real = functional.batch_norm

    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        asked = ask(input.flatten(1), weight, bias) if weight is not None and not training else None
        if asked is None:
            return real(input, running_mean, running_var, weight, bias, training, momentum, eps)
        x = real(input, running_mean, running_var, None, None, False, momentum, eps)
        return _applied(_Affine, x, weight, bias, True, asked)

    return batch_norm


def _group_norm_for(ask: Ask) -> Layer:
    real = functional.group_norm

    def group_norm(
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        asked = ask(input.flatten(1), weight, bias) if weight is not None else None
        if asked is None:
            return real(input, num_groups, weight, bias, eps)
        return _applied(
            _Affine, real(input, num_groups, None, None, eps), weight, bias, True, asked
        )

    return group_norm


def _rms_norm_for(ask: Ask) -> Layer:
    real = functional.rms_norm

    def rms_norm(
        input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        plain = weight is not None and weight.ndim == 1
        asked = ask(input, weight, None) if plain else None
        if asked is None:
            return real(input, normalized_shape, weight, eps)
        x = real(input, normalized_shape, None, eps)
        return _applied(_Affine, x, weight, None, False, asked)

    return rms_norm


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result
