"""What is kept of a weight: its spectrum, its sums, and its distance from earlier checkpoints.

Axes: H heads, out, in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .spectra import Floats, Spectrum, Statuses, spectra_of


@dataclass(frozen=True)
class Magnitude:
    """Float64 sums over the entries of each tensor of a batch [...] (() or (H,)).

    `count` entries each; `absolute` and `square` are sums of |w| and w^2; `change` and `drift` sums
    of (w - previous)^2 and (w - first)^2: None when there is no earlier tensor, a string when it
    can't be compared ("shape_changed"). `sides` are the rows and columns of a matrix, None of
    anything else.
    """

    count: int
    absolute: Floats
    square: Floats
    status: Statuses
    replicated: ClassVar[bool] = False
    change: Floats | str | None = None
    drift: Floats | str | None = None
    sides: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        tensor: Tensor,
        *,
        previous: Tensor | None = None,
        first: Tensor | None = None,
        batched: bool = False,
    ) -> Magnitude:
        """Of a whole tensor of any shape (biases and gains too); `batched`: axis 0 are heads."""
        flat = tensor.detach().flatten(1) if batched else tensor.detach().reshape(-1)
        absolute = _norm(flat, 1)
        square = _norm(flat, 2) ** 2
        status = np.where(np.isfinite(absolute), "ok", "non_finite").astype("<U16")
        status = np.where(square == 0, "zero_matrix", status).astype("<U16")
        return cls(
            count=flat.shape[-1],
            absolute=absolute,
            square=square,
            status=status,
            change=_distance(tensor, previous, batched),
            drift=_distance(tensor, first, batched),
        )

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"Magnitude": self}

    @property
    def size(self) -> tuple[int | None, int | None]:
        """Rows and columns of each matrix; the entries of each other tensor."""
        return self.sides or (self.count, None)


@dataclass(frozen=True)
class Weight:
    """A weight matrix [out, in], or one for each head [H, out, in]."""

    spectrum: Spectrum
    magnitude: Magnitude
    replicated: ClassVar[bool] = False

    @classmethod
    def of(
        cls,
        matrices: Tensor,
        *,
        previous: Tensor | None = None,
        first: Tensor | None = None,
        device: torch.device | None = None,
    ) -> Weight:
        """Measure [out, in] or [H, out, in] of any float dtype, reduced in float64.

        `previous` and `first` are the same matrices in earlier checkpoints; another shape isn't an
        error but a status of the rows that compare. Spectra may be taken on the `device`.
        """
        batched = matrices.ndim == 3
        magnitude = Magnitude.of(matrices, previous=previous, first=first, batched=batched)
        rows, columns = matrices.shape[-2:]
        return cls(spectra_of(matrices, device), replace(magnitude, sides=(rows, columns)))

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"Weight": self, "Spectrum": self.spectrum, "Magnitude": self.magnitude}

    @property
    def status(self) -> Statuses:
        """Of each matrix."""
        return self.spectrum.status

    @property
    def size(self) -> tuple[int | None, int | None]:
        """Rows and columns of each matrix."""
        return self.spectrum.size


def _distance(tensor: Tensor, other: Tensor | None, batched: bool) -> Floats | str | None:
    if other is None:
        return None
    if other.shape != tensor.shape:
        return "shape_changed"
    start = 1 if batched else 0
    now, before = tensor.detach().flatten(start), other.detach().flatten(start)
    return _square_distance(now, before)


def _norm(flat: Tensor, order: int) -> Floats:
    """Along the last axis, summed in float64 without a float64 copy."""
    found = torch.linalg.vector_norm(flat, order, dim=-1, dtype=torch.float64)
    return np.asarray(found.cpu().numpy(), dtype=np.float64)


def _square_distance(now: Tensor, before: Tensor) -> Floats:
    """Sums of squares over the last axis in float64, a few million entries at a time."""
    total = torch.zeros(now.shape[:-1], dtype=torch.float64, device=now.device)
    size = max(1, (1 << 22) // max(1, now.shape[:-1].numel()))
    for start in range(0, now.shape[-1], size):
        part = now[..., start : start + size].double()
        part -= before[..., start : start + size].to(now.device)
        total += part.square().sum(-1)
    return np.asarray(total.cpu().numpy(), dtype=np.float64)
