"""The judgement on one pair: regression, gap, note or nothing to say.

Every cell of {number, null, absent} x {number, null, absent} has its fixed verdict here; a
comparison is only ever made between two finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .findings import GAPS, REGRESSION, Finding, Tolerance
from .pairs import Pair
from .rules import ABSOLUTE_FLOOR, RELATIVE_FLOOR, Rule
from .values import Value


def judge(pair: Pair) -> Finding | None:
    """What to say of a pair; None when two comparable numbers agree within the tolerance."""
    rule = pair.rule
    if pair.after is None:
        return _gap(pair, "missing", f"{_what(pair)} at step {pair.step}: gone from the new run")
    if pair.after.value is None:
        return _null(pair, pair.after)
    if pair.gap == "reference" and rule.optional and rule.against == "trend":
        return _note(pair, "early", f"{_what(pair)}: {pair.why}")
    if pair.gap:
        return _gap(pair, pair.gap, f"{_what(pair)}: {pair.why}")
    if pair.before is None:
        return _note(pair, "new", f"{_what(pair)}: not in {pair.at}")
    if pair.before.value is None:
        why = f"no value in {pair.at} ({pair.before.status}), {pair.after.value:.4g} now"
        return _note(pair, "measured_now", f"{_what(pair)}: {why}")
    return _compared(pair, pair.before, pair.after)


def _compared(pair: Pair, before: Value, after: Value) -> Finding | None:
    """What to say of two numbers."""
    rule = pair.rule
    assert before.value is not None and after.value is not None
    change, tolerance = worsening(rule, before.value, after.value), tolerate(rule, before, after)
    if change <= tolerance.decisive or not _is_steady(pair):
        return None
    told = f"{_what(pair)} {_moved(before.value, after.value)}"
    span = f"({pair.at} to step {pair.step})"
    if pair.from_zero and rule.relative:
        if pair.beside is None:
            return _note(pair, "from_zero", f"{told}, no factor of zero {span}")
        # Its own beginning has no multiples: what it has become is held against its siblings.
        before = replace(before, value=pair.beside)
        change, tolerance = after.value - pair.beside, tolerate(rule, before, after)
        told += f", its siblings {pair.beside:.4g}"
        if change <= tolerance.decisive:
            return _note(pair, "from_zero", f"{told} {span}")
    message = f"{told} {span}, tolerance {tolerance}"
    excess = change / tolerance.decisive
    return _finding(pair, REGRESSION, rule.severity, message, tolerance, excess)


def _is_steady(pair: Pair) -> bool:
    if pair.trend is None:
        return True
    toward = {"up": pair.trend, "down": -pair.trend, "either": abs(pair.trend)}[pair.rule.bad]
    return toward >= pair.rule.steady


def is_compared(pair: Pair) -> bool:
    """Whether two finite numbers that measure the same thing stood side by side."""
    known = [v for v in (pair.before, pair.after) if v is not None and v.value is not None]
    return len(known) == 2 and not pair.gap


def worsening(rule: Rule, before: float, after: float) -> float:
    """How far the value moved in the bad direction (negative: it got better)."""
    change = after - before
    return {"up": change, "down": -change, "either": abs(change)}[rule.bad]


def tolerate(rule: Rule, before: Value, after: Value) -> Tolerance:
    """The tolerances of a comparison; never finer than rounding, nor than one unit in n."""
    assert before.value is not None
    errors = [v.error for v in (before, after) if v.error is not None]
    if rule.against == "baseline":
        errors += [counting_error(v) for v in (before, after)]
    return Tolerance(
        max(rule.absolute, ABSOLUTE_FLOOR, grain(after), before.rounding + after.rounding),
        max(rule.relative, RELATIVE_FLOOR) * abs(before.value),
        rule.errors * math.hypot(*errors) if errors else 0.0,
    )


def grain(value: Value) -> float:
    """The smallest step of a fraction: one unit in n (with room for rounding), else 0."""
    return (1 + 1e-6) / value.columns if _counts_units(value) and value.columns else 0.0


def counting_error(value: Value) -> float:
    """The binomial standard error of a share of n units, else 0: another run's units are other
    draws of the same initialisation."""
    if not _counts_units(value) or not value.columns or value.value is None:
        return 0.0
    share = min(max(value.value, 0.0), 1.0)
    return math.sqrt(share * (1 - share) / value.columns)


def _counts_units(value: Value) -> bool:
    return value.series.metric.endswith("_fraction") and value.series.subject == "unit"


def _what(pair: Pair) -> str:
    return f"{pair.series.where} {pair.series.what}"


def _moved(before: float, after: float) -> str:
    share = f", {100 * (after / before - 1):+.0f} %" if before > 0 else ""
    return f"{before:.4g} -> {after:.4g}{share}"


def _null(pair: Pair, after: Value) -> Finding:
    """A new value that isn't a number: never a pass, unless it never was one."""
    if after.status in pair.rule.nulls:
        return _note(pair, "accepted", f"{_what(pair)}: no value ({after.status}), accepted")
    if pair.before is not None and pair.before.value is None:
        return _note(pair, "unchanged_null", f"{_what(pair)}: no value, as before ({after.status})")
    return _gap(pair, "null", f"{_what(pair)} at step {pair.step}: no value ({after.status})")


def _gap(pair: Pair, kind: str, message: str) -> Finding:
    return _finding(pair, kind, pair.rule.severity, message)


def _note(pair: Pair, kind: str, message: str) -> Finding:
    return _finding(pair, kind, "informational", message)


def _finding(
    pair: Pair,
    kind: str,
    severity: str,
    message: str,
    tolerance: Tolerance | None = None,
    excess: float = 0.0,
) -> Finding:
    return Finding(
        kind=kind,
        severity=severity,
        message=message,
        rule=pair.rule.name,
        run=pair.run,
        step=pair.step,
        series=pair.series,
        before=pair.before.value if pair.before else None,
        after=pair.after.value if pair.after else None,
        at=pair.at,
        tolerance=tolerance,
        excess=excess,
    )


def share_out(rule: Rule, findings: Sequence[Finding], compared: int) -> list[Finding]:
    """The findings, with the regressions made notes when too small a share of `compared` moved."""
    moved = sum(f.kind == REGRESSION for f in findings)
    if not moved or moved >= max(1.0, rule.share * compared):
        return list(findings)
    few = f"{moved} of {compared}, the rule asks for {rule.share:.0%}"
    return [
        replace(f, kind="few", severity="informational", message=f"{f.message}: {few}")
        if f.kind == REGRESSION
        else f
        for f in findings
    ]


__all__ = [
    "GAPS",
    "counting_error",
    "grain",
    "is_compared",
    "judge",
    "share_out",
    "tolerate",
    "worsening",
]
