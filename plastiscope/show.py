"""The tables as a person or a paper wants them: chosen rows, sorted or pivoted, in any format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import cast

import pandas as pd

from .errors import NotEnoughEvidenceError, UsageError, unknown

FORMATS = ("text", "csv", "markdown", "latex")
PIVOTS = ("step", "block", "head", "component", "metric", "run", "task")
COLUMNS = (
    "run", "step", "block", "component", "head", "tokens", "subject", "metric", "parameters",
    "value", "standard_error", "maximum", "rows", "status",
)  # fmt: skip
_PLACE = ["run", "step", "block", "component", "head", "tokens", "subject", "metric", "parameters"]
_APART = ("branch", "probe", "index")
"""Shown too where rows differ in them: else nothing would tell these rows apart."""


@dataclass(frozen=True)
class View:
    """Which rows, and in what form. Empty choices mean all."""

    metrics: Sequence[str] = ()
    components: Sequence[str] = ()
    blocks: Sequence[int] = ()
    heads: Sequence[int] = ()
    steps: Sequence[int] = ()
    subjects: Sequence[str] = ()
    tokens: Sequence[str] = ()
    statuses: Sequence[str] = ()
    runs: Sequence[str] = ()
    sort: str | None = None
    pivot: str | None = None
    limit: int | None = None
    columns: Sequence[str] = field(default=COLUMNS)


def view(table: pd.DataFrame, chosen: View) -> pd.DataFrame:
    """The chosen rows of a table (as `plastiscope.read_tables` gives it).

    Columns that are null or the same everywhere are left out, but for the value. With `pivot` the
    values stand side by side, a column for each of that column's entries. Raises UsageError for a
    name that the table doesn't have, NotEnoughEvidenceError when no row is left.
    """
    if chosen.limit is not None and chosen.limit < 1:
        raise UsageError(f"--limit takes a number of rows, at least 1, not {chosen.limit}")
    rows = _filtered(table, chosen)
    if rows.empty:
        raise NotEnoughEvidenceError("no row of the tables is what was asked for")
    if chosen.pivot is not None:
        rows = _pivoted(rows, chosen.pivot)
    else:
        at = chosen.columns.index("value") if "value" in chosen.columns else len(chosen.columns)
        columns = [*chosen.columns[:at], *_differing(rows), *chosen.columns[at:]]
        rows = rows[[c for c in columns if c in rows]]
    if chosen.sort is not None:
        rows = _sorted(rows, chosen.sort)
    kept: pd.DataFrame = rows.reset_index(drop=True).iloc[: chosen.limit]
    return kept


def _filtered(table: pd.DataFrame, chosen: View) -> pd.DataFrame:
    whole = table
    for column, wanted in (
        ("run", chosen.runs),
        ("metric", chosen.metrics),
        ("component", chosen.components),
        ("subject", chosen.subjects),
        ("tokens", chosen.tokens),
        ("status", chosen.statuses),
        ("block", chosen.blocks),
        ("head", chosen.heads),
        ("step", chosen.steps),
    ):
        if not wanted:
            continue
        known = set(whole[column].dropna().unique())
        for name in wanted:
            if name not in known:
                raise unknown(column, str(name), known)
        table = table[table[column].isin(list(wanted))]
    return table


def _differing(rows: pd.DataFrame) -> list[str]:
    return [name for name in _APART if name in rows and rows[name].nunique() > 1]


def _pivoted(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    if column not in PIVOTS:
        raise unknown("column to pivot by", column, PIVOTS)
    keys = [k for k in _PLACE if k != column and rows[k].notna().any()] + _differing(rows)
    plain = rows.astype(dict.fromkeys([*keys, column], object))
    plain = plain.drop_duplicates([*keys, column, "value"])
    twice = plain[plain.duplicated([*keys, column], keep=False)]
    if not twice.empty:
        at = twice.iloc[0]
        where = ", ".join(f"{k} {at[k]}" for k in [*keys, column] if not pd.isna(at[k]))
        raise UsageError(f"several values at one place ({where}): show them without --pivot")
    wide = plain.pivot_table(
        index=keys, columns=column, values="value", aggfunc="first", dropna=False, sort=False
    )
    wide = wide.dropna(how="all").reindex(columns=_ordered(wide.columns))
    wide.columns = [str(name) for name in wide.columns]
    wide = wide.reset_index()
    wide.columns.name = column
    return cast("pd.DataFrame", wide)


def _ordered(names: pd.Index) -> list[object]:
    known = [n for n in names if not pd.isna(n)]
    return sorted(known, key=lambda n: (isinstance(n, str), n))


def _sorted(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """By a column, descending when its name begins with "-"."""
    name = column.removeprefix("-")
    if name not in rows:
        raise unknown("column to sort by", name, [str(c) for c in rows.columns])
    ordered: pd.DataFrame = rows.sort_values(name, ascending=name == column, kind="stable")
    return ordered


def compact(rows: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, str]]:
    """Without the columns that are null everywhere; those that say the same in each of several
    rows are given apart, once."""
    rows = rows.dropna(axis="columns", how="all")
    same: dict[str, str] = {}
    for name in [c for c in rows.columns if c in COLUMNS and c not in ("value", "standard_error")]:
        if len(rows) > 1 and rows[name].astype(str).nunique(dropna=False) == 1:
            same[name] = str(rows[name].iloc[0])
            rows = rows.drop(columns=name)
    if rows.columns.name:
        same["columns"] = f"by {rows.columns.name}"
    return rows, {k: v for k, v in same.items() if v}


def written(rows: pd.DataFrame, format: str, digits: int = 4) -> str:
    """The rows as csv (all columns, full precision), markdown or latex (booktabs).

    In the latter two numbers have `digits` significant digits, and what is the same in all rows
    is said once, above.
    """
    if format == "csv":
        return str(rows.to_csv(index=False))
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    kept, same = compact(rows)
    text = kept.map(lambda v: _text(v, digits))
    said = ", ".join(f"{name} {value}" for name, value in same.items())
    numeric = [_is_numeric(kept[name]) for name in kept]
    if format == "markdown":
        sides = ["right" if right else "left" for right in numeric]
        table = text.to_markdown(index=False, disable_numparse=True, colalign=sides)
        return f"{said}\n\n{table}\n" if said else f"{table}\n"
    columns = "".join("r" if right else "l" for right in numeric)
    table = text.to_latex(index=False, escape=True, na_rep="", column_format=columns)
    return f"% {said}\n{table}" if said else str(table)


def _is_numeric(column: pd.Series) -> bool:
    return bool(column.dropna().map(lambda v: isinstance(v, Real)).all())


def _text(value: object, digits: int) -> str:
    if pd.isna(value):  # type: ignore[call-overload]
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def texts(rows: pd.DataFrame, digits: int = 4) -> list[list[str]]:
    """Every cell as text, nulls empty."""
    return [[_text(v, digits) for v in row] for row in rows.itertuples(index=False)]
