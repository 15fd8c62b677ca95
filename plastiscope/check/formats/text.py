"""Plain lines for a terminal or a log: the verdict, then everything found, worst first."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from ..findings import Finding, Result

FEW = 10
WIDTH = 80


def render(result: Result) -> str:
    """The verdict, how many regressions each rule found, then every regression, gap and warning,
    and the first notes of each kind."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Result) -> Iterator[str]:
    yield result.verdict
    if result.baseline:
        yield f"baseline {result.baseline}"
    yield from _by_rule(result)
    for heading, findings in (
        ("Regressions", result.regressions),
        ("Not enough evidence", result.gaps),
        ("Warnings", result.warnings),
    ):
        if findings:
            yield f"\n{heading}"
        for finding in findings:
            yield from _told(result, finding)
    if result.notes:
        yield "\nNotes"
        yield from _shortened(result.notes)


def _by_rule(result: Result) -> Iterator[str]:
    """One line a rule that found regressions, when there are more than fit one look."""
    if len(result.regressions) <= FEW:
        return
    counts = Counter(finding.rule for finding in result.regressions)
    name_width, width = max(map(len, counts)), len(str(max(counts.values())))
    for rule, count in counts.most_common():
        yield f"  {rule:<{name_width}}  {count:>{width}} of {result.matched[rule]}"


def _told(result: Result, finding: Finding) -> Iterator[str]:
    yield from _wrapped(finding.message)
    place = [f"rule {finding.rule}"] if finding.rule else []
    place += [f"run {finding.run}"] if finding.run else []
    if place:
        yield f"      {', '.join(place)}"
    for line in result.look(finding):
        yield f"      {line}"


def _shortened(notes: Sequence[Finding]) -> Iterator[str]:
    """At most FEW notes of a kind; they never decide anything, and JSON has them all."""
    kinds: dict[str, list[Finding]] = {}
    for note in notes:
        kinds.setdefault(note.kind, []).append(note)
    for found in kinds.values():
        for note in found[:FEW]:
            yield from _wrapped(note.message)
        if len(found) > FEW:
            yield f"  and {len(found) - FEW} more like the last (--format json has them all)"


def _wrapped(message: str) -> list[str]:
    """The message broken between words; names and paths are never broken."""
    return textwrap.wrap(
        message,
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
