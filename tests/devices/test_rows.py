"""Every row is the same on every device: nothing stays on the CPU, nothing is lost on the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import plastiscope
from plastiscope.config import Settings
from plastiscope.metrics import METRICS
from plastiscope.reporter import Silent
from tests.devices import networks
from tests.devices.present import DEVICES

KEY = ["component", "block", "head", "tokens", "subject", "metric", "parameters", "index"]
EVERYTHING = tuple(metric.name for metric in METRICS)
SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"


class Lines(Silent):
    """Fails a test that couldn't measure something."""

    def say(self, line: str) -> None:
        assert "not measured" not in line, line


def run_of(name: str, folder: Path) -> Path:
    """A run of one float64 checkpoint with the optimizer's state, and its probe."""
    torch.manual_seed(0)
    net = getattr(networks, name)().double()
    x = networks.INPUTS[name]()
    labels = torch.randint(networks.CLASSES, (len(x), *(x.shape[1:] if x.ndim == 2 else ())))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(3):
        logits = net(x)
        torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()).backward()
        optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / "s_1.pt")
    np.savez(folder / "probe.npz", inputs=x.numpy(), labels=labels.numpy())
    return folder


def measured(run: Path, out: Path, device: str, **settings: object) -> pd.DataFrame:
    chosen = Settings(
        out=out, device=device, only=EVERYTHING, gradient_inputs=4, jacobian_inputs=2, batch_size=8,
        kernel=("mean_logit", "loss", "logits"), folds=4, **settings,
    )  # fmt: skip
    return plastiscope.analyze(run, chosen, Lines()).table()


def compare(here: pd.DataFrame, there: pd.DataFrame, tolerance: float) -> int:
    """How many numbers were compared; raises where rows, statuses, values or errors differ."""
    pd.testing.assert_frame_equal(here[[*KEY, "status"]], there[[*KEY, "status"]])
    # What is zero but for rounding (a norm's smallest singular value) has no digits to compare.
    vague = here.metric.str.contains("condition_number|sigma_min|log_sigma|ntk_spectrum")
    kept = ~vague & here.value.notna()
    scale = here.value.abs()[kept].clip(lower=1e-9)
    for column in ("value", "standard_error"):
        pd.testing.assert_series_equal(here[column].isna(), there[column].isna())
        apart = ((here[column] - there[column])[kept].abs() / scale).fillna(0.0)
        worst = here[kept].assign(there=there[column][kept], apart=apart).nlargest(3, "apart")
        assert apart.max() <= tolerance, worst[[*KEY, column, "there", "apart"]].to_string()
    return int(kept.sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["vit", "gpt"])
def test_transformers(device: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = run_of(name, tmp_path / "run")
    model = f"{Path(networks.__file__)}:{name}"
    here = measured(run, tmp_path / "here", "cpu", model=model)
    there = measured(run, tmp_path / "there", device, model=model)
    assert compare(here, there, 1e-6) > 1000
    kinds = here[here.value.notna()].subject.unique()
    assert {"feature", "unit", "attention", "ntk", "jacobian", "sensitivity", "gradient",
            "optimizer", "weight"} <= {*kinds}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_a_single_precision_sample(device: str, tmp_path: Path) -> None:
    here, there = (
        measured(SAMPLES / "cnn", tmp_path / where, where, steps="0", probe_rows=256)
        for where in ("cpu", device)
    )
    assert compare(here, there, 1e-4) > 500
