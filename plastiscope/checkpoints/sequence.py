"""Whether a run's checkpoints join: the same network, moving from each to the next."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from plastiscope.checkpoints.blobs import UNREADABLE
from plastiscope.checkpoints.run import Break, State, TensorInfo
from plastiscope.errors import UnreadableError

_SAMPLED_TENSORS, _SAMPLED_VALUES = 12, 128
# A step that returns to within this part of the way it went didn't happen in training.
_RETURN = 0.2
_HEAD = re.compile(r"(^|\.)(head|heads|fc|classifier|lm_head|output|score|logits|predictor)(\.|$)")
_POSITION = re.compile(r"pos(ition)?_?(emb|table|enc)|\bwpe\b|position_embeddings")
_VOCABULARY = re.compile(
    r"(^|[._])(wte|embed_tokens|tok_emb\w*|word_embeddings|embedding|emb)(\.|$)"
)


@dataclass(frozen=True)
class Moment:
    """One checkpoint of the sequence as far as joining needs it."""

    name: str
    step: int
    tensors: Mapping[str, TensorInfo]
    optimizer_step: int | None
    open: Callable[[], State]
    sample: torch.Tensor | None = None
    local: bool = True


def find_breaks(moments: Sequence[Moment]) -> tuple[list[Break], list[str]]:
    """Where no difference may be taken, and what else looks odd about the sequence."""
    breaks: list[Break] = []
    notes: list[str] = []
    for before, after in pairwise(moments):
        found = _table_break(before, after, last=after is moments[-1])
        if found is not None:
            breaks.append(found)
        notes += _reset(before, after) + _untied(before, after)
    strange, odd = _wrong_era(moments)
    return breaks + strange, notes + odd


def _table_break(before: Moment, after: Moment, *, last: bool) -> Break | None:
    old, new = _shapes(before), _shapes(after)
    kept = [name for name in old if new.get(name) == old[name]]
    if not kept or len(kept) < 0.3 * max(len(old), len(new)):
        return Break(
            after.name,
            f"another network: {len(old)} tensors before, {len(new)} from step {after.step}",
        )
    changed = [name for name in old if name in new and old[name] != new[name]]
    gone = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    if not changed and not gone and not added:
        return None
    if gone and not changed and not added and last:
        reason = f"partial save: {len(gone)} of {len(old)} tensors are missing"
        return Break(after.name, reason, tuple(gone))
    names = tuple(dict.fromkeys((*changed, *gone, *added)))
    return Break(after.name, _reason(names, old, new), names)


def _shapes(moment: Moment) -> dict[str, tuple[int, ...]]:
    return {n: i.shape for n, i in moment.tensors.items() if i.alias_of is None}


def _reason(
    names: Sequence[str],
    old: Mapping[str, tuple[int, ...]],
    new: Mapping[str, tuple[int, ...]],
) -> str:
    first = names[0]
    change = f"{first} {_shown(old.get(first))} -> {_shown(new.get(first))}"
    if all(_POSITION.search(name) for name in names):
        return f"position table changed: {change}"
    if any(_VOCABULARY.search(name) and len(old.get(name, ())) == 2 for name in names):
        vocabulary = all(_VOCABULARY.search(name) or _HEAD.search(name) for name in names)
        if vocabulary:
            return f"vocabulary changed: {change}"
    if all(_HEAD.search(name) for name in names):
        return f"head replaced: {change}"
    return f"architecture changed in {len(names)} tensors: {change}"


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def _reset(before: Moment, after: Moment) -> list[str]:
    old, new = before.optimizer_step, after.optimizer_step
    if old is None or new is None or new >= old:
        return []
    return [f"optimizer reset before {after.name}: its own step goes from {old} to {new}"]


def _untied(before: Moment, after: Moment) -> list[str]:
    old = {n for n, i in before.tensors.items() if i.alias_of is not None}
    new = {n for n, i in after.tensors.items() if i.alias_of is not None}
    lines = [f"{n}: tied before, its own tensor from {after.name}" for n in sorted(old - new)]
    return [
        *(line for line in lines if line.split(":")[0] in after.tensors),
        *(f"{n}: tied from {after.name} on" for n in sorted(new - old) if n in before.tensors),
    ]


def sample(state: State) -> torch.Tensor | None:
    """A few hundred of a checkpoint's weights, at places that depend on the shapes alone.

    None where nothing can be read.
    """
    weights = [i for i in state.tensors.values() if i.kind == "weight" and i.alias_of is None]
    weights = [i for i in weights if i.dtype.is_floating_point]
    if not weights:
        return None
    stride = max(len(weights) // _SAMPLED_TENSORS, 1)
    try:
        return torch.cat([_values(state, info.name) for info in weights[::stride]])
    except UNREADABLE:
        return None


def _values(state: State, name: str) -> torch.Tensor:
    flat = state.peek(name).reshape(-1)
    step = max(flat.numel() // _SAMPLED_VALUES, 1)
    return flat[::step][:_SAMPLED_VALUES].double()


def _wrong_era(moments: Sequence[Moment]) -> tuple[list[Break], list[str]]:
    """Files whose weights belong to another step: copies, and jumps there and back."""
    if len(moments) < 2:
        return [], []
    samples = [moment.sample for moment in moments]
    breaks: list[Break] = []
    notes: list[str] = []
    seen: dict[bytes, list[int]] = {}
    for at, moment in enumerate(moments):
        alike = seen.setdefault(_print(samples[at], at), [])
        twin = next((e for e in alike if equal_weights(moments[e], moment)), -1)
        alike.append(at)
        if twin == at - 1 and twin >= 0:
            notes.append(f"{moment.name}: weights identical to {moments[twin].name}")
        elif twin >= 0:
            reason = f"weights identical to step {moments[twin].step} ({moments[twin].name})"
            breaks.append(Break(moment.name, reason))
            if at + 1 < len(moments):
                breaks.append(Break(moments[at + 1].name, f"follows {moment.name}: {reason}"))
    known = {b.checkpoint for b in breaks}
    for at in range(1, len(moments) - 1):
        if moments[at].name not in known and _jumps(samples[at - 1 : at + 2]):
            reason = f"weights jump at step {moments[at].step} and back: a file of another run?"
            breaks.append(Break(moments[at].name, reason))
            breaks.append(Break(moments[at + 1].name, f"follows {moments[at].name}: {reason}"))
    return breaks, notes


def _print(sample: torch.Tensor | None, at: int) -> bytes:
    """Equal for checkpoints whose sampled weights are; never equal where nothing was sampled."""
    return f"none {at}".encode() if sample is None else sample.numpy().tobytes()


def equal_weights(one: Moment, other: Moment) -> bool:
    """Whether all weights of two checkpoints are the same; reads until the first difference."""
    if {n: (i.shape, i.dtype) for n, i in one.tensors.items()} != {
        n: (i.shape, i.dtype) for n, i in other.tensors.items()
    }:
        return False
    try:
        first, second = one.open(), other.open()
        names = [n for n, i in one.tensors.items() if i.kind == "weight" and i.alias_of is None]
        return bool(names) and all(_same(first.read(n), second.read(n)) for n in names)
    except UnreadableError:
        return False


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype.itemsize == 1:
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return torch.equal(one, other)


def _jumps(window: Sequence[torch.Tensor | None]) -> bool:
    before, here, after = window
    if before is None or here is None or after is None:
        return False
    if before.shape != here.shape or here.shape != after.shape:
        return False
    if not all(bool(part.isfinite().all()) for part in (before, here, after)):
        return False
    out, back, direct = (
        (a - b).norm() for a, b in ((here, before), (after, here), (after, before))
    )
    return bool(direct < _RETURN * torch.minimum(out, back))
