"""What a probe is, and what identifies it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from plastiscope.models.live import Batch


@dataclass(frozen=True)
class Probe:
    """One probe set: `batch` in the model's own shape and dtype.

    `fingerprint` (hex) depends on the batch's content alone. `source` says where it came from and
    `note` is one line for the user ("" when there's nothing to say).
    """

    name: str
    batch: Batch
    fingerprint: str
    synthetic: bool
    source: str
    note: str = ""


def fingerprint(batch: Mapping[str, Tensor]) -> str:
    """A hash of names, dtypes, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(batch):
        tensor = batch[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
