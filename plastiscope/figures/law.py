"""Onset of plasticity loss against model size: T = a P^b, fitted by least squares in logarithms."""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ..errors import NotEnoughEvidenceError
from .kind import Kind
from .network import Numbers, probe_auc_data
from .panels import Canvas, canvas, legend, runs_of
from .selection import Choice, pick
from .style import BLUE, GREEN, ORANGE, PURPLE, Look


@dataclass(frozen=True)
class Law:
    """T = exp(intercept) P^exponent fitted by least squares in logarithms."""

    intercept: float
    exponent: float
    exponent_error: float
    r_squared: float
    residual_deviation: float
    mean_log_size: float
    spread_log_size: float
    count: int

    def at(self, sizes: Numbers) -> Numbers:
        """The fitted onset at these sizes."""
        fitted: Numbers = np.exp(self.intercept + self.exponent * np.log(sizes))
        return fitted

    def band(self, sizes: Numbers) -> Numbers:
        """The factor by which one new model lies within the fit, 95 % of the time."""
        distance = (np.log(sizes) - self.mean_log_size) ** 2 / self.spread_log_size
        error = self.residual_deviation * np.sqrt(1 + 1 / self.count + distance)
        factor: Numbers = np.exp(student_quantile(self.count - 2) * error)
        return factor


def fit_law(sizes: Numbers, onsets: Numbers) -> Law:
    """Fit T = a P^b. Raises NotEnoughEvidenceError under three sizes."""
    x, y = np.log(sizes), np.log(onsets)
    if len(x) < 3 or len(np.unique(x)) < 2:
        raise NotEnoughEvidenceError("a law over model sizes needs three models of different size")
    spread = float(((x - x.mean()) ** 2).sum())
    exponent = float(((x - x.mean()) * (y - y.mean())).sum() / spread)
    intercept = float(y.mean() - exponent * x.mean())
    rest = float(((y - intercept - exponent * x) ** 2).sum())
    deviation = float(np.sqrt(rest / (len(x) - 2)))
    total = float(((y - y.mean()) ** 2).sum())
    return Law(
        intercept,
        exponent,
        deviation / float(np.sqrt(spread)),
        1 - rest / total if total else 1.0,
        deviation,
        float(x.mean()),
        spread,
        len(x),
    )


def student_quantile(freedom: int, share: float = 0.975) -> float:
    """Student's t quantile, by integrating its density (SciPy isn't a dependency)."""
    # With t = sqrt(freedom) tan(angle) the density is cos(angle)^(freedom - 1) on a finite range.
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    steps = (density[1:] + density[:-1]) / 2
    total = np.concatenate([[0.0], np.cumsum(steps)])
    angle = np.interp((2 * share - 1) * total[-1], total, angles)
    return float(np.sqrt(freedom) * np.tan(angle))


def onset_law_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """One row a run: parameter count, onset, the fitted onset, residual and 95 % band.

    The onset is that of `probe_auc_data`, at the x asked for; a run records its `parameter_count`
    beside it.
    """
    courses = probe_auc_data(table, choice)
    onsets = courses[courses["onset"]].set_index("run")["x"]
    sizes = pick(table, choice, "parameter_count", ("network", "weight"))
    sizes = sizes[sizes["block"].isna()].drop_duplicates("run", keep="last").set_index("run")
    runs = [run for run in runs_of(courses, choice) if run in onsets and run in sizes.index]
    x, y = sizes.loc[runs, "value"].to_numpy(float), onsets.loc[runs].to_numpy(float)
    kept = (x > 0) & (y > 0)
    law = fit_law(x[kept], y[kept])
    return law_frame(law, x[kept], y[kept], [r for r, k in zip(runs, kept, strict=True) if k])


def law_frame(law: Law, x: Numbers, y: Numbers, runs: list[str]) -> pd.DataFrame:
    """The fit as a table."""
    fitted, factor = law.at(x), law.band(x)
    return pd.DataFrame(
        {
            "run": runs,
            "parameter_count": x,
            "value": y,
            "fitted": fitted,
            "log_residual": np.log(y / fitted),
            "low": fitted / factor,
            "high": fitted * factor,
            "exponent": law.exponent,
            "exponent_error": law.exponent_error,
            "r_squared": law.r_squared,
        }
    )


def draw_onset_law(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """Left the onsets, the law and its band, log-log; right the residuals."""
    x, y = data["parameter_count"].to_numpy(float), data["value"].to_numpy(float)
    law = fit_law(x, y)
    on = canvas(of, 1 if axes is not None else 2, axes, columns=2, height=2.0, share=(False, False))
    panel = on.panels[0]
    line = np.geomspace(x.min() / 1.5, x.max() * 1.5, 100)
    (points,) = panel.loglog(x, y, linestyle="", marker="o", color=BLUE, markersize=of.marker * 2)
    (fit,) = panel.loglog(line, law.at(line), color=ORANGE)
    factor = law.band(line)
    panel.fill_between(line, law.at(line) / factor, law.at(line) * factor, color=ORANGE, alpha=0.2)
    name = f"b = {law.exponent:.3f} ± {law.exponent_error:.3f}, R² = {law.r_squared:.3f}"
    on.entries |= {"onset of a model": points, f"a P^b, 95 % band; {name}": fit}
    panel.set_xlabel("parameters")
    panel.set_ylabel(f"onset ({choice.x})")
    if len(on.panels) > 1:
        rest = on.panels[1]
        rest.semilogx(x, data["log_residual"], linestyle="", marker="s", color=PURPLE,
                      markersize=of.marker * 2)  # fmt: skip
        rest.axhline(0, color=GREEN)
        rest.set_xlabel("parameters")
        rest.set_ylabel("log residual")
    legend(on)
    return on


onset_law = Kind(
    "onset-law",
    "onset against model size, log-log, with the fitted law, its residuals and prediction band",
    onset_law_data,
    draw_onset_law,
    takes_metric=False,
)
