"""The terminal prints names and docstrings as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plastiscope.inspection import inspect
from plastiscope.metrics import METRICS, explain
from plastiscope.terminal import print_explanation, print_inspection

ODD = "[bold]a[red]"


def test_names_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / ODD
    run.mkdir()
    torch.save({"fc.weight": torch.eye(3), "[dim]odd": torch.eye(3)}, run / "[b]_1.pt")
    print_inspection(inspect([run]))
    said = capsys.readouterr().out
    assert f"{ODD}  1 checkpoint\n" in said and "[b]_1.pt" in said and "[dim]odd" in said


@pytest.mark.parametrize("metric", [m.name for m in METRICS])
def test_an_explanation_keeps_its_brackets(metric: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_explanation(metric)
    said = "".join(capsys.readouterr().out.split())
    found = explain(metric)
    for text in (found.definition, found.formula):
        assert "".join(text.split()) in said
