"""The application, the options that several commands share, and how their texts are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError

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
    Path | None, typer.Option("--out", "-o", help="Where to write. (default: plastiscope-out)")
]
Profile = Annotated[
    str | None, typer.Option(help="Named settings of the configuration: its table profiles.NAME.")
]
READING = "Reading checkpoints"
REPLAY = "Model and probe"
MEASURE = "Measuring"


def pairs(options: list[str] | None, name: str = "--assume") -> dict[str, str] | None:
    """A repeated option KEY=VALUE."""
    if not options:
        return None
    for option in options:
        if "=" not in option:
            raise UsageError(f"{name} takes KEY=VALUE, not {option!r}")
    return dict(option.split("=", 1) for option in options)


def step_range(option: str | None) -> tuple[int | None, int | None] | None:
    """A range of steps, end included; either end may be left out."""
    if option is None:
        return None
    try:
        first, last = (int(part) if part.strip() else None for part in option.split(":"))
    except ValueError:
        raise UsageError(f"--steps takes a range such as 0:1000, not {option!r}") from None
    return first, last


def name_list(option: str | None) -> tuple[str, ...] | None:
    """Names between commas."""
    if option is None:
        return None
    names = tuple(name.strip() for name in option.split(",") if name.strip())
    if not names:
        raise UsageError(f"a list of names is empty: {option!r}")
    return names


def all_of(option: list[str] | None) -> tuple[str, ...] | None:
    """A repeated option; None when it wasn't given."""
    return tuple(option) if option else None
