"""Commands that judge: check and watch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from .options import Out, Profile, all_of, app


@app.command()
def check(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="What analyze wrote.")],
    baseline: Annotated[
        Path | None, typer.Option(help="The OUT or baseline file of a run that is known good.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help="A rules file. (default: plastiscope.toml, else built in)")
    ] = None,
    format: Annotated[
        list[str] | None,
        typer.Option(
            help="text, json, junit, markdown, github, sarif. Repeatable. (default: text)"
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
    from ..check import command

    runs = all_of(run) or ()
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
    profile: Profile = None,
    baseline: Annotated[
        Path | None, typer.Option(help="The OUT or baseline file of a run that is known good.")
    ] = None,
    rules: Annotated[Path | None, typer.Option(help="A rules file, as for check.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 10.0,
    on_fail: Annotated[
        str | None,
        typer.Option(help="Shell command to call when a rule fails. (default: exit)"),
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
    from ..check.configuration import read_check_settings
    from ..config import read_settings

    settings = read_settings(profile=profile, out=out, probe=probe, model=model, device=device)
    gate = read_check_settings(rules)
    baseline = baseline or gate.baseline
    from ..watch import Watch, follow

    chosen = gate.chosen(baseline is not None)
    raise typer.Exit(
        follow(Watch(run, settings, baseline, chosen, interval, on_fail, once, most, _say))
    )


def _say(line: str) -> None:
    print(line, flush=True)
