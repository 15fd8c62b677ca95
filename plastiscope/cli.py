"""The command line: a few lines a command. Torch is imported only where something is measured."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import UNREADABLE, PlastiscopeError, UsageError, unknown

app = typer.Typer(
    name="plastiscope",
    help="Diagnose loss of plasticity from the checkpoints of any training run.",
    epilog="Exit status: 0 fine, 1 a gate failed, 2 usage or configuration, "
    "3 unreadable input, 4 not enough evidence.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="Directories, files or URLs.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Where to write. [default: plastiscope-out]")
]
READING = "Reading checkpoints"
REPLAY = "Model and probe"
MEASURE = "Measuring"


def main() -> None:
    """Run the command line; every error a user can mend is one line and an exit status."""
    try:
        app()
    except PlastiscopeError as error:
        print(f"plastiscope: {error}", file=sys.stderr)
        raise SystemExit(error.status) from None
    except BrokenPipeError:
        # The reader has gone: leave no traceback, and don't flush into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from . import __version__

        print(f"plastiscope {__version__}")
        raise typer.Exit


@app.command()
def analyze(
    runs: Runs,
    out: Out = None,
    probe: Annotated[
        str | None,
        typer.Option(
            help="File, directory, URL or module:function. [default: the probe beside the run, "
            "else a synthetic one]",
            rich_help_panel=REPLAY,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="timm:NAME, torchvision:NAME, transformers:CLASS, FILE.py:FUNCTION or "
            "MODULE:FUNCTION. [default: from the checkpoint]",
            rich_help_panel=REPLAY,
        ),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            help="Override what was assumed, e.g. activation=tanh. Repeatable.",
            metavar="KEY=VALUE",
            rich_help_panel=REPLAY,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1. [default: cpu]", rich_help_panel=REPLAY)
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Measure only these metrics.", metavar="A,B", rich_help_panel=MEASURE),
    ] = None,
    extra: Annotated[
        str | None,
        typer.Option(
            "--with",
            help="These too: metrics, or ntk, jacobian, sensitivity, gradients, optimizer.",
            metavar="A,B",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    probe_rows: Annotated[
        int | None,
        typer.Option(
            help="At most so many rows a feature matrix. [default: 4096]", rich_help_panel=MEASURE
        ),
    ] = None,
    probe_inputs: Annotated[
        int | None,
        typer.Option(help="Size of a synthetic probe. [default: 64]", rich_help_panel=REPLAY),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Inputs replayed at once. [default: 32]", rich_help_panel=REPLAY),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="[default: 0]", rich_help_panel=MEASURE)] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(help="A further table of tensor names. Repeatable.", rich_help_panel=REPLAY),
    ] = None,
    allow_partial: Annotated[
        bool | None,
        typer.Option(
            "--allow-partial",
            help="Replay although some tensors don't fit the model.",
            rich_help_panel=REPLAY,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="raw or ema. [default: raw]", rich_help_panel=READING),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="Only the tensors below this name.", rich_help_panel=READING),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(help="Only these, e.g. 0,100 or 0:1000.", rich_help_panel=READING),
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="Only every n-th checkpoint.", rich_help_panel=READING)
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(help="Only names that match this pattern.", rich_help_panel=READING),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="No names that match this pattern.", rich_help_panel=READING),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(help="auto, name, content or time.", rich_help_panel=READING),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="The base model to merge an adapter into.", rich_help_panel=READING),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            help="A tensor's name changed during the run, e.g. head.=classifier. Repeatable.",
            metavar="OLD=NEW",
            rich_help_panel=READING,
        ),
    ] = None,
    trust_pickle: Annotated[
        bool | None,
        typer.Option(
            "--trust-pickle",
            help="Import and run what the pickles name. Only for files you made yourself.",
            rich_help_panel=READING,
        ),
    ] = None,
    strict: Annotated[
        bool | None,
        typer.Option("--strict", help="Stop at the first bad file.", rich_help_panel=READING),
    ] = None,
    figures: Annotated[bool | None, typer.Option(help="Draw figures. [default: yes]")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Measure every checkpoint; write tables and figures; say what changed most."""
    from .config import read_settings

    settings = read_settings(
        out=out, probe=probe, model=model, assume=_pairs(assume), device=device,
        only=_names(only), extra=_names(extra), probe_rows=probe_rows, probe_inputs=probe_inputs,
        batch_size=batch_size, seed=seed, families=_tuple(family), allow_partial=allow_partial,
        weights=weights, prefix=prefix, steps=steps, every=every, include=_tuple(include),
        exclude=_tuple(exclude), order=order, base=base, rename=_tuple(rename),
        trust_pickle=trust_pickle, strict=strict, figures=figures,
    )  # fmt: skip
    from .terminal import Terminal

    with Terminal(quiet) as terminal:
        from .analysis import analyze as measure

        analysis = measure(runs, settings, terminal)
    if settings.figures:
        terminal.drawn(_draw(analysis.out, [a.run.name for a in analysis.runs]))
    terminal.summarize(analysis)
    if analysis.failures:
        raise typer.Exit(UNREADABLE)


def _draw(out: Path, names: list[str]) -> list[Any]:
    """Draw the standard figures of these runs into OUT/figures/RUN."""
    from . import figures, store

    table = store.read(out, results=True)
    drawn = []
    for name in names:
        own = table[table["run"] == name]
        drawn += figures.draw(own, out / "figures" / name, names=figures.STANDARD)
    return drawn


@app.command()
def inspect(
    runs: Runs,
    model: Annotated[str | None, typer.Option(help="As for analyze.")] = None,
    assume: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE")] = None,
    probe: Annotated[str | None, typer.Option(help="As for analyze.")] = None,
    weights: Annotated[str | None, typer.Option(help="raw or ema.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Only the tensors below this name.")] = None,
    base: Annotated[str | None, typer.Option(help="The base of an adapter.")] = None,
    family: Annotated[list[str] | None, typer.Option(help="A table of tensor names.")] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Print how exactly attention was rebuilt from the mapped parts."
        ),
    ] = False,
    format: Annotated[str, typer.Option(help="text or json.")] = "text",
) -> None:
    """Show what is there, before anything is measured: checkpoints, model, every tensor's place."""
    from .config import read_settings

    if format not in ("text", "json"):
        raise unknown("format", format, ("text", "json"))
    settings = read_settings(
        model=model, assume=_pairs(assume), probe=probe, weights=weights, prefix=prefix,
        base=base, families=_tuple(family),
    )  # fmt: skip
    from .inspection import inspect as describe

    found = describe(runs, settings)
    if format == "json":
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        from .terminal import print_inspection

        print_inspection(found, verify)
    if any(s["unreadable"] for run in found["runs"] for s in run["skipped"]):
        raise typer.Exit(UNREADABLE)


@app.command()
def figures(
    outs: Annotated[list[Path], typer.Argument(metavar="OUT...", help="What analyze wrote.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="Where to draw. [default: OUT/figures]")
    ] = None,
    figure: Annotated[list[str] | None, typer.Option(help="Only this figure. Repeatable.")] = None,
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
    from . import figures as drawing
    from . import store

    table = store.read(outs, results=True)
    groups = {name: tuple(runs.split(",")) for name, runs in (_pairs(group) or {}).items()}
    names = [str(n) for n in table["run"].dropna().unique()]
    for name in run or ():
        if name not in names:
            raise unknown("run", name, names)
    chosen = table[table["run"].isin(run or names)]
    folder = to or outs[0] / "figures"
    apart = [] if together or groups else list(chosen.groupby("run", observed=True, sort=False))
    for place, frame in [(folder / str(n), f) for n, f in apart] or [(folder, chosen)]:
        for each in drawing.draw(
            frame, place, names=_tuple(figure), formats=_names(format) or (), style=style,
            metric=metric, block=block, head=head, component=component, steps=_range(steps),
            groups=groups, x=x, tokens_per_step=tokens_per_step, parameters=parameters,
            subject=subject,
        ):  # fmt: skip
            print(f"{each.name}: {each.note or ', '.join(str(f) for f in each.files)}")


@app.command()
def report(
    outs: Annotated[list[Path], typer.Argument(metavar="OUT...", help="What analyze wrote.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="The file. [default: OUT/report.html]")
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page.")] = "Plasticity report",
) -> None:
    """Write one self-contained HTML page: the diagnosis, then the numbers to explore."""
    from . import store
    from .report import write
    from .warnings import warnings_of

    file = to or outs[0] / "report.html"
    print(write(store.read(outs), file, warnings=warnings_of(outs), title=title))


@app.command()
def check(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="What analyze wrote.")],
    baseline: Annotated[
        Path | None, typer.Option(help="The OUT or baseline file of a run that is known good.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help="A rules file. [default: plastiscope.toml, else built in]")
    ] = None,
    format: Annotated[
        list[str] | None,
        typer.Option(
            help="text, json, junit, markdown, github, sarif. Repeatable. [default: text]"
        ),
    ] = None,
    output: Annotated[
        list[Path] | None, typer.Option(help="Write there; one for each --format.")
    ] = None,
    run: Annotated[list[str] | None, typer.Option(help="Only this run. Repeatable.")] = None,
    allow_missing: Annotated[
        list[str] | None, typer.Option(help="What may be gone, by name or pattern. Repeatable.")
    ] = None,
    allow_missing_baseline: Annotated[
        bool, typer.Option("--allow-missing-baseline", help="No baseline yet is no failure.")
    ] = False,
    init: Annotated[bool, typer.Option("--init", help="Write a commented rules file.")] = False,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write this run's values as the baseline.")
    ] = False,
) -> None:
    """Gate for CI: exit with 1 when a run lost plasticity, by its own past or a baseline."""
    from .check import command

    runs = _tuple(run) or ()
    if init and update_baseline:
        raise UsageError("--init and --update-baseline exclude each other")
    if init:
        status = command.run_init(out, baseline, rules)
    elif update_baseline:
        status = command.run_update_baseline(out, baseline, rules, runs)
    else:
        status = command.run_check(
            out, baseline, rules, format or ["text"], output or [], runs, allow_missing or [],
            allow_missing_baseline,
        )  # fmt: skip
    raise typer.Exit(status)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that training fills.")],
    out: Out = None,
    baseline: Annotated[
        Path | None, typer.Option(help="The OUT or baseline file of a run that is known good.")
    ] = None,
    rules: Annotated[Path | None, typer.Option(help="A rules file, as for check.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 10.0,
    on_fail: Annotated[
        str | None,
        typer.Option(help="Shell command to call when a rule fails. [default: exit]"),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Measure what is whole now, then exit.")
    ] = False,
    most: Annotated[
        int | None, typer.Option("--max", help="Exit after so many checkpoints.")
    ] = None,
    probe: Annotated[str | None, typer.Option(help="As for analyze.")] = None,
    model: Annotated[str | None, typer.Option(help="As for analyze.")] = None,
    device: Annotated[str | None, typer.Option(help="As for analyze.")] = None,
) -> None:
    """Follow a live run: measure each checkpoint once it is written, exit when a rule fails."""
    from .check.configuration import read_check_settings
    from .config import read_settings

    settings = read_settings(out=out, probe=probe, model=model, device=device)
    gate = read_check_settings(rules)
    baseline = baseline or gate.baseline
    from .watch import Watch, follow

    chosen = gate.chosen(baseline is not None)
    raise typer.Exit(
        follow(Watch(run, settings, baseline, chosen, interval, on_fail, once, most, _say))
    )


def _say(line: str) -> None:
    print(line, flush=True)


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
    from . import show as tables
    from . import store

    if format not in tables.FORMATS:
        raise unknown("format", format, tables.FORMATS)
    chosen = tables.View(
        metric or (), component or (), block or (), head or (), step or (), subject or (),
        tokens or (), status or (), run or (), sort, pivot, limit,
    )  # fmt: skip
    rows = tables.view(store.read(outs), chosen)
    if format == "text":
        from .terminal import print_rows

        print_rows(rows)
    else:
        print(tables.written(rows, format), end="")


@app.command()
def export(
    outs: Annotated[list[Path], typer.Argument(metavar="OUT...", help="What analyze wrote.")],
    tensorboard: Annotated[Path | None, typer.Option(help="Write event files here.")] = None,
    mlflow: Annotated[Path | None, typer.Option(help="Write an MLflow database here.")] = None,
) -> None:
    """Write the tables for an experiment tracker: TensorBoard or MLflow, steps preserved."""
    from . import store
    from .export import to_mlflow, to_tensorboard

    if tensorboard is None and mlflow is None:
        raise UsageError("say where to: --tensorboard DIR or --mlflow DIR")
    table = store.read(outs, results=True)
    written = to_tensorboard(table, tensorboard) if tensorboard else []
    written += to_mlflow(table, mlflow) if mlflow else []
    for path in written:
        print(path)


@app.command()
def explain(
    metric: Annotated[str | None, typer.Argument(help="A metric; all when left out.")] = None,
) -> None:
    """The definition of a metric: formula, range, how to read it, when it misleads, source."""
    from .terminal import print_explanation

    print_explanation(metric)


def _pairs(options: list[str] | None) -> dict[str, str] | None:
    if not options:
        return None
    for option in options:
        if "=" not in option:
            raise UsageError(f"--assume takes KEY=VALUE, not {option!r}")
    return dict(option.split("=", 1) for option in options)


def _range(option: str | None) -> tuple[int | None, int | None] | None:
    if option is None:
        return None
    try:
        first, last = (int(part) if part.strip() else None for part in option.split(":"))
    except ValueError:
        raise UsageError(f"--steps takes a range such as 0:1000, not {option!r}") from None
    return first, last


def _names(option: str | None) -> tuple[str, ...] | None:
    if option is None:
        return None
    names = tuple(name.strip() for name in option.split(",") if name.strip())
    if not names:
        raise UsageError(f"a list of names is empty: {option!r}")
    return names


def _tuple(option: list[str] | None) -> tuple[str, ...] | None:
    return tuple(option) if option else None
