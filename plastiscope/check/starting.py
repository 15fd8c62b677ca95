"""`plastiscope check --init`: the default rules as a commented file, with this run's numbers."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from .. import store
from ..config import parse_toml
from ..errors import UsageError
from .defaults import BASELINE_RULES, RUN_RULES
from .judgement import tolerate, worsening
from .pairs import Pair, pair_with_baseline, pair_within, select
from .rules import Rule
from .values import Runs, distinct, load, read_runs

FILE = Path("plastiscope.toml")


def write_starting_rules(out: Path, file: Path | None, baseline: Path | None) -> Path:
    """Write the file, or add the section to a plastiscope.toml that has none; returns its path.

    Raises UsageError when there are rules already.
    """
    target = file or FILE
    text = "".join(f"{line}\n" if line else "\n" for line in _lines(out, baseline))
    if target.exists():
        if "check" in parse_toml(target) or file is not None:
            raise UsageError(f"{target} is there already: edit it, or name another with --rules")
        text = f"{target.read_text('utf-8').rstrip()}\n\n{text}"
    elif file is None and _has_settings(Path("pyproject.toml")):
        raise UsageError(
            "this project's settings are in pyproject.toml, which plastiscope.toml would hide: "
            "name a file for the rules, --rules plastiscope-rules.toml"
        )
    with store.replacing(target) as partial:
        partial.write_text(text, "utf-8")
    return target


def _has_settings(project: Path) -> bool:
    return project.exists() and "plastiscope" in parse_toml(project).get("tool", {})


def _lines(out: Path, baseline: Path | None) -> Iterator[str]:
    rows = load(out)
    rules = BASELINE_RULES if baseline else RUN_RULES
    yield f"# Rules for `plastiscope check`, written from {out}."
    yield "# A value fails when it moved in the bad direction by more than every tolerance:"
    yield "# absolute, relative, and so many standard errors of the difference."
    yield "[check]"
    yield f"baseline = {json.dumps(str(baseline))}" if baseline else '# baseline = "FILE or OUT"'
    yield '# allow_missing = ["weight_*"]  # what may be gone from a new run, by name'
    yield ""
    runs = read_runs(rows, {rule.metric for rule in rules})
    for rule in rules:
        yield from _comment(rule.reason)
        yield from _comment(_here(rule, runs))
        yield from _table(rule)
        yield ""
    others = sorted(set(distinct(rows, "metric")) - {r.metric for r in rules})
    if others:
        yield from _comment(f"Measured too, without a rule: {', '.join(others)}.")


def _comment(text: str) -> Iterator[str]:
    yield from (f"# {line}" for line in textwrap.wrap(text, 96))


def _here(rule: Rule, runs: Runs) -> str:
    """What the rule sees in this run: how many values, and the one nearest to failing."""
    pairs: list[Pair] = []
    for run, values in runs.items():
        mine = select(rule, values)
        if rule.against == "baseline":
            # Beside itself: the values at hand, and no movement.
            pairs += pair_with_baseline(rule, run, mine, mine)
        else:
            pairs += pair_within(rule, run, mine)
    known = [_movement(rule, p) for p in pairs]
    moved = sorted((m for m in known if m is not None), key=lambda m: -m[0])
    if not moved:
        return "Here: nothing to look at."
    return f"Here: {len(moved)} values; nearest to failing: {moved[0][1]}."


def _movement(rule: Rule, pair: Pair) -> tuple[float, str] | None:
    before, after = pair.before, pair.after
    if before is None or after is None or before.value is None or after.value is None:
        return None
    tolerance = tolerate(rule, before, after)
    used = worsening(rule, before.value, after.value) / tolerance.decisive
    words = f"{pair.series.where} {before.value:.4g} -> {after.value:.4g}"
    return used, f"{words} (tolerance {tolerance})"


def _table(rule: Rule) -> Iterator[str]:
    yield "[[check.rules]]"
    plain = Rule(rule.name, rule.metric, against=rule.against, limit=rule.limit, bad="up")
    always = ("name", "metric", "bad", "against", "absolute", "relative")
    for field in fields(Rule):
        value = getattr(rule, field.name)
        if field.name == "reason" or value is None:
            continue
        if field.name in always or value != getattr(plain, field.name):
            yield f"{field.name} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_toml(v) for v in value)}]"
    return json.dumps(value)
