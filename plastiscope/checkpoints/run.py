"""What a run of checkpoints is: the values that readers return and the rest of the tool uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor, known without reading its data.

    `kind` is "weight" or "buffer" (masks, index tables, running statistics, counters, rotary
    frequencies) or "no_data" (meta or empty tensors). `alias_of` names the tensor that shares
    its storage and is counted in its place.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = "weight"
    alias_of: str | None = None


def _nothing(name: str) -> torch.Tensor:
    raise KeyError(name)


@dataclass(frozen=True)
class State:
    """The content of one checkpoint: tensors that are read one at a time, and plain extras.

    `tensors` is in stored order, under names with the wrapper prefixes removed; `read` gives one
    of them, on the CPU, in its stored dtype (dequantised when the format packs integers).
    `extras` holds what else was stored, as plain Python values (config, model_args,
    hyper_parameters, iter_num ...). `optimizer` gives the optimizer's state dict, or None.
    `notes` are single lines for the user: stubbed classes, ignored files, branches.
    `stripped` is the prefix that a training framework put before every name and that was removed
    ("net." of a Lightning module), `stubs` the classes that the file names and nobody imported.
    `peek` reads a tensor without verifying its checksum, for looking at a few of its values.
    """

    tensors: Mapping[str, TensorInfo]
    read: Callable[[str], torch.Tensor]
    extras: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[], Mapping[str, Any] | None] = lambda: None
    notes: tuple[str, ...] = ()
    branch: str = "raw"
    stripped: str = ""
    stubs: tuple[str, ...] = ()
    peek: Callable[[str], torch.Tensor] = _nothing


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a run, known but not yet read.

    `name` is its path within the run; `step_source` says where the step was found
    ("stored global_step", "trainer_state.json", "name"); `fingerprint` is a hash of its content
    (hex, the same for the same bytes under another name). `open` reads it.
    """

    name: str
    path: str
    format: str
    step: int
    step_source: str
    size: int
    fingerprint: str
    open: Callable[[], State]
    task: int | None = None


@dataclass(frozen=True)
class Skipped:
    """A file that isn't measured, and why. `unreadable` is True when it should have been."""

    name: str
    reason: str
    unreadable: bool = False


@dataclass(frozen=True)
class Break:
    """A step at which the sequence doesn't join: no difference is taken across it.

    `tensors` names what changed (shape, head, vocabulary); empty means the whole network.
    """

    checkpoint: str
    reason: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """The ordered checkpoints of one training run, and what was left out."""

    name: str
    path: str
    checkpoints: tuple[Checkpoint, ...]
    skipped: tuple[Skipped, ...] = ()
    breaks: tuple[Break, ...] = ()
    notes: tuple[str, ...] = ()
