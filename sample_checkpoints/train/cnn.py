"""A ReLU convolution stack on digits whose labels are shuffled for every task; Lightning."""

from __future__ import annotations

from pathlib import Path

import torch
from stream import Moment, Stream, Task, digits, main
from torch import Tensor, nn

TEST = 256
LEARNING_RATE = 1.5e-3
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
    """The digits with their ten labels shuffled by the seed, judged on held-out ones."""
    images, labels = digits()
    images = images.view(-1, 1, 8, 8)
    labels = torch.randperm(10, generator=torch.Generator().manual_seed(seed))[labels]
    return Task(images[TEST:], labels[TEST:], images[:TEST], labels[:TEST])


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
            stationary=lambda: shuffled(0),
            save=save,
            load=lambda file: torch.load(file, weights_only=True)["state_dict"],
            tasks=100,
            steps=60,
            batch=32,
            learning_rate=LEARNING_RATE,
            checkpoints=(0, 1, 2, 5, 10, 20, 40, 60, 80, 100),
        )
    )
