"""A small ViT on digits with random labels, drawn anew for every task; Trainer's folders."""

from __future__ import annotations

from pathlib import Path

import torch
from stream import Moment, Stream, Task, digits, main
from torch import nn
from transformers import TrainerState, ViTConfig, ViTForImageClassification
from transformers.utils.logging import disable_progress_bar

IMAGES = 48
TEST = 256
CLASSES = 10
BATCH = IMAGES


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
    return Task(images[TEST:], labels[TEST:], images[:TEST], labels[:TEST])


def save(folder: Path, moment: Moment) -> None:
    """A `checkpoint-N` folder with the files that Trainer needs to resume."""
    target = folder / f"checkpoint-{moment.step}"
    moment.model.save_pretrained(target)  # type: ignore[operator]
    torch.save(moment.optimizer.state_dict(), target / "optimizer.pt")
    steps = moment.step // max(moment.task, 1)
    history = [
        {"epoch": k, "step": k * steps, "eval_accuracy": score}
        for k, score in enumerate(moment.scores, start=1)
    ]
    state = TrainerState(
        epoch=moment.task, global_step=moment.step, train_batch_size=BATCH, log_history=history
    )
    state.save_to_json(str(target / "trainer_state.json"))


if __name__ == "__main__":
    disable_progress_bar()
    main(
        Stream(
            name="vit",
            build=build,
            task=shuffled,
            stationary=true_labels,
            save=save,
            load=lambda folder: ViTForImageClassification.from_pretrained(folder).state_dict(),
            tasks=80,
            steps=60,
            batch=BATCH,
            learning_rate=5e-3,
            checkpoints=(0, 1, 5, 10, 20, 40, 60, 80),
            fused=True,
        )
    )
