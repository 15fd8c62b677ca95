"""Derivatives of PyTorch's layers that hand out gradient factors while backward runs.

A layer computes what the function computes; in backward it passes the input's gradient on, gives
the factors of the parameter's gradient away and returns no gradient for the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input

from .factors import Direct, Factor, Indexed, Outer

# The functions themselves, whatever stands in for them later.
functional_linear = functional.linear
functional_conv2d = functional.conv2d

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


class Linear(torch.autograd.Function):
    """x @ weight^T + bias; `transposed`: the weight is [in, out]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, asked: Asked
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.asked = transposed, asked
        made = functional_linear(x, weight.mT if transposed else weight, bias)
        # The same memory, but no view: what follows may rewrite it in place.
        whole: Tensor = torch.ops.aten._unsafe_view(made, made.shape)
        return whole

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
    return lambda at: Outer(at(gradient)[:, None], at(x), transposed)


def _sums(gradient: Tensor) -> Make:
    return lambda at: Direct(at(gradient).sum(1, keepdim=True))


class Affine(torch.autograd.Function):
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


class LayerNorm(torch.autograd.Function):
    """(x - mean) / deviation * weight + bias along the last axis."""

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


class Embedding(torch.autograd.Function):
    """Rows of a table; the padding row gets no gradient."""

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
            ctx.asked.weight, lambda at: Indexed(at(kept)[:, None], at(ids[..., None]).squeeze(-1))
        )
        return None, None, None, None


class Convolution(torch.autograd.Function):
    """A 2-d convolution in one group."""

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
