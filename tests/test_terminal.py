"""The terminal prints names and docstrings as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from plastiscope.config import Settings
from plastiscope.inspection import inspect
from plastiscope.listing import print_inspection
from plastiscope.metrics import METRICS, explain
from plastiscope.terminal import print_explanation

ODD = "[bold]a[red]"


def test_names_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / ODD
    run.mkdir()
    torch.save({"fc.weight": torch.eye(3), "[dim]odd": torch.eye(3)}, run / "[b]_1.pt")
    print_inspection(inspect([run]))
    said = capsys.readouterr().out
    assert f"{ODD}  1 checkpoint\n" in said and "[b]_1.pt" in said and "[dim]odd" in said


def test_inspect_lists_probe_files_as_probes_and_fits_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    # A chain of layers can be rebuilt; layers of sizes that fit nowhere can't.
    for name, sizes in (("chain", ((4, 5), (2, 4))), ("loose", ((4, 5), (7, 3)))):
        folder = tmp_path / name
        folder.mkdir()
        state = {f"{i}.weight": torch.randn(size) for i, size in enumerate(sizes)}
        torch.save({"model_state_dict": state, "step": 3}, folder / "a.pt")
        np.savez(folder / "probe.npz", inputs=np.ones((4, 5), np.float32))
        (folder / "b.pt").write_bytes(b"broken")
    other = tmp_path / "other.npz"
    np.savez(other, inputs=np.zeros((6, 5), np.float32))
    found = inspect([tmp_path / "chain", tmp_path / "loose"])
    for run in found["runs"]:
        assert run["probes"] == [{"name": "probe.npz", "used": True}]
        assert [s["name"] for s in run["skipped"]] == ["b.pt"]
    print_inspection(found)
    print_inspection(inspect([tmp_path / "chain"], Settings(probe=str(other))))
    said = capsys.readouterr().out
    assert said.count("\nprobes\n  probe.npz\n") == 2
    assert "\nprobes\n  probe.npz: not used\n" in said and "probe: other.npz, 6 inputs" in said
    assert "probe.npz: no checkpoint" not in said
    missing = said[said.index("no live model: ") :]
    assert "--model path.py:function" in " ".join(missing.split())
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("metric", [m.name for m in METRICS])
def test_an_explanation_keeps_its_brackets(metric: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_explanation(metric)
    said = "".join(capsys.readouterr().out.split())
    found = explain(metric)
    for text in (found.definition, found.formula):
        assert "".join(text.split()) in said
