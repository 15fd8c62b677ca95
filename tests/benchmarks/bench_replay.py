"""The replay's memory against the probe's size, and one more checkpoint against the whole run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.harness import Comparison, Target, compare

SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"
ONLY = ("effective_rank", "dormant_fraction", "attention_entropy")


def _replay(inputs: int) -> Callable[[], object]:
    """A ViT of 4 blocks, width 64, at 32 px, on so many images made batch by batch."""
    import timm
    import torch

    from plastiscope.anatomy import trace
    from plastiscope.models.live import Inputs, Live
    from plastiscope.replay import Replay, Sampling

    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=64,
        num_heads=4,
        depth=4,
        num_classes=10,
    ).eval()
    live = Live(model, Inputs("image", (3, 32, 32)), {}, lambda b: model(b["inputs"]), "timm")
    # Views of one image: the probe itself must not be what grows.
    images = torch.zeros(1, 3, 32, 32).expand(inputs, 3, 32, 32)
    noise = torch.randn(64, 3, 32, 32)
    live = replace(live, forward=lambda b: model(b["inputs"] + noise[: len(b["inputs"])]))
    anatomy = trace(model, live.forward, {"inputs": noise[:2]})

    def work() -> object:
        # Rows are held up to 2 K d of them, then moments: at 1024 inputs that has been reached.
        replay = Replay(anatomy, inputs, Sampling(2, 4096, 64, 0))
        replay.run(live, {"inputs": images}, torch.device("cpu"))
        return replay.rows(ONLY)

    return work


def small_probe() -> Callable[[], object]:
    return _replay(1024)


def large_probe() -> Callable[[], object]:
    return _replay(16 * 1024)


def _run(count: int) -> Path:
    """A run of so many checkpoints."""
    run = Path(tempfile.mkdtemp()) / "mlp"
    run.mkdir()
    for file in (SAMPLES / "mlp").glob("*"):
        shutil.copy(file, run)
    for number in range(count - len(list(run.glob("task_*.pt")))):
        _step(run / "task_300.pt", run / f"task_{400 + number}.pt", 40_000 + number)
    return run


def _step(source: Path, target: Path, step: int) -> None:
    import torch

    state = torch.load(source, weights_only=True)
    state["model_state_dict"]["net.0.bias"] += step
    torch.save({**state, "step": step}, target)


def whole_run() -> Callable[[], object]:
    import plastiscope
    from plastiscope.config import Settings

    run = _run(21)
    return lambda: plastiscope.analyze(run, Settings(out=Path(tempfile.mkdtemp())))


def one_more() -> Callable[[], object]:
    import plastiscope
    from plastiscope.config import Settings

    run, out, aside = _run(20), Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
    plastiscope.analyze(run, Settings(out=out))
    for number in range(900, 920):
        _step(run / "task_300.pt", aside / f"task_{number}.pt", 90_000 + number)
    more = iter(sorted(aside.glob("*.pt")))

    def work() -> object:
        file = next(more)
        file.rename(run / file.name)
        return plastiscope.analyze(run, Settings(out=out))

    return work


def comparisons() -> Iterator[Comparison]:
    yield compare(
        __name__,
        "replay of 16,384 images",
        "large_probe",
        "of 1024",
        "small_probe",
        Target(memory=1.1),
    )
    yield compare(
        __name__,
        "checkpoint 21 of a finished run",
        "one_more",
        "all 21",
        "whole_run",
        Target(speed=21 / 1.2),
    )
