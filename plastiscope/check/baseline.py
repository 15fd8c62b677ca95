"""The baseline as a small text file: a header and one line a value, sorted, rounded to its error.

Each line is a JSON object without its null fields, so that a change of one value is one line of a
diff. A value with a standard error keeps two of the error's digits, another seven of its own; half
a unit of the last digit is added to the tolerance when it is compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import store
from ..errors import NotEnoughEvidenceError, UnreadableError
from .values import Runs, Series, Value, read_runs

FORMAT = 1
_DIGITS = 7
_EPS = 2.0**-52


def write_baseline(file: Path, runs: Mapping[str, Iterable[Value]]) -> int:
    """Write the values atomically; returns how many there are.

    Raises NotEnoughEvidenceError when there is none, or none that is a number.
    """
    lines = [
        (run, value.series.order, value.step, value.probe or "", _line(run, value))
        for run, values in runs.items()
        for value in values
    ]
    if not any(v.value is not None for values in runs.values() for v in values):
        raise NotEnoughEvidenceError("no value to keep: the rules match no number of this run")
    versions = {v.series.metric: v.version for values in runs.values() for v in values}
    header = {"plastiscope_baseline": FORMAT, "versions": dict(sorted(versions.items()))}
    text = "\n".join([json.dumps(header), *(line for *_, line in sorted(set(lines)))])
    with store.replacing(file) as partial:
        partial.write_text(text + "\n", "utf-8")
    return len(set(lines))


def _line(run: str, value: Value) -> str:
    fields = {"run": run, "step": value.step, **asdict(value.series)}
    digits = _last_digit(value)
    fields |= {
        "value": None if value.value is None else _rounded(value.value, digits),
        "error": None if value.error is None else _rounded(value.error, digits),
        "status": None if value.status == "ok" else value.status,
        "rows": value.rows,
        "columns": value.columns,
        "probe": value.probe,
        "segment": value.segment or None,
    }
    return json.dumps({k: v for k, v in fields.items() if v is not None and v != ""})


def _last_digit(value: Value) -> int:
    """The decimal place that a value is rounded to (2: hundredths, -1: tens)."""
    if value.error:
        return 1 - math.floor(math.log10(value.error))
    if value.value:
        return _DIGITS - 1 - math.floor(math.log10(abs(value.value)))
    return 0


def _rounded(number: float, digits: int) -> float:
    return float(f"{number:.{digits}f}") if digits >= 0 else round(number, digits)


def read_baseline(source: Any, metrics: Iterable[str]) -> Runs:
    """The values of a baseline: an OUT folder, a baseline file, or a table.

    Raises NotEnoughEvidenceError when there is none or it is empty, UnreadableError when it isn't
    one.
    """
    if not isinstance(source, (str, Path)):
        return read_runs(source, metrics)
    path = Path(source)
    if not path.exists():
        raise NotEnoughEvidenceError(
            f"no baseline at {path}: write one with `plastiscope check OUT --update-baseline "
            "--baseline FILE`, or pass --allow-missing-baseline"
        )
    if path.is_dir():
        if not store.metric_files(path):
            raise NotEnoughEvidenceError(f"the baseline {path} is empty: it holds no tables")
        return read_runs(path, metrics)
    return _read_file(path, frozenset(metrics))


def _read_file(path: Path, metrics: frozenset[str]) -> Runs:
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UnreadableError(f"{path} isn't a baseline: {error}") from error
    if not lines:
        raise NotEnoughEvidenceError(f"the baseline {path} is empty")
    versions = _versions(path, lines[0])
    runs: Runs = {}
    for number, fields in enumerate(lines[1:], 2):
        try:
            run, value = _parse(fields, versions)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UnreadableError(f"{path}, line {number} isn't a baseline's: {error!r}") from error
        runs.setdefault(run, []).append(value)
    if not runs:
        raise NotEnoughEvidenceError(f"the baseline {path} is empty: it holds no values")
    return {run: [v for v in values if v.series.metric in metrics] for run, values in runs.items()}


def _versions(path: Path, header: Any) -> Mapping[str, int]:
    known = isinstance(header, dict) and header.get("plastiscope_baseline")
    if not known or not isinstance(header.get("versions"), dict):
        raise UnreadableError(f"{path} isn't a baseline: its first line isn't a baseline's header")
    if known != FORMAT:
        raise UnreadableError(
            f"{path} is a baseline of format {known}, this version reads {FORMAT}: "
            "write it anew with --update-baseline"
        )
    versions: Mapping[str, int] = header["versions"]
    return versions


def _parse(fields: Mapping[str, Any], versions: Mapping[str, int]) -> tuple[str, Value]:
    known = dict(fields)
    run, step = str(known.pop("run")), int(known.pop("step"))
    number = {k: known.pop(k, None) for k in ("value", "error", "rows", "columns", "probe")}
    status, segment = str(known.pop("status", "ok")), int(known.pop("segment", 0))
    series = Series(**known)
    if number["value"] is None and status == "ok":
        raise ValueError("no value and no status")
    value = None if number["value"] is None else float(number["value"])
    if value is not None and not math.isfinite(value):
        raise ValueError(f"the value {value}")
    found = Value(
        series, step, value, number["error"], status, number["rows"], number["columns"],
        versions[series.metric], number["probe"], segment,
    )  # fmt: skip
    # Half a digit, and room for the difference of two floats: 0.125 - 0.12 is above 0.005.
    rounding = 0.5 * 10.0 ** -_last_digit(found) + 4 * _EPS * abs(found.value or 0.0)
    return run, Value(**{**vars(found), "rounding": rounding})


def keep(selected: Sequence[Value]) -> list[Value]:
    """The values without doubles, in a fixed order."""
    return sorted(dict.fromkeys(selected), key=lambda v: (v.series.order, v.step, v.probe or ""))
