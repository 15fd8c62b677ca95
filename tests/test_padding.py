"""Padding in a probe counts nowhere: not in the loss, nor in the rows of features or gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import plastiscope
from plastiscope.config import Settings

CODE = """
from torch import nn

class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.fc1 = nn.Embedding(11, 6), nn.Linear(6, 8)
        self.act, self.fc2 = nn.ReLU(), nn.Linear(8, 3)

    def forward(self, ids, attention_mask=None):
        x = self.act(self.fc1(self.table(ids)))
        kept = attention_mask[..., None].to(x)
        return self.fc2((x * kept).sum(1) / kept.sum(1))
"""


def test_padding_is_left_out_of_loss_and_rows(tmp_path: Path) -> None:
    file = tmp_path / "pooled.py"
    file.write_text(CODE)
    scope: dict[str, type[nn.Module]] = {}
    exec(CODE, scope)
    torch.manual_seed(0)
    net = scope["Pooled"]().eval()
    ids, labels = torch.randint(0, 11, (10, 5)), torch.randint(0, 3, (10,))
    mask = (torch.arange(5) < torch.randint(1, 6, (10, 1))).long()
    assert 10 < int(mask.sum()) < 50
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"model": net.state_dict(), "step": 0}, folder / "step_0.pt")
    np.savez(folder / "probe.npz", input_ids=ids, attention_mask=mask, labels=labels)
    settings = Settings(out=tmp_path / "out", model=f"{file}:Pooled", extra=("gradients",))
    table = plastiscope.analyze(folder, settings).table()
    (loss,) = table[table["metric"] == "loss"]["value"]
    assert loss == pytest.approx(
        nn.functional.cross_entropy(net(ids, mask), labels).item(), rel=1e-5
    )
    for metric in ("active_fraction", "grama_inactive_fraction"):
        rows = table[(table["metric"] == metric) & (table["component"] == "activation")]["rows"]
        assert len(rows) and (rows == int(mask.sum())).all()
