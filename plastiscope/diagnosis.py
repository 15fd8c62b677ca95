"""From the tables to plain sentences: what moved, how far, and whether the signs agree.

A *series* is one metric of one component (and head) over a run's checkpoints. A *sign* is a family
of series and the direction that means trouble. Nothing here is a score: every statement carries
the numbers that it stands on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

SERIES = ["block", "component", "head", "tokens", "subject", "metric", "parameters", "probe"]
ENOUGH_CHECKPOINTS = 4
SIGNIFICANT = 3.0
STEADY = 0.5
"""Kendall's tau from which a series is a trend."""


@dataclass(frozen=True)
class Sign:
    """A family of series and when it means trouble.

    Signs of one `kind` speak of one thing, and count once in the verdict. `worse` is +1 when growth
    is bad, -1 when a fall is. `least` is the smallest change that counts: of the value itself for a
    fraction (`relative` False), else of its logarithm, so that halving and doubling weigh the same.
    `share` of the family must have moved that far for the sign to be present. `of` says what the
    series are of.
    """

    name: str
    kind: str
    metric: str
    subject: str
    worse: int
    least: float
    relative: bool = True
    parameters: str = ""
    tokens: str | None = None
    per_head: bool = False
    share: float = 0.25
    of: str = "components"


SIGNS = (
    Sign("features lose rank", "rank", "effective_rank", "feature", -1, np.log(1.25),
         tokens="all"),
    Sign("CLS token loses rank", "rank", "effective_rank", "feature", -1, np.log(1.25),
         tokens="cls"),
    Sign("heads lose rank", "rank", "effective_rank", "feature", -1, np.log(1.25), tokens="all",
         per_head=True, of="q, k and v of the heads"),
    Sign("units go dormant", "units", "dormant_fraction", "unit", 1, 0.1, relative=False,
         parameters="tau=0.025", of="activation layers"),
    Sign("weights grow", "weights", "weight_magnitude", "weight", 1, np.log(1.5), of="matrices"),
    Sign("attention narrows", "attention", "attention_entropy", "attention", -1, np.log(1.5),
         per_head=True, of="heads"),
)  # fmt: skip
CORE = ("rank", "units")
"""Kinds of signs that healthy runs don't show. Weights grow and attention sharpens in any training:
they support a diagnosis, and don't make one."""


@dataclass(frozen=True)
class Movement:
    """One series from its first to its last checkpoint.

    `error` is the standard error of last - first (None where it isn't known); `trend` Kendall's
    tau of the values against time, in [-1, 1]; `size` how far it moved in the bad direction, in
    the sign's own measure (negative: it got better).
    """

    component: str
    block: int | None
    head: int | None
    first: float
    last: float
    error: float | None
    trend: float
    size: float

    @property
    def where(self) -> str:
        """The place in words: "block 3 v head 2"."""
        return place(self.component, self.block, self.head)


@dataclass(frozen=True)
class Finding:
    """What became of one sign: its series by size (largest first), and whether it is present."""

    sign: Sign
    movements: tuple[Movement, ...]
    moved: int
    present: bool


@dataclass(frozen=True)
class Diagnosis:
    """The findings for one run, over the checkpoints `first` to `last`.

    `unmeasured` counts the rows without a value by their reason; `coverage` is the share of the
    parameters and of the components that were measured; `floors` of the feature ranks, the share
    that has too few rows of the probe to be more than a floor.
    """

    run: str
    checkpoints: int
    first: int
    last: int
    findings: tuple[Finding, ...]
    verdict: str
    unmeasured: tuple[tuple[str, int], ...]
    coverage: tuple[tuple[str, float], ...] = ()
    floors: float = 0.0

    @property
    def present(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.present)


def place(component: str, block: int | None, head: int | None) -> str:
    """A component in words."""
    parts = [] if block is None else [f"block {block}"]
    parts.append(component)
    return " ".join(parts if head is None else [*parts, f"head {head}"])


def diagnose(table: pd.DataFrame) -> tuple[Diagnosis, ...]:
    """One diagnosis a run of the table (as `plastiscope.read_tables` gives it)."""
    return tuple(
        _diagnose(str(name), frame)
        for name, frame in table.groupby("run", observed=True, sort=False)
    )


def _diagnose(run: str, frame: pd.DataFrame) -> Diagnosis:
    frame = frame[(frame["subject"] != "task") & frame["step"].notna()]
    # What the last checkpoint's least broken series still joins is the stretch to judge.
    latest = frame["step"] == frame["step"].max()
    joined = frame[frame["segment"] >= frame.loc[latest, "segment"].min()]
    steps = sorted(joined["step"].unique())
    found = (_find(sign, joined, steps[-1]) for sign in SIGNS)
    findings = tuple(f for f in found if f.movements)
    reasons = frame.loc[frame["value"].isna(), "status"].astype(str).value_counts()
    return Diagnosis(
        run,
        len(steps),
        int(steps[0]),
        int(steps[-1]),
        findings,
        _not_finite(joined) or _verdict(findings, len(steps)),
        tuple((str(reason), int(count)) for reason, count in reasons.items()),
        _coverage(frame),
        _floors(joined),
    )


def _coverage(frame: pd.DataFrame) -> tuple[tuple[str, float], ...]:
    """The least share of parameters and of components that any checkpoint was measured in."""
    rows = frame[frame["metric"] == "coverage"]
    least = rows.groupby("parameters", observed=True)["value"].min()
    return tuple((str(of).removeprefix("of="), float(v)) for of, v in least.items())


def _floors(frame: pd.DataFrame) -> float:
    ranks = frame[(frame["metric"] == "effective_rank") & (frame["subject"] == "feature")]
    known = ranks[ranks["value"].notna()]
    return float((known["status"] == "insufficient_rows").mean()) if len(known) else 0.0


def _not_finite(frame: pd.DataFrame) -> str | None:
    """What broke, when the last checkpoint holds NaN or infinity: nothing else can be judged."""
    bad = frame[(frame["status"] == "non_finite") & frame["value"].isna()]
    if bad.empty or bad["step"].max() < frame["step"].max():
        return None
    weights = bad[bad["subject"] == "weight"]
    first = (weights if len(weights) else bad).sort_values("step", kind="stable").iloc[0]
    block = None if pd.isna(first["block"]) else int(first["block"])
    where = place(str(first["component"]), block, None)
    return f"Broken: NaN or infinity since step {int(first['step'])}, first in {where}."


def _verdict(findings: Iterable[Finding], checkpoints: int) -> str:
    """At least one core kind of sign, and one kind more: else no diagnosis."""
    findings = tuple(findings)
    if checkpoints < ENOUGH_CHECKPOINTS:
        return (
            f"Not enough evidence: {checkpoints} comparable "
            f"checkpoint{'s' * (checkpoints != 1)}, a trend needs {ENOUGH_CHECKPOINTS}."
        )
    if not {f.sign.kind for f in findings} & set(CORE):
        return "Not enough evidence: only weights were measured, no features or units."
    present = [f.sign for f in findings if f.present]
    names = ", ".join(sign.name for sign in present)
    kinds = {sign.kind for sign in present}
    if not kinds & set(CORE):
        also = f" {names.capitalize()}, as in healthy training too." if names else ""
        few = "".join(f" {_too_few(f)}" for f in findings if f.sign.kind in CORE and f.moved)
        return f"No sign of plasticity loss ({len(findings)} looked for).{few}{also}"
    if len(kinds) == 1:
        return f"Only one kind of sign: {names}. Watch it; not a diagnosis."
    return f"Losing plasticity: {len(present)} of {len(findings)} signs: {names}."


def _too_few(finding: Finding) -> str:
    sign = finding.sign
    return (
        f"{sign.name[0].upper()}{sign.name[1:]} in {finding.moved} of {len(finding.movements)} "
        f"{sign.of}, too few to be a sign."
    )


def _find(sign: Sign, frame: pd.DataFrame, last: int) -> Finding:
    series = [_movement(sign, group, last) for group in _series(sign, frame)]
    movements = sorted((m for m in series if m is not None), key=lambda m: -m.size)
    moved = sum(_counts(sign, m) for m in movements)
    present = bool(movements) and moved >= max(1, sign.share * len(movements))
    return Finding(sign, tuple(movements), moved, present)


def _series(sign: Sign, frame: pd.DataFrame) -> Iterable[pd.DataFrame]:
    chosen = frame[
        (frame["metric"] == sign.metric)
        & (frame["subject"] == sign.subject)
        & (frame["parameters"] == sign.parameters)
        & (frame["component"] != "network")
        & (frame["head"].notna() == sign.per_head)
    ]
    if sign.metric == "weight_magnitude":
        chosen = chosen[_places(chosen).isin(_matrices(frame))]
    if sign.tokens is not None:
        chosen = chosen[chosen["tokens"] == sign.tokens]
    for _, group in chosen.groupby(SERIES, observed=True, dropna=False, sort=False):
        yield group.sort_values("step")


def _matrices(frame: pd.DataFrame) -> pd.Series:
    """The places that hold a matrix: what has a spectrum. Biases and gains don't."""
    spectral = frame[(frame["metric"] == "spectral_norm") & (frame["subject"] == "weight")]
    return _places(spectral)


def _places(frame: pd.DataFrame) -> pd.Series:
    return frame["component"].astype(str) + " " + frame["block"].fillna(-1).astype(int).astype(str)


def _movement(sign: Sign, group: pd.DataFrame, end: int) -> Movement | None:
    """A series' movement; None when it has no value at the run's last step."""
    known = group[group["value"].notna() & (group["segment"] == group["segment"].iloc[-1])]
    if len(known) < 2 or known["step"].iloc[-1] != end:
        return None
    first, last = known.iloc[0], known.iloc[-1]
    return Movement(
        str(last["component"]),
        None if pd.isna(last["block"]) else int(last["block"]),
        None if pd.isna(last["head"]) else int(last["head"]),
        float(first["value"]),
        float(last["value"]),
        _error(first["standard_error"], last["standard_error"]),
        _kendall(known["value"].to_numpy()),
        sign.worse * _change(sign, float(first["value"]), float(last["value"])),
    )


def _change(sign: Sign, first: float, last: float) -> float:
    if not sign.relative:
        return last - first
    if first <= 0 or last <= 0:
        return float(np.sign(last - first) * np.inf) if first != last else 0.0
    return float(np.log(last / first))


def _error(*errors: float) -> float | None:
    return None if any(pd.isna(e) for e in errors) else float(np.sqrt(np.square(errors).sum()))


def _kendall(values: np.ndarray) -> float:
    """Kendall's tau against time: concordant minus discordant pairs over all pairs."""
    i, j = np.triu_indices(len(values), 1)
    return float(np.sign(values[j] - values[i]).mean())


def _counts(sign: Sign, movement: Movement) -> bool:
    """Whether a series moved far enough, surely enough and steadily enough."""
    return not shortfall(sign, movement)


def shortfall(sign: Sign, movement: Movement) -> str:
    """What a series lacks to count as moved; empty when it counts."""
    if movement.size < sign.least:
        return "too small"
    moved = abs(movement.last - movement.first)
    if movement.error is not None and moved < SIGNIFICANT * movement.error:
        return f"under {SIGNIFICANT:g} standard errors"
    return "" if movement.trend * sign.worse >= STEADY else "not steady"
