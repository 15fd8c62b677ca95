"""Which fold of the probe, and which of its inputs, each row belongs to: here and on a device.

Numbers that are copied to a GPU make the CPU wait for it. They are the same for all components with
the same rows, so they go there once.

Axes: n rows, B inputs, K folds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Folds:
    """The fold [n] of each row and, where it is known, its input [n], numbered from 0."""

    def __init__(self, fold: Tensor, inputs: Tensor | None = None) -> None:
        self.fold = fold.detach().cpu().long()
        self.inputs = None if inputs is None else inputs.detach().cpu().long()
        self._there: dict[tuple[str, torch.device], Tensor] = {}
        self._sorted: dict[int, tuple[Tensor, npt.NDArray[np.int64]]] = {}

    @classmethod
    def of(cls, fold: Folds | Tensor, inputs: Tensor | None = None) -> Folds:
        """Itself, or that of a tensor."""
        return fold if isinstance(fold, Folds) else cls(fold, inputs)

    def there(self, device: torch.device) -> Tensor:
        """The folds [n] on a device."""
        return self._sent("fold", self.fold, device)

    def inputs_there(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """On a device: the input [n] of each row; rows (1 for none) and fold of each input [B]."""
        assert self.inputs is not None
        rows = torch.bincount(self.inputs)
        folds = torch.zeros(len(rows), dtype=torch.long)
        folds[self.inputs] = self.fold
        return (
            self._sent("inputs", self.inputs, device),
            self._sent("rows", rows.clamp(min=1), device),
            self._sent("folds", folds, device),
        )

    def counts(self, folds: int) -> npt.NDArray[np.int64]:
        """Rows [K] of each of so many folds; with fewer than there are, in turn."""
        return np.bincount(self.fold.numpy() % folds, minlength=folds)

    def input_counts(self, folds: int) -> npt.NDArray[np.int64]:
        """Inputs [K] that have rows, of each fold."""
        assert self.inputs is not None
        _, first = np.unique(self.inputs.numpy(), return_index=True)
        return np.bincount(self.fold.numpy()[first], minlength=folds)

    def groups(self, device: torch.device, folds: int, size: int) -> Iterator[tuple[int, Tensor]]:
        """Each fold of so many, and which rows are in it, at most `size` together."""
        if folds not in self._sorted:
            self._sorted[folds] = (self.fold % folds).argsort(stable=True), self.counts(folds)
        order, counts = self._sorted[folds]
        there = self._sent(f"order {folds}", order, device)
        ends = np.cumsum(counts)
        for k, (count, end) in enumerate(zip(counts, ends, strict=True)):
            for start in range(end - count, end, size):
                yield k, there[start : min(start + size, end)]

    def _sent(self, name: str, numbers: Tensor, device: torch.device) -> Tensor:
        if (name, device) not in self._there:
            self._there[name, device] = numbers.to(device, non_blocking=True)
        return self._there[name, device]
