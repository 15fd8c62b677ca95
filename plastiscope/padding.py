"""Inputs without padding, for what compares or differentiates whole inputs: a padded position is in
neither a distance nor a Jacobian.

Axes: B inputs, T positions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .models.live import Batch


def unpadded(*batches: Batch) -> tuple[Batch, ...] | None:
    """The inputs of one length, that of the most, cut to it; of several batches those of one index,
    all of that length. None where every input is padded in front or between.

    What is padded behind is cut; in front the positions would change. Batches without a mask of
    positions are whole.
    """
    masks = [batch["mask"].bool().cpu() for batch in batches if _is_padded(batch)]
    if not masks:
        return batches
    count = min(len(batch["inputs"]) for batch in batches)
    lengths = torch.stack([_lengths(mask[:count]) for mask in masks])
    if len(masks) < len(batches):
        # The others' inputs are as long as they are.
        lengths = torch.cat([lengths, torch.full((1, count), masks[0].shape[1])])
    same = (lengths == lengths[0]).all(0) & (lengths[0] > 0)
    if not same.any():
        return None
    often = np.bincount(lengths[0][same].numpy())
    # Of several lengths as common the longest.
    length = len(often) - 1 - int(often[::-1].argmax())
    chosen = (same & (lengths[0] == length)).nonzero().squeeze(1)
    return tuple(_cut(batch, chosen, masks[0].shape[1], length) for batch in batches)


def _is_padded(batch: Batch) -> bool:
    return "mask" in batch and batch["mask"].ndim == 2 and not bool(batch["mask"].bool().all())


def _lengths(mask: Tensor) -> Tensor:
    """Of each input [B] padded behind alone, else 0."""
    lengths = mask.sum(1)
    behind = mask == (torch.arange(mask.shape[1]) < lengths[:, None])
    return torch.where(behind.all(1), lengths, 0)


def _cut(batch: Batch, chosen: Tensor, width: int, length: int) -> Batch:
    return {
        name: part[:, :length] if part.ndim > 1 and part.shape[1] == width else part
        for name, part in ((n, x[chosen.to(x.device)]) for n, x in batch.items())
    }
