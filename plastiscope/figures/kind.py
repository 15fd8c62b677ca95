"""What a figure is: a function from the table to its numbers, and one from the numbers to ink."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import unknown
from .panels import Canvas, runs_of
from .selection import Choice
from .style import Look, applied, look, settle

Blocks = int | Sequence[int] | None
Names = str | Sequence[str] | None
Steps = tuple[int | None, int | None] | None


def choose(
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
) -> Choice:
    """A Choice from single values or sequences of them."""
    return Choice(
        metric=metric,
        blocks=_integers(block),
        heads=_integers(head),
        components=(component,) if isinstance(component, str) else tuple(component or ()),
        steps=steps or (None, None),
        x=x,
        tokens_per_step=tokens_per_step,
        groups=dict(groups or {}),
        parameters=parameters,
        probe=probe,
        subject=subject,
    )


def _integers(given: Blocks) -> tuple[int, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)


def check_names(table: pd.DataFrame, choice: Choice) -> None:
    """Names and numbers that the table doesn't have are mistakes, not missing data."""
    asked: tuple[tuple[str, Sequence[object]], ...] = (
        ("metric", [choice.metric] if choice.metric else []),
        ("subject", [choice.subject] if choice.subject else []),
        ("component", choice.components),
        ("block", choice.blocks),
        ("head", choice.heads),
        ("run", [member for members in choice.groups.values() for member in members]),
    )
    for column, names in asked:
        present = set(table[column].dropna().unique()) if names else set()
        if column == "run" and names:
            branches = table[["run", "branch"]].drop_duplicates()
            present |= {f"{run}/{branch}" for run, branch in branches.itertuples(index=False)}
        for name in names:
            if name not in present:
                raise unknown(column, str(name), present)


@dataclass(frozen=True)
class Kind:
    """A kind of figure; called with a table it returns the drawn matplotlib Figure.

    `data` gives the numbers (a tidy frame, what the CSV beside the figure holds) and raises
    NotEnoughEvidenceError when the table has none; `ink` draws them. `takes_metric` says whether
    another metric can be asked for.
    """

    name: str
    about: str
    data: Callable[[pd.DataFrame, Choice], pd.DataFrame]
    ink: Callable[[pd.DataFrame, Choice, Look, Axes | None], Canvas]
    takes_metric: bool = True

    def __call__(
        self,
        table: pd.DataFrame,
        *,
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
        style: str | Path | Look = "paper",
        axes: Axes | None = None,
    ) -> Figure:
        """Draw the figure from the rows of `plastiscope.store.read`.

        `block`, `head`, `component` and `steps` (inclusive) restrict it; `groups` maps a name to
        the runs shown as their mean and standard deviation; `x` is step, task, checkpoint or
        tokens (with `tokens_per_step`). With `axes`, a figure of one panel is drawn there.

        Raises NotEnoughEvidenceError when the table holds nothing of it, UsageError for an
        unknown name and for one Axes where there are several panels.
        """
        choice = choose(
            metric, block, head, component, steps, groups, x, tokens_per_step, parameters, probe,
            subject,
        )  # fmt: skip
        check_names(table, choice)
        return self.draw(self.data(table, choice), choice, style, axes)

    def draw(
        self,
        data: pd.DataFrame,
        choice: Choice,
        style: str | Path | Look = "paper",
        axes: Axes | None = None,
    ) -> Figure:
        """Draw numbers that `data` gave."""
        of = look(style)
        if "run" in data:
            choice = replace(choice, runs=tuple(runs_of(data, choice)))
        with applied(of):
            on = self.ink(data, choice, of, axes)
            if on.own:
                settle(on.figure)
        return on.figure
