"""Hugging Face datasets in folders: Arrow or Parquet files with images, texts or arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plastiscope.errors import UsageError
from plastiscope.models.live import Inputs
from plastiscope.probe.arrays import as_batch
from plastiscope.probe.draw import spread
from plastiscope.probe.pictures import prepare
from plastiscope.probe.tables import column, image_file, is_image, numeric, read_arrow, read_table
from plastiscope.probe.texts import read_texts

SPLITS = ("test", "validation", "valid", "val", "dev", "eval", "train")
LABELS = ("label", "labels", "fine_label", "target", "y", "class")


def data_files(folder: Path) -> list[Path]:
    """The data files of one split of a dataset: a held-out one where its name tells."""
    files = sorted(folder.rglob("*.arrow")) or sorted(folder.rglob("*.parquet"))
    files = [path for path in files if not path.name.startswith("cache-")]
    for split in SPLITS:
        part = [
            path
            for path in files
            if split in path.relative_to(folder).parts[:-1] or path.name.startswith(split)
        ]
        if part:
            return part
    return files


def read_dataset(
    folder: Path, inputs: Inputs, settings: dict[str, Any], places: Sequence[Path], size: int
) -> tuple[dict[str, Tensor], list[str]]:
    """At most `size` rows of a dataset, spread evenly, as the model takes them.

    Encoded images are prepared, texts tokenised, anything else is taken as arrays.
    """
    files = data_files(folder)
    table = _joined([read_table(file) if _parquet(file) else read_arrow(file) for file in files])
    if table.num_rows == 0:
        raise UsageError(f"the dataset {folder} is empty")
    images = column(table, is_image)
    text = column(table, lambda value: isinstance(value, str))
    if text is not None and inputs.kind == "tokens":
        return read_texts(table.column(text).to_pylist(), inputs, places, size)
    rows = table.take(spread(range(table.num_rows), size))
    notes = [f"{rows.num_rows} of {table.num_rows} rows"] if rows.num_rows < table.num_rows else []
    if images is None:
        return as_batch(numeric(rows), folder.name), notes
    cells = rows.column(images).to_pylist()
    batch, more = prepare([image_file(cell) for cell in cells], inputs, settings)
    label = next((name for name in LABELS if name in rows.column_names), None)
    values = rows.column(label).to_pylist() if label else []
    if values and all(type(value) is int for value in values):
        batch["labels"] = torch.tensor(values)
    return batch, notes + more


def _parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def _joined(tables: list[Any]) -> Any:
    import pyarrow as pa

    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise UsageError("the dataset's files have different columns") from error
