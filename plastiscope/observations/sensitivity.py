"""How much a component's output changes for two different inputs, and what bounds it.

Axes: B probe inputs, S shifts (pairings of the inputs), H heads, dh head width, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from .captures import Batch, Called, Capture, capture
from .device import fetched
from .spectra import Floats, spectra_of

PAIRINGS = 4


@dataclass(frozen=True)
class RateOfChange:
    """Ratios ‖f(x) - f(y)‖_F / ‖x - y‖_F [B, S], NaN for a pair of equal inputs, infinity where an
    input or output holds NaN or infinity.

    With `shifts` [S], column s pairs input i with input i - shifts[s] of the same batch: each input
    is in several pairs. Without, y is of another data set and each pair has its own inputs.
    `protocol` is "own" (the component's propagated inputs) or "embedding" (every component is fed
    the embedding's output).
    """

    ratios: Floats
    protocol: str
    rows: int
    columns: int
    shifts: tuple[int, ...] = ()
    replicated: ClassVar[bool] = False

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"RateOfChange": self}

    @property
    def size(self) -> tuple[int, int]:
        """Pairs, and the size of one input."""
        return self.rows, self.columns

    @property
    def status(self) -> str:
        """ "ok", "non_finite", or "no_pairs" when no two inputs differ."""
        if np.isinf(self.ratios).any():
            return "non_finite"
        return "ok" if np.isfinite(self.ratios).any() else "no_pairs"


@dataclass(frozen=True)
class ChangeBound:
    """The upper bound of a component's rate of change, from its weights."""

    value: float
    formula: str
    replicated: ClassVar[bool] = False
    status: ClassVar[str] = "ok"
    size: ClassVar[tuple[None, None]] = (None, None)

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"ChangeBound": self}


def observe_rate_of_change(
    module: nn.Module,
    forward: Callable[[Batch], Tensor],
    batch: Batch,
    paths: Mapping[Hashable, str | Called],
    other: Batch | None = None,
) -> dict[Hashable, RateOfChange]:
    """Of each module named by path, at its own inputs for different inputs of the probe.

    Each input is paired with some others of the batch; with `other` (a second data set, as many
    inputs), with the one of the same index there.
    """
    first = _own(module, forward, batch, paths)
    if other is None:
        return {key: _paired(x, fx, "own") for key, (x, fx) in first.items()}
    second = _own(module, forward, other, paths)
    return {
        key: _across(x, second[key][0], fx, second[key][1], "own")
        for key, (x, fx) in first.items()
        if key in second
    }


def _own(
    module: nn.Module,
    forward: Callable[[Batch], Tensor],
    batch: Batch,
    paths: Mapping[Hashable, str | Called],
) -> dict[Hashable, tuple[Tensor, Tensor]]:
    """What each module is given and gives, [B, ...]; tokens as rows [B*T, d] are put together."""
    count = len(batch["inputs"])
    return {
        key: (c.x.reshape(count, -1), c.output.reshape(count, -1))
        for key, c in capture(module, forward, batch, paths).items()
        if len(c.x) % count == len(c.output) % count == 0
    }


def observe_rate_of_change_embedding(
    module: nn.Module,
    forward: Callable[[Batch], Tensor],
    batch: Batch,
    paths: Mapping[Hashable, str | Called],
    embedded: str | Called,
    other: Batch | None = None,
) -> dict[Hashable, RateOfChange]:
    """The protocol of the source: every module named by path is fed the embedding's output.

    `embedded` is the path of the module that is given the embedding's output (the first block).
    Name attention by the module that holds its output projection. A linear layer with a larger
    fan-in is fed [x, 0, ...]. What else a module takes (rotary tables) stays as in the first batch.
    """
    places = {**paths, _EMBEDDED: embedded}
    first = capture(module, forward, batch, places)
    x = first[_EMBEDDED].x
    y = None if other is None else capture(module, forward, other, {0: embedded})[0].x
    found: dict[Hashable, RateOfChange] = {}
    with torch.no_grad():
        for key in paths:
            if key not in first:
                continue
            fx = _fed(first[key], x)
            found[key] = (
                _paired(x, fx, "embedding")
                if y is None
                else _across(x, y, fx, _fed(first[key], y), "embedding")
            )
    return found


_EMBEDDED = ("where the embedding's output goes in",)


def _fed(call: Capture, x: Tensor) -> Tensor:
    wide = call.x.shape[-1] - x.shape[-1]
    return call.again(torch.nn.functional.pad(x, (0, wide)) if wide > 0 else x)


def _paired(x: Tensor, fx: Tensor, protocol: str) -> RateOfChange:
    shifts = tuple(range(1, min(PAIRINGS, len(x) - 1) + 1))
    apart, moved = ([_apart(value, value.roll(s, 0)) for s in shifts] for value in (x, fx))
    stacked = _ratios(apart, moved) if shifts else np.full((len(x), 1), np.nan)
    return RateOfChange(stacked, protocol, int(np.isfinite(stacked).sum()), x[0].numel(), shifts)


def _across(x: Tensor, y: Tensor, fx: Tensor, fy: Tensor, protocol: str) -> RateOfChange:
    n = min(len(x), len(y))
    ratios = _ratios([_apart(x[:n], y[:n])], [_apart(fx[:n], fy[:n])])
    return RateOfChange(ratios, protocol, int(np.isfinite(ratios).sum()), x[0].numel())


def joined_rates(parts: Sequence[RateOfChange]) -> RateOfChange:
    """Those of several batches of pairs across two data sets as one."""
    ratios = np.concatenate([part.ratios for part in parts])
    return replace(parts[0], ratios=ratios, rows=int(np.isfinite(ratios).sum()))


def _apart(x: Tensor, y: Tensor) -> Tensor:
    """Distances [B] in float64."""
    apart: Tensor = torch.linalg.vector_norm((x.double() - y.double()).flatten(1), dim=1)
    return apart


def _ratios(apart: Sequence[Tensor], moved: Sequence[Tensor]) -> Floats:
    """[B, S] of distances [B] of S pairings before and after."""
    before, after = fetched(torch.stack([*apart], 1), torch.stack([*moved], 1))
    ratios = np.where(before == 0, np.nan, after / np.where(before == 0, 1.0, before))
    return np.where(np.isfinite(before) & np.isfinite(after), ratios, np.inf)


def norm_bound(gain: Tensor) -> ChangeBound:
    """Of a layer norm: the largest |gamma|."""
    return ChangeBound(float(gain.detach().double().abs().max()), "max|gamma|")


def linear_bound(weight: Tensor) -> ChangeBound:
    """Of a linear layer: the largest singular value of its weight [out, in]."""
    return ChangeBound(float(spectra_of(weight).values[0]), "sigma_1")


def token_radius(x: Tensor) -> float:
    """Mean over inputs of the root mean square token length, of x [B, T, d]."""
    return float(x.detach().double().square().sum(-1).mean(-1).sqrt().mean())


def attention_bound(
    q: Tensor, k: Tensor, v: Tensor, output: Tensor, tokens: int, radius: float
) -> ChangeBound:
    """Of multi-head attention on inputs of some radius.

    q, k, v [H, dh, d] are each head's rows of the projections (k and v repeated to as many heads
    as q has), output [H, d, dh] each head's columns of the output projection.
    """
    q, k, v, output = (part.detach().double() for part in (q, k, v, output))
    scores = spectra_of(q.mT @ k / q.shape[1] ** 0.5).values[:, 0]
    gains = spectra_of(output).values[:, 0] * spectra_of(v).values[:, 0]
    inner = 3 * tokens + (12 * tokens + 3) * radius**4 * scores**2
    return ChangeBound(float((gains * np.sqrt(inner)).sum()), f"attention, tokens={tokens}")
