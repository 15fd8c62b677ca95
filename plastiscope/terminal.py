"""What a person sees: progress, notes, the summary. Plain lines when the output is no terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from .diagnosis import Diagnosis, Finding, diagnose
from .sentences import change, coverage, error, floors, number

if TYPE_CHECKING:
    from .analysis import Analysis


WHERE = 30
"""Characters of a place in the summary, so that its six columns fit 80."""


def plain_console(stderr: bool = False, quiet: bool = False, soft_wrap: bool = False) -> Console:
    """A console that prints names and docstrings as they are: `[dh, fan_in]` is no markup."""
    return Console(stderr=stderr, quiet=quiet, soft_wrap=soft_wrap, highlight=False, markup=False)


class Terminal:
    """Reports an analysis: notes and progress on standard error, the summary on standard output."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.notes = plain_console(stderr=True, quiet=quiet, soft_wrap=True)
        self.output = plain_console(quiet=quiet)
        self.live = self.notes.is_terminal and not quiet
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[at]}", markup=False),
            TimeRemainingColumn(),
            console=self.notes,
            disable=not self.live,
            transient=True,
        )
        self.task: TaskID | None = None
        self.run, self.total, self.done = "", 0, 0

    def __enter__(self) -> Terminal:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def say(self, line: str) -> None:
        self.notes.print(line)

    def start(self, run: str, total: int) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.run, self.total, self.done = run, total, 0
        self.task = self.progress.add_task(run, total=total, at="")

    def advance(self, checkpoint: str, step: int, resumed: bool) -> None:
        self.done += 1
        if self.live and self.task is not None:
            self.progress.update(self.task, advance=1, at=f"step {step} {checkpoint}")
        elif not resumed:
            self.say(f"{self.run}: {self.done}/{self.total} step {step} {checkpoint}")

    def drawn(self, drawn: Sequence[Any]) -> None:
        left_out = list(dict.fromkeys(figure.name for figure in drawn if not figure.files))
        if left_out:
            self.say(f"no data for the figures {', '.join(left_out)}")

    def summarize(self, analysis: Analysis) -> None:
        """The diagnosis of each run, then where the files are; fits 80 columns."""
        runs = {a.run.name: a for a in analysis.runs}
        for diagnosis in diagnose(analysis.table()):
            print_diagnosis(self.output, diagnosis)
            missing = runs[diagnosis.run].missing
            if missing:
                self.output.print(f"  Features, units and attention are missing: {missing}")
        for line in analysis.failures:
            self.output.print(f"not measured: {line}", soft_wrap=True)
        self.output.print(f"tables   {analysis.out / 'metrics'}", soft_wrap=True)
        figures = analysis.out / "figures"
        if figures.exists():
            self.output.print(f"figures  {figures}", soft_wrap=True)
        if request := on_request(analysis.costs):
            self.output.print(request, style="dim", soft_wrap=True)


def on_request(costs: Mapping[str, float]) -> str | None:
    """The line that says what the measures on request would take; None when there are none."""
    if not costs:
        return None
    times = [duration(seconds) for seconds in costs.values()]
    listed = " and ".join([", ".join(times[:-1]), times[-1]] if len(times) > 1 else times)
    return f"--with {','.join(costs)} would add about {listed}"


def duration(seconds: float) -> str:
    """Roughly: "1 s" at least, minutes from 90 s, hours from 90 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{round(seconds / 3600)} h"


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """The verdict and, for each sign, the two places that moved most."""
    console.print()
    console.print(Text.assemble((diagnosis.run, "bold"), f"  {_span(diagnosis)}"))
    console.print(diagnosis.verdict, style="bold")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for heading, justify in (
        ("sign", "left"), ("moved", "right"), ("most in", "left"),
        ("first", "right"), ("last", "right"), ("change", "right"), ("±", "right"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for finding in diagnosis.findings:
        _add_finding(table, finding)
    if diagnosis.findings:
        console.print(table)
    if part := coverage(diagnosis):
        console.print(f"{part}: see `plastiscope inspect`")
    if few := floors(diagnosis):
        console.print(f"{few}: a larger probe tells", style="dim")
    left_out = [f"{reason} {count}" for reason, count in diagnosis.unmeasured]
    if left_out:
        console.print(f"no value: {', '.join(left_out)} rows", style="dim")
    console.print()


def _span(diagnosis: Diagnosis) -> str:
    if diagnosis.checkpoints == 1:
        return f"1 checkpoint, step {diagnosis.first}"
    return f"{diagnosis.checkpoints} checkpoints, steps {diagnosis.first} to {diagnosis.last}"


def _short(where: str) -> str:
    """At most WHERE characters, the end kept: it tells the layers of one network apart."""
    return where if len(where) <= WHERE else f"…{where[-WHERE + 1 :]}"


def _add_finding(table: Table, finding: Finding) -> None:
    sign = Text(finding.sign.name, style="red" if finding.present else "")
    moved = f"{finding.moved}/{len(finding.movements)}"
    for position, movement in enumerate(finding.movements[:2]):
        head = (sign, moved) if position == 0 else (Text(), "")
        table.add_row(
            *head,
            _short(movement.where),
            number(movement.first, finding.sign),
            number(movement.last, finding.sign),
            change(movement, finding.sign),
            error(movement, finding.sign),
        )


def print_rows(rows: pd.DataFrame) -> None:
    """A table of rows; what is the same in all of them is said once, above."""
    from .show import compact, texts

    console = plain_console()
    kept, same = compact(rows)
    if same:
        console.print(", ".join(f"{k} {v}" for k, v in same.items()))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, kind in kept.dtypes.items():
        right = pd.api.types.is_numeric_dtype(kind)
        table.add_column(str(name), justify="right" if right else "left")
    for row in texts(kept):
        table.add_row(*row)
    console.print(table)


def print_explanation(metric: str | None) -> None:
    """One metric's explanation, or the list of all."""
    from .metrics import METRICS, explain

    console = plain_console()
    if metric is None:
        table = Table(box=None, pad_edge=False)
        table.add_column("metric", no_wrap=True)
        table.add_column("what")
        for each in METRICS:
            table.add_row(each.name, explain(each.name).definition)
        console.print(table)
        return
    found = explain(metric)
    said = f" (version {found.version})  {found.definition}\n"
    console.print(Text.assemble((found.name, "bold"), said))
    table = Table.grid(padding=(0, 2))
    for title, text in (
        ("formula", found.formula),
        ("unit", found.unit),
        ("range", found.range),
        ("measured of", found.subject),
        ("read it", found.reading),
        ("misleads", found.misleads),
        ("also called", found.aliases),
        ("unchanged by", "; ".join(found.laws)),
        ("source", found.source),
        ("by default", "yes" if found.default else f"no: --with {found.name}"),
    ):
        if text:
            table.add_row(title, text)
    console.print(table)
