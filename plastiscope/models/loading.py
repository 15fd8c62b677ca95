"""Fill a live network from a checkpoint exactly, or say what doesn't fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from plastiscope.checkpoints.run import State
from plastiscope.models.live import Live, ModelError


@dataclass(frozen=True)
class LoadReport:
    """How a checkpoint filled a module, in the module's names except for `unexpected`.

    `missing` have no stored tensor, `reshaped` one of another shape; `unexpected` are stored
    weights that no parameter takes. `ignored` matters to no output: stored masks and tables that
    the module computes itself, and integer counters that the file lacks.
    """

    matched: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def full(self) -> bool:
        """Every parameter filled, every stored weight used."""
        return bool(self.matched) and not (self.missing or self.unexpected or self.reshaped)


def load(
    live: Live, state: State, *, allow_partial: bool = False, dtype: torch.dtype | None = None
) -> LoadReport:
    """Copy the stored tensors into the module: parameters, tied weights and running statistics.

    The module computes in float32 (float64 when every stored weight is), whatever the stored
    precision, unless `dtype` says otherwise. Raises ModelError when weights that the module ties
    are stored apart with different values, and when the match isn't full, unless `allow_partial`:
    then every parameter without a stored value is NaN, so that nothing computed from it passes for
    a measurement.
    """
    live.module.to(dtype or _precision(state))
    targets = tensors_of(live.module)
    matched, reshaped = _fill(live, state, targets)
    report = _report(live, state, targets, matched, reshaped)
    if not report.full and not allow_partial:
        raise ModelError(_mismatch(report))
    _void(targets, (*report.missing, *report.reshaped))
    live.module.eval()
    return report


def _void(targets: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    with torch.no_grad():
        for name in names:
            target = targets.get(name)
            running = name.endswith(("running_mean", "running_var"))
            if isinstance(target, nn.Parameter) or (target is not None and running):
                target.fill_(torch.nan)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, tied ones under each of their names."""
    items = module.state_dict(keep_vars=True).items()
    return {name: tensor for name, tensor in items if isinstance(tensor, torch.Tensor)}


def _precision(state: State) -> torch.dtype:
    stored = {
        info.dtype
        for info in state.tensors.values()
        if info.kind == "weight" and info.dtype.is_floating_point
    }
    return torch.float64 if stored == {torch.float64} else torch.float32


def _fill(
    live: Live, state: State, targets: Mapping[str, torch.Tensor]
) -> tuple[list[str], list[str]]:
    matched: list[str] = []
    reshaped: list[str] = []
    filled: dict[int, str] = {}
    for name, target in targets.items():
        source = live.stored.get(name)
        if source is None or source not in state.tensors:
            continue
        (matched if _place(name, target, _read(state, source), filled) else reshaped).append(name)
    for merge in live.merges:
        if all(source in state.tensors for source in merge.sources):
            made = merge.convert({source: _read(state, source) for source in merge.sources})
            for name, value in made.items():
                placed = name in targets and _place(name, targets[name], value, filled)
                (matched if placed else reshaped).append(name)
    return matched, reshaped


def _read(state: State, name: str) -> torch.Tensor:
    if state.tensors[name].kind == "no_data":
        raise ModelError(f"{name} is stored without data: the file holds its name and shape only")
    return state.read(name)


def _place(name: str, target: torch.Tensor, value: torch.Tensor, filled: dict[int, str]) -> bool:
    """Copy one tensor; False when the shapes differ. A tied one has to be the same each time."""
    if isinstance(target, (UninitializedParameter, UninitializedBuffer)):
        target.materialize(value.shape)
    if target.shape != value.shape:
        return False
    with torch.no_grad():
        if id(target) in filled and not torch.equal(target, value.to(target)):
            raise ModelError(
                f"{name} and {filled[id(target)]} are one tensor in the model and two different "
                "ones in the checkpoint: give a --model that doesn't tie them"
            )
        target.copy_(value, non_blocking=True)
    filled[id(target)] = name
    return True


def _report(
    live: Live,
    state: State,
    targets: Mapping[str, torch.Tensor],
    matched: Iterable[str],
    reshaped: Iterable[str],
) -> LoadReport:
    known = {id(targets[name]) for name in (*matched, *reshaped) if name in targets}
    absent = [name for name, tensor in targets.items() if id(tensor) not in known]
    # A counter or an index table that isn't stored is what the module made of it.
    counters = [name for name in absent if not targets[name].is_floating_point()]
    spare = _unclaimed(live, state)
    buffers = [name for name in spare if state.tensors[name].kind == "buffer"]
    return LoadReport(
        matched=tuple(matched),
        missing=tuple(name for name in absent if name not in counters),
        unexpected=tuple(name for name in spare if name not in buffers),
        reshaped=tuple(reshaped),
        ignored=(*counters, *buffers),
    )


def _unclaimed(live: Live, state: State) -> list[str]:
    claimed = {*live.stored.values(), *live.unused}
    claimed.update(source for merge in live.merges for source in merge.sources)
    return [
        name
        for name, info in state.tensors.items()
        if name not in claimed and info.alias_of not in claimed
    ]


def _mismatch(report: LoadReport) -> str:
    parts = [
        f"{len(names)} {label} ({_sample(names)})"
        for label, names in (
            ("parameters of the model without a stored tensor", report.missing),
            ("stored weights that the model doesn't have", report.unexpected),
            ("tensors of another shape", report.reshaped),
        )
        if names
    ]
    what = "; ".join(parts) or "no tensor of the model is in the checkpoint"
    return f"the model doesn't fit the checkpoint: {what}. Give the right one with --model"


def _sample(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
