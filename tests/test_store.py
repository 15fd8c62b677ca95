"""The tables on disk: one schema, atomic, resumable."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plastiscope import store
from plastiscope.errors import NotEnoughEvidenceError, UnreadableError, UsageError
from plastiscope.store import Row


def common(checkpoint: str = "a.pt", step: int = 0, **other: Any) -> dict[str, Any]:
    values = {"run": "r", "checkpoint": checkpoint, "step": step, "task": None}
    return values | {"branch": "raw", "checkpoint_fingerprint": "f"} | other


def put(out: Path, rows: list[Row], key: str = "k", **fields: Any) -> Path:
    shared = common(**fields)
    file = store.checkpoint_file(out, "r", shared["checkpoint"])
    store.write(file, rows, shared, key, {"note": "n"})
    return file


def test_a_folder_in_the_file_s_place_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    said = pytest.raises(UsageError, match=r"can't write .*to: Is a directory")
    with said, store.replacing(tmp_path / "to") as partial:
        partial.write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["to"]


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    row = Row("effective_rank", "weight", 2.5, "q", 3, 1, rows=8, columns=4, maximum=4.0)
    put(tmp_path, [row])
    read = store.read(tmp_path).iloc[0]
    assert (read["value"], read["block"], read["head"], read["component"]) == (2.5, 3, 1, "q")
    assert (read["maximum"], read["rows"], read["status"]) == (4.0, 8, "ok")
    assert pd.isna(read["standard_error"]) and pd.isna(read["index"])


def test_an_all_null_file_keeps_the_schema(tmp_path: Path) -> None:
    """O01: a column that is null everywhere keeps its type."""
    put(tmp_path, [Row("effective_rank", "feature", 3.0, "norm1", 0, tokens="cls")])
    null = Row("effective_rank", "feature", None, "norm1", 0, tokens="cls", status="no_cls_token")
    put(tmp_path, [null], checkpoint="b.pt", step=1)
    table = store.read(tmp_path)
    pd.testing.assert_frame_equal(store.read(str(tmp_path)), table)
    assert table["value"].dtype == "float64"
    assert list(table["value"].isna()) == [False, True]
    folder = pq.ParquetDataset(tmp_path / "metrics").read()
    assert folder.schema.field("value").type == pa.float64() and folder.num_rows == 2


def test_nan_is_never_written_as_a_value_of_another_kind(tmp_path: Path) -> None:
    put(tmp_path, [Row("m", "weight", math.inf)])
    assert store.read(tmp_path)["value"].iloc[0] == math.inf


def test_finished_means_this_very_key(tmp_path: Path) -> None:
    file = put(tmp_path, [Row("m", "weight", 1.0)], key="one")
    assert store.is_finished(file, "one")
    assert not store.is_finished(file, "two")
    file.write_bytes(file.read_bytes()[:-9])
    assert not store.is_finished(file, "one")


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    """O09: a write is whole or not at all."""
    file = put(tmp_path, [Row("m", "weight", 1.0)])
    with pytest.raises(KeyboardInterrupt), store.replacing(file) as partial:
        partial.write_bytes(b"half")
        raise KeyboardInterrupt
    assert store.read(tmp_path)["value"].tolist() == [1.0]
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_a_leftover_of_a_killed_process_is_not_read(tmp_path: Path) -> None:
    file = put(tmp_path, [Row("m", "weight", 1.0)])
    (file.parent / ".tmp123.parquet").write_bytes(b"half")
    assert len(store.read(tmp_path)) == 1


def test_names_that_differ_get_files_that_differ(tmp_path: Path) -> None:
    names = ["a/b", "a_b", "a b", "../a", ".a", "x" * 300, "x" * 301, "epoch=1-step=2.ckpt"]
    files = {store.checkpoint_file(tmp_path, "r", name) for name in names}
    assert len(files) == len(names)
    assert all(f.parent == tmp_path / "metrics" / "r" and len(f.name) < 200 for f in files)


def test_rows_are_read_in_step_order(tmp_path: Path) -> None:
    put(tmp_path, [Row("m", "weight", 1.0)], step=1000, checkpoint="a")
    put(tmp_path, [Row("m", "weight", 2.0)], step=50, checkpoint="b")
    assert store.read(tmp_path)["step"].tolist() == [50, 1000]


def test_runs_of_one_name_in_two_outs_stay_two(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    put(one, [Row("m", "weight", 1.0)])
    put(two, [Row("m", "weight", 2.0)], checkpoint="b")
    put(two, [Row("m", "weight", 3.0)], checkpoint="c", run="other")
    table = store.read([one, two, one])
    assert dict(zip(table["value"], table["run"], strict=True)) == {
        1.0: f"{one}/r", 2.0: f"{two}/r", 3.0: "other"
    }  # fmt: skip


def test_recorded_results_are_read_on_request(tmp_path: Path) -> None:
    put(tmp_path, [Row("m", "weight", 1.0)])
    rows = [Row("accuracy", "task", 0.5, step=7, task=1), Row("accuracy", "task", 0.25, step=9)]
    store.write(store.results_file(tmp_path, "r"), rows, common("results.csv"), "k", {})
    assert len(store.read(tmp_path)) == 1
    table = store.read(tmp_path, results=True)
    assert table["step"].tolist() == [0, 7, 9] and table["task"].tolist()[1] == 1


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tables in"):
        store.read(tmp_path)
    put(tmp_path, [])
    with pytest.raises(NotEnoughEvidenceError):
        store.read(tmp_path)
    (tmp_path / "metrics" / "r" / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(UnreadableError, match=r"bad\.parquet"):
        store.read(tmp_path)


def test_facts_are_kept_beside_the_rows(tmp_path: Path) -> None:
    assert store.read_facts(put(tmp_path, [Row("m", "weight", 1.0)])) == {"note": "n"}
