"""The gate: rules over a run's tables, against its own past or a baseline. One comparison, one
result; formats and exit status only tell it."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import NotEnoughEvidenceError, UsageError, unknown
from .baseline import read_baseline
from .configuration import read_rules
from .defaults import BASELINE_RULES, RUN_RULES
from .findings import GAPS, Finding, Result, worst_first
from .judgement import is_compared, judge, share_out
from .pairs import Pair, chosen_steps, pair_with_baseline, pair_within, select
from .rules import Rule
from .values import Runs, Value, distinct, load, read_runs

EVIDENCE = frozenset({"feature", "unit", "attention"})


def check(
    table: Any,
    baseline: Any = None,
    rules: Iterable[Rule] | str | Path | None = None,
    *,
    runs: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    allow_missing_baseline: bool = False,
    growing: bool = False,
) -> Result:
    """Apply rules to the tables of one or several runs and return what they found.

    `table`: an OUT folder, a frame of `plastiscope.read_tables`, or an Analysis. `baseline`: an
    OUT folder, a baseline file or a table. `rules`: Rule objects, or a TOML file; by default the
    baseline rules when there is a baseline, else the rules that look at a run by itself. `runs`:
    only these. `allow_missing`: patterns of metrics, components or places that may be gone from
    the new run. `growing`: the run isn't finished; the baseline's later steps don't count yet.

    Raises UsageError for a wrong rule or name, UnreadableError for a file that can't be read,
    NotEnoughEvidenceError for a table without rows. Everything else is a finding.
    """
    default = rules is None
    chosen = _chosen(rules, baseline is not None)
    rows = load(table)
    new = _only(read_runs(rows, {r.metric for r in chosen}), runs, rows)
    old, said = _baseline(baseline, chosen, allow_missing_baseline)
    pairs = list(_pairs(chosen, new, old, growing))
    found = _Found(chosen, allow_missing, default)
    for rule in chosen:
        found.judge(rule, [p for p in pairs if p.rule is rule], bool(old))
    metrics = distinct(rows, "metric")
    extra = [*said, *_lost_runs(old, new, runs), *found.missing(metrics, bool(said))]
    where = str(table) if isinstance(table, (str, Path)) else getattr(table, "out", None)
    return Result(
        findings=worst_first([*found.findings, *extra]),
        compared=sum(found.matched.values()),
        rules=tuple(chosen),
        matched=found.matched,
        runs=tuple(new),
        out=None if where is None else str(where),
        baseline=str(baseline) if isinstance(baseline, (str, Path)) else None,
    )


def _chosen(rules: Iterable[Rule] | str | Path | None, baseline: bool) -> list[Rule]:
    if rules is None:
        return list(BASELINE_RULES if baseline else RUN_RULES)
    chosen = list(read_rules(Path(rules)) if isinstance(rules, (str, Path)) else rules)
    if not chosen:
        raise UsageError("no rules: leave them out for the default set, or give at least one")
    names = [rule.name for rule in chosen]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two rules are called {name!r}: give each its own `name`")
    compares = any(rule.against == "baseline" for rule in chosen)
    if baseline and not compares:
        raise UsageError(
            "no rule compares with the baseline: set against = 'baseline' in one, or let "
            "`plastiscope check OUT --baseline FILE --init --rules NEW` write such rules"
        )
    if compares and not baseline:
        name = next(rule.name for rule in chosen if rule.against == "baseline")
        raise UsageError(f"rule {name!r} compares with a baseline: give one with --baseline")
    return chosen


def _only(runs: Runs, names: Sequence[str], rows: Any) -> Runs:
    """The chosen runs; one without any row that a rule wants is there, with no values."""
    every = distinct(rows, "run")
    for name in names:
        if name not in every:
            raise unknown("run", name, every)
    return {name: runs.get(name, []) for name in every if not names or name in names}


def _baseline(source: Any, rules: Sequence[Rule], allowed: bool) -> tuple[Runs, list[Finding]]:
    """The baseline's values, and what to say when there are none."""
    if source is None:
        return {}, []
    try:
        old = read_baseline(source, {r.metric for r in rules})
        if not any(old.values()):
            raise NotEnoughEvidenceError(f"the baseline {source} holds no row for any rule")
        return old, []
    except NotEnoughEvidenceError as error:
        if allowed:
            return {}, [Finding("note", "informational", f"{error} (allowed)")]
        return {}, [Finding("baseline", "fail", str(error))]


def _partner(run: str, new: Runs, old: Runs) -> list[Value]:
    """The baseline's values for a run: of the same name, or of the only one when both are alone."""
    if run not in old and len(new) == len(old) == 1:
        return next(iter(old.values()))
    return old.get(run, [])


def _lost_runs(old: Runs, new: Runs, chosen: Sequence[str]) -> list[Finding]:
    """A finding for each of the chosen runs of the baseline that has no partner."""
    if len(new) == len(old) == 1:
        return []
    lost = [run for run in old if run not in new and (not chosen or run in chosen)]
    return [
        Finding("missing", "fail", f"run {run!r}: gone from the new tables", run=run)
        for run in lost
    ]


def _pairs(rules: Sequence[Rule], new: Runs, old: Runs, growing: bool) -> Iterator[Pair]:
    for run, values in new.items():
        partner = _partner(run, new, old)
        for rule in rules:
            mine = select(rule, values)
            if rule.against == "baseline":
                yield from pair_with_baseline(rule, run, mine, select(rule, partner), growing)
            else:
                yield from pair_within(rule, run, mine)


class _Found:
    """Collects findings rule by rule, and counts what was compared."""

    def __init__(self, rules: Sequence[Rule], allow_missing: Sequence[str], default: bool) -> None:
        self.rules, self.allow_missing, self.default = rules, allow_missing, default
        self.findings: list[Finding] = []
        self.matched = {rule.name: 0 for rule in rules}
        self.evidence: set[str] = set()

    def judge(self, rule: Rule, pairs: list[Pair], baseline: bool) -> None:
        pairs = [p for p in pairs if not (p.after is None and self._allowed(p))]
        changed = other_architecture(pairs) if rule.against == "baseline" else []
        if changed:
            # Numbers of two different networks say nothing about each other.
            self.findings += changed
            return
        compared = [p for p in pairs if is_compared(p)]
        found = [f for f in map(judge, pairs) if f is not None]
        if not baseline:
            found = [f for f in found if f.kind != "new"]
        self.findings += share_out(rule, found, len(compared))
        self.matched[rule.name] = len(compared)
        self.evidence |= {p.series.subject for p in compared}

    def _allowed(self, pair: Pair) -> bool:
        series = pair.series
        names = (
            series.metric,
            series.component or "",
            series.where,
            f"{series.where} {series.what}",
        )
        return any(fnmatch.fnmatchcase(n, p) for n in names for p in self.allow_missing)

    def missing(self, metrics: Sequence[str], no_baseline: bool) -> Iterator[Finding]:
        """What keeps a gate without findings from being a pass; that there is no baseline has
        been said already."""
        explained = {f.rule for f in self.findings if f.kind in GAPS}
        rules = [r for r in self.rules if not (no_baseline and r.against == "baseline")]
        for rule in rules:
            if not self.matched[rule.name] and rule.name not in explained and not rule.optional:
                yield _unmatched(rule, metrics)
        if no_baseline or any(f.kind in GAPS and f.fails for f in self.findings):
            return
        if not sum(self.matched.values()):
            yield Finding("nothing", "fail", "no rows were compared, so nothing may be concluded")
        elif self.default and not self.evidence & EVIDENCE:
            yield Finding(
                "nothing",
                "fail",
                "only weights were compared, no features or units: give the model and a probe to "
                "`analyze`, or name the rules that suffice with --rules",
            )


def _unmatched(rule: Rule, metrics: Sequence[str]) -> Finding:
    near = difflib.get_close_matches(rule.metric, metrics, n=1)
    if rule.metric in metrics:
        hint = f"{rule.metric} was measured, but not where the rule looks"
    elif near:
        hint = f"no metric {rule.metric!r} in the table: did you mean {near[0]!r}?"
    else:
        hint = f"no metric {rule.metric!r} in the table"
    message = f"rule {rule.name!r} matches nothing: {hint}"
    return Finding("unmatched", rule.severity, message, rule=rule.name)


def other_architecture(pairs: Sequence[Pair]) -> list[Finding]:
    """One finding when the weights' places or any shape differ between the two runs, else none."""
    weights = [p.series.where for p in pairs if p.series.subject == "weight" and p.after]
    before = [p.series.where for p in pairs if p.series.subject == "weight" and p.before]
    new = sorted(set(weights) - set(before)) if before else []
    gone = sorted(set(before) - set(weights))
    changed = [p for p in pairs if p.gap == "architecture"]
    if not new and not changed:
        return []
    shapes = sorted({f"{p.series.where} ({p.why})" for p in changed})
    parts = {"only here": new, "only in the baseline": gone, "changed": shapes}
    words = "; ".join(f"{k}: {_some(v)}" for k, v in parts.items() if v)
    pair = changed[0] if changed else pairs[0]
    return [
        Finding(
            "architecture",
            pair.rule.severity,
            f"the architecture isn't the baseline's, nothing was compared ({words})",
            rule=pair.rule.name,
            run=pair.run,
            step=pair.step,
        )
    ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def baseline_values(
    table: Any, rules: Iterable[Rule] | str | Path | None = None, runs: Sequence[str] = ()
) -> dict[str, list[Value]]:
    """The values that the rules which look at a baseline will want from it.

    Raises UsageError when no rule compares with a baseline.
    """
    chosen = [rule for rule in _chosen(rules, True) if rule.against == "baseline"]
    rows = load(table)
    new = _only(read_runs(rows, {r.metric for r in chosen}), runs, rows)
    kept: dict[str, list[Value]] = {}
    for run, values in new.items():
        wanted: list[Value] = []
        for rule in chosen:
            mine = select(rule, values)
            steps = chosen_steps(rule, mine)
            wanted += [v for v in mine if v.step in steps]
        kept[run] = list(dict.fromkeys(wanted))
    return kept
