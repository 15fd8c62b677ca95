"""Padding in a probe counts nowhere: not in the loss, nor in the rows of features or gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from torch import nn

import plastiscope
from plastiscope.config import Settings
from plastiscope.padding import unpadded

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


def saved_bert(folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_labels=3,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    model.save_pretrained(folder / "checkpoint-1")


@pytest.mark.parametrize("padding", ["other ids", "longer"])
def test_padding_is_in_no_jacobian_and_no_rate_of_change(tmp_path: Path, padding: str) -> None:
    saved_bert(tmp_path / "run")
    random = np.random.default_rng(0)
    ids, lengths = random.integers(1, 40, (10, 8)), np.array([5] * 4 + [3, 4, 6, 7, 8, 8])
    mask = (np.arange(8) < lengths[:, None]).astype(np.int64)
    extra = 0 if padding == "other ids" else 20
    fill = 7 if padding == "other ids" else 0
    rows = []
    for more, filled in ((0, 0), (extra, fill)):
        wide = np.pad(mask, ((0, 0), (0, more)))
        inputs = np.where(wide == 1, np.pad(ids, ((0, 0), (0, more))), filled)
        np.savez(tmp_path / "probe.npz", inputs=inputs, mask=wide, labels=np.arange(10) % 3)
        settings = Settings(
            out=tmp_path / f"out{more}{filled}", probe=str(tmp_path / "probe.npz"),
            only=("rate_of_change", "rate_of_change_embedding", "isometry_score"),
            jacobian_inputs=2,
        )  # fmt: skip
        table = plastiscope.analyze(tmp_path / "run", settings).table()
        places = (
            table[["metric", "component", "block", "parameters"]].astype(str).agg(tuple, axis=1)
        )
        rows.append(table.set_index(places)[["value", "rows"]].dropna())
    assert len(rows[0]) > 20 and {m[0] for m in rows[0].index} == set(settings.only)
    pd.testing.assert_frame_equal(rows[0], rows[1], rtol=1e-4)
    pairs = rows[0].loc[[m for m in rows[0].index if m[0] == "rate_of_change"], "rows"]
    # Four inputs of the commonest length, each in three pairs.
    assert set(pairs) == {12}


def batch(mask: list[list[int]], **more: torch.Tensor) -> dict[str, torch.Tensor]:
    given = torch.tensor(mask)
    return {"inputs": torch.arange(given.numel()).reshape(given.shape), "mask": given, **more}


def test_inputs_of_the_commonest_length_are_cut_to_it() -> None:
    mask = [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [0, 1, 1, 0]]
    (found,) = unpadded(batch(mask, labels=torch.arange(4))) or ()
    assert found["inputs"].tolist() == [[0, 1], [8, 9]] and found["labels"].tolist() == [0, 2]
    assert found["mask"].tolist() == [[1, 1], [1, 1]]
    one, other = unpadded(batch(mask), batch([[1, 1, 1, 1], *mask[1:]])) or ()
    assert one["inputs"].tolist() == [[4, 5, 6]] == other["inputs"].tolist()
    assert unpadded(batch([[0, 1, 1], [0, 0, 1]])) is None
    whole = batch([[1, 1], [1, 1]])
    assert unpadded(whole) == (whole,)
