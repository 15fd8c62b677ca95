"""What a person sees: progress, notes, the summary. Plain lines when the output is no terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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


def _console(stderr: bool = False, quiet: bool = False, soft_wrap: bool = False) -> Console:
    """A console that prints names and docstrings as they are: `[dh, fan_in]` is no markup."""
    return Console(stderr=stderr, quiet=quiet, soft_wrap=soft_wrap, highlight=False, markup=False)


class Terminal:
    """Reports an analysis: notes and progress on standard error, the summary on standard output."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.notes = _console(stderr=True, quiet=quiet, soft_wrap=True)
        self.output = _console(quiet=quiet)
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


def print_inspection(found: dict[str, Any], verify: bool = False) -> None:
    """Runs, checkpoints in order, what was skipped, the model and its parts."""
    console = _console()
    for run in found["runs"]:
        count = len(run["checkpoints"])
        said = f"  {count or 'no readable'} checkpoint{'' if count == 1 else 's'}"
        console.print(Text.assemble((run["name"], "bold"), said))
        if count:
            console.print()
            console.print(_checkpoints(run["checkpoints"]))
        for title, lines in _remarks(run):
            console.print(f"\n{title}", style="bold")
            for line in lines:
                console.print(f"  {line}")
        for network in run["architectures"].values():
            _print_network(console, network, verify)


def _checkpoints(checkpoints: Sequence[dict[str, Any]]) -> Table:
    table = _table("step", "checkpoint", "format", "dtype", "parameters", "size", "step from")
    table.columns[1].no_wrap = True
    for c in checkpoints:
        table.add_row(
            str(c["step"]),
            c["name"],
            c["format"] if c["branch"] == "raw" else f"{c['format']} ({c['branch']})",
            ", ".join(c["dtypes"]),
            f"{c['parameters']:,}",
            f"{c['bytes'] / 1e6:.2f} MB",
            c["step_source"],
        )
    return table


def _remarks(run: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    notes = [*run["notes"], *(f"{c['name']}: {n}" for c in run["checkpoints"] for n in c["notes"])]
    notes += [
        f"{c['name']}: NaN or infinity in {', '.join(c['non_finite'])}"
        for c in run["checkpoints"]
        if c["non_finite"]
    ]
    breaks = [f"{b['checkpoint']}: {b['reason']}" for b in run["breaks"]]
    skipped = [f"{s['name']}: {s['reason']}" for s in run["skipped"]]
    for title, lines in (("notes", notes), ("breaks", breaks), ("skipped", skipped)):
        if lines:
            yield title, lines


def _print_network(console: Console, network: dict[str, Any], verify: bool) -> None:
    model = network["model"] or f"no live model: {network['missing']}"
    console.print(Text.assemble(("\nmodel", "bold"), f"  {model}"), soft_wrap=True)
    for line in network["assumptions"]:
        console.print(f"  {line}", soft_wrap=True)
    for probe in network["probes"]:
        console.print(f"  probe: {probe['source']}, {probe['inputs']} inputs")
    table = _table("component", "blocks", "heads", "replayed", "tensors")
    for members in _alike(network["components"]):
        first = members[0]
        tensors = (
            first["tensors"]
            if len(members) == 1
            else [_starred(first, t) for t in first["tensors"]]
        )
        blocks = _spans([c["block"] for c in members if c["block"] is not None])
        replayed = "yes" if first["replayed"] else "no"
        heads = str(first["heads"] or "")
        table.add_row(first["component"], blocks, heads, replayed, "\n".join(tensors))
    console.print(table)
    for name, tensors in (("buffers", network["buffers"]), ("no data", network["no_data"])):
        if tensors:
            console.print(f"{name}: {', '.join(tensors)}")
    for name, other in network["tied"].items():
        console.print(f"tied: {name} is {other}")
    for proof in network["proofs"]:
        if not proof["ok"]:
            console.print(f"attention of block {proof['block']}: REFUSED: {proof['why']}")
        elif verify:
            error = f"largest relative error {proof['error']:.1e}"
            console.print(f"attention of block {proof['block']}: proved, {error}")


def _alike(components: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Components that are the same in several blocks but for the block's number, together."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for c in components:
        tensors = tuple(_starred(c, t) for t in c["tensors"])
        groups.setdefault((c["component"], c["heads"], c["replayed"], tensors), []).append(c)
    return list(groups.values())


def _starred(component: dict[str, Any], tensor: str) -> str:
    return re.sub(rf"(?<![0-9]){component['block']}(?![0-9])", "*", tensor, count=1)


def _spans(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    spans: list[list[int]] = []
    for one in sorted(numbers):
        if spans and one == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], one]
        else:
            spans.append([one])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def print_rows(rows: pd.DataFrame) -> None:
    """A table of rows; what is the same in all of them is said once, above."""
    from .show import compact, texts

    console = _console()
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

    console = _console()
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
