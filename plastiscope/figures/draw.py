"""Draw figures to files: the pictures and, beside each, its numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ..errors import NotEnoughEvidenceError, UsageError, unknown
from ..store import replacing
from .components import component_rank, component_rank_grid, component_stable_rank, weight_magnitude
from .delta import delta_heatmap, delta_heatmap_blocks
from .depth import cls_rank
from .heads import head_magnitude, head_magnitude_map, head_rank, head_rank_map
from .isometry import isometry, isometry_map, isometry_types, isometry_violins, ntk
from .jacobian import jacobian_depth
from .kind import Blocks, Kind, Names, Steps, check_names, choose
from .law import onset_law
from .network import dormant_layers, head_shares, network_course, probe_auc
from .selection import Choice
from .sensitivity import rate_bound, rate_box, rate_of_change
from .style import FORMATS, Look, look, save
from .tasks import accuracy
from .units import units

FIGURES: tuple[Kind, ...] = (
    delta_heatmap,
    delta_heatmap_blocks,
    component_rank,
    component_stable_rank,
    component_rank_grid,
    weight_magnitude,
    head_rank,
    head_rank_map,
    head_magnitude,
    head_magnitude_map,
    cls_rank,
    units,
    accuracy,
    network_course,
    dormant_layers,
    head_shares,
    probe_auc,
    onset_law,
    isometry,
    isometry_types,
    isometry_map,
    isometry_violins,
    jacobian_depth,
    ntk,
    rate_of_change,
    rate_box,
    rate_bound,
)

STANDARD = (
    "delta-heatmap", "delta-heatmap-blocks", "component-rank", "weight-magnitude", "head-rank",
    "head-magnitude", "head-rank-map", "cls-rank", "units", "accuracy", "network",
)  # fmt: skip
"""What an analysis draws by itself; the others on request."""
MOST_LINES = 200_000


@dataclass(frozen=True)
class Drawn:
    """A figure that was drawn, or the reason (`note`) why there was nothing to draw.

    The note of one that was drawn says what a reader must beware of.
    """

    name: str
    files: tuple[Path, ...]
    note: str = ""


def draw(
    table: pd.DataFrame,
    out_dir: Path,
    names: Sequence[str] | None = None,
    formats: Sequence[str] = ("png", "pdf", "svg"),
    style: str | Path | Look = "paper",
    metric: str | None = None,
    block: Blocks = None,
    head: Blocks = None,
    component: Names = None,
    steps: Steps = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    x: str = "step",
    tokens_per_step: float | None = None,
    parameters: str | None = None,
    probe: str | None = None,
    subject: str | None = None,
) -> list[Drawn]:
    """Draw the named figures (all by default) of the table into `out_dir`.

    Each is written once a format, with its numbers beside it, as CSV or, of more than 200,000
    rows, as Parquet. A figure that the table has
    no data for comes back without files and with a note. With `metric`, only the figures that can
    show any metric are drawn.

    Raises UsageError for an unknown figure, format, style, run of a group, or x axis.
    """
    kinds, of = _named(names, metric), look(style)
    for kind in formats:
        if kind not in FORMATS:
            raise unknown("format", kind, FORMATS)
    choice = choose(
        metric,
        block,
        head,
        component,
        steps,
        groups,
        x,
        tokens_per_step,
        parameters,
        probe,
        subject,
    )
    check_names(table, choice)
    return [_draw(table, out_dir, kind, choice, formats, of) for kind in kinds]


def _named(names: Sequence[str] | None, metric: str | None) -> list[Kind]:
    known = {kind.name: kind for kind in FIGURES}
    for name in names or ():
        if name not in known:
            raise unknown("figure", name, known)
    kinds = [known[name] for name in names] if names else list(FIGURES)
    if metric is None:
        return kinds
    fixed = [kind.name for kind in kinds if not kind.takes_metric]
    if names and fixed:
        raise UsageError(f"{', '.join(fixed)} shows its own metrics: leave out the metric")
    return [kind for kind in kinds if kind.takes_metric]


def _draw(
    table: pd.DataFrame, out: Path, kind: Kind, choice: Choice, formats: Sequence[str], of: Look
) -> Drawn:
    try:
        data = kind.data(table, choice)
    except NotEnoughEvidenceError as error:
        return Drawn(kind.name, (), f"no data: {error}")
    figure = kind.draw(data, choice, of)
    stem = out / _stem(kind.name, choice)
    files = [save(figure, stem.with_name(f"{stem.name}.{ending}"), of) for ending in formats]
    numbers = _write_numbers(data, stem)
    return Drawn(kind.name, (*files, numbers), _caution(table, data, choice))


def _caution(table: pd.DataFrame, data: pd.DataFrame, choice: Choice) -> str:
    shown = {str(run).split("/")[0] for run in data["run"]}
    absent = [str(r) for r in table["run"].dropna().unique() if str(r).split("/")[0] not in shown]
    if absent and not choice.groups:
        return f"no value in {', '.join(absent)}"
    # The tasks of one run may have a probe each: these are no runs to compare.
    several = "probe" in data and bool(data["run"].nunique() > 1 or choice.groups)
    probes = {str(one) for one in data["probe"].dropna()} if several else set()
    if len(probes) > 1 or " and " in "".join(probes):
        return "the runs were measured on different probes: compare their courses, not their levels"
    return ""


def _stem(name: str, choice: Choice) -> str:
    """A file name that tells the choices apart."""
    parts = [name, choice.metric or "", *choice.components]
    parts += [f"block-{block}" for block in choice.blocks]
    parts += [f"head-{head}" for head in choice.heads]
    parts += [part for part in (choice.parameters, choice.subject) if part]
    plain = re.sub(r"[^A-Za-z0-9._=+-]+", "-", "-".join(part for part in parts if part))
    return plain[:120]


def _write_numbers(data: pd.DataFrame, stem: Path) -> Path:
    """CSV, or Parquet where that would be tens of megabytes."""
    kept = data.dropna(axis="columns", how="all")
    ending = "csv" if len(kept) <= MOST_LINES else "parquet"
    file = stem.with_name(f"{stem.name}.{ending}")
    with replacing(file) as partial:
        if ending == "csv":
            kept.to_csv(partial, index=False)
        else:
            kept.to_parquet(partial, index=False)
    return file
