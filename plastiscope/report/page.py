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
from ..sentences import REASONS, change, coverage, error, evidence, floors, number, rule
from ..store import replacing
from .payload import payload

BUDGET = 6_000_000
SHOWN = 3
KINDS = (("Losing", "bad"), ("Broken", "bad"), ("No sign", "good"))
"""Which verdict is good or bad news; any other is neither."""
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

    `verdict_lines` are the sentences at the top; by default, the diagnosis of each run and, for
    each of its signs, the numbers that it stands on.
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
    names_of_runs = [str(run["name"]) for run in packed.head["runs"]]
    packed.head["start"] = _start(found, names_of_runs)
    parts = {
        "title": escape(title),
        "verdict": _list(verdict_lines, "verdict") if verdict_lines else _verdicts(found, undated),
        "rule": escape(rule()),
        "changes": _changes(found, names_of_runs),
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


def _verdicts(found: Sequence[Diagnosis], undated: Sequence[str]) -> str:
    """Each run's verdict, what it looked at, and a sentence of numbers for each sign."""
    runs = []
    for one in found:
        kind = next((kind for start, kind in KINDS if one.verdict.startswith(start)), "unsure")
        count = f"{one.checkpoints} checkpoint{'s' * (one.checkpoints != 1)}"
        span = f"{count}, step {one.first} to {one.last}" + (
            "".join(f"; {said}" for said in (coverage(one), floors(one)) if said)
        )
        said = _list(_kept(evidence(one)), "evidence")
        runs.append(
            f'<div class="verdict {kind}"><p class="run">{escape(one.run)} <span>{span}</span></p>'
            f'<p class="said">{escape(one.verdict)}</p>{said}</div>'
        )
    return "".join(runs) + (_list(undated, "evidence") if undated else "")


def _kept(sentences: Sequence[str]) -> list[str]:
    """Numbers on one line with their unit and error."""
    return [one.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0") for one in sentences]


def _largest(diagnosis: Diagnosis) -> list[tuple[Finding, Movement]]:
    """The first few movements of each sign in the bad direction, the largest first."""
    movements = [
        (finding, movement)
        for finding in diagnosis.findings
        for movement in finding.movements[:SHOWN]
        if movement.size > 0
    ]
    return sorted(movements, key=lambda pair: -pair[1].size / pair[0].sign.least)


def _start(found: Sequence[Diagnosis], runs: Sequence[str]) -> dict[str, Any]:
    """What the explorer opens with: the largest movement of the run that has most signs."""
    for diagnosis in sorted(found, key=lambda one: -len(one.present)):
        if largest := _largest(diagnosis):
            return _view(_number(diagnosis, runs), *largest[0])
    return {}


def _number(diagnosis: Diagnosis, runs: Sequence[str]) -> int:
    """The page's number of a diagnosed run, or of its first branch."""
    if diagnosis.run in runs:
        return runs.index(diagnosis.run)
    own = (n for n, name in enumerate(runs) if name.startswith(f"{diagnosis.run}/"))
    return next(own, 0)


def _changes(found: Sequence[Diagnosis], runs: Sequence[str]) -> str:
    """The largest movements of each sign in each run, each with a link to its course."""
    tables = []
    for diagnosis in found:
        number = _number(diagnosis, runs)
        rows = "".join(_change(number, *pair) for pair in _largest(diagnosis))
        if rows:
            tables.append(_table(diagnosis, rows))
    return "".join(tables) or "<p>Nothing moved in the direction of plasticity loss.</p>"


def _table(diagnosis: Diagnosis, rows: str) -> str:
    caption = f"{diagnosis.run}, step {diagnosis.first} to {diagnosis.last}"
    head = "".join(
        f'<th scope="col"{kind}>{name}</th>'
        for name, kind in (("where", ""), *((n, ' class="n"') for n in ("first", "last", "change")))
    )
    return (
        f'<div class="scroll"><table class="changes"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _view(run: int, finding: Finding, movement: Movement) -> dict[str, Any]:
    """The explorer's state that shows a movement."""
    return {
        "run": run,
        "metric": finding.sign.metric,
        "level": "whole" if movement.head is None else "heads",
        "subject": finding.sign.subject,
        "tokens": finding.sign.tokens or "",
        "parameters": finding.sign.parameters,
        "row": row_key(movement.block, movement.component, movement.head),
    }


def _change(run: int, finding: Finding, movement: Movement) -> str:
    sign = finding.sign
    said = change(movement, sign) or f"{movement.last - movement.first:+.3g}"
    of = error(movement, sign)
    link = escape(f"#{urlencode(_view(run, finding, movement))}")
    where = f'<a href="{link}">{escape(movement.where)}</a> <span>{escape(sign.name)}</span>'
    cells = (number(movement.first, sign), number(movement.last, sign),
             f"{said} ± {of}" if of else said)  # fmt: skip
    numbers = "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
    return f"<tr><td>{where}</td>{numbers}</tr>"


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
    for reason, count in reasons.items():
        why = REASONS.get(str(reason))
        lines.append(f"{count} without a value: {reason}" + (f" ({why})" if why else ""))
    return _list(lines, "coverage")
