"""What a gate found: one finding a value, the same for every format and for the exit status."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import FAILED, NOT_ENOUGH_EVIDENCE, PASSED, UNREADABLE
from .rules import Rule
from .values import Series

REGRESSION = "regression"
GAPS = {
    "null": "no value in the new run",
    "missing": "gone from the new run",
    "unmatched": "a rule that matches nothing",
    "reference": "nothing to compare with",
    "probe": "measured with another probe",
    "version": "measured by another version of the metric",
    "architecture": "another architecture",
    "baseline": "no baseline",
    "nothing": "nothing was compared",
    "unreadable": "a file that can't be read",
}
NOTES = {
    "new": "not in the baseline",
    "unchanged_null": "no value before and now",
    "measured_now": "no value before, one now",
    "accepted": "no value, accepted by the rule",
    "early": "too few checkpoints for a trend yet",
    "few": "moved, in too few places for the rule",
    "from_zero": "grown from zero, and not beyond its siblings",
    "note": "note",
}
_RANK = {"fail": 0, "warn": 1, "informational": 2}


@dataclass(frozen=True)
class Tolerance:
    """The three tolerances of a comparison, in the metric's unit; the largest decides.

    `errors` is the statistical one: so many standard errors of the difference.
    """

    absolute: float
    relative: float
    errors: float

    @property
    def decisive(self) -> float:
        return max(self.absolute, self.relative, self.errors)

    def __str__(self) -> str:
        names = {"absolute": self.absolute, "relative": self.relative, "errors": self.errors}
        name = max(names, key=lambda n: names[n])
        words = {"relative": "relative", "absolute": "absolute", "errors": "standard errors"}
        return f"{self.decisive:.3g} ({words[name]})"


@dataclass(frozen=True)
class Finding:
    """One thing that the gate has to say.

    `kind` is "regression", a key of GAPS (not enough evidence) or of NOTES; `severity` fail, warn
    or informational. `before` and `after` are null when there is no value; `excess` is the change
    in the bad direction over the tolerance (above 1 for a regression).
    """

    kind: str
    severity: str
    message: str
    rule: str = ""
    run: str = ""
    step: int | None = None
    series: Series | None = None
    before: float | None = None
    after: float | None = None
    at: str = ""
    tolerance: Tolerance | None = None
    excess: float = 0.0

    @property
    def fails(self) -> bool:
        return self.severity == "fail"

    @property
    def order(self) -> tuple[object, ...]:
        """Worst first: regressions before gaps before notes, the largest excess first."""
        kind = 0 if self.kind == REGRESSION else 1 if self.kind in GAPS else 2
        place = self.series.order if self.series else ()
        return _RANK[self.severity], kind, -self.excess, self.rule, self.run, place, self.step or 0


@dataclass(frozen=True)
class Result:
    """The outcome of a gate: `findings` worst first, and how much was compared.

    `rules` are those that were applied; `matched` counts, for each name, the values compared;
    `out` is where the tables lie, when they lie somewhere; `baseline` what was compared with.
    """

    findings: tuple[Finding, ...]
    compared: int
    rules: tuple[Rule, ...]
    matched: dict[str, int] = field(default_factory=dict)
    runs: tuple[str, ...] = ()
    out: str | None = None
    baseline: str | None = None

    @property
    def regressions(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.kind == REGRESSION and f.fails)

    @property
    def gaps(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.kind in GAPS and f.fails)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "warn")

    @property
    def notes(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "informational")

    @property
    def status(self) -> int:
        """0 pass, 1 regression, 3 unreadable, 4 not enough evidence; a regression outweighs what
        is missing."""
        if self.regressions:
            return FAILED
        if any(f.kind == "unreadable" for f in self.gaps):
            return UNREADABLE
        return NOT_ENOUGH_EVIDENCE if self.gaps else PASSED

    @property
    def passed(self) -> bool:
        return self.status == PASSED

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        said = {
            PASSED: "passed",
            FAILED: f"failed: {_count(len(self.regressions), 'regression')}",
            UNREADABLE: "unreadable",
            NOT_ENOUGH_EVIDENCE: f"not enough evidence: {_count(len(self.gaps), 'gap')}",
        }[self.status]
        also = f", {_count(len(self.gaps), 'gap')}" if self.regressions and self.gaps else ""
        rules = _count(len(self.rules), "rule")
        return f"{said}{also} ({_count(self.compared, 'comparison')} by {rules})"

    def look(self, finding: Finding) -> tuple[str, ...]:
        """How to look at a finding: the command that prints its series, and its figure if drawn."""
        if self.out is None or finding.series is None:
            return ()
        return (_show(self.out, finding.series), *_drawn(self.out, finding))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _show(out: str, series: Series) -> str:
    words: list[object] = ["plastiscope", "show", out, "--metric", series.metric]
    for option, value in (
        ("--component", series.component),
        ("--block", series.block),
        ("--head", series.head),
    ):
        words += [] if value is None else [option, value]
    return shlex.join(str(w) for w in words)


def _drawn(out: str, finding: Finding) -> Iterator[str]:
    """The figure that shows the finding, when `analyze` has drawn it."""
    series = finding.series
    assert series is not None
    of_head = series.head is not None
    name = {
        "effective_rank": "head-rank" if of_head else "component-rank",
        "weight_magnitude": "head-magnitude" if of_head else "weight-magnitude",
        "dormant_fraction": "units",
        "active_fraction": "units",
        "accuracy": "accuracy",
    }.get(series.metric, "")
    if series.tokens == "cls":
        name = "cls-rank"
    file = Path(out) / "figures" / finding.run / f"{name}.png"
    if file.is_file():
        yield str(file)


def worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda f: f.order))
