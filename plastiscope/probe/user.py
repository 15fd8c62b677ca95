"""A probe that the user's own function makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plastiscope.errors import UsageError
from plastiscope.models.live import Inputs

ORDER = ("inputs", "labels", "mask")


def call(
    maker: Callable[..., Any], inputs: Inputs, size: int, seed: int, spec: str
) -> dict[str, dict[str, Tensor]]:
    """The function's batches by name; one batch alone is named "probe".

    The function takes any of inputs, size and seed by name. It gives a tensor or array, a tuple
    (inputs, labels, mask), a dictionary of arrays, or a dictionary of such batches by name.
    """
    if not callable(maker):
        raise UsageError(f"--probe {spec} is a {type(maker).__name__}, not a function")
    offered = {"inputs": inputs, "size": size, "seed": seed}
    asked = inspect.signature(maker).parameters
    made = maker(**{name: value for name, value in offered.items() if name in asked})
    if isinstance(made, Mapping) and made and all(_is_batch(value) for value in made.values()):
        return {str(name): _arrays(value, spec) for name, value in made.items()}
    return {"probe": _arrays(made, spec)}


def _is_batch(value: Any) -> bool:
    return isinstance(value, (Mapping, tuple))


def _arrays(made: Any, spec: str) -> dict[str, Tensor]:
    if isinstance(made, tuple):
        made = {name: value for name, value in zip(ORDER, made, strict=False) if value is not None}
    if not isinstance(made, Mapping):
        made = {"inputs": made}
    return {str(name): _tensor(value, spec) for name, value in made.items()}


def _tensor(value: Any, spec: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise UsageError(f"--probe {spec} gave a {type(value).__name__}, not arrays of numbers")
    return torch.from_numpy(np.ascontiguousarray(array))
