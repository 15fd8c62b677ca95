"""A ReLU convolution stack on a stream of label-shuffled digits; Lightning's .ckpt layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from stream import Moment, Stream, Task, digits, main

IMAGES = 256
LEARNING_RATE = 3e-3
HYPER_PARAMETERS = {
    "input_shape": [1, 8, 8],
    "channels": [16, 32],
    "kernel_size": 3,
    "stride": 1,
    "padding": 1,
    "pool_size": 2,
    "hidden": 64,
    "num_classes": 10,
    "activation": "relu",
    "learning_rate": LEARNING_RATE,
}


class CNN(nn.Module):
    """Two convolutions with pooling, one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 1, 8, 8] to logits [B, 10]."""
        output: Tensor = self.net(images)
        return output


def shuffled(seed: int) -> Task:
    """The same images under labels drawn by the seed; what counts is how many were memorised."""
    images = digits()[0][:IMAGES].view(-1, 1, 8, 8)
    labels = torch.randint(10, (IMAGES,), generator=torch.Generator().manual_seed(seed))
    return Task(images, labels, images, labels)


def true_labels() -> Task:
    """Every digit under its own label, judged on held-out ones."""
    images, labels = digits()
    images = images.view(-1, 1, 8, 8)
    return Task(images[IMAGES:], labels[IMAGES:], images[:IMAGES], labels[:IMAGES])


def save(folder: Path, moment: Moment) -> None:
    epoch = moment.task
    torch.save(
        {
            "epoch": epoch,
            "global_step": moment.step,
            "pytorch-lightning_version": "2.5.5",
            "state_dict": moment.model.state_dict(),
            "callbacks": {},
            "optimizer_states": [moment.optimizer.state_dict()],
            "lr_schedulers": [],
            "hparams_name": "kwargs",
            "hyper_parameters": HYPER_PARAMETERS,
        },
        folder / f"epoch={epoch}-step={moment.step}.ckpt",
    )


if __name__ == "__main__":
    main(
        Stream(
            name="cnn",
            build=CNN,
            task=shuffled,
            stationary=true_labels,
            save=save,
            tasks=200,
            steps=200,
            batch=32,
            learning_rate=LEARNING_RATE,
            checkpoints=(0, 1, 2, 5, 10, 20, 50, 100, 150, 200),
        )
    )
