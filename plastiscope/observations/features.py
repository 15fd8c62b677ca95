"""Second moments of a component's outputs, summed over the probe batch by batch, fold by fold.

Axes: N rows (inputs or tokens), d width, H heads, K folds. Results have a leading axis [1 + K]:
everything, then everything but one fold (for the jackknife), and a last axis H for heads.

Rows are held while they take less memory than K moments [d, d]; beyond that only the moments are.
They are taken about the first batch's mean, so that centring cancels nothing even where all rows
are nearly equal (CLS tokens after the embedding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .device import fetched
from .folds import Folds
from .moments import counts_without_each, moment_spectra, row_spectra, without_each
from .spectra import Floats, Spectrum, Statuses
from .symmetric import gram_of_columns

_CHUNK = 1 << 22
ROWS_LIMIT = 1 << 28
"""Bytes of rows held at most where the moments would be larger still (a vocabulary's logits)."""
WIDE, WIDE_FOLDS = 512, 4
"""Beyond this width every further fold costs more than its standard error is worth: the folds are
joined to four for the spectra."""
UNITS_LIMIT = 8192
"""Widest layer whose pairs of units are compared."""
DUPLICATE_COSINE = 0.95


@dataclass(frozen=True)
class Features:
    """Spectra of the feature matrix [N, d] (of each head [N, H, dh]), plain and centred.

    Both have batch axes [1 + K] or [1 + K, H]. `norm` is the mean L2 norm of a row; `residual` the
    mean over inputs of ‖X - 1 mean(X)^T‖_F / ‖X‖_F, None when rows weren't told apart by input;
    `duplicates` the share of coordinates with a cosine above 0.95 to another one, None when not
    compared.
    """

    spectrum: Spectrum
    centered: Spectrum
    norm: Floats
    residual: Floats | None
    duplicates: float | None
    replicated: ClassVar[bool] = True
    sample: ClassVar[bool] = True

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"Features": self, "Spectrum": self.spectrum}

    @property
    def status(self) -> Statuses:
        """Of each head's matrix."""
        return self.spectrum.status

    @property
    def size(self) -> tuple[int | None, int | None]:
        """Rows and columns of the feature matrix."""
        return self.spectrum.size


class FeatureSums:
    """Adds up rows of one component; `finish` gives its Features.

    `batches` is how many batches like the first will come, where that is known: no more memory is
    taken at once than for these.
    """

    def __init__(self, folds: int, batches: float | None = None) -> None:
        self.folds, self.batches = folds, batches
        self.counts = np.zeros(folds, dtype=np.int64)
        self.held: Tensor | None = None
        self.filled = 0
        self.kept = 1.0
        self.generator = torch.Generator().manual_seed(0)
        self.pivot: Tensor | None = None
        self.moments: Tensor | None = None
        self.residuals: _Residuals | None = None

    def add(self, x: Tensor, fold: Tensor | Folds, inputs: Tensor | None = None) -> None:
        """Rows x [n, d] or [n, H, dh], the fold [n] of each (best on the CPU), and its input [n].

        `inputs` numbers the probe inputs of this call from 0; with it the rank residual can be had.
        """
        if len(x) == 0:
            return
        x, folds = x.detach(), Folds.of(fold, inputs)
        if self.pivot is None:
            self._start(x)
        self.counts += folds.counts(self.folds)
        norms = torch.linalg.vector_norm(x, dim=-1).double()
        self.norms.index_add_(0, folds.there(x.device), norms)
        if folds.inputs is not None and x.ndim == 2:
            self.residuals = self.residuals or _Residuals(self.folds, x.device)
            self.residuals.add(x, folds)
        if self.moments is None:
            self._hold(x, folds)
        else:
            self._add_moments(x, folds, self.sums, self.moments)
            self.moment_counts += folds.counts(self.parts)

    def _start(self, x: Tensor) -> None:
        self.dtype, self.shape = x.dtype, tuple(x.shape[1:])
        wide = self.shape[-1] > WIDE
        self.parts = min(self.folds, WIDE_FOLDS) if wide else self.folds
        self.moment_counts = np.zeros(self.parts, dtype=np.int64)
        self.pivot = x.double().mean(0)
        heads = self.shape[:-1]
        self.norms = torch.zeros(self.folds, *heads, dtype=torch.float64, device=x.device)

    @property
    def _moment_bytes(self) -> int:
        return self.parts * 8 * int(np.prod(self.shape)) * self.shape[-1]

    def _hold(self, x: Tensor, folds: Folds) -> None:
        fold = folds.fold
        if self.kept < 1:
            chosen = self._chosen(len(x), self.kept)
            x, fold = _taken(x, chosen), fold[chosen]
        if self.held is None:
            self._allocate(x)
        assert self.held is not None
        if self.filled + len(x) > len(self.held) < self.room:
            self._grow(self.filled + len(x))
        if self._moment_bytes > 2 * ROWS_LIMIT:
            x, fold = self._thinned(x, fold)
        elif self.filled + len(x) > len(self.held):
            self._start_moments(x, folds)
            return
        part = slice(self.filled, self.filled + len(x))
        self.held[part], self.held_folds[part] = x, fold % self.parts
        self.filled = part.stop

    def _allocate(self, x: Tensor) -> None:
        """All at once, so that what is held doesn't lie scattered between batches."""
        most = self._moment_bytes if self._moment_bytes <= 2 * ROWS_LIMIT else ROWS_LIMIT
        self.room = max(2, most // (x[0].numel() * x.element_size()))
        rows = self.room if self.batches is None else math.ceil(len(x) * self.batches)
        self.held = x.new_empty(min(self.room, max(2, rows)), *self.shape)
        self.held_folds = torch.empty(len(self.held), dtype=torch.long)

    def _grow(self, rows: int) -> None:
        """Room for so many rows and some more, as far as there may be any."""
        held, fold = self.rows()
        size = min(self.room, max(rows, 2 * self.filled))
        self.held = held.new_empty(size, *self.shape)
        self.held_folds = torch.empty(size, dtype=torch.long)
        self.held[: self.filled], self.held_folds[: self.filled] = held, fold

    def _start_moments(self, x: Tensor, folds: Folds) -> None:
        self.sums, self.moments = self._zeros()
        held, of_held = self.rows()
        self.held = None
        for rows, of in ((held, Folds(of_held)), (x, folds)):
            self._add_moments(rows, of, self.sums, self.moments)
            self.moment_counts += of.counts(self.parts)

    def _thinned(self, x: Tensor, fold: Tensor) -> tuple[Tensor, Tensor]:
        """Where there is no more room half of the rows go, those held and these, now and from here
        on: the vocabulary doesn't set the memory."""
        assert self.held is not None
        while 2 < self.filled + len(x) > len(self.held):
            chosen = self._chosen(self.filled + len(x), 0.5)
            old, new = chosen[chosen < self.filled], chosen[chosen >= self.filled] - self.filled
            self.held[: len(old)] = _taken(self.held, old)
            self.held_folds[: len(old)] = self.held_folds[old]
            self.filled, self.kept = len(old), self.kept / 2
            x, fold = _taken(x, new), fold[new]
        return x, fold

    def rows(self) -> tuple[Tensor, Tensor]:
        """The rows held and their folds."""
        assert self.held is not None
        return self.held[: self.filled], self.held_folds[: self.filled]

    def _chosen(self, rows: int, share: float) -> Tensor:
        """A seeded choice: a regular one could take all rows of one fold."""
        return (torch.rand(rows, generator=self.generator) < share).nonzero().squeeze(1)

    def _zeros(self) -> tuple[Tensor, Tensor]:
        assert self.pivot is not None
        zeros = self.pivot.new_zeros
        return zeros(self.parts, *self.shape), zeros(self.parts, *self.shape, self.shape[-1])

    def _add_moments(self, x: Tensor, folds: Folds, sums: Tensor, moments: Tensor) -> None:
        assert self.pivot is not None
        size = max(1, _CHUNK // int(np.prod(self.shape)))
        for k, part in folds.groups(x.device, self.parts, size):
            rows = x if len(part) == len(x) else x[part]
            shifted = rows.double() - self.pivot
            sums[k] += shifted.sum(0)
            moments[k] += gram_of_columns(shifted.movedim(0, -2))

    def finish(self) -> Features:
        """Spectra of all rows, and of all rows but each fold's. Raises ValueError without rows."""
        if self.pivot is None:
            raise ValueError("no rows were added")
        plain, centered, second = self._spectra()
        counts, duplicates = counts_without_each(self.counts), _duplicates(second)
        small = [self.norms, *([] if duplicates is None else [duplicates])]
        small += [] if self.residuals is None else [self.residuals.sums]
        found = list(fetched(*small))
        norms = without_each(found.pop(0))
        with np.errstate(invalid="ignore", divide="ignore"):
            norm = norms / counts.reshape(counts.shape + (1,) * (norms.ndim - 1))
        share = None if duplicates is None else float(found.pop(0))
        residual = self.residuals.finish(found.pop(0)) if self.residuals is not None else None
        return Features(plain, centered, norm, residual, share)

    def _spectra(self) -> tuple[Spectrum, Spectrum, Tensor | None]:
        assert self.pivot is not None
        eps = float(torch.finfo(self.dtype).eps)
        if self.moments is not None:
            sums, moments, counts = self.sums, self.moments, self.moment_counts
        else:
            rows, fold = self.rows()
            if len(rows) < self.shape[-1]:
                plain, centered = row_spectra(rows, fold, self.parts, self.pivot, eps)
                return plain, centered, _second(rows) if rows.ndim == 2 else None
            folds = Folds(fold)
            counts = folds.counts(self.parts)
            sums, moments = self._zeros()
            self._add_moments(rows, folds, sums, moments)
        plain, centered = moment_spectra(moments, sums, counts, self.pivot, eps)
        second = None
        if len(self.shape) == 1:
            total, pivot = sums.sum(0), self.pivot
            second = moments.sum(0).addr_(total, pivot).addr_(pivot, total)
            second.addr_(pivot, pivot, alpha=int(counts.sum()))
        return plain, centered, second


def _taken(rows: Tensor, chosen: Tensor) -> Tensor:
    return rows[chosen.to(rows.device, non_blocking=True)]


def _second(rows: Tensor) -> Tensor | None:
    if rows.shape[1] > UNITS_LIMIT:
        return None
    return gram_of_columns(rows.double())


def _duplicates(second: Tensor | None) -> Tensor | None:
    """Share of the coordinates whose cosine with another one is above 0.95; zeros have none. Their
    products [d, d] are overwritten."""
    if second is None or len(second) < 2 or len(second) > UNITS_LIMIT:
        return None
    norm = second.diagonal().clamp(min=0).sqrt().clamp(min=1e-150)
    cosine = second.div_(norm[:, None]).div_(norm[None, :])
    cosine.fill_diagonal_(0.0)
    return (cosine > DUPLICATE_COSINE).any(1).double().mean()


class _Residuals:
    """Sums over inputs of ‖X - 1 mean(X)^T‖_F / ‖X‖_F, X the rows [T, d] of one input."""

    def __init__(self, folds: int, device: torch.device) -> None:
        self.sums = torch.zeros(folds, dtype=torch.float64, device=device)
        self.counts = np.zeros(folds, dtype=np.int64)

    def add(self, x: Tensor, folds: Folds) -> None:
        where, tokens, of_input = folds.inputs_there(x.device)
        wide = x.double()
        means = wide.new_zeros(len(tokens), x.shape[1]).index_add_(0, where, wide)
        means /= tokens[:, None]
        squares = wide.new_zeros(len(tokens)).index_add_(0, where, wide.square().sum(1))
        rest = wide.new_zeros(len(tokens))
        rest.index_add_(0, where, (wide - means[where]).square().sum(1))
        # An input without rows adds 0.
        self.sums.index_add_(0, of_input, (rest / squares.clamp(min=1e-300)).sqrt())
        self.counts += folds.input_counts(len(self.counts))

    def finish(self, sums: Floats) -> Floats:
        """Mean over inputs [1 + K], from the sums [K]."""
        with np.errstate(invalid="ignore", divide="ignore"):
            mean: Floats = without_each(sums) / counts_without_each(self.counts)
        return mean
