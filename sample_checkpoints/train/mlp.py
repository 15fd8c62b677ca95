"""A ReLU MLP on digits whose pixels are permuted anew for every task; torch.save dictionaries."""

from __future__ import annotations

from pathlib import Path

import torch
from stream import Moment, Stream, Task, digits, main
from torch import Tensor, nn

TEST = 256
WIDTH = 64


class MLP(nn.Module):
    """64 pixels, three hidden layers, ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 64] to logits [B, 10]."""
        output: Tensor = self.net(images)
        return output


def permuted(seed: int) -> Task:
    """The digits under the seed's permutation of their pixels."""
    images, labels = digits()
    images = images[:, torch.randperm(64, generator=torch.Generator().manual_seed(seed))]
    return Task(images[TEST:], labels[TEST:], images[:TEST], labels[:TEST])


def save(folder: Path, moment: Moment) -> None:
    torch.save(
        {
            "model_state_dict": moment.model.state_dict(),
            "optimizer_state_dict": moment.optimizer.state_dict(),
            "task": moment.task,
            "step": moment.step,
        },
        folder / f"task_{moment.task:03d}.pt",
    )


if __name__ == "__main__":
    main(
        Stream(
            name="mlp",
            build=MLP,
            task=permuted,
            stationary=lambda: permuted(0),
            save=save,
            load=lambda file: torch.load(file, weights_only=True)["model_state_dict"],
            tasks=300,
            steps=100,
            batch=32,
            learning_rate=3e-3,
            checkpoints=(0, 1, 5, 20, 50, 100, 150, 200, 250, 300),
        )
    )
