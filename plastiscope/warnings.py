"""What a reader of the tables must know first: breaks, skipped files, what wasn't measured."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from . import store


def warnings_of(outs: Iterable[Path]) -> tuple[str, ...]:
    """Lines from the facts beside the rows: notes on the sequence, the model and the probe."""
    lines: list[str] = []
    for out in outs:
        for file in store.metric_files(out):
            facts = store.read_facts(file)
            run = file.parent.name
            said = [*facts.get("sequence", []), *facts.get("announcements", [])]
            said += [f"{file.stem}: {note}" for note in facts.get("notes", [])]
            lines += [f"{run}: {line}" for line in said]
    return tuple(dict.fromkeys(lines))
