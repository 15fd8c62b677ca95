"""The network's outputs against the labels of the probe.

Axes: B inputs, T tokens, C classes or V vocabulary, K folds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .moments import counts_without_each, without_each
from .spectra import Floats

IGNORED = -100


@dataclass(frozen=True)
class Outputs:
    """Mean cross-entropy in nats and share of correct answers [1 + K] over `rows` labels."""

    loss: Floats
    accuracy: Floats
    rows: int
    columns: int
    status: str
    replicated: ClassVar[bool] = True

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"Outputs": self}

    @property
    def size(self) -> tuple[int | None, int | None]:
        """Labels and classes."""
        return self.rows, self.columns


class OutputSums:
    """Adds up outputs; `finish` gives the Outputs. Memory doesn't grow with the vocabulary."""

    def __init__(self, folds: int) -> None:
        self.folds = folds
        self.inputs = 0
        self.columns = 0
        self.sums: Tensor | None = None

    def add(self, logits: Tensor, labels: Tensor, fold: Tensor | None = None) -> None:
        """Logits [B, C] with labels [B], or [B, T, V] with [B, T]; a label -100 doesn't count.

        A label belongs to the logits at its own place: shift them first for a language model.
        `fold` [B]; without it inputs are dealt out in turn.
        """
        if labels.shape != logits.shape[:-1]:
            raise ValueError(
                f"labels {tuple(labels.shape)} don't fit logits {tuple(logits.shape)}: "
                f"expected {tuple(logits.shape[:-1])}"
            )
        if fold is None:
            fold = torch.arange(self.inputs, self.inputs + len(logits)) % self.folds
        self.inputs += len(logits)
        self.columns = logits.shape[-1]
        per_input = labels[0].numel() if len(labels) else 1
        where = fold.detach().long().repeat_interleave(per_input)
        where = where.to(logits.device, non_blocking=True)
        flat = logits.detach().reshape(-1, self.columns)
        truth = labels.detach().reshape(-1).to(logits.device)
        size = max(1, (1 << 22) // self.columns)
        for start in range(0, len(flat), size):
            part = slice(start, start + size)
            self._add_some(flat[part].double(), truth[part], where[part])

    def _add_some(self, logits: Tensor, truth: Tensor, where: Tensor) -> None:
        counts = truth != IGNORED
        at = truth.clamp(min=0)[:, None]
        loss = torch.logsumexp(logits, 1) - logits.gather(1, at).squeeze(1)
        right = (logits.argmax(1) == truth).double()
        zero = torch.zeros_like(loss)
        triple = torch.stack(
            [torch.where(counts, loss, zero), torch.where(counts, right, zero), counts.double()], 1
        )
        if self.sums is None:
            self.sums = torch.zeros(self.folds, 3, dtype=torch.float64, device=logits.device)
        self.sums.index_add_(0, where, triple)

    def finish(self) -> Outputs:
        """Means over the labels that count; status `no_labels` when there are none."""
        sums = self.sums.cpu().numpy() if self.sums is not None else np.zeros((self.folds, 3))
        total = without_each(sums)
        with np.errstate(invalid="ignore", divide="ignore"):
            counts = counts_without_each(sums[:, 2])
            loss, accuracy = total[:, 0] / counts, total[:, 1] / counts
        status = "ok" if np.isfinite(loss[0]) else "non_finite"
        if total[0, 2] == 0:
            status = "no_labels"
        if not np.isfinite(loss[0]):
            accuracy = np.full_like(accuracy, np.nan)
        return Outputs(loss, accuracy, int(total[0, 2]), self.columns, status)


@dataclass(frozen=True)
class TaskAccuracies:
    """Accuracy on each task of a stream at the checkpoint right after it, in order."""

    accuracies: tuple[float, ...]
    replicated: ClassVar[bool] = False

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"TaskAccuracies": self}

    @property
    def size(self) -> tuple[int, None]:
        """Tasks."""
        return len(self.accuracies), None

    @property
    def status(self) -> str:
        """ "ok", "no_labels" without tasks, "non_finite" when one has no accuracy."""
        if not self.accuracies:
            return "no_labels"
        return "ok" if np.isfinite(self.accuracies).all() else "non_finite"
