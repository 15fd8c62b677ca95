"""A small ViT on a stream of new classes; Hugging Face Trainer's checkpoint folders."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import TrainerState, ViTConfig, ViTForImageClassification

from stream import Moment, Stream, Task, digits, main

IMAGES = 128
CLASSES = 10


def build() -> nn.Module:
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=96,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.15,
    )
    model: nn.Module = ViTForImageClassification(config)
    return model


def shuffled(seed: int) -> Task:
    """The same images under labels drawn by the seed; what counts is how many were memorised."""
    images = digits()[0][:IMAGES].view(-1, 1, 8, 8)
    labels = torch.randint(CLASSES, (IMAGES,), generator=torch.Generator().manual_seed(seed))
    return Task(images, labels, images, labels)


def true_labels() -> Task:
    """Every digit under its own label, judged on held-out ones."""
    images, labels = digits()
    images = images.view(-1, 1, 8, 8)
    return Task(images[IMAGES:], labels[IMAGES:], images[:IMAGES], labels[:IMAGES])


def save(folder: Path, moment: Moment) -> None:
    target = folder / f"checkpoint-{moment.step}"
    moment.model.save_pretrained(target)  # type: ignore[operator]
    torch.save(moment.optimizer.state_dict(), target / "optimizer.pt")
    TrainerState(global_step=moment.step, epoch=float(moment.task)).save_to_json(
        str(target / "trainer_state.json")
    )


if __name__ == "__main__":
    main(
        Stream(
            name="vit",
            build=build,
            task=shuffled,
            stationary=true_labels,
            save=save,
            tasks=60,
            steps=300,
            batch=32,
            learning_rate=1e-3,
            checkpoints=(0, 1, 2, 5, 10, 20, 50, 100, 150, 200),
        )
    )
