"""Run a module on a probe batch, and pick the one tensor that is its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plastiscope.models.live import Batch, ModelError

ANSWERS = ("logits", "prediction_logits", "last_hidden_state", "pooler_output", "out")


def answer(output: Any) -> Tensor:
    """The outputs [B, classes] or [B, T, ...] in what a model returned.

    A tensor is itself; of a structure, the logits if it has any, else the last hidden state; of a
    tuple or list, the first tensor. Raises ModelError for anything else.
    """
    if isinstance(output, Tensor):
        return output
    for name in ANSWERS:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], (Tensor, tuple)):
        return answer(output[0])
    raise ModelError(
        f"the model returned a {type(output).__name__} without logits or a hidden state: give a "
        "--model whose forward returns one tensor"
    )


def positional(module: nn.Module) -> Callable[[Batch], Tensor]:
    """A forward that calls the module with the inputs alone, in the precision of its weights."""

    def forward(batch: Batch) -> Tensor:
        return answer(module(cast(module, batch["inputs"])))

    return forward


def cast(module: nn.Module, inputs: Tensor) -> Tensor:
    """Real inputs in the dtype of the module's first real parameter; ids stay integers."""
    if not inputs.is_floating_point():
        return inputs
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return inputs.to(parameter.dtype)
    return inputs.to(torch.get_default_dtype())
