"""Arrays from files, under the three names of a batch: inputs, labels, mask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plastiscope.checkpoints.blobs import local
from plastiscope.checkpoints.content import as_tensor, children
from plastiscope.checkpoints.sniff import read_content
from plastiscope.errors import UnreadableError, UsageError

SUFFIXES = (".npz", ".npy", ".pt", ".pth", ".safetensors", ".parquet")
NAMES = {
    "inputs": (
        "inputs",
        "input",
        "x",
        "input_ids",
        "pixel_values",
        "images",
        "image",
        "tokens",
        "ids",
        "obs",
        "observations",
        "observation",
        "states",
        "features",
        "data",
        "x_test",
        "x_val",
    ),
    "labels": ("labels", "label", "y", "targets", "target", "y_test", "y_val"),
    "mask": ("mask", "attention_mask"),
}


def read_arrays(path: Path) -> dict[str, Tensor]:
    """Every array of a file by its own name; nothing in it is executed.

    A list of dictionaries (batches) is joined along the first axis, name by name.
    """
    if path.suffix == ".parquet":
        from plastiscope.probe.tables import read_parquet

        return read_parquet(path)
    if path.suffix == ".npy":
        return {"inputs": _read_npy(path)}
    try:
        tree = read_content(local(path)).tree
    except UnreadableError as error:
        raise UsageError(f"the probe {path.name} can't be read: {error}") from error
    lone = as_tensor(tree)
    if lone is not None:
        return {"inputs": lone.read().clone()}
    if isinstance(tree, (list, tuple)):
        return _joined(path, tree)
    return _members(tree)


def _read_npy(path: Path) -> Tensor:
    import numpy as np

    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (ValueError, OSError, EOFError) as error:
        raise UsageError(f"the probe {path.name} can't be read: {error}") from error


def _members(tree: Any) -> dict[str, Tensor]:
    found = {name: as_tensor(value) for name, value in children(tree) or []}
    return {name: stored.read().clone() for name, stored in found.items() if stored is not None}


def _joined(path: Path, batches: list[Any] | tuple[Any, ...]) -> dict[str, Tensor]:
    parts = [_members(batch) for batch in batches if isinstance(batch, Mapping)]
    if len(parts) != len(batches) or not parts:
        tensors = [as_tensor(item) for item in batches]
        names = ("inputs", "labels", "mask")
        if 0 < len(tensors) <= 3 and all(tensor is not None for tensor in tensors):
            pairs = zip(names, tensors, strict=False)
            return {name: tensor.read().clone() for name, tensor in pairs if tensor is not None}
        raise UsageError(f"the probe {path.name} is a list, but not of dictionaries of arrays")
    shared = [name for name in parts[0] if all(name in part for part in parts)]
    try:
        return {name: torch.cat([part[name] for part in parts]) for name in shared}
    except RuntimeError as error:
        raise UsageError(f"the batches in {path.name} have different shapes") from error


def as_batch(arrays: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The arrays that are a batch's inputs, labels and mask; the others are left out."""
    by_name = {name.lower(): tensor for name, tensor in arrays.items()}
    batch: dict[str, Tensor] = {}
    for role, names in NAMES.items():
        for name in names:
            if name in by_name:
                batch[role] = by_name[name]
                break
    if "inputs" not in batch:
        held = ", ".join(sorted(arrays)[:8]) or "nothing"
        raise UsageError(
            f"the probe {source} has no array named inputs (or x, images, input_ids, obs): it "
            f"holds {held}"
        )
    return batch
