"""Natural order, and the step in a name."""

from __future__ import annotations

import pytest

from plastiscope.checkpoints.names import natural, step_numbers, template

STEPS = {
    "checkpoint-50": 50,
    "100000": 100000,
    "0900000": 900000,
    "epoch=9-step=90.ckpt": 90,
    "epoch=2-val_loss=0.12.ckpt": 2,
    "handpicked": None,
    "epoch=10-step=100-v1.ckpt": 100,
    "rl_model_10000_steps.zip": 10000,
    "0000100_adapters.safetensors": 100,
    "task_012.pt": 12,
    "seed3_step_100.pt": 100,
    "seed3.pt": None,
    "resnet50_epoch_3.pt": 3,
    "resnet50.pt": None,
    "ckpt_100k.pt": 100000,
    "CartPole-v1.zip": None,
    "model_2024-05-01_step_10.pt": 10,
    "20240501-120000_step_10.pt": 10,
    "iter_00010.pth": 10,
    "model_acc91_epoch3.pt": 3,
    "step_1000_loss_2.34.pt": 1000,
    "ckpt_ep12_acc0.91.pt": 12,
    "val_loss_3.pt": None,
    "best_model.pt": None,
    "global_step100": 100,
    "epoch3.pth": 3,
    "net-000012.pkl": 12,
}


@pytest.mark.parametrize("name", STEPS)
def test_step_in_a_name(name):  # L12
    from plastiscope.checkpoints.names import best_word

    found = step_numbers(name)
    step = found[best_word(found)] if found else None
    assert step == STEPS[name], found


def test_layers_in_natural_order():  # L12
    names = ["layers.10.w", "layers.2.w", "layers.1.w"]
    assert sorted(names, key=natural) == ["layers.1.w", "layers.2.w", "layers.10.w"]


def test_templates_tell_runs_apart():
    assert template("step_1.pt") == template("step_00010.pt")
    assert template("epoch=1-val_loss=0.5.ckpt") == template("epoch=2-val_loss=0.25.ckpt")
    assert template("actor_step_1.pt") != template("critic_step_1.pt")
    assert template("seed1_step_1.pt") != template("seed2_step_1.pt")
