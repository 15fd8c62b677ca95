"""Jacobian isometry of a ViT-Tiny's components against dense Jacobians."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tests.benchmarks.harness import Comparison, Target, compare

PATHS = ("norm1", "attn", "mlp", "")
INPUTS = 1


def _model() -> tuple[nn.Module, dict[str, Tensor], dict[str, str]]:
    import timm

    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, num_classes=10, img_size=64
    ).eval()
    batch = {"inputs": torch.randn(INPUTS, 3, 64, 64)}
    return model, batch, {p: f"blocks.5.{p}".rstrip(".") for p in PATHS}


def ours() -> Callable[[], object]:
    from plastiscope.observations import observe_jacobians

    model, batch, paths = _model()
    return lambda: observe_jacobians(model, lambda b: model(b["inputs"]), batch, paths)


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
                found.append(torch.linalg.svdvals(jacobian.reshape(len(jacobian), -1)))
        return found

    return work


def agreement() -> float:
    """Largest relative difference of the isometry score from the dense one, over components."""
    results = ours()()
    spectra = dense()()
    worst = 0.0
    for i, found in enumerate(results.values()):  # type: ignore[attr-defined]
        mine = (found.weights * 2 * found.nodes / (1 + found.nodes**2)).sum(1)
        for b in range(INPUTS):
            sigma = spectra[i * INPUTS + b]  # type: ignore[index]
            exact = float((2 * sigma / (1 + sigma**2)).mean())
            worst = max(worst, abs(float(mine[b]) / exact - 1))
    return worst


def comparisons() -> Iterator[Comparison]:
    yield compare(
        __name__,
        "Jacobian isometry of a block, its attention, norm and FFN, ViT-Tiny at 64 px, 1 input "
        f"(isometry score within {agreement():.1%})",
        "ours",
        "dense Jacobians and svdvals",
        "dense",
        Target(speed=10.0),
    )
