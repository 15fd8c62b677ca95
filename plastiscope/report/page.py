"""The page: what a reader must know first, in HTML without scripts; then the explorer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pandas as pd

from ..diagnosis import Diagnosis, Finding, Movement, diagnose
from ..errors import NotEnoughEvidenceError
from ..metrics import METRICS
from ..metrics.definition import explanation
from ..store import replacing
from .payload import payload

BUDGET = 6_000_000
SHOWN = 3
HERE = Path(__file__).parent


def write(
    table: pd.DataFrame,
    out_file: Path,
    verdict_lines: Sequence[str] | None = None,
    *,
    warnings: Sequence[str] = (),
    title: str = "plastiscope report",
    budget: int = BUDGET,
) -> Path:
    """Write the report of a table (as `plastiscope.store.read` gives it) as one HTML file.

    `verdict_lines` are the sentences at the top; by default, the diagnosis of each run.
    `warnings` say what to beware of (breaks of the sequence, what couldn't be read). `budget` is
    the room for numbers in bytes: metrics beyond it stay in the tables, and the page says so.

    Raises NotEnoughEvidenceError for an empty table.
    """
    if table.empty:
        raise NotEnoughEvidenceError("the tables hold no rows, so there is nothing to report")
    stepped = table.groupby("run", observed=True)["step"].transform("count") > 0
    found = diagnose(table[stepped]) if stepped.any() else ()
    without = table.loc[~stepped, "run"].unique()
    undated = [f"{name}: its checkpoints name no step, so it isn't diagnosed." for name in without]
    packed = payload(table, budget)
    names = {str(chunk["metric"]) for chunk in packed.head["chunks"]}
    packed.head["explanations"] = _explanations(names)
    verdicts = verdict_lines or [*(f"{one.run}: {one.verdict}" for one in found), *undated]
    parts = {
        "title": escape(title),
        "verdict": _list(verdicts, "verdict"),
        "changes": _changes(found, [str(run["name"]) for run in packed.head["runs"]]),
        "warnings": _warnings([*warnings, *_left_out(packed.left_out)]),
        "coverage": _coverage(table),
        "style": (HERE / "page.css").read_text("utf-8"),
        "library": (HERE / "plotly.min.js").read_text("utf-8"),
        "script": (HERE / "page.js").read_text("utf-8"),
        "data": _json(packed.head),
        "chunks": "\n".join(
            f'<script type="text/plain" id="chunk-{number}">{chunk}</script>'
            for number, chunk in enumerate(packed.chunks)
        ),
    }
    with replacing(out_file) as partial:
        partial.write_text(_fill((HERE / "page.html").read_text("utf-8"), parts), "utf-8")
    return out_file


def _fill(template: str, parts: dict[str, str]) -> str:
    """Put the parts where the template names them; nothing inside a part is read as a name."""
    pieces = template.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, rest = piece.split("}}", 1)
        filled += [parts[name.strip()], rest]
    return "".join(filled)


def _json(value: Any) -> str:
    """JSON that can't end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _list(lines: Sequence[str], kind: str) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>'


def _explanations(names: set[str]) -> dict[str, dict[str, str]]:
    texts = {}
    for metric in METRICS:
        if metric.name in names:
            one = explanation(metric)
            texts[metric.name] = {
                "Definition": one.definition,
                "Formula": one.formula,
                "Unit": one.unit,
                "Range": one.range,
                "How to read it": one.reading,
                "When it misleads": one.misleads,
                "Also called": one.aliases,
                "Source": one.source,
            }
    return texts


def _changes(found: Sequence[Diagnosis], runs: Sequence[str]) -> str:
    """The largest movements of each sign in each run, each with a link to its course."""
    tables = []
    for diagnosis in found:
        own = (
            n for n, name in enumerate(runs) if name.split("/")[0] == diagnosis.run.split("/")[0]
        )
        number = runs.index(diagnosis.run) if diagnosis.run in runs else next(own, 0)
        movements = [
            (finding, movement)
            for finding in diagnosis.findings
            for movement in finding.movements[:SHOWN]
            if movement.size > 0
        ]
        movements.sort(key=lambda pair: -pair[1].size / pair[0].sign.least)
        if movements:
            rows = "".join(_change(number, *pair) for pair in movements)
            tables.append(_table(diagnosis, rows))
    return "".join(tables) or "<p>Nothing moved in the direction of plasticity loss.</p>"


def _table(diagnosis: Diagnosis, rows: str) -> str:
    caption = f"{diagnosis.run}: what moved most, step {diagnosis.first} to {diagnosis.last}"
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("where", "sign", "first", "last", "change")
    )
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _change(run: int, finding: Finding, movement: Movement) -> str:
    change = movement.last - movement.first
    error = "" if movement.error is None else f" ± {movement.error:.2g}"
    view = {
        "run": run,
        "metric": finding.sign.metric,
        "level": "whole" if movement.head is None else "heads",
        "subject": finding.sign.subject,
        "tokens": finding.sign.tokens or "",
        "parameters": finding.sign.parameters,
        "row": row_key(movement.block, movement.component, movement.head),
    }
    link = f'<a href="#{escape(urlencode(view))}">{escape(movement.where)}</a>'
    cells = (
        finding.sign.name,
        f"{movement.first:.4g}",
        f"{movement.last:.4g}",
        f"{change:+.3g}{error}",
    )
    return f"<tr><td>{link}</td>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>"


def row_key(block: int | None, component: str, head: int | None) -> str:
    """A series' place in a link, as the page's script writes it."""
    return "|".join(["" if block is None else str(block), component, _or_empty(head), ""])


def _or_empty(number: int | None) -> str:
    return "" if number is None else str(number)


def _left_out(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [f"Too large for this page, so only in the tables: {', '.join(names)}."]


def _warnings(lines: Sequence[str]) -> str:
    if not lines:
        return "<p>No warnings.</p>"
    return _list(lines, "warnings")


def _coverage(table: pd.DataFrame) -> str:
    """How many rows have a value, and why the others don't."""
    known = table["value"].notna()
    runs = table.groupby("run", observed=True)["checkpoint"].nunique()
    counts = ", ".join(f"{name}: {count} checkpoints" for name, count in runs.items())
    lines = [f"{counts}. {int(known.sum())} of {len(table)} values measured."]
    reasons = table.loc[~known, "status"].astype(str).value_counts()
    lines += [f"{count} without a value: {reason}" for reason, count in reasons.items()]
    return _list(lines, "coverage")
