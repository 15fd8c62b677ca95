"""Who is told what happens during an analysis."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Who is told what happens; the command line draws it, the Python API stays silent."""

    def say(self, line: str) -> None:
        """One line for the user: an assumption, a note, a warning."""

    def start(self, run: str, total: int) -> None:
        """A run with this many checkpoints begins."""

    def advance(self, checkpoint: str, step: int, resumed: bool) -> None:
        """A checkpoint is finished; `resumed` when its rows were there already."""


class Silent:
    """The reporter that says nothing."""

    def say(self, line: str) -> None: ...
    def start(self, run: str, total: int) -> None: ...
    def advance(self, checkpoint: str, step: int, resumed: bool) -> None: ...
