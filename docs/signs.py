"""Which signs moved before plasticity was lost: writes the tables of signs.md from measured tables.

    python docs/signs.py STREAMS TWINS > docs/signs-tables.md

STREAMS and TWINS are what `plastiscope analyze` wrote for the sample runs and for their stationary
twins; `trainability.csv` is read beside the checkpoints that the tables name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain, permutations
from pathlib import Path

import numpy as np
import pandas as pd
from courses import Course, Floats, Key, Loss, courses, read_loss

import plastiscope

RUNS = ("mlp", "cnn", "vit", "gpt")
WORSE = {
    **dict.fromkeys(
        (
            "effective_rank", "effective_rank_centered", "effective_rank_squared", "srank",
            "approximate_rank", "stable_rank", "participation_ratio", "numerical_rank",
            "rank_residual", "dormancy_score", "active_fraction", "unit_sign_entropy",
            "attention_entropy", "attention_entropy_normalized", "attention_rank",
            "attention_column_mass", "accuracy", "ntk_effective_rank", "ntk_srank",
            "ntk_approximate_rank", "ntk_alignment", "fisher_effective_rank",
            "jacobian_sigma_min", "isometry_score", "rate_of_change",
            "rate_of_change_embedding", "update_to_weight_ratio", "effective_learning_rate",
            "second_moment_effective_rank", "gradient_norm",
        ), -1,
    ),
    **dict.fromkeys(
        (
            "condition_number", "spectral_norm", "frobenius_norm", "weight_magnitude",
            "weight_rms", "weight_l2", "weight_drift", "gram_deviation",
            "gram_deviation_normalized", "squared_singular_value", "dormant_fraction",
            "dormant_fraction_signed", "dead_fraction", "rarely_active_fraction",
            "saturated_fraction", "duplicate_fraction", "collapsed_head", "attention_sink_rate",
            "loss", "ntk_condition_number", "ntk_offdiagonal", "ntk_drift",
            "grama_inactive_fraction", "jacobian_sigma_max", "jacobian_condition_number",
            "isometry_distance", "rate_of_change_bound",
        ), 1,
    ),
}  # fmt: skip
"""The direction that the literature takes for worse, stated before the runs were looked at; the
metrics that aren't listed have none."""


def spearman(a: Floats, b: Floats) -> float:
    """Rank correlation; NaN when one of both doesn't vary."""
    x, y = (pd.Series(v).rank().to_numpy(float) for v in (a, b))
    if x.std() == 0 or y.std() == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


@cache
def _null(n: int) -> Floats:
    """|rho| of every order of n values without ties, ascending."""
    flat = np.fromiter(chain.from_iterable(permutations(range(n))), np.int8).reshape(-1, n)
    squares = ((flat - np.arange(n)) ** 2).sum(1, dtype=np.int64)
    return np.sort(np.abs(1 - 6 * squares / (n * (n**2 - 1))))


def chance(rho: float, n: int) -> float:
    """The exact share of random orders with a |rho| as large (two-sided, ties left out)."""
    null = _null(n)
    return float(len(null) - np.searchsorted(null, abs(rho) - 1e-9)) / len(null)


@dataclass(frozen=True)
class Sign:
    """What became of one metric in one run and its twin."""

    metric: str
    of: str
    first: float
    last: float
    rho: float
    chance: float
    both: float
    moved: tuple[int, int] | None
    twin: tuple[int, int] | None
    parted: tuple[int, int] | None

    @property
    def worse(self) -> int:
        return WORSE.get(self.metric, 0)

    @property
    def shared(self) -> bool:
        """Whether the healthy twin moved the same way."""
        return self.moved is not None and self.twin is not None and self.twin[1] == self.moved[1]

    def verdict(self, onset: int | None) -> str:
        """In a word, against the step from which the loss of plasticity is measurable.

        "early", "with" or "late": when the metric had moved the bad way; with a star where the
        healthy twin moves that way too, and then when the run had left its twin behind.
        """
        if self.moved is None:
            return "unmoved"
        step, side = self.moved
        if self.worse and side != self.worse:
            return "wrong way"
        if self.shared:
            if self.parted is None or self.parted[1] != side:
                return "twin too"
            step = max(step, self.parted[0])
        when = "early" if onset is None or step < onset else "with" if step == onset else "late"
        return f"{when}*" if self.shared else when


def signs(run: str, streams: Path, twins: Path) -> tuple[Loss, Loss, list[Sign]]:
    """The losses of a run and its twin, and every metric's sign."""
    tables = [plastiscope.read_tables(folder) for folder in (streams, twins)]
    own, other = (t[t["run"] == run] for t in tables)
    losses = read_loss(streams, run), read_loss(twins, run)
    mine, theirs = courses(own), courses(other)
    found = [_sign(key, c, theirs.get(key), losses) for key, c in mine.items()]
    return *losses, found


def _sign(key: Key, course: Course, twin: Course | None, losses: tuple[Loss, Loss]) -> Sign:
    at, values = _matched(course, losses[0])
    rho = spearman(values, at)
    both = rho
    if twin is not None:
        at_twin, values_twin = _matched(twin, losses[1])
        both = spearman(np.r_[values, values_twin], np.r_[at, at_twin])
    return Sign(
        *key, float(course.values[0]), float(course.values[-1]), rho,
        chance(rho, len(at)) if np.isfinite(rho) else float("nan"), both,
        course.moved(), twin.moved() if twin else None, course.parted(twin) if twin else None,
    )  # fmt: skip


def _matched(course: Course, loss: Loss) -> tuple[Floats, Floats]:
    """The loss and the values at the steps that have both."""
    known = dict(zip(loss.steps, loss.values, strict=True))
    pairs = [(known[s], v) for s, v in zip(course.steps, course.values, strict=True) if s in known]
    return np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])


# --- what is written ---


def number(value: float) -> str:
    """Three digits, without an exponent where it fits."""
    if not np.isfinite(value):
        return ""
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e+0" in text and abs(value) < 1e5 else text


def _rho(value: float) -> str:
    return "" if not np.isfinite(value) else f"{value:+.2f}"


def _when(event: tuple[int, int] | None) -> str:
    return "" if event is None else f"{event[0]} {'up' if event[1] > 0 else 'down'}"


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(r) + " |" for r in (headings, ["---"] * len(headings), *rows)]
    return "\n".join(lines)


def evidence(losses: Mapping[str, tuple[Loss, Loss]]) -> str:
    """The directly measured loss, run by run."""
    rows = []
    for run, pair in losses.items():
        for name, loss in zip(("stream", "twin"), pair, strict=True):
            cells = [
                f"{s}: {v:.3f} ± {e:.3f}"
                for s, v, e in zip(loss.steps, loss.values, loss.errors, strict=True)
            ]
            onset = loss.measurable()
            rows.append([run, name, "never" if onset is None else str(onset), ", ".join(cells)])
    return table(["run", "", "measurable from", "loss at each step"], rows)


def by_run(run: str, onset: int | None, found: list[Sign]) -> str:
    """One run's table, the highest correlation first."""
    order = sorted(found, key=lambda s: -abs(s.rho) if np.isfinite(s.rho) else 1.0)
    rows = [
        [
            s.metric, s.of, number(s.first), number(s.last), _rho(s.rho),
            "" if not np.isfinite(s.chance) else f"{s.chance:.2g}", _rho(s.both),
            _when(s.moved), _when(s.twin), _when(s.parted), s.verdict(onset),
        ]
        for s in order
    ]  # fmt: skip
    headings = [
        "metric", "of", "first", "last", "ρ", "p", "ρ with twin", "moved at", "twin moved at",
        "parted at", "verdict",
    ]  # fmt: skip
    return table(headings, rows)


def across(found: Mapping[str, list[Sign]], onsets: Mapping[str, int | None]) -> str:
    """Every metric in all runs: ρ over the run's and its twin's checkpoints, and the verdict; those
    whose ρ has one direction in all of their runs first, by their weakest."""
    keys = list(dict.fromkeys((s.metric, s.of) for some in found.values() for s in some))
    rows = []
    for metric, of in keys:
        own = {run: next((s for s in some if (s.metric, s.of) == (metric, of)), None)
               for run, some in found.items()}  # fmt: skip
        rhos = [0.0 if np.isnan(s.both) else s.both for s in own.values() if s is not None]
        agree = abs(sum(np.sign(rhos))) == len(rhos)
        cells = [
            "" if s is None else f"{_rho(s.both)} {s.verdict(onsets[run])}"
            for run, s in own.items()
        ]
        way = {1: "up", -1: "down", 0: ""}[WORSE.get(metric, 0)]
        order = (-len(rhos), -min(map(abs, rhos)) if agree else 0.0)
        rows.append((order, [metric, of, way, *cells]))
    rows.sort(key=lambda row: row[0])
    return table(["metric", "of", "worse", *found], [cells for _, cells in rows])


def counts(found: Mapping[str, list[Sign]], onsets: Mapping[str, int | None]) -> str:
    """How many series of each run had which verdict."""
    names = [
        "early",
        "with",
        "late",
        "early*",
        "with*",
        "late*",
        "twin too",
        "wrong way",
        "unmoved",
    ]
    rows = []
    for run, some in found.items():
        verdicts = [s.verdict(onsets[run]) for s in some]
        chances = [s.chance for s in some if np.isfinite(s.chance)]
        by_chance = sum(p < 0.05 for p in chances)
        rows.append(
            [run, str(len(some)), *(str(verdicts.count(n)) for n in names),
             f"{by_chance} of {len(chances)}"]
        )  # fmt: skip
    return table(["run", "series", *names, "p < 0.05"], rows)


def main(streams: Path, twins: Path) -> None:
    """Print the tables."""
    measured = {run: signs(run, streams, twins) for run in RUNS}
    onsets = {run: own.measurable() for run, (own, _, _) in measured.items()}
    found = {run: some for run, (_, _, some) in measured.items()}
    print("# The tables of signs.md\n\nWritten by `docs/signs.py`; signs.md says what they mean.\n")
    print("## Loss of plasticity, measured\n")
    print(evidence({run: (own, twin) for run, (own, twin, _) in measured.items()}))
    print("\n## Verdicts\n")
    print(counts(found, onsets))
    print("\n## Every metric in all runs\n")
    print(across(found, onsets))
    for run in RUNS:
        print(f"\n## {run}\n")
        print(by_run(run, onsets[run], found[run]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
