"""At which step each checkpoint was saved: its content says first, its name second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from plastiscope.checkpoints.names import best_word, step_numbers

# In order of how directly they count the training.
STEP_KEYS = (
    *("global_step", "global_steps", "step", "current_step", "train_step", "training_step"),
    *("iter_num", "iteration", "iter", "it", "n_iter", "current_iter", "itr", "steps", "iters"),
    *("num_timesteps", "timesteps", "timestep", "env_step", "env_steps", "gradient_step"),
    *("num_updates", "iterations", "total_it", "num_steps", "total_steps", "total_timesteps"),
    *("epoch", "current_epoch", "epochs", "num_epochs", "last_epoch", "task", "task_id"),
)
# These often hold what was planned; alone, without a second file that differs, they say nothing.
_PLANNED = {"steps", "iters", "iterations", "num_steps", "total_steps", "total_timesteps"} | {
    "epochs",
    "num_epochs",
}
_CONTAINERS = ("trainer_state", "metadata", "trainer", "meta", "state", "progress", "info", "stats")


@dataclass(frozen=True)
class Steps:
    """The step of each checkpoint (None where nothing tells), where it was found, and notes."""

    values: tuple[int | None, ...]
    source: str
    notes: tuple[str, ...] = ()
    key: str | None = None


def stored_numbers(extras: Mapping[str, Any]) -> dict[str, int]:
    """The whole numbers in a checkpoint's extras that may be a step."""
    found: dict[str, int] = {}
    nested = [extras[c] for c in _CONTAINERS if isinstance(extras.get(c), Mapping)]
    for table in (extras, *nested):
        for key in STEP_KEYS:
            number = _whole(table.get(key))
            if number is not None and key not in found:
                found[key] = number
    return found


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        value = int(value) if value.isdigit() and len(value) < 19 else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else None


def find_steps(
    names: Sequence[str], stored: Sequence[Mapping[str, int]], order: str = "auto"
) -> Steps:
    """One rule for all checkpoints of a run.

    A stored number that every file has and that tells the files apart is the step. One that is
    the same in every file isn't. Where stored numbers tie and the names don't, the names decide.
    """
    named = _named(names)
    notes: list[str] = []
    if order != "name":
        key = _best_key(stored)
        if key is not None:
            values = tuple(table[key] for table in stored)
            distinct = len(set(values)) == len(values)
            if not distinct and not _tells_apart(named) and (pair := _paired(stored)) is not None:
                return Steps(*pair, tuple(notes))
            if distinct or order == "content" or not _tells_apart(named):
                notes += _disagreement(names, values, named)
                source = "trainer_state.json" if _from_trainer(stored, key) else f"stored {key}"
                return Steps(values, source, tuple(notes), key)
            notes.append(f"stored {key} is the same in several files: the names give the step")
    constant = [k for k in STEP_KEYS if len(stored) > 1 and len({t.get(k) for t in stored}) == 1]
    constant = [k for k in constant if k in stored[0]]
    if constant and any(v is not None for v in named):
        notes.append(f"stored {constant[0]} is {stored[0][constant[0]]} in every file: not a step")
    return Steps(tuple(named), "name", tuple(notes))


def _from_trainer(stored: Sequence[Mapping[str, int]], key: str) -> bool:
    return key == "global_step" and all("_trainer" in table for table in stored)


def _best_key(stored: Sequence[Mapping[str, int]]) -> str | None:
    """The first key whose values all differ, else the first that varies at all."""
    shared = [key for key in STEP_KEYS if stored and all(key in table for table in stored)]
    if len(stored) == 1:
        return next((key for key in shared if key not in _PLANNED), None)
    counts = {key: len({table[key] for table in stored}) for key in shared}
    varying = [key for key in shared if counts[key] > 1]
    full = [key for key in varying if counts[key] == len(stored)]
    return next(iter(full), max(varying, key=lambda k: counts[k], default=None))


_COARSE = ("epoch", "current_epoch", "epochs", "task", "task_id")


def _paired(tables: Sequence[Mapping[str, int]]) -> tuple[tuple[int, ...], str] | None:
    """A counter that starts again in every epoch, made one that doesn't.

    The step is epoch * (largest counter + 1) + counter: in the right order and unique.
    """
    shared = [key for key in tables[0] if all(key in table for table in tables)]
    for coarse in (key for key in _COARSE if key in shared):
        for fine in (key for key in shared if key not in _COARSE):
            pairs = [(table[coarse], table[fine]) for table in tables]
            if len(set(pairs)) == len(pairs):
                width = max(f for _, f in pairs) + 1
                return tuple(c * width + f for c, f in pairs), f"stored {coarse} and {fine}"
    return None


def _named(names: Sequence[str]) -> list[int | None]:
    """The number under the word that most of the names share and that varies."""
    tables = [step_numbers(name) for name in names]
    words: dict[str, set[int]] = {}
    for table in tables:
        for word, value in table.items():
            words.setdefault(word, set()).add(value)
    if not words:
        return [None] * len(names)
    everywhere = [w for w in words if all(w in table for table in tables)]
    varying = [w for w in everywhere if len(words[w]) == len(names)]
    if varying:
        word = best_word(varying)
        return [table[word] for table in tables]
    pair = _paired(tables) if all(tables) else None
    if pair is not None:
        return list(pair[0])
    return [table[best_word(table)] if table else None for table in tables]


def _tells_apart(named: Sequence[int | None]) -> bool:
    return None not in named and len(set(named)) == len(named)


def _disagreement(
    names: Sequence[str], values: Sequence[int], named: Sequence[int | None]
) -> list[str]:
    if not _tells_apart(named):
        return []
    by_name = sorted(range(len(names)), key=lambda at: named[at] or 0)
    ordered = [values[at] for at in by_name]
    if ordered == sorted(ordered):
        return []
    wrong = next(b for a, b in pairwise(by_name) if values[b] < values[a])
    return [f"names and stored steps disagree about the order (at {names[wrong]}): stored counts"]
