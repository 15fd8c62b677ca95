"""A live network for a checkpoint: the module, what it takes, and how stored tensors fill it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

Batch = Mapping[str, torch.Tensor]
"""Named tensors of one probe batch: "inputs" (images [B, C, h, w], vectors [B, d] or token ids
[B, T]), and where there are any "labels" ([B] or [B, T], -100 ignored) and "mask" ([B, T], 1 =
counts)."""


@dataclass(frozen=True)
class Inputs:
    """What a network takes: kind "image", "tokens" or "vector"; the shape of one input; for
    tokens, the number of ids."""

    kind: str
    shape: tuple[int, ...]
    vocabulary: int | None = None


@dataclass(frozen=True)
class Live:
    """A module in eval mode, not yet filled, and how to use it.

    `stored` maps each parameter and buffer of the module to the checkpoint's tensor that fills it.
    `forward` gives the outputs [B, classes] or [B, T, vocabulary] for a batch. `source` and
    `assumptions` are for the user: where the model came from, and what was guessed.
    """

    module: nn.Module
    inputs: Inputs
    stored: Mapping[str, str]
    forward: Callable[[Batch], torch.Tensor]
    source: str
    assumptions: tuple[str, ...] = ()
