"""`inspect` as text: runs, their checkpoints, what was skipped and why, the model and its parts."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .terminal import plain_console


def print_inspection(found: dict[str, Any], verify: bool = False) -> None:
    """Runs, checkpoints in order, what was skipped, the model and its parts."""
    console = plain_console()
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
                _say(console, line, "  ")
        for network in run["architectures"].values():
            _print_network(console, network, verify)


def _checkpoints(checkpoints: Sequence[dict[str, Any]]) -> Table:
    table = _columns("step", "checkpoint", "format", "dtype", "parameters", "size", "step from")
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
    probes = [p["name"] if p["used"] else f"{p['name']}: not used" for p in run["probes"]]
    named = {"notes": notes, "breaks": breaks, "probes": probes, "skipped": skipped}
    yield from ((title, lines) for title, lines in named.items() if lines)


def _print_network(console: Console, network: dict[str, Any], verify: bool) -> None:
    console.print()
    _say(console, network["model"] or f"no live model: {network['missing']}", title="model")
    for line in network["assumptions"]:
        _say(console, line, "  ")
    for probe in network["probes"]:
        _say(console, f"probe: {probe['source']}, {probe['inputs']} inputs", "  ")
    table = _columns("component", "blocks", "heads", "replayed", "tensors")
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
            _say(console, f"{name}: {', '.join(tensors)}")
    for name, other in network["tied"].items():
        _say(console, f"tied: {name} is {other}")
    for proof in network["proofs"]:
        if not proof["ok"]:
            _say(console, f"attention of block {proof['block']}: REFUSED: {proof['why']}")
        elif verify:
            error = f"largest relative error {proof['error']:.1e}"
            _say(console, f"attention of block {proof['block']}: proved, {error}")


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


def _say(console: Console, line: str, indent: str = "", title: str = "") -> None:
    """A line after its title, broken between words at the console's width; names stay whole."""
    said = Text(
        textwrap.fill(
            f"{title}  {line}" if title else line,
            console.width,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    )
    said.stylize("bold", 0, len(title))
    console.print(said, soft_wrap=True)


def _columns(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
