"""What was found in files before, so that a run's next checkpoint needn't open all the others.

OUT/seen.parquet has a row a checkpoint: where it lies, a stamp, and what `examine` found. A row
counts while the stamp is the same: size, inode and both times of every file that was read, or the
hash that an object store keeps, and what else says how they are read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from plastiscope.checkpoints.places import Place, joined
from plastiscope.checkpoints.reading import SETTINGS, Opened, side_files
from plastiscope.checkpoints.run import TensorInfo
from plastiscope.checkpoints.units import Unit
from plastiscope.errors import PlastiscopeError
from plastiscope.replacing import replacing

# Raise the number when this package finds other tables, steps, notes or hashes in the same files.
_READER = f"{version('plastiscope')} 1"

_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("stamp", pa.string()),
        ("fingerprint", pa.string()),
        ("format", pa.string()),
        # The same for nearly every checkpoint of a run: stored once.
        ("tensors", pa.dictionary(pa.int32(), pa.string())),
        ("numbers", pa.string()),
        ("notes", pa.string()),
        ("optimizer_step", pa.int64()),
        ("task", pa.int64()),
        ("sample", pa.list_(pa.float64())),
    ]
)


class Seen:
    """Rows by the path of the checkpoint."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._rows = _read(file) if file is not None and file.exists() else {}
        self._looked_at: set[str] = set()
        self._changed = False

    def recall(self, unit: Unit, where: str, stamp: str | None) -> Opened | None:
        """What was found in the unit, if nothing about its files has changed since."""
        self._looked_at.add(where)
        row = self._rows.get(where)
        if row is None or stamp is None or row["stamp"] != stamp:
            return None
        try:
            return _opened(unit, row)
        except (AttributeError, KeyError, TypeError, ValueError):
            # Not what was written: the checkpoint itself is still there.
            return None

    def keep(self, where: str, stamp: str | None, found: Opened) -> None:
        """Remember what was found, unless a change of the files couldn't be told."""
        if stamp is not None:
            self._rows[where] = {"path": where, "stamp": stamp, **_row(found)}
            self._changed = True

    def save(self, roots: Sequence[str]) -> None:
        """Write the file, without what is no longer there below `roots`.

        It only saves time: where it can't be written, the tables will say so.
        """
        below = tuple(f"{root.rstrip('/')}/" for root in roots)
        gone = [p for p in self._rows if p.startswith(below) and p not in self._looked_at]
        for path in gone:
            del self._rows[path]
        if self._file is None or not (self._changed or gone):
            return
        table = pa.Table.from_pylist(list(self._rows.values()), schema=_SCHEMA)
        with contextlib.suppress(OSError, PlastiscopeError), replacing(self._file) as partial:
            pq.write_table(table, partial, compression="zstd", write_page_checksum=True)
        self._changed = False


def stamp_of(place: Place, unit: Unit, how: object) -> str | None:
    """A hash that is the same while no file of the unit has changed; None where that can't be told.

    `how` is everything else that the reading depends on."""
    digest = hashlib.blake2b(f"{_READER} {how}".encode(), digest_size=16)
    for path in (
        *unit.files,
        *(joined(unit.folder, name) for name in (*SETTINGS, *side_files(unit))),
    ):
        stamp = place.stamp(path)
        if stamp is None:
            return None
        digest.update(f"{path}\0{stamp}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        table = pq.read_table(file, page_checksum_verification=True)
        if not table.schema.equals(_SCHEMA):
            return {}
        samples = table["sample"].combine_chunks()
        rows = table.drop_columns(["sample"]).to_pylist()
        for at, row in enumerate(rows):
            row["sample"] = samples[at].values
        return {row["path"]: row for row in rows}
    except (OSError, pa.ArrowException):
        return {}


def _row(found: Opened) -> dict[str, Any]:
    tensors = [
        (i.name, i.shape, str(i.dtype).removeprefix("torch."), i.kind, i.alias_of)
        for i in found.tensors.values()
    ]
    return {
        "fingerprint": found.fingerprint,
        "format": found.format,
        "tensors": json.dumps(tensors),
        "numbers": json.dumps(dict(found.numbers)),
        "notes": json.dumps(found.notes),
        "optimizer_step": found.optimizer_step,
        "task": found.task,
        "sample": None if found.sample is None else found.sample.numpy(),
    }


def _opened(unit: Unit, row: dict[str, Any]) -> Opened:
    sample = row["sample"]
    if sample is not None:
        sample = torch.from_numpy(np.array(sample, dtype=np.float64))
    return Opened(
        unit=unit,
        format=row["format"],
        fingerprint=row["fingerprint"],
        tensors=_tensors(row["tensors"]),
        numbers=dict(json.loads(row["numbers"])),
        optimizer_step=row["optimizer_step"],
        notes=tuple(json.loads(row["notes"])),
        task=row["task"],
        sample=sample,
    )


@functools.lru_cache(maxsize=64)
def _tensors(text: str) -> dict[str, TensorInfo]:
    """One table for all checkpoints that have it."""
    return {
        name: TensorInfo(name, tuple(shape), _dtype(dtype), kind, alias)
        for name, shape, dtype, kind, alias in json.loads(text)
    }


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(name)
    return found
