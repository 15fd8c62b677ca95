"""Jacobian isometry of a ViT-Tiny's components against dense Jacobians."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from plastiscope.observations import Jacobian
from plastiscope.observations.spectra import Floats
from tests.benchmarks.harness import Comparison, Target, compare

PATHS = ("norm1", "attn", "mlp", "")
INPUTS, SEEDS = 1, 5


def _model() -> tuple[nn.Module, dict[str, Tensor], dict[str, str]]:
    import timm

    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, num_classes=10, img_size=64
    ).eval()
    batch = {"inputs": torch.randn(INPUTS, 3, 64, 64)}
    return model, batch, {p: f"blocks.5.{p}".rstrip(".") for p in PATHS}


def ours() -> Callable[[], object]:
    model, batch, paths = _model()
    return lambda: _observed(model, batch, paths, 0)


def _observed(
    model: nn.Module, batch: dict[str, Tensor], paths: dict[str, str], seed: int
) -> dict[object, Jacobian]:
    from plastiscope.observations import observe_jacobians

    return observe_jacobians(model, lambda b: model(b["inputs"]), batch, paths, seed=seed)


def dense() -> Callable[[], object]:
    """Each component's whole [T*d, T*d] Jacobian of each input, and its singular values."""
    from plastiscope.observations import capture

    model, batch, paths = _model()
    calls = capture(model, lambda b: model(b["inputs"]), batch, paths)

    def work() -> object:
        found = []
        for call in calls.values():
            for i in range(INPUTS):
                jacobian = torch.func.vmap(
                    torch.func.vjp(call.module, call.x[i : i + 1])[1], chunk_size=256
                )(torch.eye(call.output[0].numel()).reshape(-1, 1, *call.output.shape[1:]))[0]
                whole = jacobian.detach().reshape(len(jacobian), -1)
                found.append(torch.linalg.svdvals(whole))
        return found

    return work


def agreement() -> float:
    """Largest relative difference of the isometry score and of the distance from 1 from the dense
    ones, over components and seeds."""
    spectra = [sigma.double().numpy() for sigma in dense()()]  # type: ignore[attr-defined]
    model, batch, paths = _model()
    worst = 0.0
    for seed in range(SEEDS):
        for i, found in enumerate(_observed(model, batch, paths, seed).values()):
            for b in range(INPUTS):
                sigma = spectra[i * INPUTS + b]
                exact = _values(sigma, np.full(len(sigma), 1 / len(sigma)))
                mine = _values(found.nodes[b], found.weights[b])
                worst = max(worst, float(np.abs(mine / exact - 1).max()))
    return worst


def _values(sigma: Floats, weights: Floats) -> Floats:
    score = (weights * 2 * sigma / (1 + sigma**2)).sum()
    return np.array([score, np.sqrt((weights * (sigma - 1) ** 2).sum())])


def comparisons() -> Iterator[Comparison]:
    yield compare(
        __name__,
        "Jacobian isometry of a block, its attention, norm and FFN, ViT-Tiny at 64 px, 1 input "
        f"(isometry score and distance within {agreement():.1%} for {SEEDS} seeds)",
        "ours",
        "dense Jacobians and svdvals",
        "dense",
        Target(speed=10.0),
    )
