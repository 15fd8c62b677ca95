"""The replay's memory against the probe's size, and one more checkpoint against the whole run."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Sample:
    """A sample run whose last checkpoint is copied under further steps."""

    folder: str
    last: str
    named: str
    weights: str
    step: str

    def run(self, count: int) -> Path:
        """So many of its checkpoints, in a folder of their own."""
        run = Path(tempfile.mkdtemp()) / self.folder
        shutil.copytree(SAMPLES / self.folder, run)
        for number in range(count - len(list(run.glob(self.named.format("*"))))):
            self.copy(run, 40_000 + number)
        return run

    def copy(self, folder: Path, step: int) -> None:
        """Another checkpoint, with other weights."""
        import torch

        state = torch.load(SAMPLES / self.folder / self.last, weights_only=True)
        next(t for t in state[self.weights].values() if t.is_floating_point()).mul_(1 + step / 1e6)
        torch.save({**state, self.step: step}, folder / self.named.format(step))

    def whole(self, count: int) -> Callable[[], object]:
        """An analysis of so many."""
        import plastiscope
        from plastiscope.config import Settings

        run = self.run(count)
        return lambda: plastiscope.analyze(run, Settings(out=Path(tempfile.mkdtemp())))

    def next(self, count: int) -> Callable[[], object]:
        """An analysis of the last of so many, when the others are measured."""
        import plastiscope
        from plastiscope.config import Settings

        run, out = self.run(count - 1), Path(tempfile.mkdtemp())
        # What was written less than two seconds ago is looked at again: a finished run is older.
        time.sleep(2)
        plastiscope.analyze(run, Settings(out=out))
        aside = Path(tempfile.mkdtemp())
        for number in range(20):
            self.copy(aside, 90_000 + number)
        more = iter(sorted(aside.iterdir()))

        def work() -> object:
            file = next(more)
            file.rename(run / file.name)
            return plastiscope.analyze(run, Settings(out=out))

        return work


MLP = Sample("mlp", "task_300.pt", "task_{}.pt", "model_state_dict", "step")
GPT = Sample("gpt", "ckpt_3600.pt", "ckpt_{}.pt", "model", "iter_num")


def mlp() -> Callable[[], object]:
    return MLP.whole(21)


def mlp_next() -> Callable[[], object]:
    return MLP.next(21)


def gpt() -> Callable[[], object]:
    return GPT.whole(11)


def gpt_next() -> Callable[[], object]:
    return GPT.next(11)


def comparisons() -> Iterator[Comparison]:
    yield compare(
        __name__,
        "replay of 16,384 images",
        "large_probe",
        "of 1024",
        "small_probe",
        Target(memory=1.1),
    )
    for run, count in (("gpt", 11), ("mlp", 21)):
        yield compare(
            __name__,
            f"checkpoint {count} of the finished sample run {run}",
            f"{run}_next",
            f"all {count}",
            run,
            Target(speed=count / 1.2),
        )
