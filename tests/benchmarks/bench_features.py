"""Features, units, attention and CLS tokens of a ViT-S, reduced in the hooks, against stored
activations and `svdvals`.

Both sides run the product's own replay, with the same inputs, rows, folds and metrics. The other
side keeps what each reduction is given until the forward passes are over. Then the values of units
and attention come from the same code as ours, and every spectrum of a feature matrix (whole, and
without each fold; plain and centred) from one float64 `svdvals` with both threads.
BENCH_WHOLE=1 runs the whole network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plastiscope import replay, replayed
from plastiscope.observations import AttentionSums, FeatureSums, Spectrum, UnitSums
from plastiscope.observations.folds import Folds
from plastiscope.observations.moments import spectra_without_each
from plastiscope.observations.together import Pair
from tests.benchmarks.harness import WHOLE, Comparison, Target, compare

INPUTS, BATCH, FOLDS, ROWS = 256, 16, 8, 4096
BLOCKS = 12 if WHOLE else 3
"""For the whole network the other side takes 12 GB and ten minutes."""


class Kept:
    """Stands in for a reduction: keeps what it's given, and reduces at the end."""

    def __init__(self, sums: Any) -> None:
        self.sums, self.calls = sums, list[tuple[Any, ...]]()

    def add(self, *given: Any) -> None:
        self.calls.append(tuple(x.clone() if isinstance(x, Tensor) else x for x in given))

    def finish(self) -> Any:
        for call in self.calls:
            self.sums.add(*call)
        return self.sums.finish()


class KeptFeatures(FeatureSums):
    """Rows that are kept whole, with one svdvals for every spectrum."""

    def __init__(self, folds: int, batches: float | None = None) -> None:
        super().__init__(folds, batches)
        self.all: list[tuple[Tensor, Tensor]] = []

    def _hold(self, x: Tensor, folds: Folds) -> None:
        self.all.append((x.clone(), folds.fold % self.parts))

    def _spectra(self) -> tuple[Spectrum, Spectrum, Tensor | None]:
        rows, fold = (torch.cat(parts) for parts in zip(*self.all, strict=True))
        heads = rows.unbind(1) if rows.ndim == 3 else [rows]

        def solve(kept: list[int], head: int) -> Pair:
            part = heads[head][torch.isin(fold, torch.tensor(kept))].double()
            return _squares(part), _squares(part - part.mean(0))

        counts = np.bincount(fold.numpy(), minlength=self.parts)
        eps = float(torch.finfo(self.dtype).eps)
        found = spectra_without_each(solve, counts, tuple(rows.shape[1:-1]), rows.shape[-1], eps)
        return *found, rows.double().mT @ rows.double() if rows.ndim == 2 else None


def _squares(part: Tensor) -> tuple[Any, float]:
    return (torch.linalg.svdvals(part) ** 2).numpy(), float(part.square().sum())


def _work() -> Callable[[], list[Any]]:
    import timm

    from plastiscope.anatomy import trace
    from plastiscope.metrics import default_metrics
    from plastiscope.models.live import Inputs, Live

    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224", pretrained=False, depth=BLOCKS).eval()
    live = Live(model, Inputs("image", (3, 224, 224)), {}, lambda b: model(b["inputs"]), "timm")
    batch = {"inputs": torch.randn(INPUTS, 3, 224, 224)}
    anatomy = trace(model, live.forward, {"inputs": batch["inputs"][:2]})

    def work() -> list[Any]:
        run = replay.Replay(anatomy, INPUTS, replay.Sampling(FOLDS, ROWS, BATCH, 0))
        run.run(live, batch, torch.device("cpu"))
        return run.rows(default_metrics())

    return work


def ours() -> Callable[[], object]:
    return _work()


def stored() -> Callable[[], object]:
    replay.FeatureSums = KeptFeatures
    replay.UnitSums = lambda *given: Kept(UnitSums(*given))
    replay.AttentionSums = lambda *given, **named: Kept(AttentionSums(*given, **named))
    replayed.in_threads = lambda function, items: [function(item) for item in items]
    return _work()


def agreement() -> float:
    """Largest relative difference of a value or standard error between the two sides."""
    mine, theirs = ours()(), stored()()
    pairs = [
        (a, b)
        for one, other in zip(mine, theirs, strict=True)
        for a, b in ((one.value, other.value), (one.standard_error, other.standard_error))
        if a is not None and b is not None
    ]
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)


def comparisons() -> Iterator[Comparison]:
    yield compare(
        __name__,
        f"features, units, attention and CLS of {INPUTS} images, {BLOCKS} of 12 blocks of a ViT-S "
        "at 224 px, standard errors included",
        "ours",
        "stored activations and svdvals",
        "stored",
        Target(speed=4.0, memory=1 / 5),
    )
