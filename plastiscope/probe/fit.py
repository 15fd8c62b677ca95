"""Bring a batch into the model's shape and dtype, or say in one line why it can't be.

Axes: B inputs, T tokens, d features, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from plastiscope.errors import UsageError
from plastiscope.models.live import Inputs

IGNORED = -100


def fit(
    batch: Mapping[str, Tensor], inputs: Inputs, source: str
) -> tuple[dict[str, Tensor], list[str]]:
    """The batch as the model takes it, and notes on what was changed.

    Raises UsageError for a wrong number of channels or features, ids outside the vocabulary, more
    tokens than positions, values that aren't finite, labels or masks that don't fit.
    """
    notes: list[str] = []
    values = batch["inputs"].detach()
    if values.ndim == 0 or values.numel() == 0:
        raise UsageError(f"the probe {source} is empty")
    if inputs.kind == "tokens":
        fitted = {"inputs": _tokens(values, inputs, source)}
    else:
        fitted = {"inputs": _real(values, inputs, source, notes)}
    if "mask" in batch:
        fitted["mask"] = _mask(batch["mask"], fitted["inputs"], inputs, source)
    if "labels" in batch:
        labels = _labels(batch["labels"], fitted["inputs"], inputs, source, notes)
        if labels is not None:
            fitted["labels"] = labels
    return fitted, notes


def _tokens(values: Tensor, inputs: Inputs, source: str) -> Tensor:
    if values.ndim != 2:
        raise UsageError(
            f"the model takes token ids [inputs, tokens], the probe {source} has shape "
            f"{list(values.shape)}"
        )
    if values.is_floating_point() or values.dtype == torch.bool:
        raise UsageError(f"the model takes token ids, the probe {source} holds {values.dtype}")
    ids = values.long()
    low, high = int(ids.min()), int(ids.max())
    if inputs.vocabulary is not None and (low < 0 or high >= inputs.vocabulary):
        raise UsageError(
            f"the probe {source} has the token id {high if low >= 0 else low}, but the model "
            f"knows 0 to {inputs.vocabulary - 1}: was it made with another tokenizer?"
        )
    if inputs.longest is not None and ids.shape[1] > inputs.longest:
        raise UsageError(
            f"the probe {source} has {ids.shape[1]} tokens an input, but the model has "
            f"{inputs.longest} positions"
        )
    return ids


def _real(values: Tensor, inputs: Inputs, source: str, notes: list[str]) -> Tensor:
    if values.is_complex():
        raise UsageError(f"the probe {source} is complex: the model takes real numbers")
    pixels = values.dtype == torch.uint8 and inputs.kind == "image"
    if not values.is_floating_point() and not pixels:
        if inputs.kind == "image":
            raise UsageError(
                f"the probe {source} holds {values.dtype}, the model takes images: save pixels as "
                "uint8 (0 to 255), or as floats, scaled as in training"
            )
        notes.append(f"{values.dtype} values read as real numbers".replace("torch.", ""))
    real = values if values.dtype == torch.float64 else values.float()
    if not bool(torch.isfinite(real).all()):
        bad = int((~torch.isfinite(real)).sum())
        raise UsageError(f"the probe {source} has {bad} values that are NaN or infinite")
    shaped = _image(real, inputs, source, notes) if inputs.kind == "image" else None
    shaped = _vector(real, inputs, source, notes) if shaped is None else shaped
    return _scaled(shaped, inputs, notes) if pixels else shaped


def _vector(values: Tensor, inputs: Inputs, source: str, notes: list[str]) -> Tensor:
    if len(inputs.shape) == 2:
        return _series(values, inputs.shape, source, notes)
    width = inputs.shape[0]
    if values.ndim == 1 or math.prod(values.shape[1:]) != width:
        raise UsageError(
            f"the model takes {width} features an input, the probe {source} has shape "
            f"{list(values.shape)}"
        )
    if values.ndim > 2:
        notes.append(f"inputs {list(values.shape[1:])} flattened to {width} features")
    return values.flatten(1)


def _series(values: Tensor, shape: tuple[int, ...], source: str, notes: list[str]) -> Tensor:
    """Channels along one axis [B, C, L]."""
    channels, length = shape
    if values.ndim == 2 and values.shape[1] == channels * length:
        notes.append(f"inputs of {values.shape[1]} values read as {channels}x{length}")
        values = values.reshape(-1, channels, length)
    if values.shape[1:] == (length, channels) and channels != length:
        notes.append("channels moved from the last axis to the first")
        values = values.transpose(1, 2).contiguous()
    if values.shape[1:] != (channels, length):
        raise UsageError(
            f"the model takes {channels} channels of {length} values, the probe {source} has shape "
            f"{list(values.shape)}"
        )
    return values


def _image(values: Tensor, inputs: Inputs, source: str, notes: list[str]) -> Tensor:
    channels, high, wide = inputs.shape
    if values.ndim == 3 and channels == 1:
        values = values.unsqueeze(1)
    if values.ndim == 2 and values.shape[1] == channels * high * wide:
        notes.append(f"inputs of {values.shape[1]} values read as {channels}x{high}x{wide} images")
        values = values.reshape(-1, channels, high, wide)
    if values.ndim == 4 and values.shape[1] != channels and values.shape[3] == channels:
        notes.append("channels moved from the last axis to the first")
        values = values.permute(0, 3, 1, 2).contiguous()
    wrong = values.ndim != 4 or values.shape[1] != channels
    if wrong or not (inputs.resizable or values.shape[2:] == (high, wide)):
        size = f"{channels} channels" if inputs.resizable else f"{channels}x{high}x{wide}"
        raise UsageError(
            f"the model takes images of {size}, the probe {source} has shape {list(values.shape)}"
        )
    return values


def _scaled(values: Tensor, inputs: Inputs, notes: list[str]) -> Tensor:
    scaled = values / 255
    if inputs.mean is None or inputs.std is None:
        notes.append("bytes scaled to 0..1 (the model's mean and std aren't stored)")
        return scaled
    notes.append("bytes scaled to 0..1, then normalised by the model's mean and std")
    mean, std = (
        torch.tensor(part, dtype=scaled.dtype).reshape(1, -1, 1, 1)
        for part in (inputs.mean, inputs.std)
    )
    return (scaled - mean) / std


def _mask(mask: Tensor, values: Tensor, inputs: Inputs, source: str) -> Tensor:
    if inputs.kind != "tokens" or mask.shape != values.shape:
        raise UsageError(
            f"the mask of the probe {source} has shape {list(mask.shape)}, its inputs "
            f"{list(values.shape)}: a mask has one 0 or 1 a token"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise UsageError(f"the mask of the probe {source} holds other values than 0 and 1")
    counted = mask.long()
    if bool((counted.sum(1) == 0).any()):
        raise UsageError(f"the probe {source} has an input whose tokens are all masked out")
    return counted


def _labels(
    labels: Tensor, values: Tensor, inputs: Inputs, source: str, notes: list[str]
) -> Tensor | None:
    if labels.ndim == 0 or labels.shape[0] != values.shape[0]:
        raise UsageError(
            f"the probe {source} has {values.shape[0]} inputs and labels of shape "
            f"{list(labels.shape)}"
        )
    if labels.ndim == 2 and labels.shape[1] == 1 and inputs.kind != "tokens":
        labels = labels[:, 0]
    whole = not labels.is_floating_point() or bool((labels == labels.round()).all())
    if not whole or labels.ndim not in (1, 2) or (labels.ndim == 2 and inputs.kind != "tokens"):
        notes.append(f"labels {list(labels.shape)} aren't class numbers: no loss, no accuracy")
        return None
    if labels.ndim == 2 and labels.shape != values.shape:
        raise UsageError(
            f"the labels of the probe {source} have shape {list(labels.shape)}, its inputs "
            f"{list(values.shape)}"
        )
    return _in_range(labels.long(), inputs, source)


def _in_range(labels: Tensor, inputs: Inputs, source: str) -> Tensor:
    classes = inputs.classes or (inputs.vocabulary if labels.ndim == 2 else None)
    counted = labels[labels != IGNORED]
    if counted.numel() == 0:
        raise UsageError(f"every label of the probe {source} is {IGNORED}, which is ignored")
    low, high = int(counted.min()), int(counted.max())
    if low < 0 or (classes is not None and high >= classes):
        known = f"0 to {classes - 1}" if classes is not None else "numbers from 0"
        raise UsageError(
            f"the probe {source} has the label {high if low >= 0 else low}, but the model's "
            f"classes are {known}"
        )
    return labels
