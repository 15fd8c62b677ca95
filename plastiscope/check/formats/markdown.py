"""Markdown for a job summary or a comment: the verdict and a table, worst first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..findings import GAPS, REGRESSION, Finding, Result, Tolerance

# A job summary may take 1 MiB; a table longer than this helps nobody.
MOST_ROWS = 200


def render(result: Result) -> str:
    """A heading, a table of what fails or warns, and the notes folded away."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Result) -> Iterator[str]:
    sign = {0: "✅", 1: "❌"}.get(result.status, "⚠️")
    yield f"### {sign} plastiscope check {_escape(result.verdict)}\n"
    if result.baseline:
        yield f"Baseline: {_code(result.baseline)}\n"
    moved = [f for f in result.findings if f.kind == REGRESSION]
    if moved:
        yield from _table(moved)
    gaps = [f for f in result.findings if f.kind in GAPS]
    if gaps:
        yield "**Not enough evidence**\n"
        yield from _list(gaps)
    commands = dict.fromkeys(line for f in moved[:5] for line in result.look(f))
    if commands:
        yield "Look closer:\n\n```sh"
        yield from commands
        yield "```\n"
    notes = [f for f in result.notes if f.kind not in GAPS and f.kind != REGRESSION]
    if notes:
        yield f"<details><summary>{len(notes)} notes</summary>\n"
        yield from _list(notes)
        yield "</details>"


def _table(findings: Sequence[Finding]) -> Iterator[str]:
    yield "| | where | metric | before | after | tolerance | rule | run, step |"
    yield "|---|---|---|---:|---:|---|---|---|"
    for finding in findings[:MOST_ROWS]:
        yield f"| {' | '.join(_cells(finding))} |"
    if len(findings) > MOST_ROWS:
        yield f"\n{len(findings) - MOST_ROWS} more rows: see `--format json`."
    yield ""


def _cells(finding: Finding) -> list[str]:
    series = finding.series
    assert series is not None
    return [
        finding.severity,
        _escape(series.where),
        _escape(series.what),
        _number(finding.before),
        _number(finding.after),
        _escape(str(finding.tolerance or Tolerance(0, 0, 0))),
        _escape(finding.rule),
        _escape(f"{finding.run}, {finding.step}"),
    ]


def _list(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in findings[:MOST_ROWS]:
        yield f"- {_escape(finding.message)}"
    if len(findings) > MOST_ROWS:
        yield f"- and {len(findings) - MOST_ROWS} more"
    yield ""


def _number(number: float | None) -> str:
    return "none" if number is None else f"{number:.4g}"


def _escape(text: str) -> str:
    """Text that can't break out of a table's cell or start markup."""
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")


def _code(text: str) -> str:
    return f"`{text.replace('`', '')}`"
