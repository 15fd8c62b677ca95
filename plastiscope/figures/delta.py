"""Difference maps: the last block against the first, and every block against its beginning."""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from ..errors import NotEnoughEvidenceError
from .kind import Kind
from .panels import (
    Canvas,
    canvas,
    colour_bar,
    map_labels,
    matrix,
    picture,
    runs_of,
    symmetric_limit,
    x_label,
)
from .selection import (
    Choice,
    blocks_of,
    demand_values,
    grouped,
    in_chosen_blocks,
    ordered,
    pick,
    without_heads,
)
from .style import Look
from .ticks import label_rows, plain, quantity, words

SUBJECTS = ("feature", "weight", "unit", "attention", "jacobian", "gradient", "ntk", "network")
STUDY = ["norm1", "attention_output", "residual1", "norm2", "fc1", "activation", "fc2", "residual2"]
STUDY += ["q", "k", "v"]


def any_subject(table: pd.DataFrame, metric: str) -> list[str]:
    """The subjects that the table has for a metric, features first."""
    present = set(table.loc[table["metric"] == metric, "subject"].dropna())
    return [name for name in SUBJECTS if name in present] + sorted(present - set(SUBJECTS))


def component_values(table: pd.DataFrame, choice: Choice, metric: str) -> pd.DataFrame:
    """One value of the metric for each run, checkpoint, block and component."""
    data = pick(table, choice, metric, any_subject(table, metric), parameters="tau=0.025")
    return without_heads(in_chosen_blocks(data, choice)).assign(metric=metric)


def block_difference(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """`value` = the metric at the later block minus the metric at the earlier one.

    Null where either is null. Columns `first_block`, `last_block` say which two: the ends of each
    run's network, or the two (first and last) of those chosen.
    """
    data = component_values(table, choice, choice.metric or "effective_rank")
    pairs = [_ends(one, choice) for _, one in data.groupby("run", sort=False)]
    found = [pair for pair in pairs if pair is not None and len(pair)]
    if not found:
        raise NotEnoughEvidenceError("a difference needs two blocks that share a component")
    both = pd.concat(found, ignore_index=True)
    both = demand_values(both, both["metric"].iloc[0])
    blocks = both[["first_block", "last_block"]].drop_duplicates()
    result = grouped(both, choice)
    if choice.groups:
        first, last = blocks.iloc[0] if len(blocks) == 1 else (float("nan"), float("nan"))
        result = result.assign(first_block=first, last_block=last)
    return result.assign(metric=both["metric"].iloc[0], subject=both["subject"].iloc[0])


def _ends(data: pd.DataFrame, choice: Choice) -> pd.DataFrame | None:
    """One run's difference; None where it has no two blocks, or lacks one of those chosen."""
    present = blocks_of(data)
    blocks = list(choice.blocks) or present
    if len(blocks) < 2 or not {blocks[0], blocks[-1]} <= set(present):
        return None
    first, last = blocks[0], blocks[-1]
    keys = ["run", "checkpoint", "component", "index"]
    start, end = (data[data["block"] == block] for block in (first, last))
    both = end.merge(start[[*keys, "value"]], on=keys, suffixes=("", "_first"))
    both = both.rename(columns={"value": "last_value", "value_first": "first_value"})
    both["value"] = both["last_value"] - both["first_value"]
    return both.assign(first_block=first, last_block=last, block=float("nan"))


def draw_block_difference(
    data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None
) -> Canvas:
    """Rows are components in the study's order, columns checkpoints, one panel a run."""
    present = list(data["component"].unique())
    rows = [name for name in STUDY if name in present]
    rows += [name for name in ordered(present) if name not in rows]
    pairs = data[["first_block", "last_block"]].drop_duplicates().dropna()
    title = "last block minus first block"
    if len(pairs) == 1:
        first, last = (int(block) for block in pairs.iloc[0])
        title = f"block {last} minus block {first}"
    return _maps(data, choice, of, axes, rows, [words(row) for row in rows], title)


def start_difference(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """`value` = the metric at a checkpoint minus the metric at its run's first checkpoint.

    Null where either is null, and where the component's shape changed in between. Rows of every
    block and component, those outside blocks included.
    """
    metric = choice.metric or "effective_rank"
    data = component_values(table, choice, metric)
    keys = ["run", "block", "component", "index"]
    first = data[data["point"] == 0].rename(columns={"value": "first_value"})
    first = first.rename(columns={"segment": "first_segment"})
    data = data.merge(first[[*keys, "first_value", "first_segment"]], on=keys, how="left")
    same = data["segment"] == data["first_segment"]
    data["value"] = (data["value"] - data["first_value"]).where(same)
    subject = data["subject"].iloc[0]
    data = grouped(demand_values(data, metric), choice).assign(metric=metric, subject=subject)
    return data.assign(row=_row_keys(data))


def _row_keys(data: pd.DataFrame) -> list[str]:
    return [
        component if pd.isna(block) else f"{int(block)}/{component}"
        for block, component in zip(data["block"], data["component"], strict=True)
    ]


def depth_order(data: pd.DataFrame) -> list[tuple[int | None, str]]:
    """(block, component) from the input to the output."""
    places = data[["block", "component"]].drop_duplicates()
    ranks = {name: rank for rank, name in enumerate(ordered(list(places["component"])))}
    after = ranks.get("final_norm", ranks.get("head", len(ranks)))

    def key(place: tuple[float, str]) -> tuple[float, float, int]:
        block, name = place
        if pd.isna(block):
            return (0 if ranks[name] < after and name == "embedding" else 2, 0, ranks[name])
        return (1, block, ranks[name])

    rows = sorted(places.itertuples(index=False, name=None), key=key)
    return [(None if pd.isna(block) else int(block), name) for block, name in rows]


def draw_start_difference(
    data: pd.DataFrame, choice: Choice, of: Look, axes: Axes | None
) -> Canvas:
    """Rows from input to output; a block's name stands beside its first row."""
    places = depth_order(data)
    rows = [name if block is None else f"{block}/{name}" for block, name in places]
    labels = [words(n) if b is None else f"{b}: {words(n)}" for b, n in places]
    data = data.drop(columns="component").rename(columns={"row": "component"})
    title = "change from the first checkpoint"
    on = _maps(data, choice, of, axes, rows, labels, title)
    for panel in on.panels if len(places) <= 150 else ():
        for row in range(1, len(places)):
            if places[row][0] != places[row - 1][0]:
                panel.axhline(row - 0.5, color=of.paper, linewidth=1.5 * of.line)
    if len(rows) * of.row * 0.8 > on.figure.get_figheight() - 3 * of.row:
        for panel in on.panels[:: _columns(len(on.panels))]:
            _name_blocks(panel, places)
    return on


def _name_blocks(axes: Axes, places: list[tuple[int | None, str]]) -> None:
    """Too many rows to name each: name the blocks, each at its first row."""
    label_rows(axes, ["" for _ in places])
    starts, names, seen = [], [], set()
    for row, (block, name) in enumerate(places):
        label = words(name) if block is None else f"block {block}"
        if label not in seen:
            seen.add(label)
            starts.append(row)
            names.append(label)
    axes.set_yticks(starts, names)


def _columns(panels: int) -> int:
    return 1 if panels == 1 else 2


def _maps(
    data: pd.DataFrame,
    choice: Choice,
    of: Look,
    axes: Axes | None,
    rows: list[str],
    labels: list[str],
    title: str,
) -> Canvas:
    runs = runs_of(data, choice)
    height = min(max(len(rows), 7) * of.row * 0.95 + 0.2, of.tallest * 0.45) / (
        of.double / Look.double
    )
    wide = of.double if len(runs) > 1 or data["point"].max() > 24 else of.single
    on = canvas(
        of, len(runs), axes, columns=_columns(len(runs)), height=height, width=wide,
        share=(False, True),
    )  # fmt: skip
    limit = symmetric_limit(data["value"])
    for panel, run in zip(on.panels, runs, strict=True):
        values, xs = matrix(data[data["run"] == run], rows, "component")
        image = picture(on, panel, values, (-limit, limit), "RdBu_r")
        map_labels(panel, labels, xs)
        panel.set_title(plain(run) if len(runs) > 1 else title)
        panel.set_xlabel(x_label(choice))
    if on.own and len(runs) > 1:
        on.figure.suptitle(title)
    colour_bar(on, image, f"difference in\n{quantity(data)}")
    return on


delta_heatmap = Kind(
    "delta-heatmap",
    "metric at the last block minus the metric at the first, by component and checkpoint",
    block_difference,
    draw_block_difference,
)
delta_heatmap_blocks = Kind(
    "delta-heatmap-blocks",
    "every component of every block, minus its value at the first checkpoint",
    start_difference,
    draw_start_difference,
)
