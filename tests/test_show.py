"""Tables for people: filtered, pivoted, written; the numbers are those of the rows."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
import pytest

from plastiscope import store
from plastiscope.errors import NotEnoughEvidenceError, UsageError, unknown
from plastiscope.show import View, compact, view, written
from plastiscope.store import Row


@pytest.fixture
def table(tmp_path: Path) -> pd.DataFrame:
    for step in (1000, 50):
        rows = [
            Row("srank", "weight", step + block + (head or 0) / 10, "q", block, head)
            for block in (0, 1)
            for head in (None, 0)
        ]
        rows.append(Row("loss", "output", None, "head", status="no_labels"))
        shared = {"run": "r_1", "checkpoint": str(step), "step": step, "task": None}
        shared |= {"branch": "raw", "checkpoint_fingerprint": "f"}
        store.write(store.checkpoint_file(tmp_path, "r", str(step)), rows, shared, "k", {})
    return store.read(tmp_path)


def test_a_pivot_by_step_is_in_numeric_order(table: pd.DataFrame) -> None:
    wide = view(table, View(metrics=["srank"], pivot="step"))
    assert list(wide.columns[-2:]) == ["50", "1000"]
    at = wide[(wide["block"] == 1) & wide["head"].isna()]
    assert at[["50", "1000"]].to_numpy().tolist() == [[51.0, 1001.0]]


def test_filters_and_sorting(table: pd.DataFrame) -> None:
    rows = view(table, View(metrics=["srank"], steps=[50], sort="-value", limit=2))
    assert rows["value"].tolist() == [51.0, 51.0]
    assert view(table, View(statuses=["no_labels"]))["value"].isna().all()
    with pytest.raises(UsageError, match="did you mean 'srank'"):
        view(table, View(metrics=["sranc"]))
    with pytest.raises(UsageError, match="column to sort by"):
        view(table, View(sort="valu"))
    with pytest.raises(UsageError, match="column to pivot by"):
        view(table, View(pivot="value"))
    with pytest.raises(NotEnoughEvidenceError):
        view(table, View(metrics=["loss"], components=["q"]))


def test_of_many_names_the_nearest_twelve_are_listed() -> None:
    names = [f"metric_{n:02}" for n in range(40)] + ["zebra"]
    said = str(unknown("metric", "zebr", names))
    assert said.startswith("unknown metric 'zebr': did you mean 'zebra'? known: zebra, metric_00, ")
    assert said.endswith("metric_10, ... 29 more") and said.count("metric_") == 11


def test_csv_keeps_every_digit(table: pd.DataFrame) -> None:
    rows = view(table.assign(value=1 / 3), View(metrics=["srank"]))
    back = pd.read_csv(io.StringIO(written(rows, "csv")))
    assert back["value"].tolist() == [1 / 3] * 8


def test_latex_has_booktabs_and_escapes(table: pd.DataFrame) -> None:
    rows = view(table.assign(component="q_1"), View(metrics=["srank"], limit=3))
    lines = written(rows.assign(component=["q_1", "q_1", "k&v"]), "latex").splitlines()
    assert lines[:4] == [
        "% run r_1, step 50, subject weight, metric srank, status ok",
        r"\begin{tabular}{rlrr}",
        r"\toprule",
        r"block & component & head & value \\",
    ]
    assert lines[4:8] == [
        r"\midrule",
        r"0 & q\_1 &  & 50 \\",
        r"0 & q\_1 & 0 & 50 \\",
        r"1 & k\&v &  & 51 \\",
    ]
    assert lines[8] == r"\bottomrule"


def test_markdown_is_a_table_of_all_rows(table: pd.DataFrame) -> None:
    said, empty, head, rule, *lines = written(
        view(table, View(metrics=["srank"], pivot="step")), "markdown"
    ).splitlines()
    assert (
        said == "run r_1, component q, subject weight, metric srank, columns by step"
        and empty == ""
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]
    assert cells[:3] == [
        ["block", "head", "50", "1000"],
        ["0", "", "50", "1000"],
        ["0", "0", "50", "1000"],
    ]
    assert len(lines) == 4 and set(rule) == set("|-:")


def test_what_is_always_the_same_is_said_once(table: pd.DataFrame) -> None:
    kept, same = compact(view(table, View(metrics=["srank"], steps=[50])))
    assert same["run"] == "r_1" and same["step"] == "50" and "block" not in same
    assert list(kept.columns) == ["block", "head", "value"]


def test_known_steps_are_listed_as_numbers(table: pd.DataFrame) -> None:
    with pytest.raises(UsageError, match=r"unknown step '999'.*known: 50, 1000$"):
        view(table, View(steps=[999]))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_shows_nothing_is_a_mistake(table: pd.DataFrame, limit: int) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        view(table, View(limit=limit))
