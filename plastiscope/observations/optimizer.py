"""What an optimizer remembers of one parameter, reduced to sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .spectra import Spectrum, spectra_of


@dataclass(frozen=True)
class OptimizerState:
    """Of one parameter: `update` and `weight` are root mean squares of the next step and of w.

    `norm` is ‖w‖, `learning_rate` lr, `kind` "adam" or "sgd". `second_moment` is the spectrum of
    Adam's v as a matrix, None for vectors and SGD. `update` is NaN where the state can't tell.
    """

    update: float
    weight: float
    norm: float
    learning_rate: float
    kind: str
    count: int
    second_moment: Spectrum | None
    status: str
    replicated: ClassVar[bool] = False

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"OptimizerState": self}

    @property
    def size(self) -> tuple[int, None]:
        """Entries of the parameter."""
        return self.count, None

    @classmethod
    def adam(
        cls,
        weight: Tensor,
        mean: Tensor,
        square: Tensor,
        step: float,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> OptimizerState:
        """From Adam's or AdamW's exp_avg, exp_avg_sq and step, all in the parameter's shape.

        The step is the gradient's part alone: decoupled weight decay isn't in it.
        """
        if mean.shape != weight.shape or square.shape != weight.shape:
            return cls._unusable(weight, lr, "adam", "shape_changed")
        if step < 1:
            return cls._unusable(weight, lr, "adam", "no_steps")
        first = mean.detach().double() / (1 - betas[0] ** step)
        second = square.detach().double() / (1 - betas[1] ** step)
        update = lr * first / (second.sqrt() + eps)
        spectrum = spectra_of(square.flatten(1)) if square.ndim > 1 else None
        return cls._of(weight, update, lr, "adam", spectrum)

    @classmethod
    def sgd(cls, weight: Tensor, momentum: Tensor | None, *, lr: float) -> OptimizerState:
        """From SGD's momentum buffer; without one the next step depends on the next gradient."""
        if momentum is None:
            return cls._unusable(weight, lr, "sgd", "no_momentum")
        return cls._of(weight, lr * momentum.detach().double(), lr, "sgd", None)

    @classmethod
    def _of(
        cls, weight: Tensor, update: Tensor, lr: float, kind: str, spectrum: Spectrum | None
    ) -> OptimizerState:
        w = weight.detach().double()
        rms = float(update.square().mean().sqrt())
        norm = float(torch.linalg.vector_norm(w))
        finite = np.isfinite(rms) and np.isfinite(norm)
        status = "ok" if finite else "non_finite"
        return cls(rms, norm / w.numel() ** 0.5, norm, lr, kind, w.numel(), spectrum, status)

    @classmethod
    def _unusable(cls, weight: Tensor, lr: float, kind: str, status: str) -> OptimizerState:
        norm = float(torch.linalg.vector_norm(weight.detach().double()))
        rms = norm / weight.numel() ** 0.5
        return cls(float("nan"), rms, norm, lr, kind, weight.numel(), None, status)
