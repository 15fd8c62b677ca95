"""Small runs on disk for the reader's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plastiscope.checkpoints import Options, Run, discover

Table = dict[str, torch.Tensor]


def small(seed: int = 0, **shapes: tuple[int, ...]) -> Table:
    """A state dict of random tensors; by default two linear layers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = shapes or {
        "fc1.weight": (8, 4),
        "fc1.bias": (8,),
        "fc2.weight": (3, 8),
        "fc2.bias": (3,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def table() -> Callable[..., Table]:
    return small


@pytest.fixture
def one_run() -> Callable[..., Run]:
    """The only run at a path; fails where there are several."""

    def read(path: Path, **options: object) -> Run:
        runs = discover(path, Options(**options))  # type: ignore[arg-type]
        assert len(runs) == 1, [run.name for run in runs]
        return runs[0]

    return read


@pytest.fixture
def tensors() -> Callable[[Path], Table]:
    """Every tensor of the single checkpoint at a path, read."""

    def read(path: Path, **options: object) -> Table:
        runs = discover(path, Options(**options))  # type: ignore[arg-type]
        (checkpoint,) = runs[0].checkpoints
        state = checkpoint.open()
        return {name: state.read(name) for name in state.tensors}

    return read
