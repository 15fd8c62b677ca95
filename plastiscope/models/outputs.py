"""Run a module on a probe batch, and pick the one tensor that is its answer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plastiscope.models.live import Batch, ModelError

ANSWERS = ("logits", "prediction_logits", "last_hidden_state", "pooler_output", "out")
COUNTS = "attention_mask"
IGNORES = ("src_key_padding_mask", "key_padding_mask")


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
    """A forward that calls the module with the inputs, in the precision of its weights, and with
    the probe's mask where the module's forward names one whose meaning is known."""
    taken = takes_mask(module)

    def forward(batch: Batch) -> Tensor:
        named = {}
        if taken is not None and "mask" in batch:
            # PyTorch's layers are told what to ignore, the others what counts.
            named[taken] = batch["mask"] if taken == COUNTS else batch["mask"] == 0
        with _padded():
            return answer(module(cast(module, batch["inputs"]), **named))

    return forward


@contextlib.contextmanager
def _padded() -> Iterator[None]:
    """While it lasts, PyTorch's encoders keep padding in place: their fast path packs inputs of
    different lengths together, in tensors without a shape."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def takes_mask(module: nn.Module) -> str | None:
    """The name of the forward's argument for a mask [B, T]: "attention_mask" (1 = counts), or one
    of PyTorch's (True = ignored). A plain "mask" may mean either, and isn't taken."""
    try:
        named = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return None  # Compiled code has no signature.
    return next((name for name in (COUNTS, *IGNORES) if name in named), None)


def unmasked(module: nn.Module, mask: Tensor | None) -> str | None:
    """A line for the user where a probe has padding that the model isn't told of."""
    if mask is None or bool(mask.all()) or takes_mask(module) is not None:
        return None
    return (
        "the model's forward takes no attention_mask: padding takes part in its attention, and is "
        "left out of the rows only"
    )


def cast(module: nn.Module, inputs: Tensor) -> Tensor:
    """Real inputs in the dtype of the module's first real parameter; ids stay integers."""
    if not inputs.is_floating_point():
        return inputs
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return inputs.to(parameter.dtype)
    return inputs.to(torch.get_default_dtype())
