"""Stand-ins for PyTorch's layer functions, on the parameters whose gradients are asked for.

A parameter whose autograd gradient is None afterwards was seen completely, and one that still gets
a gradient was also used in another way: it isn't lost, but left to a general path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .derivatives import Affine, Asked, Convolution, Embedding, LayerNorm, Linear, Listener


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
        return _applied(Linear, input, weight, bias, False, asked)

    return linear


def _addmm_for(ask: Ask) -> Layer:
    """The linear layer of GPT-2's Conv1D: bias + x @ weight."""
    real = torch.addmm

    def addmm(bias: Tensor, x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        asked = None if options else ask(x, weight, bias)
        if asked is None:
            return real(bias, x, weight, **options)
        return _applied(Linear, x, weight, bias, True, asked)

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
        return _applied(Convolution, input, weight, bias, (stride, padding, dilation), asked)

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
        return _applied(Embedding, input, weight, padding, asked)

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
        return _applied(LayerNorm, input, weight, bias, eps, asked)

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
        return _applied(Affine, x, weight, bias, True, asked)

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
        return _applied(Affine, real(input, num_groups, None, None, eps), weight, bias, True, asked)

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
        return _applied(Affine, x, weight, None, False, asked)

    return rms_norm


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result
