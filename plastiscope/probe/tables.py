"""Columns of Parquet and Arrow files as arrays: numbers, nested lists, encoded images, texts."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plastiscope.errors import UsageError


def read_parquet(path: Path) -> dict[str, Tensor]:
    """Every numeric column of the file, lists as further axes; ragged columns are left out."""
    return numeric(read_table(path))


def read_table(path: Path) -> Any:
    """The Arrow table of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        line = str(error).splitlines()[0]
        raise UsageError(f"the probe {path.name} can't be read: {line}") from error


def read_arrow(path: Path) -> Any:
    """The table in an Arrow file, as the datasets library keeps it (a stream) or not (a file)."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            try:
                return pa.ipc.open_stream(source).read_all()
            except pa.ArrowInvalid:
                source.seek(0)
                return pa.ipc.open_file(source).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        line = str(error).splitlines()[0]
        raise UsageError(f"the probe {path.name} can't be read: {line}") from error


def numeric(table: Any) -> dict[str, Tensor]:
    """The columns of an Arrow table that are regular arrays of numbers."""
    found = {}
    for name in table.column_names:
        array = as_array(table.column(name).to_pylist())
        if array is not None:
            found[name] = torch.from_numpy(array)
    return found


def as_array(values: list[Any]) -> np.ndarray[Any, Any] | None:
    """A regular array of numbers [rows, ...], or None."""
    try:
        array = np.array(values)
    except ValueError:
        return None
    if array.dtype == np.uint16 or array.dtype.kind not in "biuf":
        return array.astype(np.int64) if array.dtype == np.uint16 else None
    return array


def column(table: Any, test: Callable[[Any], bool]) -> str | None:
    """The first column whose first value passes the test."""
    for name in table.column_names:
        if table.num_rows and test(table.column(name)[0].as_py()):
            return str(name)
    return None


def is_image(value: Any) -> bool:
    """Whether a cell is an encoded image, as the datasets library stores it."""
    return isinstance(value, bytes) or (
        isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes)
    )


def image_file(value: Any) -> io.BytesIO:
    """The encoded image of a cell, as a file."""
    return io.BytesIO(value if isinstance(value, bytes) else value["bytes"])
