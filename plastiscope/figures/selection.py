"""What of the table a figure shows: one metric, one probe, the chosen runs, blocks, heads, steps.

The result is tidy and unambiguous: at most one value for each (run, checkpoint, block, component,
head, index). Two different values for one place are an error, never averaged away.
"""

# pandas' stubs call a filtered frame Any where pyarrow has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from ..errors import NotEnoughEvidenceError, UsageError, unknown

# fmt: off
COMPONENTS = (
    "embedding", "norm1", "q", "k", "v", "attention", "attention_output", "residual1", "norm2",
    "router", "gate", "fc1", "experts", "conv", "fc", "norm", "activation", "fc2",
    "residual2", "final_norm", "head", "network",
)
# fmt: on
X = ("step", "task", "checkpoint", "tokens")
PLACE = ["run", "checkpoint", "block", "component", "head", "index"]
_NEEDED = [*PLACE, "step", "task", "segment", "branch", "tokens", "subject", "metric", "parameters"]
_NEEDED += ["value", "standard_error", "maximum", "rows", "columns", "status", "probe"]
_NUMBERS = ["block", "head", "index", "step", "task", "value", "standard_error", "maximum"]
_NUMBERS += ["rows", "columns", "segment"]


@dataclass(frozen=True)
class Choice:
    """What the user asked for; empty means the figure's own default.

    `steps` is an inclusive range. `x` is what lies on the horizontal axis; "tokens" is
    step * `tokens_per_step`. `groups` maps a name to runs shown as their mean and standard
    deviation. `parameters` ("tau=0.01"), `probe` and `subject` choose between rows that differ
    only there. `runs` are those that the figure shows, once it is known: each has its dash pattern
    in every panel, whether or not the others have a line there.
    """

    metric: str | None = None
    blocks: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    components: tuple[str, ...] = ()
    steps: tuple[int | None, int | None] = (None, None)
    x: str = "step"
    tokens_per_step: float | None = None
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    parameters: str | None = None
    probe: str | None = None
    subject: str | None = None
    runs: tuple[str, ...] = ()


def pick(
    table: pd.DataFrame,
    choice: Choice,
    metric: str,
    subjects: Sequence[str] = (),
    *,
    tokens: str | None = None,
    parameters: str | Sequence[str] = (),
    matching: Callable[[str], bool] | None = None,
    indexed: bool = False,
) -> pd.DataFrame:
    """The rows of one metric, restricted to the choice.

    `subjects` are tried in order and the first that has rows is taken (`choice.subject` goes
    first); without any, the first subject that has the metric. `tokens` None means all tokens.
    Where rows of several parameters exist, the first of `parameters` that is there is the default;
    with `matching`, all rows whose parameters match are taken (they differ by component).
    Of several probes, the one chosen, or else the one that a run has most rows of; results of
    tasks are of all probes, each task being measured on its own.
    Columns of the result: run, checkpoint, x, point (rank of the checkpoint within its run), block,
    component, head, index (floats, NaN for null), segment, value, standard_error, maximum, rows,
    columns, status, subject, parameters, probe.

    Raises NotEnoughEvidenceError when nothing is left, with the reason.
    """
    _check_x(choice)
    rows = _of_metric(table, metric)
    rows = _of_subject(rows, choice, metric, subjects)
    rows = rows[_has_tokens(rows, tokens) & (rows["index"].notna() == indexed)]
    rows = _within(rows, choice)
    if rows.empty:
        of = "what was chosen" if tokens is None else f"{tokens.upper()} tokens"
        raise NotEnoughEvidenceError(f"the tables hold no {metric} of {of}")
    if matching is None:
        rows = _one(rows, "parameters", choice.parameters, parameters)
    else:
        rows = rows[[matching(str(text)) for text in rows["parameters"]]]
    # Each run has a probe of its own: that of another run would leave it without rows; each task
    # of a stream may have one too.
    if choice.probe or rows["subject"].iloc[0] != "task":
        own = [_one(one, "probe", choice.probe) for _, one in rows.groupby("run", observed=True)]
        rows = pd.concat(own).sort_index(kind="stable")
    rows = _named_runs(rows)
    rows["x"] = _x(rows, choice)
    return _unambiguous(rows, metric)


def demand_values(data: pd.DataFrame, what: str) -> pd.DataFrame:
    """The data itself, when it holds at least one finite value; otherwise the reasons why not."""
    if np.isfinite(data["value"].to_numpy(float)).any():
        return data
    reasons = data["status"].astype(str).value_counts() if "status" in data else pd.Series()
    listed = ", ".join(f"{name} ({count} rows)" for name, count in reasons.items() if name != "ok")
    raise NotEnoughEvidenceError(f"no value of {what}" + (f": {listed}" if listed else ""))


def grouped(data: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """The runs of each group as one: mean, standard deviation (`spread`) and number of runs.

    A mean is given only where every run of the group has a value: the mean of the runs that are
    left would flatter a group whose other runs have failed. Without groups, the data with an
    empty `spread`.
    """
    if not choice.groups:
        return data.assign(spread=np.nan, runs=1)
    parts = [_group(data, name, list(members)) for name, members in choice.groups.items()]
    return pd.concat(parts, ignore_index=True)


def _group(data: pd.DataFrame, name: str, members: list[str]) -> pd.DataFrame:
    known = set(data["run"])
    for member in members:
        if member not in known:
            raise NotEnoughEvidenceError(
                f"run {member!r} has no value here, so group {name!r} has no mean"
            )
    extra = [column for column in ("series",) if column in data]
    keys = ["x", "block", "component", "head", "index", *extra]
    mine = data[data["run"].isin(members)].sort_values("point", kind="stable")
    mine = mine.drop_duplicates(["run", *keys], keep="last")
    one = mine.groupby(keys, dropna=False, sort=True, observed=True)["value"]
    result = one.agg(value="mean", spread="std", runs="count").reset_index()
    incomplete = result["runs"] < len(set(members))
    result.loc[incomplete, ["value", "spread"]] = np.nan
    if incomplete.all():
        raise NotEnoughEvidenceError(f"the runs of group {name!r} share no point of the x axis")
    rank = {x: place for place, x in enumerate(sorted(result["x"].unique()))}
    probes = sorted(set(mine["probe"].dropna())) if "probe" in mine else []
    result = result.assign(run=name, checkpoint="", point=result["x"].map(rank), status="ok")
    return result.assign(standard_error=np.nan, probe=" and ".join(probes) or None)


def ordered(components: Sequence[str]) -> list[str]:
    """Component names in forward order; names of no canonical part last, as they came."""
    place = {name: number for number, name in enumerate(COMPONENTS)}
    return sorted(dict.fromkeys(components), key=lambda name: place.get(name, len(place)))


def blocks_of(data: pd.DataFrame) -> list[int]:
    """The block numbers in the data, ascending."""
    return sorted(int(block) for block in data["block"].dropna().unique())


def spaced(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    places = np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))
    return [items[place] for place in places]


def is_transformer(table: pd.DataFrame) -> bool:
    """Whether the table has the parts of an attention block."""
    return bool({"q", "k", "v", "attention_output"} & set(table["component"].dropna().unique()))


def in_chosen_blocks(data: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """Without what lies outside the blocks, when blocks were chosen."""
    return data[data["block"].notna()] if choice.blocks else data


def without_heads(data: pd.DataFrame) -> pd.DataFrame:
    """One value a component: the whole component's where it was measured, else the heads' mean.

    A head without a value leaves the mean without one. `head_mean` says which it is.
    """
    data = data.assign(head_mean=False)
    whole = data[data["head"].isna()]
    keys = ["run", "checkpoint", "block", "component"]
    known = pd.MultiIndex.from_frame(whole[keys])
    split = data[data["head"].notna()]
    split = split[~pd.MultiIndex.from_frame(split[keys]).isin(known)]
    if split.empty:
        return whole
    groups = split.groupby(keys, dropna=False, sort=False, observed=True)
    means = groups.first().reset_index()
    values = groups["value"].agg(lambda one: one.mean(skipna=False)).to_numpy()
    means = means.assign(value=values, head=np.nan, head_mean=True, standard_error=np.nan)
    return pd.concat([whole, means[data.columns]], ignore_index=True)


def completed(data: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The data of one run with a null row wherever a series lacks one of the run's points."""
    points = data[["point", "x"]].drop_duplicates("point").sort_values("point")
    series = data[list(keys)].drop_duplicates()
    return series.merge(points, how="cross").merge(data, how="left", on=[*keys, "point", "x"])


def _check_x(choice: Choice) -> None:
    if choice.x not in X:
        raise unknown("x axis", choice.x, X)
    if choice.x == "tokens" and choice.tokens_per_step is None:
        raise UsageError("tokens on x need tokens_per_step: how many tokens one step trains on")


def _of_metric(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    rows = table[table["metric"] == metric]
    if rows.empty:
        raise NotEnoughEvidenceError(f"the tables hold no {metric}")
    missing = [name for name in _NEEDED if name not in rows]
    return rows.assign(**dict.fromkeys(missing))


def _of_subject(
    rows: pd.DataFrame, choice: Choice, metric: str, subjects: Sequence[str]
) -> pd.DataFrame:
    present = [str(name) for name in rows["subject"].dropna().unique()]
    wanted = [choice.subject] if choice.subject else list(subjects) or present
    found = next((name for name in wanted if name in present), None)
    if found is None:
        raise NotEnoughEvidenceError(f"the tables hold no {metric} of {' or '.join(wanted)}")
    return rows[rows["subject"] == found]


def _has_tokens(rows: pd.DataFrame, tokens: str | None) -> pd.Series:
    if tokens is None:
        return rows["tokens"].isna() | (rows["tokens"] == "all")
    return rows["tokens"] == tokens


def _within(rows: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    keep = pd.Series(True, index=rows.index)
    if choice.components:
        keep &= rows["component"].isin(choice.components)
    if choice.heads:
        keep &= rows["head"].isna() | rows["head"].isin(choice.heads)
    if choice.blocks:
        keep &= rows["block"].isna() | rows["block"].isin(choice.blocks)
    first, last = choice.steps
    if first is not None:
        keep &= (rows["step"] >= first).fillna(False)
    if last is not None:
        keep &= (rows["step"] <= last).fillna(False)
    return rows[keep.astype(bool)]


def _one(
    rows: pd.DataFrame, column: str, asked: str | None, defaults: str | Sequence[str] = ()
) -> pd.DataFrame:
    """The rows of one value of a column (and those that have none, when it's the probe)."""
    present = sorted(str(name) for name in rows[column].dropna().unique())
    if asked is not None:
        if asked not in present:
            raise unknown(column, asked, present)
        return rows[rows[column] == asked]
    if len(present) < 2:
        return rows
    defaults = (defaults,) if isinstance(defaults, str) else defaults
    chosen = next((name for name in defaults if name in present), None)
    chosen = chosen if chosen is not None else _most_frequent(rows[column], present)
    return rows[(rows[column] == chosen) | (rows[column].isna() if column == "probe" else False)]


def _most_frequent(column: pd.Series, present: Sequence[str]) -> str:
    counts = column.astype(object).value_counts()
    return max(present, key=lambda name: (name == "", counts[name]))


def _named_runs(rows: pd.DataFrame) -> pd.DataFrame:
    """Plain columns, floats for nullable integers, and the branch in the name where there are two.

    A run of two branches is two courses: joining their points would invent a jump.
    """
    plain = pd.DataFrame(
        {n: rows[n].astype("Float64" if n in _NUMBERS else object) for n in _NEEDED}
    ).astype(dict.fromkeys(_NUMBERS, float))
    plain["segment"] = plain["segment"].fillna(0)
    branches = plain.groupby("run", dropna=False)["branch"].transform(
        lambda one: one.nunique(dropna=False)
    )
    forked = (branches > 1) & plain["branch"].notna()
    named = plain["run"].astype(str) + "/" + plain["branch"].astype(str)
    plain["run"] = plain["run"].where(~forked, named)
    return plain


def _x(rows: pd.DataFrame, choice: Choice) -> pd.Series:
    order = rows.groupby("run")["checkpoint"].transform(lambda one: pd.factorize(one)[0])
    steps = rows["step"]
    if choice.x == "checkpoint" or (choice.x == "step" and steps.isna().all()):
        return order.astype(float)
    if choice.x == "task":
        if rows["task"].isna().all():
            raise NotEnoughEvidenceError("no checkpoint says its task: put steps on x")
        return rows["task"]
    return steps * (choice.tokens_per_step or 1) if choice.x == "tokens" else steps


def _unambiguous(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    rows = rows.drop_duplicates([*PLACE, "value"])
    twice = rows[rows.duplicated(PLACE, keep=False)]
    if not twice.empty:
        first = twice.iloc[0]
        place = ", ".join(f"{name} {first[name]}" for name in PLACE if pd.notna(first[name]))
        raise UsageError(
            f"{metric} has several values at one place ({place}): choose parameters or a probe, "
            "or remove one of the tables"
        )
    rows = rows.sort_values(["run", "x"], kind="stable", ignore_index=True)
    rows["point"] = rows.groupby("run")["checkpoint"].transform(lambda one: pd.factorize(one)[0])
    keep = [
        "x",
        "point",
        "segment",
        "value",
        "standard_error",
        "maximum",
        "rows",
        "columns",
        "status",
    ]
    return rows[[*PLACE, *keep, "subject", "parameters", "probe"]]
