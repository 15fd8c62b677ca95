"""What can't be measured of a checkpoint is a null row with a line, and the rest is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import plastiscope
from plastiscope.config import Settings

CODE = """
from torch import nn

class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)

    def forward(self, x):
        x = self.act(self.fc1(x))
        return self.fc2(x - x.mean(0))
"""


class Lines:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def start(self, run: str, total: int) -> None: ...

    def advance(self, checkpoint: str, step: int, resumed: bool) -> None: ...


def test_a_kernel_that_is_not_defined_loses_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "mixes.py").write_text(CODE)
    torch.manual_seed(0)
    for step in (0, 1):
        layers = {"fc1": nn.Linear(5, 7), "fc2": nn.Linear(7, 3)}
        stored = {f"{n}.{k}": v for n, m in layers.items() for k, v in m.state_dict().items()}
        torch.save({"model": stored, "step": step}, folder / f"step_{step}.pt")
    np.savez(folder / "probe.npz", inputs=torch.randn(12, 5).numpy())
    settings = Settings(
        out=tmp_path / "out", model=f"{tmp_path / 'mixes.py'}:Mixes", extra=("ntk", "sensitivity")
    )
    lines = Lines()
    table = plastiscope.analyze(folder, settings, lines).table()
    for step in (0, 1):
        at = table[table["step"] == step]
        kernel = at[at["metric"] == "ntk_trace"]
        assert list(kernel["status"]) == ["refused"] and kernel["value"].isna().all()
        assert (at[at["metric"] == "rate_of_change_bound"]["value"] > 0).any()
        assert (at[at["metric"] == "active_fraction"]["value"] > 0).any()
    said = [line for line in lines.said if "ntk not measured" in line]
    assert [line.split(":")[0] for line in said] == ["run/step_0.pt", "run/step_1.pt"]
    assert all("depends on the other inputs" in line for line in said)
