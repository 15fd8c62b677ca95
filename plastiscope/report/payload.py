"""The numbers inside the page: one compressed chunk a metric and level, the most telling first."""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

FIRST = (
    "effective_rank",
    "dormant_fraction",
    "active_fraction",
    "weight_magnitude",
    "attention_entropy",
    "accuracy",
    "loss",
    "stable_rank",
)
VARIANT = ["subject", "tokens", "parameters", "probe"]
SERIES = ["run", *VARIANT, "block", "component", "head", "index"]


@dataclass
class Payload:
    """What the page holds.

    `head` is what every view needs: runs with their checkpoints, and the list of chunks; `chunks`
    the compressed numbers in the same order; `left_out` the (metric, level) that didn't fit.
    """

    head: dict[str, Any]
    chunks: list[str]
    left_out: list[str] = field(default_factory=list)


def payload(table: pd.DataFrame, budget: int) -> Payload:
    """Pack the table's series into at most `budget` bytes of base64.

    A chunk holds the series of one metric, of whole components or of heads. Values keep five
    significant digits, standard errors two.
    """
    table = _with_branches(table)
    table = table if "segment" in table else table.assign(segment=0)
    runs = _runs(table)
    found = Payload({"runs": runs, "chunks": []}, [])
    heads = table["head"].notna().to_numpy()
    left = budget
    for metric, level in _order(table):
        mask = (table["metric"] == metric).to_numpy() & (heads == (level == "heads"))
        if not mask.any():
            continue
        about, packed = _chunk(table[mask], runs)
        if len(packed) > left:
            found.left_out.append(f"{metric} ({level})")
            continue
        left -= len(packed)
        found.head["chunks"].append({"metric": metric, "level": level, **about})
        found.chunks.append(packed)
    return found


def _with_branches(table: pd.DataFrame) -> pd.DataFrame:
    """A run's branches as runs of their own: joining them would invent a jump."""
    branches = table.groupby("run", observed=True)["branch"].nunique(dropna=False)
    forked = table["run"].isin(branches.index[branches > 1]) & table["branch"].notna()
    named = table["run"].astype(str)
    return table.assign(run=named.where(~forked, named + "/" + table["branch"].astype(str)))


def _runs(table: pd.DataFrame) -> list[dict[str, Any]]:
    runs = []
    for name, one in table.groupby("run", observed=True, sort=False):
        points = one[["checkpoint", "step", "task"]].drop_duplicates("checkpoint")
        runs.append(
            {
                "name": str(name),
                "checkpoints": [str(checkpoint) for checkpoint in points["checkpoint"]],
                "steps": [None if pd.isna(step) else int(step) for step in points["step"]],
                "tasks": [None if pd.isna(task) else int(task) for task in points["task"]],
            }
        )
    return runs


def _order(table: pd.DataFrame) -> list[tuple[str, str]]:
    present = [str(name) for name in table["metric"].dropna().unique()]
    first = [name for name in FIRST if name in present]
    others = [name for name in present if name not in FIRST]
    order = [(name, level) for name in first for level in ("whole", "heads")]
    order += [(name, "whole") for name in others]
    return order + [(name, "heads") for name in others]


def _chunk(rows: pd.DataFrame, runs: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The variants and blocks of a metric's series, and all of it compressed."""
    keys = pd.MultiIndex.from_frame(rows[SERIES].astype(object).where(rows[SERIES].notna(), None))
    codes, unique = pd.factorize(keys)
    first = rows.iloc[np.unique(codes, return_index=True)[1]]
    variants: dict[tuple[str, ...], int] = {}
    places = [{c: p for p, c in enumerate(run["checkpoints"])} for run in runs]
    number = {run["name"]: position for position, run in enumerate(runs)}
    run_numbers = np.array([number[str(name)] for name in rows["run"]])
    points = [
        places[run][str(checkpoint)]
        for run, checkpoint in zip(run_numbers, rows["checkpoint"], strict=True)
    ]
    most = max(len(run["checkpoints"]) for run in runs)
    values, errors, segments = (
        _matrix(rows[name], codes, np.array(points), (len(unique), most))
        for name in ("value", "standard_error", "segment")
    )
    states = _states(rows, codes, points)
    series = []
    for code, row in enumerate(first.itertuples(index=False)):
        variant = tuple(_text(getattr(row, name)) for name in VARIANT)
        run = number[str(row.run)]
        count = len(runs[run]["checkpoints"])
        series.append(
            {
                "v": variants.setdefault(variant, len(variants)),
                "r": run,
                "b": _integer(row.block),
                "c": _text(row.component),
                "h": _integer(row.head),
                "i": _integer(row.index),
                "y": _rounded(values[code, :count], 5),
                "e": _rounded(errors[code, :count], 2),
                "g": _segments(segments[code, :count]),
                "s": states.get(code, {}),
            }
        )
    about = {"variants": [dict(zip(VARIANT, variant, strict=True)) for variant in variants]}
    raw = json.dumps({"series": series}, separators=(",", ":"), allow_nan=False).encode()
    return about, base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()


def _matrix(
    column: pd.Series, codes: Any, points: npt.NDArray[Any], shape: tuple[int, int]
) -> npt.NDArray[np.float64]:
    filled = np.full(shape, np.nan)
    filled[codes, points] = column.to_numpy(float, na_value=np.nan)
    return filled


def _segments(numbers: npt.NDArray[np.float64]) -> list[int] | int:
    """The segment of each checkpoint (that before it, where there is no row); 0 if all are one."""
    filled = pd.Series(numbers).ffill().bfill().fillna(0).astype(int)
    return 0 if filled.nunique() < 2 else [int(number) for number in filled]


def _states(rows: pd.DataFrame, codes: Any, points: Sequence[int]) -> dict[int, dict[int, str]]:
    """Why a value is missing (or special), by series and checkpoint."""
    found: dict[int, dict[int, str]] = {}
    for at in np.flatnonzero((rows["status"].astype(object) != "ok").to_numpy()).tolist():
        found.setdefault(int(codes[at]), {})[points[at]] = str(rows["status"].iloc[at])
    return found


def _rounded(values: npt.NDArray[np.float64], digits: int) -> list[float | None] | int:
    """Numbers to so many significant digits, null where there is none; 0 for none at all."""
    known = np.isfinite(values)
    if not known.any():
        return 0
    form = f"%.{digits}g"
    return [float(form % v) if k else None for v, k in zip(values, known, strict=True)]


def _text(value: object) -> str:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)


def _integer(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)
