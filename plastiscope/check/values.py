"""The rows that a gate reads, as plain values by run: from tables on disk or in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .. import store
from ..errors import NotEnoughEvidenceError, UsageError


@dataclass(frozen=True)
class Series:
    """What stays the same from checkpoint to checkpoint: a metric of one place of the network."""

    metric: str
    subject: str
    parameters: str = ""
    component: str | None = None
    block: int | None = None
    head: int | None = None
    tokens: str | None = None
    index: int | None = None
    branch: str | None = None

    @property
    def where(self) -> str:
        """The place in words: "block 3 q head 2 (cls)"."""
        parts = [] if self.block is None else [f"block {self.block}"]
        parts.append(self.component or "network")
        parts += [] if self.head is None else [f"head {self.head}"]
        parts += [] if self.index is None else [f"[{self.index}]"]
        parts += [f"({self.tokens})"] if self.tokens not in (None, "all") else []
        return " ".join(parts)

    @property
    def what(self) -> str:
        """The quantity in words: "feature effective_rank"."""
        text = f"{self.subject} {self.metric}"
        return f"{text} ({self.parameters})" if self.parameters else text

    @property
    def order(self) -> tuple[Any, ...]:
        """For sorting: metric by metric, in the network's order, nulls first."""
        numbers = (self.block, self.head, self.index)
        block, head, index = (-1 if n is None else n for n in numbers)
        names = (self.component or "", self.tokens or "", self.branch or "")
        return self.metric, self.subject, self.parameters, block, names, head, index


@dataclass(frozen=True)
class Value:
    """A series at one checkpoint. `value` is None when there is no finite number, and `status`
    says why; `error` is its standard error, None where it has none; `rounding` half a unit of its
    last digit, when it was written rounded."""

    series: Series
    step: int
    value: float | None
    error: float | None = None
    status: str = "ok"
    rows: int | None = None
    columns: int | None = None
    version: int = 1
    probe: str | None = None
    segment: int = 0
    rounding: float = 0.0

    @property
    def is_matrix(self) -> bool:
        """Whether it was measured of a matrix, and not of a vector's entries."""
        return min(self.rows or 0, self.columns or 0) > 1

    @property
    def shape(self) -> tuple[int | None, int | None]:
        """What must not differ between compared values: a weight's shape, else the width."""
        return (self.rows if self.series.subject == "weight" else None), self.columns


_SERIES = [f.name for f in fields(Series)]
_OTHER = ["run", "checkpoint", "step", "value", "standard_error", "status", "rows", "columns"]
COLUMNS = [*_SERIES, *_OTHER, "version", "probe", "segment", "checkpoint_fingerprint"]


Runs = dict[str, list[Value]]


def read_runs(source: Any, metrics: Iterable[str] | None = None) -> dict[str, list[Value]]:
    """The values of each run, of these metrics only (all when None).

    `source` is an OUT directory, a frame as `plastiscope.read_tables` gives it, an Arrow table, or
    an Analysis. Raises what `store.read` raises, and NotEnoughEvidenceError when two different
    checkpoints of a run stand at one step.
    """
    table = _table(source)
    if metrics is not None:
        wanted = frozenset(metrics)
        table = table.filter(_mask([name in wanted for name in table["metric"].to_pylist()]))
    _refuse_collisions(table)
    runs: dict[str, list[Value]] = {}
    seen: set[tuple[str, int, Series, str | None]] = set()
    for row in table.to_pylist():
        value = _value(row)
        key = (row["run"], value.step, value.series, value.probe)
        if key not in seen:
            seen.add(key)
            runs.setdefault(row["run"], []).append(value)
    return runs


def load(source: Any) -> pa.Table:
    """A source's rows as an Arrow table, which `read_runs` takes too."""
    return _table(source)


def _table(source: Any) -> pa.Table:
    if isinstance(source, (str, Path)):
        return store.read_arrow(Path(source), COLUMNS)
    if isinstance(source, pa.Table):
        return source.select(COLUMNS)
    if hasattr(source, "out") and hasattr(source, "table"):
        source = source.table()
    if not hasattr(source, "columns") or not hasattr(source, "itertuples"):
        raise UsageError(f"can't check a {type(source).__name__}: give an OUT folder or its table")
    return _from_frame(source)


def _from_frame(frame: Any) -> pa.Table:
    missing = [name for name in COLUMNS if name not in frame]
    if missing:
        raise UsageError(f"the table lacks the columns {', '.join(missing)}")
    if len(frame) == 0:
        raise NotEnoughEvidenceError("the tables hold no rows")
    arrays, schema = [], pa.schema([store.SCHEMA.field(name) for name in COLUMNS])
    for field in schema:
        column = frame[field.name].astype(object)
        kind = pa.string() if pa.types.is_dictionary(field.type) else field.type
        arrays.append(pa.array(column.where(column.notna(), None).tolist(), kind))
    return pa.Table.from_arrays(arrays, names=COLUMNS)


def _mask(keep: list[bool]) -> pa.Array:
    """An Arrow array made of its buffer: to convert a list imports pandas, half a second."""
    bits = np.packbits(np.asarray(keep, dtype=bool), bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(keep), [None, pa.py_buffer(bits.tobytes())])


def distinct(table: pa.Table, column: str) -> list[str]:
    """The different names in a column, sorted."""
    return sorted(set(table[column].to_pylist()) - {None})


def _refuse_collisions(table: pa.Table) -> None:
    columns = ("run", "step", "checkpoint", "checkpoint_fingerprint")
    at: dict[tuple[str, int], tuple[str, str]] = {}
    rows = zip(*(table[name].to_pylist() for name in columns), strict=True)
    for run, step, checkpoint, fingerprint in sorted(set(rows)):
        other, same = at.setdefault((run, step), (checkpoint, fingerprint))
        if same != fingerprint:
            raise NotEnoughEvidenceError(
                f"run {run!r} has two checkpoints at step {step}, {other} and {checkpoint}: "
                "analyze it with --exclude for one of them"
            )


def _value(row: Mapping[str, Any]) -> Value:
    series = Series(**{name: row[name] for name in _SERIES})
    value = finite(row["value"])
    status = row["status"] or "ok"
    if value is None and status == "ok":
        status = "undefined" if row["value"] is None else "non_finite"
    return Value(
        series,
        row["step"],
        value,
        finite(row["standard_error"]),
        status,
        row["rows"],
        row["columns"],
        row["version"],
        row["probe"],
        row["segment"],
    )


def finite(number: float | None) -> float | None:
    """The number, or None for null, NaN and the infinities."""
    return None if number is None or not math.isfinite(number) else number
