"""A checkpoint's state held in memory, for models that are never written to disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from plastiscope.checkpoints.run import State, TensorInfo

RUNNING = ("running_mean", "running_var", "num_batches_tracked", "_mean", "_var", "_std", "count")


def hold(tensors: Mapping[str, torch.Tensor], **extras: Any) -> State:
    """The state that a reader gives for these tensors: shared storages are aliases."""
    kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    first: dict[tuple[int, torch.Size], str] = {}
    infos = {}
    for name, tensor in tensors.items():
        owner = first.setdefault((tensor.data_ptr(), tensor.shape), name)
        infos[name] = TensorInfo(
            name,
            tuple(tensor.shape),
            tensor.dtype,
            "buffer" if name.endswith(RUNNING) else "weight",
            owner if owner != name and tensor.numel() else None,
        )
    return State(infos, lambda name: kept[name], extras)


@pytest.fixture
def state_of() -> Callable[..., State]:
    return hold


@pytest.fixture
def corpus() -> Path:
    """Real checkpoints of other people's runs, where they are at hand."""
    folder = Path(__file__).parents[2].parent / "shared" / "corpus"
    if not folder.is_dir():
        pytest.skip("the corpus of real checkpoints isn't beside the repository")
    return folder
