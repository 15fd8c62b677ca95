"""The command line: a few lines a command. Torch is imported only where something is measured."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ..errors import PlastiscopeError
from . import measuring, tables, verdicts
from .options import app

__all__ = ["app", "main", "measuring", "tables", "verdicts"]


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
        from .. import __version__

        print(f"plastiscope {__version__}")
        raise typer.Exit
