"""Commands that open checkpoints: analyze and inspect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UNREADABLE, unknown
from .options import MEASURE, READING, REPLAY, Out, Profile, Runs, all_of, app, name_list, pairs


@app.command()
def analyze(
    runs: Runs,
    out: Out = None,
    profile: Profile = None,
    probe: Annotated[
        str | None,
        typer.Option(
            help="File, directory, URL or module:function. (default: the probe beside the run, "
            "else a synthetic one)",
            rich_help_panel=REPLAY,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="timm:NAME, torchvision:NAME, transformers:CLASS, FILE.py:FUNCTION or "
            "MODULE:FUNCTION. (default: from the checkpoint)",
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
        str | None, typer.Option(help="cpu, cuda, cuda:1. (default: cpu)", rich_help_panel=REPLAY)
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
    kernel: Annotated[
        str | None,
        typer.Option(
            help="Of which functions the tangent kernel is: mean_logit, loss, logits. "
            "(default: mean_logit, and with labels loss)",
            metavar="A,B",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    second_probe: Annotated[
        str | None,
        typer.Option(
            help="Another data set, as for --probe: the sensitivity pairs input i of the probe "
            "with input i there. (default: pairs within the probe)",
            metavar="PROBE",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    sensitivity_pairs: Annotated[
        int | None,
        typer.Option(
            help="At most so many pairs with the second probe. (default: 1024)",
            rich_help_panel=MEASURE,
        ),
    ] = None,
    probe_rows: Annotated[
        int | None,
        typer.Option(
            help="At most so many rows a feature matrix. (default: 4096)", rich_help_panel=MEASURE
        ),
    ] = None,
    probe_inputs: Annotated[
        int | None,
        typer.Option(help="Size of a synthetic probe. (default: 64)", rich_help_panel=REPLAY),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Inputs replayed at once. (default: 32)", rich_help_panel=REPLAY),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Of every random choice. (default: 0)", rich_help_panel=MEASURE),
    ] = None,
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
        typer.Option(help="raw or ema. (default: raw)", rich_help_panel=READING),
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
        typer.Option(help="auto, name, content or time. (default: auto)", rich_help_panel=READING),
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
    figures: Annotated[bool | None, typer.Option(help="Draw figures. (default: yes)")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Measure every checkpoint; write tables and figures; say what changed most."""
    from ..config import read_settings

    settings = read_settings(
        profile=profile, out=out, probe=probe, model=model, assume=pairs(assume), device=device,
        only=name_list(only), extra=name_list(extra), kernel=name_list(kernel),
        second_probe=second_probe, sensitivity_pairs=sensitivity_pairs, probe_rows=probe_rows,
        probe_inputs=probe_inputs, batch_size=batch_size, seed=seed, families=all_of(family),
        allow_partial=allow_partial, weights=weights, prefix=prefix, steps=steps, every=every,
        include=all_of(include), exclude=all_of(exclude), order=order, base=base,
        rename=all_of(rename), trust_pickle=trust_pickle, strict=strict, figures=figures,
    )  # fmt: skip
    from ..terminal import Terminal

    with Terminal(quiet) as terminal:
        from ..analysis import analyze as measure

        analysis = measure(runs, settings, terminal)
    if settings.figures:
        terminal.drawn(_draw(analysis.out, [a.run.name for a in analysis.runs]))
    terminal.summarize(analysis)
    if analysis.failures:
        raise typer.Exit(UNREADABLE)


def _draw(out: Path, names: list[str]) -> list[Any]:
    """Draw the standard figures of these runs into OUT/figures/RUN."""
    from .. import figures, store

    table = store.read(out, results=True)
    drawn = []
    for name in names:
        own = table[table["run"] == name]
        drawn += figures.draw(own, out / "figures" / name, names=figures.STANDARD)
    return drawn


@app.command()
def inspect(
    runs: Runs,
    profile: Profile = None,
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
    from ..config import read_settings

    if format not in ("text", "json"):
        raise unknown("format", format, ("text", "json"))
    settings = read_settings(
        profile=profile, model=model, assume=pairs(assume), probe=probe, weights=weights,
        prefix=prefix, base=base, families=all_of(family),
    )  # fmt: skip
    from ..inspection import inspect as describe

    found = describe(runs, settings)
    if format == "json":
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        from ..listing import print_inspection

        print_inspection(found, verify)
    if any(s["unreadable"] for run in found["runs"] for s in run["skipped"]):
        raise typer.Exit(UNREADABLE)
