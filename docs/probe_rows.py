"""What the size of the probe does to the numbers: writes the tables of probe-rows.md.

    python docs/probe_rows.py > docs/probe-rows-tables.md

The first and the last checkpoint of two sample runs, measured on 64 to 4096 inputs from the scripts
that trained them: windows of the GPT's languages, and the ViT's digits (of which there are 1797).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import torch

import plastiscope
from plastiscope.config import Settings

SAMPLES = Path(__file__).parent.parent / "sample_checkpoints"
sys.path.insert(0, str(SAMPLES / "train"))

BOUND = Settings().probe_rows
MANY = 1 << 20
"""A bound on rows that bounds nothing here."""
SIZES = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Place:
    """One series of the tables: a metric of a place, under a short heading."""

    heading: str
    metric: str
    component: str
    block: int
    subject: str = "feature"
    tokens: str | None = "all"
    head: int | None = None
    parameters: str = ""


@dataclass(frozen=True)
class Case:
    """One run: its last step, its inputs, and the numbers of them and bounds on rows to try."""

    run: str
    last: int
    inputs: Callable[[int], torch.Tensor]
    tried: tuple[tuple[int, int], ...]
    places: tuple[Place, ...]


def windows(count: int) -> torch.Tensor:
    """Held-in text of every language of the GPT's stream, drawn by a seed [count, 64]."""
    from gpt import mixed

    task = mixed()
    order = torch.randperm(len(task.inputs), generator=torch.Generator().manual_seed(0))
    return task.inputs[order[:count]]


def pictures(count: int) -> torch.Tensor:
    """The ViT's digits in their fixed random order [count, 1, 8, 8]."""
    from stream import digits

    return digits()[0][:count].reshape(-1, 1, 8, 8)


def units(block: int) -> Place:
    return Place(
        f"dormant, block {block}", "dormant_fraction", "activation", block, "unit",
        parameters="tau=0.025",
    )  # fmt: skip


def entropy(block: int, head: int) -> Place:
    return Place(
        f"entropy, block {block} head {head}", "attention_entropy", "attention", block,
        "attention", None, head,
    )  # fmt: skip


CASES = (
    Case(
        "gpt", 3600, windows,
        (
            *((64, rows) for rows in (64, 128, 256, 512, 1024, 2048)),
            *((n, BOUND) for n in (*SIZES, 2048, 4096)),
            *((n, MANY) for n in SIZES),
        ),
        (
            Place("effective rank, block 0 activation", "effective_rank", "activation", 0),
            Place("stable rank, block 0 activation", "stable_rank", "activation", 0),
            Place("effective rank, block 3 v head 0", "effective_rank", "v", 3, head=0),
            units(0), entropy(3, 0),
        ),
    ),
    Case(
        "vit", 4800, pictures,
        (*((n, BOUND) for n in (*SIZES, 1797)), *((n, MANY) for n in (*SIZES, 1797))),
        (
            Place("effective rank, block 0 activation", "effective_rank", "activation", 0),
            Place("the same of CLS", "effective_rank", "activation", 0, tokens="cls"),
            Place("stable rank of CLS", "stable_rank", "activation", 0, tokens="cls"),
            units(0), entropy(0, 0),
        ),
    ),
)  # fmt: skip


def measured(case: Case, size: int, rows: int) -> pd.DataFrame:
    """The tables of both checkpoints on that many inputs."""
    with TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.npz"
        np.savez(probe, inputs=case.inputs(size).numpy())
        settings = Settings(
            out=Path(folder) / "out", probe=str(probe), steps=f"0,{case.last}", probe_rows=rows,
            only=tuple({p.metric for p in case.places}),
        )  # fmt: skip
        return plastiscope.analyze(SAMPLES / case.run, settings).table()


def row_of(table: pd.DataFrame, place: Place) -> pd.Series:
    """The one row of a place."""
    chosen = table[(table["metric"] == place.metric) & (table["subject"] == place.subject)]
    for column in ("component", "block", "head", "tokens"):
        wanted = getattr(place, column)
        own = chosen[column]
        chosen = chosen[own.isna() if wanted is None else own == wanted]
    chosen = chosen[chosen["parameters"].astype(str).str.startswith(place.parameters)]
    if len(chosen) != 1:
        raise SystemExit(f"{len(chosen)} rows of {place}")
    row: pd.Series = chosen.iloc[0]
    return row


def cell(row: pd.Series) -> str:
    """ "12.3 ± 0.4 of 96"; a status that isn't ok beside it."""
    value, error = row["value"], row["standard_error"]
    text = f"{value:.3g} ± {error:.1g}"
    if row["subject"] == "feature":
        text += f" of {row['maximum']:.0f}"
    return text if row["status"] == "ok" else f"{text}, `{row['status']}`"


def lines(case: Case, step: int, tables: dict[tuple[int, int], pd.DataFrame]) -> Iterator[str]:
    """One checkpoint's table."""
    headings = ["inputs", "`--probe-rows`", "rows", *(p.heading for p in case.places)]
    yield "| " + " | ".join(headings) + " |"
    yield "|" + " --- |" * len(headings)
    for (size, bound), table in tables.items():
        rows = [row_of(table[table["step"] == step], place) for place in case.places]
        shown = "all" if bound == MANY else str(bound)
        cells = [str(size), shown, str(rows[0]["rows"]), *map(cell, rows)]
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the tables."""
    print("# The tables of probe-rows.md\n\nWritten by `docs/probe_rows.py`.")
    for case in CASES:
        tables = {pair: measured(case, *pair) for pair in case.tried}
        for step in (0, case.last):
            print(f"\n## {case.run}, step {step}\n")
            print("\n".join(lines(case, step, tables)))


if __name__ == "__main__":
    main()
