"""Open one candidate: its tensors, what lies beside it, and whether it is a checkpoint at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import torch

from plastiscope.checkpoints.blobs import DAMAGE
from plastiscope.checkpoints.branches import is_optimizer
from plastiscope.checkpoints.content import Content
from plastiscope.checkpoints.names import printable
from plastiscope.checkpoints.options import Options
from plastiscope.checkpoints.places import Place, joined, read_json
from plastiscope.checkpoints.run import State, TensorInfo
from plastiscope.checkpoints.sequence import sample
from plastiscope.checkpoints.sniff import read_content
from plastiscope.checkpoints.states import Beside, make_state, optimizer_state
from plastiscope.checkpoints.steps import stored_numbers
from plastiscope.checkpoints.stored import Stored
from plastiscope.checkpoints.trusted import trusted
from plastiscope.checkpoints.units import Unit
from plastiscope.errors import UnreadableError

SETTINGS = ("config.json", "adapter_config.json")
_TRAINER = "trainer_state.json"
_OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin", "optimizer.pth", "optimizer_0.pt")
_DATA_NAMES = re.compile(
    r"(^|\.)(obs|observations?|actions?|rewards?|labels?|targets?|images?|input_ids|inputs?|x|y|"
    r"tokens|batch\w*|data|dones?|logits|target_\w+|attention_mask)$"
)


@dataclass(frozen=True)
class Opened:
    """A candidate that could be opened: what the sequence needs to know of it.

    `fingerprint` is equal for what reads the same, whatever it is called.
    """

    unit: Unit
    format: str
    tensors: Mapping[str, TensorInfo]
    numbers: Mapping[str, int]
    optimizer_step: int | None
    notes: tuple[str, ...]
    task: int | None
    fingerprint: str
    sample: torch.Tensor | None = None


def side_files(unit: Unit) -> tuple[str, ...]:
    """The names that are looked for beside a whole folder's weights, but for the settings."""
    return (_TRAINER, *_OPTIMIZER_FILES) if unit.whole_folder else ()


def opener(
    place: Place, unit: Unit, options: Options, base: Mapping[str, Stored] | None
) -> Callable[[], State]:
    """A function that opens the unit's State anew, holding nothing in between."""

    def open_state() -> State:
        return _state(place, unit, options, base)[0]

    return open_state


def examine(
    place: Place,
    unit: Unit,
    options: Options,
    base: Mapping[str, Stored] | None,
    identity: Callable[[Unit], str],
) -> Opened:
    """Open a candidate once and keep only its tables.

    Raises:
        UnreadableError: why it can't be read, or why it is no checkpoint.
    """
    state, content = _state(place, unit, options, base)
    if not state.tensors:
        raise UnreadableError("no weights in it")
    if looks_like_data(state):
        raise UnreadableError("a batch of data, not a checkpoint")
    numbers = stored_numbers(state.extras)
    if "trainer_state" in state.extras and "global_step" in state.extras["trainer_state"]:
        numbers["_trainer"] = 1
    return Opened(
        unit=unit,
        format=content.format,
        tensors=state.tensors,
        numbers=numbers,
        optimizer_step=_optimizer_step(content),
        fingerprint=identity(unit),
        notes=state.notes,
        task=numbers.get("task", numbers.get("task_id")),
        # Over a network a sample would be a download of its tensors.
        sample=None if place.remote else sample(state),
    )


def looks_like_data(state: State) -> bool:
    """Whether the names are those of a batch: inputs and targets, none of a layer."""
    return all(_DATA_NAMES.search(name) for name in state.tensors)


def _state(
    place: Place, unit: Unit, options: Options, base: Mapping[str, Stored] | None
) -> tuple[State, Content]:
    try:
        content = unit.load()
        if options.trust_pickle and not place.remote:
            content = trusted(content, unit.files)
        state = make_state(
            content,
            branch=options.weights,
            prefix=options.prefix,
            rename=options.rename,
            beside=_beside(place, unit, content, base),
        )
    except UnreadableError as error:
        # The line stands behind the file's name, so it needn't repeat it.
        raise UnreadableError(printable(str(error).replace(f"{unit.path}: ", ""))) from None
    except DAMAGE as error:
        # A structure that no writer makes gets past the parser and fails in the table.
        line = f"corrupt: {type(error).__name__} {error}".rstrip()
        raise UnreadableError(printable(line)) from None
    return replace(state, tensors=dict(state.tensors)), content


def _beside(
    place: Place, unit: Unit, content: Content, base: Mapping[str, Stored] | None
) -> Beside:
    extras: dict[str, Any] = {}
    folder = unit.folder
    config, adapter, trainer = (
        read_json(place, joined(folder, name)) for name in (*SETTINGS, _TRAINER)
    )
    if unit.whole_folder and trainer:
        extras["trainer_state"] = trainer
    if config:
        extras["config"] = config
    optimizer = _optimizer_beside(place, unit) if unit.whole_folder else None
    return Beside(extras=extras, adapter=adapter, base=base, optimizer=optimizer)


def _optimizer_beside(place: Place, unit: Unit) -> Callable[[], Mapping[str, Any] | None] | None:
    for name in _OPTIMIZER_FILES:
        path = joined(unit.folder, name)
        if place.entry(path) is not None:
            return lambda: optimizer_state(_optimizer_tree(place, path))
    return None


def _optimizer_tree(place: Place, path: str) -> Any:
    try:
        return read_content(place.blob(path)).tree
    except UnreadableError as error:
        raise UnreadableError(f"{PurePosixPath(path).name}: {error}") from None


def _optimizer_step(content: Content) -> int | None:
    """The optimizer's own counter: the first `step` in its state, which a restart sets back."""
    tree = content.tree
    if not isinstance(tree, Mapping):
        return None
    for key, value in tree.items():
        part = value[0] if isinstance(value, list) and value else value
        if isinstance(part, Mapping) and is_optimizer(str(key), part):
            states = part.get("state")
            for state in states.values() if isinstance(states, Mapping) else ():
                if isinstance(state, Mapping) and "step" in state:
                    return _number(state["step"])
    return None


def _number(value: Any) -> int | None:
    if isinstance(value, Stored):
        try:
            value = value.read().item() if value.numel == 1 and value.has_data else None
        except UnreadableError:
            return None
    return int(value) if isinstance(value, int | float) and value == value else None
