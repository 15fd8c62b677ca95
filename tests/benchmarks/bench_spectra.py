"""Spectra and weight metrics of a ViT-B/16, heads included."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.benchmarks.harness import Comparison, Target, compare


def _model() -> torch.nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model("vit_base_patch16_224", pretrained=False)


def _matrices() -> list[torch.Tensor]:
    """Whole matrices, then the heads of each q, k and v together, [12, 64, 768]."""
    found, heads = [], []
    for name, p in _model().named_parameters():
        if p.ndim < 2 or min(p.shape[:1]) < 2:
            continue
        matrix = p.detach().flatten(1)
        if name.endswith("attn.qkv.weight"):
            for part in matrix.chunk(3):
                found.append(part)
                heads.append(part.reshape(12, 64, -1))
        else:
            found.append(matrix)
    return found + heads


def ours() -> Callable[[], object]:
    from plastiscope.observations import in_threads, spectra_of

    matrices = _matrices()
    return lambda: in_threads(spectra_of, matrices)


def svdvals_loop() -> Callable[[], object]:
    single = [m for whole in _matrices() for m in (whole if whole.ndim == 3 else [whole])]
    return lambda: [torch.linalg.svdvals(m) for m in single]


def all_metrics() -> Callable[[], object]:
    from plastiscope.metrics import Place, measure
    from plastiscope.observations import Weight, in_threads

    matrices = _matrices()

    def rows(matrix: torch.Tensor) -> object:
        heads = len(matrix) if matrix.ndim == 3 else None
        return measure(Weight.of(matrix), Place("w", 0, "weight", heads=heads))

    return lambda: in_threads(rows, matrices)


def weightwatcher() -> Callable[[], object]:
    import weightwatcher as ww

    watcher = ww.WeightWatcher(model=_model())
    return lambda: watcher.analyze(plot=False)


def comparisons() -> Iterator[Comparison]:
    me = __name__
    yield compare(
        me,
        "every spectrum of a ViT-B/16, 432 heads included",
        "ours",
        "a loop of torch.linalg.svdvals",
        "svdvals_loop",
        Target(speed=2.5),
    )
    yield compare(
        me,
        "all weight metrics of the same",
        "all_metrics",
        "WeightWatcher.analyze() (no heads)",
        "weightwatcher",
        Target(speed=3.0),
    )
