"""The study of dynamical isometry: spectra of the weights and of the tangent kernel."""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ..errors import NotEnoughEvidenceError, UsageError
from .depth import sampled
from .kind import Kind
from .panels import (
    Canvas,
    canvas,
    colour_bar,
    depth_colours,
    finish_courses,
    map_labels,
    picture,
    run_courses,
    runs_of,
    span,
    visible,
    with_breaks,
)
from .selection import Choice, blocks_of, demand_values, grouped, ordered, pick
from .style import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, Look, mark
from .ticks import (
    count_text,
    label_columns,
    log_scale,
    measure,
    plain,
    spans_powers,
    stacked,
    words,
)

RANKS = ("effective_rank_squared", "effective_rank")
QUANTITIES = {
    "condition_number": "condition number",
    "effective_rank_squared": "effective rank (squared)",
    "effective_rank": "effective rank",
    "sigma_squared_max": "max σ²",
    "sigma_squared_min": "min σ²",
    "sigma_squared_mean": "mean σ²",
}
KERNEL_METRICS = ("ntk_spectrum", "ntk_condition_number", "ntk_effective_rank")
DEFAULT_FUNCTION = "f=mean_logit"
COLOURS = dict(zip(QUANTITIES, (BLUE, GREEN, GREEN, RED, PURPLE, ORANGE), strict=True))


def spectra(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Condition number, rank, max, min and mean of sigma^2 of every whole matrix, one a row."""
    wanted: list[tuple[str, str, str | None]]
    wanted = [(name, name, None) for name in ("condition_number", *RANKS)]
    wanted += [(f"sigma_squared_{p}", "squared_singular_value", p) for p in ("max", "min", "mean")]
    parts, reasons = [], []
    for quantity, metric, parameters in wanted:
        try:
            data = _weights(table, replace(choice, parameters=parameters), metric)
        except (NotEnoughEvidenceError, UsageError) as error:
            reasons.append(str(error))
            continue
        parts.append(data.assign(metric=quantity))
    if not parts:
        raise NotEnoughEvidenceError(reasons[0])
    long = pd.concat(parts, ignore_index=True)
    squared = (long["metric"] == RANKS[0]).any()
    return long[long["metric"] != RANKS[1]] if squared else long


def _weights(table: pd.DataFrame, choice: Choice, metric: str) -> pd.DataFrame:
    data = pick(table, choice, metric, ("weight",))
    return data[data["head"].isna() & (data["component"] != "network")]


def _means(table: pd.DataFrame, choice: Choice, by_type: bool) -> pd.DataFrame:
    """Plain means over matrices, of all or of each weight type; null when any matrix has none."""
    long = spectra(table, choice)
    keys = ["run", "checkpoint", "point", "x"] + (["component"] if by_type else [])
    groups = long.groupby([*keys, "metric"], sort=False, dropna=False)["value"]
    means = groups.agg(lambda one: one.mean(skipna=False)).reset_index()
    means["matrices"] = groups.size().to_numpy()
    means = means.assign(block=np.nan, head=np.nan, index=np.nan, status="ok")
    means = means.assign(series=means["metric"])
    means = means if by_type else means.assign(component="network")
    result = grouped(demand_values(means, "spectrum of the weights"), choice)
    result["metric"] = result["series"]
    return with_breaks(result.drop(columns="series"), ["metric", "component"])


def isometry_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Plain mean over all weight matrices of each spectral quantity, over checkpoints."""
    return _means(table, choice, by_type=False)


def isometry_types_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Plain mean over the matrices of each weight type of each spectral quantity."""
    return _means(table, choice, by_type=True)


def draw_isometry(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """2 x 3 panels: condition number (dashed at 1), rank, max, min and mean of sigma squared.

    Logarithmic where all values are positive and span more than a factor of 100.
    """
    metrics = [name for name in QUANTITIES if (data["metric"] == name).any()]
    on = canvas(of, len(metrics), axes, columns=3, height=1.5, share=(True, False))
    names = ordered(list(data["component"].unique()))
    for panel, metric in zip(on.panels, metrics, strict=True):
        here = data[data["metric"] == metric]
        for name in names:
            one, label = here[here["component"] == name], words(name) if len(names) > 1 else ""
            colour, marker = mark(name, names) if len(names) > 1 else (COLOURS[metric], "o")
            run_courses(on, panel, one, choice, label, colour, marker)
        title, shown = QUANTITIES[metric], list(here["value"])
        if metric == "condition_number":
            panel.axhline(1, color=of.ink, linestyle="--", linewidth=0.8 * of.line)
            title, shown = f"{title} (dashed: isometry)", [*shown, 1.0]
        panel.set_title(title)
        log_scale(panel, shown)
    over = "matrices of each type" if len(names) > 1 else "all weight matrices"
    finish_courses(on, choice, f"mean over {over}")
    return on


def isometry_map_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """The condition number of every matrix at the first, the middle and the last checkpoint."""
    metric = choice.metric or "condition_number"
    data = _weights(table, choice, metric)
    data = demand_values(grouped(data[data["block"].notna()], choice), metric)
    return sampled(data, 3).assign(metric=metric)


def draw_isometry_map(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """Layer x weight type, one colour bar clipped to the 2nd to 98th percentile."""
    blocks, names = blocks_of(data), ordered(list(data["component"].unique()))
    pairs = [
        (run, point)
        for run in runs_of(data, choice)
        for point in sorted(data.loc[data["run"] == run, "point"].unique())
    ]
    height = min(max(1.4, len(blocks) * of.row + 0.5), 6) / (of.double / Look.double)
    on = canvas(of, len(pairs), axes, columns=3, height=height, width=of.double)
    limits = span(data["value"], (2, 98))
    labels = [stacked(words(name)) for name in names]
    short = len(names) * max(map(len, labels)) < 30
    for panel, (run, point) in zip(on.panels, pairs, strict=True):
        here = data[(data["run"] == run) & (data["point"] == point)]
        values = here.pivot(index="block", columns="component", values="value")
        values = values.reindex(index=blocks, columns=names).to_numpy(float)
        image = picture(on, panel, values, limits, "viridis")
        map_labels(panel, [str(block) for block in blocks], [])
        label_columns(panel, labels)
        panel.tick_params(axis="x", labelrotation=0 if short else 90)
        who = f"{plain(run)}, " if data["run"].nunique() > 1 else ""
        panel.set_title(f"{who}{choice.x} {count_text(here['x'].iloc[0])}")
    on.panels[0].set_ylabel("block")
    colour_bar(on, image, words(str(data["metric"].iloc[0])), extend="both")
    return on


def isometry_violins_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Condition number of every matrix at five checkpoints of each run."""
    metric = choice.metric or "condition_number"
    data = demand_values(_weights(table, replace(choice, groups={}), metric), metric)
    return sampled(data, 5).assign(metric=metric)


def draw_isometry_violins(
    data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None
) -> Canvas:
    """Distributions over matrices; every matrix a dot, the median a line.

    In powers of ten where all values are positive and span more than a factor of 100.
    """
    runs = [str(run) for run in data["run"].unique()]
    powers = spans_powers(data["value"])
    on = canvas(of, len(runs), axes, columns=2, height=1.9)
    for panel, run in zip(on.panels, runs, strict=True):
        here = data[(data["run"] == run) & np.isfinite(data["value"])]
        points = sorted(data.loc[data["run"] == run, "point"].unique())
        for place, point in enumerate(points):
            values = here.loc[here["point"] == point, "value"]
            _violin(panel, np.log10(values) if powers else values, place, of)
        xs = data[data["run"] == run].drop_duplicates("point").set_index("point")["x"]
        label_columns(panel, [count_text(xs[point]) for point in points])
        panel.set_xlim(-0.6, len(points) - 0.4)
        panel.set_xlabel("training step" if choice.x == "step" else choice.x)
        panel.set_title(plain(run) if len(runs) > 1 else "")
    name = measure(str(data["metric"].iloc[0]))
    on.panels[0].set_ylabel(f"log₁₀ {name}" if powers else name)
    return on


def _violin(axes: Axes, values: pd.Series, place: int, of: Look) -> None:
    if len(values) >= 2:
        body = axes.violinplot([values.to_numpy()], [place], showextrema=False, showmedians=True)
        for shape in body["bodies"]:  # type: ignore[attr-defined]
            shape.set(facecolor=SKY, alpha=0.55, linewidth=0)
        body["cmedians"].set(color=of.ink, linewidth=of.line)
    across = place + np.linspace(-0.06, 0.06, len(values))
    dot = {"color": visible(BLUE, of), "markersize": of.marker * 0.8}
    axes.plot(across, values, linestyle="", marker=".", **dot)


def ntk_data(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Spectrum of the empirical tangent kernel, its condition number and effective rank.

    Of several kernels that of the mean logit, unless `choice.parameters` names another.
    """
    parts = []
    function = _function(table)
    for metric in KERNEL_METRICS:
        try:
            data = pick(
                table, choice, metric, (), indexed=metric == "ntk_spectrum",
                matching=None if choice.parameters else lambda text: _of(text) == function,
            )  # fmt: skip
        except NotEnoughEvidenceError:
            continue
        data = data[data["block"].isna()]
        data = data[data["component"].isna() | (data["component"] == "network")]
        if len(data):
            shown = with_breaks(grouped(data, choice), ["index"]).assign(metric=metric)
            parts.append(shown.assign(parameters=" and ".join(sorted(set(data["parameters"])))))
    if not parts:
        raise NotEnoughEvidenceError("the tables hold no tangent kernel")
    return demand_values(pd.concat(parts, ignore_index=True), "tangent kernel")


def _function(table: pd.DataFrame) -> str:
    """The function whose kernel is shown: the default one where it was measured."""
    rows = table[table["metric"].isin(KERNEL_METRICS)]
    known = sorted({_of(str(text)) for text in rows["parameters"].dropna().unique()})
    return DEFAULT_FUNCTION if DEFAULT_FUNCTION in known else next(iter(known), "")


def _of(parameters: str) -> str:
    return parameters.partition(",")[0]


def draw_ntk(data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None) -> Canvas:
    """Eigenvalues over checkpoints (log), condition number (log) and effective rank; above, the
    kernel's function and inputs."""
    metrics = list(dict.fromkeys(data["metric"]))
    on = canvas(of, len(metrics), axes, columns=3, height=1.8, share=(True, False))
    for panel, metric in zip(on.panels, metrics, strict=True):
        here = data[data["metric"] == metric]
        if metric == "ntk_spectrum":
            _spectrum(on, panel, here, choice, of)
        else:
            colour = BLUE if metric == "ntk_condition_number" else GREEN
            run_courses(on, panel, here, choice, "", colour, "o")
        if metric != "ntk_effective_rank":
            panel.set_yscale("log", nonpositive="mask")
        panel.set_title(words(metric))
    if on.own:
        on.figure.suptitle(plain(data["parameters"].iloc[0]))
    finish_courses(on, choice, "")
    return on


def _spectrum(on: Canvas, axes: Axes, data: pd.DataFrame, choice: Choice, of: Look) -> None:
    numbers = sorted(data["index"].unique())
    for colour, number in zip(depth_colours(len(numbers), of), numbers, strict=True):
        named = {numbers[0]: "greatest eigenvalue", numbers[-1]: "least eigenvalue"}
        label = named.get(number, "")
        run_courses(on, axes, data[data["index"] == number], choice, label, colour)


isometry = Kind(
    "isometry",
    "condition number, effective rank, max, min and mean of sigma squared over all weights",
    isometry_data,
    draw_isometry,
    takes_metric=False,
)
isometry_types = Kind(
    "isometry-types",
    "the same spectral quantities for each weight type",
    isometry_types_data,
    draw_isometry,
    takes_metric=False,
)
isometry_map = Kind(
    "isometry-map",
    "condition number, layer x weight type, at the first, middle and last checkpoint",
    isometry_map_data,
    draw_isometry_map,
)
isometry_violins = Kind(
    "isometry-violins",
    "distribution of the condition numbers of all matrices at five checkpoints",
    isometry_violins_data,
    draw_isometry_violins,
)
ntk = Kind(
    "ntk",
    "spectrum of the empirical tangent kernel over checkpoints, condition number and rank",
    ntk_data,
    draw_ntk,
    takes_metric=False,
)
