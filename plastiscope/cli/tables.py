"""Commands that read the tables: figures, report, show, export; and explain."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import NOT_ENOUGH_EVIDENCE, UsageError, unknown
from .options import all_of, app, name_list, pairs, step_range


@app.command()
def figures(
    outs: Annotated[list[Path], typer.Argument(metavar="OUT...", help="What analyze wrote.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="Where to draw. (default: OUT/figures)")
    ] = None,
    figure: Annotated[
        list[str] | None,
        typer.Option(help="Only this one, e.g. units (docs/figures.md). Repeatable."),
    ] = None,
    run: Annotated[list[str] | None, typer.Option(help="Only this run. Repeatable.")] = None,
    metric: Annotated[str | None, typer.Option(help="Instead of the figure's own.")] = None,
    parameters: Annotated[str | None, typer.Option(help="The metric's, e.g. tau=0.1.")] = None,
    subject: Annotated[str | None, typer.Option(help="weight, feature, ...")] = None,
    component: Annotated[list[str] | None, typer.Option(help="Repeatable.")] = None,
    block: Annotated[list[int] | None, typer.Option(help="Repeatable.")] = None,
    head: Annotated[list[int] | None, typer.Option(help="Repeatable.")] = None,
    steps: Annotated[str | None, typer.Option(help="A range, e.g. 0:1000.")] = None,
    x: Annotated[str, typer.Option(help="step, task, checkpoint or tokens.")] = "step",
    tokens_per_step: Annotated[float | None, typer.Option(help="For --x tokens.")] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(help="Mean and deviation of several runs. Repeatable.", metavar="NAME=A,B"),
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="All runs side by side in each figure.")
    ] = False,
    format: Annotated[str, typer.Option(help="png, pdf, svg.", metavar="A,B")] = "png,pdf,svg",
    style: Annotated[str, typer.Option(help="paper, slide, dark or a style file.")] = "paper",
) -> None:
    """Draw again from the tables: choose figures, metric, place, runs, formats, style."""
    from .. import figures as drawing
    from .. import store

    table = store.read(outs, results=True)
    groups = {
        name: tuple(runs.split(",")) for name, runs in (pairs(group, "--group") or {}).items()
    }
    names = [str(n) for n in table["run"].dropna().unique()]
    for name in run or ():
        if name not in names:
            raise unknown("run", name, names)
    chosen = table[table["run"].isin(run or names)]
    folder = to or outs[0] / "figures"
    anything = False
    apart = [] if together or groups else list(chosen.groupby("run", observed=True, sort=False))
    for place, frame in [(folder / str(n), f) for n, f in apart] or [(folder, chosen)]:
        for each in drawing.draw(
            frame, place, names=all_of(figure), formats=name_list(format) or (), style=style,
            metric=metric, block=block, head=head, component=component, steps=step_range(steps),
            groups=groups, x=x, tokens_per_step=tokens_per_step, parameters=parameters,
            subject=subject,
        ):  # fmt: skip
            print(f"{each.name}: {', '.join(map(str, each.files)) or each.note}")
            if each.files and each.note:
                print(f"{each.name}: {each.note}", file=sys.stderr)
            anything |= bool(each.files)
    if not anything:
        raise typer.Exit(NOT_ENOUGH_EVIDENCE)


@app.command()
def report(
    outs: Annotated[list[Path], typer.Argument(metavar="OUT...", help="What analyze wrote.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="The file. (default: OUT/report.html)")
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page.")] = "Plasticity report",
) -> None:
    """Write one self-contained HTML page: the diagnosis, then the numbers to explore."""
    from .. import store
    from ..report import write
    from ..warnings import warnings_of

    file = to or outs[0] / "report.html"
    print(write(store.read(outs), file, warnings=warnings_of(outs), title=title))


@app.command()
def show(
    outs: Annotated[list[Path], typer.Argument(metavar="OUT...", help="What analyze wrote.")],
    metric: Annotated[list[str] | None, typer.Option(help="Repeatable.")] = None,
    component: Annotated[list[str] | None, typer.Option(help="Repeatable.")] = None,
    block: Annotated[list[int] | None, typer.Option(help="Repeatable.")] = None,
    head: Annotated[list[int] | None, typer.Option(help="Repeatable.")] = None,
    step: Annotated[list[int] | None, typer.Option(help="Repeatable.")] = None,
    subject: Annotated[
        list[str] | None, typer.Option(help="weight, feature, unit, attention, ...")
    ] = None,
    tokens: Annotated[list[str] | None, typer.Option(help="all or cls.")] = None,
    status: Annotated[list[str] | None, typer.Option(help="ok, zero_matrix, ...")] = None,
    run: Annotated[list[str] | None, typer.Option(help="Repeatable.")] = None,
    sort: Annotated[str | None, typer.Option(help="A column; -column: descending.")] = None,
    pivot: Annotated[
        str | None, typer.Option(help="step, block, head, component, metric, run or task.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many rows.")] = None,
    format: Annotated[str, typer.Option(help="text, csv, markdown or latex.")] = "text",
) -> None:
    """Print rows of the tables: filter, sort, pivot; as text, CSV, Markdown or LaTeX."""
    from .. import show as tables
    from .. import store

    if format not in tables.FORMATS:
        raise unknown("format", format, tables.FORMATS)
    chosen = tables.View(
        metric or (), component or (), block or (), head or (), step or (), subject or (),
        tokens or (), status or (), run or (), sort, pivot, limit,
    )  # fmt: skip
    rows = tables.view(store.read(outs, results=True), chosen)
    if format == "text":
        from ..terminal import print_rows

        print_rows(rows)
    else:
        print(tables.written(rows, format), end="")


@app.command()
def export(
    outs: Annotated[list[Path], typer.Argument(metavar="OUT...", help="What analyze wrote.")],
    tensorboard: Annotated[Path | None, typer.Option(help="Write event files here.")] = None,
    mlflow: Annotated[Path | None, typer.Option(help="Write an MLflow database here.")] = None,
    wandb_offline: Annotated[
        Path | None, typer.Option(help="Write offline runs for Weights & Biases here.")
    ] = None,
) -> None:
    """Write the tables for an experiment tracker: TensorBoard, MLflow or W&B, steps preserved."""
    from .. import store
    from ..export import to_mlflow, to_tensorboard, to_wandb

    if tensorboard is None and mlflow is None and wandb_offline is None:
        raise UsageError("say where to: --tensorboard DIR, --mlflow DIR or --wandb-offline DIR")
    table = store.read(outs, results=True)
    written = to_tensorboard(table, tensorboard) if tensorboard else []
    written += to_mlflow(table, mlflow) if mlflow else []
    written += to_wandb(table, wandb_offline) if wandb_offline else []
    for path in written:
        print(path)


@app.command()
def explain(
    metric: Annotated[str | None, typer.Argument(help="A metric; all when left out.")] = None,
) -> None:
    """The definition of a metric: formula, range, how to read it, when it misleads, source."""
    from ..terminal import print_explanation

    print_explanation(metric)
