"""Attention maps, reduced to sums per head while the forward pass runs.

Axes: B inputs, H heads, Tq queries, Tk keys, K folds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .device import faster, fetched
from .folds import Folds
from .moments import counts_without_each, without_each
from .spectra import Floats, Statuses
from .symmetric import at_once

SINK_TOKENS = 64
SINK_THRESHOLD = 0.3
ENERGY = 0.9
_TINY = 1e-300


@dataclass(frozen=True)
class Attention:
    """Means per head [1 + K, H]: over everything, then without one fold of inputs.

    `entropy` in nats over query rows; `normalized` over those that see more than one key;
    `highest` the mean over query rows of ln(visible keys). `first_sink` and `largest_sink`
    are shares of inputs, `first_mass` the mean attention paid to the first key, `column_mass` the
    mean number of columns, `rank` [1 + K, H] the mean rank of the maps looked at (`maps` of them)
    or None. `rows` counts query rows, `keys` the longest row.
    """

    rows: int
    keys: int
    entropy: Floats
    normalized: Floats
    highest: Floats
    first_sink: Floats
    largest_sink: Floats
    first_mass: Floats
    column_mass: Floats
    rank: Floats | None
    maps: int
    status: Statuses
    replicated: ClassVar[bool] = True

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"Attention": self}

    @property
    def size(self) -> tuple[int | None, int | None]:
        """Query rows and keys."""
        return self.rows, self.keys


class AttentionSums:
    """Adds up one block's attention maps; `finish` gives its Attention.

    `causal`: a query sees keys up to its own. `maps`: of how many inputs the map's rank is taken
    (an SVD for each head of each).
    """

    def __init__(self, folds: int, *, causal: bool = False, maps: int = 0) -> None:
        self.folds, self.causal, self.maps = folds, causal, maps
        self.sums: dict[str, Tensor] = {}
        self.keys = 0
        self.ranked = np.zeros(folds, dtype=np.int64)

    def add(
        self,
        probabilities: Tensor,
        visible: Tensor | None,
        fold: Tensor | Folds,
        query_mask: Tensor | None = None,
    ) -> None:
        """Maps [B, H, Tq, Tk] after the softmax, the fold [B] of each input.

        `visible` (bool, broadcastable to the maps) says which keys a query may see: without it all,
        or when causal those up to its own. `query_mask` [B, Tq]: 0 = the query is padding.
        """
        folds, device = Folds.of(fold), probabilities.device
        self.keys = max(self.keys, probabilities.shape[-1])
        size = max(1, at_once(device) // max(1, probabilities[0].numel()))
        for start in range(0, len(probabilities), size):
            part = slice(start, start + size)
            maps = probabilities[part].detach()
            seen = _part(visible, part, len(probabilities))
            mask = query_mask[part] if query_mask is not None else None
            where = folds.there(device)[part]
            a = self._add_some(maps, self._visible(maps, seen), where, mask)
            if self.maps:
                self._add_ranks(a, folds.fold[part].tolist())

    def _visible(self, maps: Tensor, visible: Tensor | None) -> Tensor | None:
        """Brought to [B, H or 1, Tq, Tk]; None where every query sees every key."""
        if visible is None:
            if not self.causal:
                return None
            queries, keys = maps.shape[-2:]
            visible = torch.ones(queries, keys, dtype=torch.bool, device=maps.device)
            visible = visible.tril(keys - queries)
        visible = visible.to(maps.device)[(None,) * (4 - visible.ndim)]
        return visible.expand(len(maps), -1, *maps.shape[-2:])

    def _add_some(
        self, maps: Tensor, visible: Tensor | None, where: Tensor, query_mask: Tensor | None
    ) -> Tensor:
        """The maps as they count, in float64."""
        a = maps.double()
        if visible is None:
            seen = a.new_full((len(a), 1, a.shape[-2]), a.shape[-1])
        else:
            a, seen = torch.where(visible, a, 0.0), visible.sum(-1).double()
        used = seen > 0
        if query_mask is not None:
            used = used & query_mask.to(a.device).bool()[:, None, :]
        # Not xlogy, which isn't vectorised; 0 ln 0 comes out as 0 all the same.
        entropy = -a.clamp(min=_TINY).log_().mul_(a).sum(-1)
        several = used & (seen > 1)
        ceiling = torch.log(seen.clamp(min=1))
        # A masked row may be NaN, so it's replaced, not multiplied by 0.
        shares = torch.where(several, entropy / ceiling.clamp(min=_TINY), 0.0)
        self._sum("entropy", torch.where(used, entropy, 0.0).sum(-1), where)
        self._sum("normalized", shares.sum(-1), where)
        self._sum("highest", torch.where(used, ceiling, 0.0).sum(-1), where)
        self._sum("used", used.sum(-1).double(), where)
        self._sum("several", several.sum(-1).double(), where)
        if visible is not None or query_mask is not None:
            a = torch.where(used[..., None], a, 0.0)
        shown = used[..., None].expand(-1, -1, -1, a.shape[-1])
        self._add_columns(a, shown if visible is None else shown & visible, where)
        return a

    def _add_columns(self, a: Tensor, visible: Tensor, where: Tensor) -> None:
        inputs = torch.ones(len(a), 1, dtype=torch.float64, device=a.device)
        self._sum("inputs", inputs, where)
        mass = a.square().sum(-2).sort(-1, descending=True).values
        needed = (mass.cumsum(-1) < ENERGY * mass.sum(-1, keepdim=True)).sum(-1) + 1
        self._sum("column_mass", needed.double(), where)
        if self.causal:
            a, visible = (t[..., :SINK_TOKENS, :SINK_TOKENS] for t in (a, visible))
        viewers = visible.sum(-2).double()
        alpha = a.sum(-2) / viewers.clamp(min=1)
        # The last keys of a causal map have hardly a query that sees them.
        often = torch.where(viewers >= viewers.amax(-1, keepdim=True) / 2, alpha, 0.0)
        self._sum("first_mass", alpha[..., 0], where)
        self._sum("first_sink", (alpha[..., 0] > SINK_THRESHOLD).double(), where)
        self._sum("largest_sink", (often.amax(-1) > SINK_THRESHOLD).double(), where)

    def _add_ranks(self, a: Tensor, fold: list[int]) -> None:
        quota = -(-self.maps // self.folds)
        chosen = [b for b, k in enumerate(fold) if self.ranked[k] + fold[:b].count(k) < quota]
        if not chosen:
            return
        some = torch.stack([a[b] for b in chosen])
        gram, solve = torch.nan_to_num(some @ some.mT), torch.linalg.eigvalsh
        found = faster(
            "maps", gram.device, gram.shape[-1], lambda: solve(gram),
            lambda: solve(gram.cpu()).to(gram.device, non_blocking=True),
        )  # fmt: skip
        energy = found.flip(-1).clamp(min=0)
        short = energy.cumsum(-1) < ENERGY * energy.sum(-1, keepdim=True)
        for b, rank in zip(chosen, (short.sum(-1) + 1).double(), strict=True):
            self.ranked[fold[b]] += 1
            self._zeros("rank", rank[None])[fold[b]] += rank

    def _sum(self, name: str, entries: Tensor, where: Tensor) -> None:
        self._zeros(name, entries).index_add_(0, where, entries)

    def _zeros(self, name: str, entries: Tensor) -> Tensor:
        """The sums of this name [K, H], zeros at first."""
        if name not in self.sums:
            shape = (self.folds, entries.shape[1])
            self.sums[name] = torch.zeros(shape, dtype=torch.float64, device=entries.device)
        return self.sums[name]

    def finish(self) -> Attention:
        """Means per head. Raises ValueError when no map was added."""
        if not self.sums:
            raise ValueError("no attention maps were added")
        folds = dict(zip(self.sums, fetched(*self.sums.values()), strict=True))
        total = {name: without_each(sums) for name, sums in folds.items()}
        used, several, inputs = (
            counts_without_each(folds[name]) for name in ("used", "several", "inputs")
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            entropy = total["entropy"] / used
            return Attention(
                rows=int(used[0, 0]),
                keys=self.keys,
                entropy=entropy,
                normalized=total["normalized"] / several,
                highest=np.broadcast_to(total["highest"] / used, entropy.shape),
                first_sink=total["first_sink"] / inputs,
                largest_sink=total["largest_sink"] / inputs,
                first_mass=total["first_mass"] / inputs,
                column_mass=total["column_mass"] / inputs,
                rank=self._rank(total),
                maps=int(self.ranked.sum()),
                status=_statuses(entropy[0], int(used[0, 0])),
            )

    def _rank(self, total: dict[str, Floats]) -> Floats | None:
        if "rank" not in total:
            return None
        mean: Floats = total["rank"] / counts_without_each(self.ranked)[:, None]
        return mean


def _part(visible: Tensor | None, part: slice, inputs: int) -> Tensor | None:
    if visible is None or visible.ndim < 4 or len(visible) != inputs:
        return visible
    return visible[part]


def _statuses(entropy: Floats, used: int) -> Statuses:
    if used == 0:
        return np.full(entropy.shape, "no_queries", dtype="<U16")
    return np.where(np.isfinite(entropy), "ok", "non_finite").astype("<U16")
