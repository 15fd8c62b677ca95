"""Courses of metrics and of the loss of plasticity over a run's checkpoints, from the tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from plastiscope import store
from plastiscope.metrics import METRICS

Floats = npt.NDArray[np.float64]
STEPS = {"mlp": 100, "cnn": 60, "vit": 60, "gpt": 150}
ERRORS = 3.0
RATIO = math.log(1.25)
SHARE = 0.05
CHOSEN = {
    "dormancy_score": "quantile=5",
    "dormant_fraction": "tau=0.025",
    "dormant_fraction_signed": "tau=0.025",
    "grama_inactive_fraction": "tau=0.025",
    "jacobian_sigma": "sigma quantile=5",
    "squared_singular_value": "mean",
}
"""Of a metric with several parameters, the ones shown."""
NETWORK = (
    "active_fraction", "dead_fraction", "dormant_fraction", "dormant_fraction_signed",
    "rarely_active_fraction", "unit_sign_entropy",
)  # fmt: skip
"""Metrics of units that have a value for the whole network: it is shown instead of the layers'."""
SHARES = {m.name for m in METRICS if m.range == "0 to 1"}


@dataclass(frozen=True)
class Course:
    """One metric of one kind of place over a run's checkpoints [C]: values and standard errors."""

    steps: tuple[int, ...]
    values: Floats
    errors: Floats
    share: bool

    def change(self, a: int, b: int) -> float:
        """From checkpoint a to b: a difference of shares, else of logarithms."""
        x, y = float(self.values[a]), float(self.values[b])
        if self.share:
            return y - x
        if x > 0 and y > 0:
            return math.log(y / x)
        return 0.0 if x == y else math.copysign(math.inf, y - x)

    def certain(self, change: float, error: float) -> bool:
        """Whether a change is large enough, and beyond its error where that is known."""
        least = SHARE if self.share else RATIO
        return abs(change) >= least and not abs(change) < ERRORS * error

    def moved(self) -> tuple[int, int] | None:
        """The step from which on the course stays away from its first value, on one side, and the
        side; None when it doesn't."""
        found = None
        for at in range(len(self.steps) - 1, 0, -1):
            change = self.change(0, at)
            error = math.hypot(self._error(0), self._error(at))
            side = int(math.copysign(1, change))
            if not self.certain(change, error) or (found and found[1] != side):
                break
            found = (self.steps[at], side)
        return found

    def _error(self, at: int) -> float:
        error, value = float(self.errors[at]), float(self.values[at])
        if not np.isfinite(error):
            return 0.0
        return error if self.share or value == 0 else error / abs(value)

    def parted(self, other: Course) -> tuple[int, int] | None:
        """The step from which on the course stays away from another one, and the side."""
        found = None
        for step in reversed([s for s in self.steps if s in other.steps]):
            a, b = other.steps.index(step), self.steps.index(step)
            pair = Course((0, 1), np.array([other.values[a], self.values[b]]), _NONE, self.share)
            change = pair.change(0, 1)
            error = math.hypot(other._error(a), self._error(b))
            side = int(math.copysign(1, change))
            if not self.certain(change, error) or (found and found[1] != side):
                break
            found = (step, side)
        return found


_NONE = np.full(2, np.nan)
Key = tuple[str, str]


@dataclass(frozen=True)
class Loss:
    """The loss of plasticity, measured directly at each step, with its standard error."""

    steps: tuple[int, ...]
    values: Floats
    errors: Floats

    def measurable(self) -> int | None:
        """The step from which on the loss stays above three standard errors."""
        found = None
        for step, value, error in reversed(
            list(zip(self.steps, self.values, self.errors, strict=True))
        ):
            if step == 0 or value <= ERRORS * error:
                break
            found = step
        return found


def read_loss(folder: Path, run: str) -> Loss:
    """The evidence beside the run's checkpoints."""
    file = next(f for f in store.metric_files(folder) if f.parent.name == run)
    evidence = pd.read_csv(Path(store.read_facts(file)["source"]) / "trainability.csv")
    aged = evidence[evidence["from_task"] != "fresh"]
    steps = tuple(int(task) * STEPS[run] for task in aged["from_task"])
    errors = aged["lost_sd"] / np.sqrt(aged["seeds"])
    return Loss(steps, aged["lost_mean"].to_numpy(float), errors.to_numpy(float))


def courses(table: pd.DataFrame) -> dict[Key, Course]:
    """Every metric's course, by metric and by what it is measured of."""
    table = table[(table["subject"] != "task") & (table["metric"] != "coverage")].copy()
    table["of"] = _of(table)
    table = table[[_shown(m, p, i) for m, p, i in _facts(table)]]
    found = {}
    for (metric, of), part in table.groupby(["metric", "of"], observed=True, sort=False):
        course = _course(part, str(metric) in SHARES)
        if course is not None:
            found[str(metric), str(of)] = course
    return found


def _facts(table: pd.DataFrame) -> Iterator[tuple[str, str, object]]:
    return zip(table["metric"], table["parameters"], table["index"], strict=True)


def _shown(metric: str, parameters: str, index: object) -> bool:
    if metric == "ntk_spectrum":
        return index == 0
    if metric.startswith(("jacobian_", "isometry_")):
        return parameters.startswith("mean") and CHOSEN.get(metric, "") in parameters
    if metric in CHOSEN and CHOSEN[metric] not in parameters:
        return False
    if metric in NETWORK and not parameters.startswith("pooled"):
        return False
    return not parameters.startswith("mean") and "scope=" not in parameters


def _of(table: pd.DataFrame) -> list[str]:
    """What a row is of, in a few words; network rows (pooled) and single places are apart."""
    whole = [p.split(",")[0] in ("pooled", "mean") for p in table["parameters"].astype(str)]
    columns = [table[c].astype(object) for c in ("subject", "component", "head", "tokens")]
    words = []
    for subject, component, head, tokens, network, text in zip(
        *columns, whole, table["parameters"].astype(str), strict=True
    ):
        if subject in ("weight", "unit") and network and component == "network":
            words.append(f"{subject}s, {text.split(',')[0]}")
        elif subject == "feature":
            words.append("CLS" if tokens == "cls" else "heads" if pd.notna(head) else "features")
        elif subject == "weight":
            words.append("weights of heads" if pd.notna(head) else "weights")
        elif subject in ("ntk", "gradient", "jacobian"):
            kernel = text.split(",")[0].removeprefix("f=") if subject == "ntk" else ""
            place = component if component in ("network", "block") else "components"
            against = text.rpartition("against=")[2] if "against=" in text else ""
            words.append(", ".join(w for w in (place, kernel, against) if w))
        elif "column=" in text:
            words.append(text)
        else:
            words.append({"output": "probe", "unit": "layers"}.get(subject, subject))
    return words


def _course(part: pd.DataFrame, share: bool) -> Course | None:
    """The mean over places that have a value at every checkpoint: of shares the plain mean, of
    other positive values the geometric one, so that no place outweighs the others.

    Its standard error is the mean of the places' own: places share the probe, so their errors
    don't cancel.
    """
    places = ["block", "component", "head", "tokens", "tensor", "parameters", "probe"]
    rows = part[places].astype(object).itertuples(index=False)
    keys = pd.Series(["|".join(map(str, row)) for row in rows], index=part.index, name="place")
    values = part.pivot_table(index="step", columns=keys, values="value", observed=True)
    values = values.dropna(axis=1)
    if len(values) < 4 or values.shape[1] == 0:
        return None
    errors = part.pivot_table(index="step", columns=keys, values="standard_error", observed=True)
    errors = errors.reindex(index=values.index, columns=values.columns)
    steps = tuple(int(step) for step in values.index)
    numbers, sizes = values.to_numpy(float), errors.to_numpy(float)
    if share or (numbers <= 0).any():
        return Course(steps, numbers.mean(1), _means(sizes), share)
    means = np.exp(np.log(numbers).mean(1))
    return Course(steps, means, means * _means(sizes / numbers), False)


def _means(errors: Floats) -> Floats:
    known = np.isfinite(errors)
    count = known.sum(1)
    total = np.where(known, errors, 0.0).sum(1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
