"""A network's parts from its stored names: tables of known families, else every tensor alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plastiscope.anatomy.effective import Effective, effective_tensors
from plastiscope.anatomy.parts import Anatomy, Component, Matrix
from plastiscope.checkpoints.run import State


def from_names(
    state: State, config: Mapping[str, Any] | None = None, families: Sequence[Path] = ()
) -> Anatomy:
    """Every part of a network of which only the tensors are known."""
    tensors = effective_tensors(state)
    found = tuple(alone(state, tensors, set()))
    return Anatomy(found, source="names", unexplained=tuple(tensors.names()))


def alone(state: State, tensors: Effective, claimed: set[str]) -> list[Component]:
    """A component for every weight that nothing has claimed, under its own path."""
    parts = []
    for name in tensors.names():
        owner, _, last = name.rpartition(".")
        kinds = {state.tensors[f].kind for f in tensors.factors(name)}
        if name in claimed or kinds != {"weight"} or not tensors.shape(name):
            continue
        if last == "bias" and f"{owner}.weight" in tensors.names():
            continue
        label = owner if last == "weight" and owner else name
        parts.append(Component(label, None, owner, (Matrix(name),)))
    return parts
