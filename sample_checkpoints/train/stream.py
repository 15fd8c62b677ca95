"""Train one network through a stream of tasks, save what such a run leaves, show what it lost.

Every sample run is the same experiment: a network and its optimiser go through many tasks, one
after another, and nothing is reset in between. The healthy twin stays on one task.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from plastiscope.checkpoints import discover

UNSEEN = 10_000  # tasks from this number on are never part of a stream

State: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """What to learn and what to be judged on: inputs [N, ...], integer labels [N] or [N, T]."""

    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Moment:
    """A point of the run: tasks learned, steps taken, each task's score right after it."""

    model: nn.Module
    optimizer: torch.optim.Adam
    task: int
    step: int
    scores: list[float]


@dataclass(frozen=True)
class Stream:
    """One sample run: the network, its tasks by number, the budget, and how a moment is stored
    and its weights are read again."""

    name: str
    build: Callable[[], nn.Module]
    task: Callable[[int], Task]
    stationary: Callable[[], Task]
    save: Callable[[Path, Moment], None]
    load: Callable[[Path], State]
    tasks: int
    steps: int
    batch: int
    learning_rate: float
    checkpoints: tuple[int, ...]
    unseen: Callable[[int], Task] | None = None
    score: Literal["accuracy", "loss"] = "accuracy"
    fused: bool | None = None  # Adam in one kernel: a quarter faster where a model has many tensors

    def adam(self, model: nn.Module) -> torch.optim.Adam:
        """A new optimiser, without weight decay."""
        return torch.optim.Adam(model.parameters(), lr=self.learning_rate, fused=self.fused)

    def learn(self, model: nn.Module, optimizer: torch.optim.Adam, task: Task, seed: int) -> float:
        """Spend the budget on random batches, whose order depends on the seed alone; the score.

        A task no larger than a batch is taken whole.
        """
        generator = torch.Generator().manual_seed(seed)
        size = len(task.inputs)
        rows = torch.arange(size)
        for _ in range(self.steps):
            if size > self.batch:
                rows = torch.randint(size, (self.batch,), generator=generator)
            optimizer.zero_grad()
            loss(model, task.inputs[rows], task.labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return self.judge(model, task)

    @torch.no_grad()
    def judge(self, model: nn.Module, task: Task) -> float:
        """Accuracy in [0, 1], or mean loss in nats, on the task's test inputs."""
        if self.score == "loss":
            return loss(model, task.test_inputs, task.test_labels).item()
        right = logits(model, task.test_inputs).argmax(-1) == task.test_labels
        return right.float().mean().item()


def logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """Class scores [..., C]; Hugging Face models wrap theirs."""
    output: Any = model(inputs)
    scores: Tensor = getattr(output, "logits", output)
    return scores


def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats."""
    return cross_entropy(logits(model, inputs).flatten(0, -2), labels.flatten())


def train(stream: Stream, folder: Path, seed: int, healthy: bool) -> dict[int, State]:
    """Run the stream or its twin; write checkpoints, results, probe; return the saved weights."""
    torch.manual_seed(seed)
    model = stream.build()
    optimizer = stream.adam(model)
    scores: list[float] = []
    saved: dict[int, State] = {}
    for index in range(stream.tasks + 1):
        if index in stream.checkpoints:
            stream.save(folder, Moment(model, optimizer, index, index * stream.steps, scores))
            saved[index] = deepcopy(model.state_dict())
        if index == stream.tasks:
            break
        task = stream.stationary() if healthy else stream.task(index)
        if index == 0:
            inputs, labels = task.test_inputs.numpy(), task.test_labels.numpy()
            np.savez_compressed(folder / "probe.npz", inputs=inputs, labels=labels)
        scores.append(stream.learn(model, optimizer, task, seed * UNSEEN + index))
    rows = [(k, (k + 1) * stream.steps, f"{score:.4f}") for k, score in enumerate(scores)]
    write(folder / "results.csv", ("task", "step", stream.score), rows)
    return saved


def learn_unseen(stream: Stream, start: State | None, seeds: int) -> Tensor:
    """Scores [seeds] on never-seen tasks, from the given or fresh weights and a fresh optimiser."""
    scores = []
    for seed in range(UNSEEN, UNSEEN + seeds):
        torch.manual_seed(seed)
        model = stream.build()
        if start is not None:
            model.load_state_dict(start)
        task = (stream.unseen or stream.task)(seed)
        scores.append(stream.learn(model, stream.adam(model), task, seed))
    return torch.tensor(scores)


def show_loss(stream: Stream, folder: Path, saved: dict[int, State], seeds: int) -> None:
    """Print and write how well a never-seen task is learned from each checkpoint and afresh.

    `lost` is what the fresh network does better, paired by seed: the same task and batches.
    """
    print(f"{stream.score} on a task never seen, mean +- sd over {seeds} seeds")
    fresh = learn_unseen(stream, None, seeds)
    sign = 1 if stream.score == "accuracy" else -1
    rows = []
    for name, start in (("fresh", None), *saved.items()):
        scores = fresh if start is None else learn_unseen(stream, start, seeds)
        lost = sign * (fresh - scores)
        print(f"from {name:>5}  {scores.mean():.3f} +- {scores.std():.3f}", flush=True)
        numbers = (scores.mean(), scores.std(), lost.mean(), lost.std())
        rows.append((name, *(f"{n:.4f}" for n in numbers), seeds))
    header = ("from_task", f"{stream.score}_mean", "sd", "lost_mean", "lost_sd", "seeds")
    write(folder / "trainability.csv", header, rows)


def stored(stream: Stream, folder: Path) -> dict[int, State]:
    """The weights of the checkpoints in a folder, by the number of tasks learned before."""
    (run,) = discover(folder)
    return {c.step // stream.steps: stream.load(Path(c.path)) for c in run.checkpoints}


def write(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A small CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1797 digits in one fixed random order: images [N, 64] in [-1, 1], labels."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = torch.from_numpy(data.data[order]).float() / 8 - 1
    return images, torch.from_numpy(data.target[order]).long()


def main(stream: Stream) -> None:
    """The command line that every run shares."""
    parser = argparse.ArgumentParser(description=f"Train the sample run {stream.name!r}.")
    parser.add_argument("--out", type=Path, help="folder to write (default: the sample's own)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--healthy", action="store_true", help="stay on one task (needs --out)")
    parser.add_argument(
        "--evidence", action="store_true", help="only measure again what is in the folder"
    )
    parser.add_argument("--seeds", type=int, default=20, help="never-seen tasks for the evidence")
    options = parser.parse_args()
    if options.healthy and options.out is None:
        parser.error("--healthy needs --out: the twin is never kept beside the sample")
    folder = options.out or Path(__file__).parent.parent / stream.name
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if options.evidence:
        saved = stored(stream, folder)
    else:
        saved = train(stream, folder, options.seed, options.healthy)
    show_loss(stream, folder, saved, options.seeds)
