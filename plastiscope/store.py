"""The tables on disk: one tidy schema, one Parquet file a checkpoint, written whole or not at all.

OUT/metrics/RUN/CHECKPOINT.parquet holds a checkpoint's rows; its schema metadata holds the key
that they depend on (checkpoint and probe content, settings, metric versions), so a finished
checkpoint is recognised and not measured again. This module is the border: the torch half writes
through it, figures, report and check read through it. It imports neither torch nor either half.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .errors import NotEnoughEvidenceError, UnreadableError, UsageError
from .replacing import replacing as replacing

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
_KEY = b"plastiscope.key"
_FACTS = b"plastiscope.facts"
_VERSIONS = b"plastiscope.versions"


@dataclass(frozen=True)
class Row:
    """One measured value, or the reason why there is none (`value` None, `status` not "ok").

    `segment` counts the breaks of the sequence before it (architecture, head or vocabulary
    changed): values of different segments are never compared. `checkpoint`, `step` and
    `task` are those of the file unless given.
    """

    metric: str
    subject: str
    value: float | None
    component: str | None = None
    block: int | None = None
    head: int | None = None
    tokens: str | None = None
    parameters: str = ""
    index: int | None = None
    rows: int | None = None
    columns: int | None = None
    maximum: float | None = None
    standard_error: float | None = None
    status: str = "ok"
    tensor: str | None = None
    probe: str | None = None
    segment: int = 0
    checkpoint: str | None = None
    step: int | None = None
    task: int | None = None
    version: int = 1


_TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        ("run", _TEXT),
        ("checkpoint", _TEXT),
        ("step", pa.int64()),
        ("task", pa.int64()),
        ("segment", pa.int64()),
        ("branch", _TEXT),
        ("block", pa.int64()),
        ("component", _TEXT),
        ("head", pa.int64()),
        ("tokens", _TEXT),
        ("subject", _TEXT),
        ("metric", _TEXT),
        ("parameters", _TEXT),
        ("index", pa.int64()),
        ("value", pa.float64()),
        ("rows", pa.int64()),
        ("columns", pa.int64()),
        ("maximum", pa.float64()),
        ("standard_error", pa.float64()),
        ("status", _TEXT),
        ("tensor", _TEXT),
        ("version", pa.int64()),
        ("probe", _TEXT),
        ("checkpoint_fingerprint", _TEXT),
    ]
)


def content_key(**parts: Any) -> str:
    """A hash of everything that a checkpoint's rows depend on."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def checkpoint_file(out: Path, run: str, checkpoint: str) -> Path:
    """Where the rows of a checkpoint lie; names are made safe for any file system."""
    return out / "metrics" / _safe(run) / f"{_safe(checkpoint)}.parquet"


def _safe(name: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._=+-]", "_", name).lstrip(".") or "_"
    if plain == name and len(name) <= 120:
        return plain
    return f"{plain[:100]}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def is_finished(file: Path, key: str, versions: Mapping[str, int] | None = None) -> bool:
    """Whether the file holds the rows of exactly this key, measured by these versions."""
    found = _metadata(file)
    return found.get(_KEY) == key.encode() and _versions(found) == (versions or {})


def outdated(file: Path, versions: Mapping[str, int]) -> str:
    """What has another version than when the file was written ("anatomy, srank and 3 more"), empty
    where nothing has or there is no such file."""
    found = _metadata(file)
    if not found:
        return ""
    if _VERSIONS not in found:
        return "its number wasn't kept"
    before = _versions(found)
    changed = [name for name, now in versions.items() if before.get(name, now) != now]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return ", ".join(changed[:3]) + more


def _metadata(file: Path) -> dict[bytes, bytes]:
    """A table's own metadata; empty where there is no such table."""
    try:
        status = file.stat()
        return _metadata_of(file, status.st_ino, status.st_mtime_ns)
    except (OSError, pa.ArrowInvalid):
        return {}


@functools.lru_cache(maxsize=1 << 10)
def _metadata_of(file: Path, _inode: int, _changed: int) -> dict[bytes, bytes]:
    """Read once for the several questions about a finished checkpoint; a rewritten table is a new
    file."""
    return dict(pq.read_metadata(file).metadata or {})


def _versions(metadata: Mapping[bytes, bytes]) -> dict[str, int]:
    found: dict[str, int] = json.loads(metadata.get(_VERSIONS, b"{}"))
    return found


def read_key(file: Path) -> str:
    """The key that the file's rows depend on."""
    return _metadata(file)[_KEY].decode()


def write(
    file: Path,
    rows: Sequence[Row],
    common: Mapping[str, Any],
    key: str,
    facts: Mapping[str, Any],
    versions: Mapping[str, int] | None = None,
) -> None:
    """Write a checkpoint's rows atomically: what the file held before stays until they are whole.

    `common` fills the columns that every row shares (run, checkpoint, step, ...); `facts` are kept
    as JSON in the file's metadata (assumptions, notes, coverage), `versions` are those of the code
    that measured.
    """
    names = [f.name for f in fields(Row)]
    columns = {name: [getattr(row, name) for row in rows] for name in names}
    for name, value in common.items():
        own = columns.get(name, [None] * len(rows))
        columns[name] = [value if given is None else given for given in own]
    table = pa.Table.from_arrays(
        [_column(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA
    )
    metadata = {_KEY: key.encode(), _FACTS: json.dumps(facts, sort_keys=True).encode()}
    metadata[_VERSIONS] = json.dumps(versions or {}, sort_keys=True).encode()
    metadata[b"plastiscope.schema"] = str(SCHEMA_VERSION).encode()
    table = table.replace_schema_metadata(metadata)
    with replacing(file) as partial:
        pq.write_table(table, partial, compression="zstd")


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if kind == _TEXT:
        return pa.array(values, pa.string()).dictionary_encode()
    return pa.array(values, kind)


def metric_files(out: Path) -> list[Path]:
    """The Parquet files below OUT/metrics (temporary ones left by a killed process excluded)."""
    return sorted(p for p in (out / "metrics").rglob("*.parquet") if not p.name.startswith("."))


def results_file(out: Path, run: str) -> Path:
    """Where the results lie that a run recorded itself, task by task."""
    return out / "results" / f"{_safe(run)}.parquet"


def read(
    outs: str | Path | Iterable[str | Path],
    columns: Sequence[str] | None = None,
    results: bool = False,
) -> pd.DataFrame:
    """All rows of one or several OUT directories, in (run, step) order.

    A run whose name stands in several of them becomes OUT/run, so that two runs never look like
    one. With `results` the recorded ones are read too (subject "task").

    Text columns are categoricals with plain string categories; block, head, index, rows, columns
    and task are Int64 (null allowed); value is float64 with NaN for null.

    Raises UsageError when OUT holds no tables, UnreadableError for a file that isn't one of ours,
    NotEnoughEvidenceError when there is no row.
    """
    return _frame(read_arrow(outs, columns, results))


def read_file(file: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Some columns of one table, as `read` gives them."""
    return _frame(_read_table(file, columns))


def read_arrow(
    outs: str | Path | Iterable[str | Path],
    columns: Sequence[str] | None = None,
    results: bool = False,
) -> pa.Table:
    """The rows as `read` gives them, as an Arrow table in file order with plain string columns:
    without pandas, whose import costs half a second. Raises what `read` raises."""
    several = [outs] if isinstance(outs, (str, Path)) else outs
    folders = list(dict.fromkeys(map(Path, several)))
    tables = [_read_out(out, columns, results) for out in folders]
    if len(tables) > 1 and (columns is None or "run" in columns):
        names = [set(pc.unique(table["run"]).to_pylist()) for table in tables]
        counts = Counter(name for some in names for name in some)
        shared = pa.array([n for n, count in counts.items() if count > 1], pa.string())
        tables = [
            _qualified(table, str(out), shared) for out, table in zip(folders, tables, strict=True)
        ]
    table = pa.concat_tables(tables)
    if table.num_rows == 0:
        raise NotEnoughEvidenceError("the tables hold no rows")
    return table


def _read_out(out: Path, columns: Sequence[str] | None, results: bool) -> pa.Table:
    files = metric_files(out)
    if not files:
        raise UsageError(
            f"no tables in {out}: it has no metrics/*.parquet; run `plastiscope analyze` first"
        )
    if results:
        files += sorted((out / "results").glob("[!.]*.parquet"))
    return pa.concat_tables([_read_table(file, columns) for file in files])


def _qualified(table: pa.Table, out: str, shared: pa.Array) -> pa.Table:
    """With OUT/ before the names of runs that other tables have too."""
    runs = table["run"]
    longer = pc.binary_join_element_wise(out, runs, "/")
    index = table.schema.get_field_index("run")
    chosen = pc.if_else(pc.is_in(runs, shared), longer, runs)
    return table.set_column(index, "run", chosen)


def _read_table(file: Path, columns: Sequence[str] | None) -> pa.Table:
    try:
        # Not pq.read_table: it takes a folder called "lr=0.1" for a column, and imports pandas.
        with pq.ParquetFile(file) as opened:
            table = opened.read(columns=list(columns) if columns else None)
        schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(c) for c in columns])
        plain = pa.schema([pa.field(f.name, _plain(f.type)) for f in schema])
        return table.replace_schema_metadata(None).cast(plain)
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise UnreadableError(f"{file} isn't a plastiscope table: {error}") from error


def _plain(kind: pa.DataType) -> pa.DataType:
    return pa.string() if kind == _TEXT else kind


def _frame(table: pa.Table) -> pd.DataFrame:
    import pandas as pd

    integers = {pa.int64(): pd.Int64Dtype()}
    frame: pd.DataFrame = table.to_pandas(types_mapper=integers.get)
    for name in frame.columns:
        if SCHEMA.field(name).type == _TEXT:
            frame[name] = frame[name].astype("category")
    order = [name for name in ("run", "step") if name in frame]
    return frame.sort_values(order, kind="stable", ignore_index=True) if order else frame


def read_rows(file: Path) -> list[Row]:
    """The rows as they were written. Raises UnreadableError for a file that isn't one of ours."""
    names = [f.name for f in fields(Row)]
    return [Row(**row) for row in _read_table(file, names).to_pylist()]


def read_facts(file: Path) -> dict[str, Any]:
    """The facts stored beside a checkpoint's rows; empty when there are none."""
    facts: dict[str, Any] = json.loads(_metadata(file).get(_FACTS, b"{}"))
    return facts
