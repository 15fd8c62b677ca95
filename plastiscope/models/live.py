"""A live network for a checkpoint: the module, what it takes, and how stored tensors fill it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from plastiscope.errors import PlastiscopeError

Batch = Mapping[str, torch.Tensor]
"""Named tensors of one probe batch: "inputs" (images [B, C, h, w], vectors [B, d] or token ids
[B, T]), and where there are any "labels" ([B] or [B, T], aligned with the outputs, -100 ignored)
and "mask" ([B, T], 1 = counts)."""


class ModelError(PlastiscopeError):
    """A network that can't be rebuilt or filled exactly: says why and which option supplies it."""


@dataclass(frozen=True)
class Inputs:
    """What a network takes: kind "image", "tokens" or "vector"; the shape of one input; for
    tokens, the number of ids.

    `longest` is the length of the position table, None when there's no limit; `mean` and `std`
    normalise each image channel after scaling to 0..1, None when the model doesn't say. `resizable`
    images may have another height and width. `classes` counts the outputs, None when unknown;
    `causal` outputs predict the next token.
    """

    kind: str
    shape: tuple[int, ...]
    vocabulary: int | None = None
    longest: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resizable: bool = False
    classes: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class Merge:
    """Parameters made of several stored tensors, or several parameters made of one.

    `convert` takes the tensors named in `sources` and gives those of the module named in `targets`.
    """

    targets: tuple[str, ...]
    sources: tuple[str, ...]
    convert: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Live:
    """A module in eval mode, not yet filled, and how to use it.

    `stored` maps each parameter and buffer of the module to the checkpoint's tensor that fills it;
    what is stored in another form (a mixture's experts one by one) is in `merges` instead.
    `forward` gives the outputs [B, classes] or [B, T, vocabulary] for a batch. `source` and
    `assumptions` are for the user: where the model came from, and what was guessed. `unused` are
    stored tensors that are left out of the replay on purpose (target networks).
    """

    module: nn.Module
    inputs: Inputs
    stored: Mapping[str, str]
    forward: Callable[[Batch], torch.Tensor]
    source: str
    assumptions: tuple[str, ...] = ()
    merges: tuple[Merge, ...] = ()
    unused: tuple[str, ...] = ()
