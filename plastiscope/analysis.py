"""Analyze runs: find them, measure each checkpoint once, and say what was found on the way."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pandas as pd

from . import checkpoints, metrics, store
from .checkpoints import Run
from .config import Settings
from .derivatives import FAMILIES, family
from .errors import NotEnoughEvidenceError, UnreadableError, UsageError
from .network import usable_device
from .probe.find import beside
from .recorded import write_recorded
from .reporter import Reporter, Silent
from .requested import PAIRED
from .session import ON_REQUEST, Session
from .tasks import write_task_results


@dataclass(frozen=True)
class Analyzed:
    """What became of one run: files written or found finished, checkpoints that failed and those
    that held nothing to measure, and why."""

    run: Run
    files: tuple[Path, ...]
    measured: int
    failed: Mapping[str, str]
    empty: Mapping[str, str]
    assumed: tuple[str, ...]
    missing: str | None

    @property
    def costs(self) -> dict[str, float]:
        """About how many seconds each family of metrics that wasn't asked for would take."""
        parts = [store.read_facts(file).get("costs", {}) for file in self.files]
        return _summed(parts)


@dataclass(frozen=True)
class Analysis:
    """The tables of an analysis in OUT, and what was found on the way."""

    out: Path
    runs: tuple[Analyzed, ...]

    def table(self) -> pd.DataFrame:
        """All rows of these runs' present checkpoints (see `plastiscope.store.read`).

        OUT may hold more: checkpoints that were measured earlier and have since been deleted.
        """
        frame = store.read(self.out)
        present = {(a.run.name, c.name) for a in self.runs for c in a.run.checkpoints}
        ours = [pair in present for pair in zip(frame["run"], frame["checkpoint"], strict=True)]
        return cast("pd.DataFrame", frame[ours].reset_index(drop=True))

    @property
    def costs(self) -> dict[str, float]:
        """The costs of all runs, family by family."""
        return _summed([analyzed.costs for analyzed in self.runs])

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for each file that should have been measured and wasn't."""
        skipped = [
            f"{a.run.name}/{s.name}: {s.reason}"
            for a in self.runs
            for s in a.run.skipped
            if s.unreadable
        ]
        failed = [f"{a.run.name}/{n}: {why}" for a in self.runs for n, why in a.failed.items()]
        return (*skipped, *failed)


def _summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each family's costs, in the order in which families are named."""
    listed = list(parts)
    named = [name for name in ON_REQUEST if any(name in part for part in listed)]
    return {name: sum(part.get(name, 0.0) for part in listed) for name in named}


def analyze(
    paths: Iterable[str | Path] | str | Path,
    settings: Settings | None = None,
    reporter: Reporter | None = None,
    *,
    retry: bool = True,
) -> Analysis:
    """Measure every checkpoint of the runs found at `paths`; write OUT/metrics/RUN/*.parquet.

    A checkpoint whose rows are there already, for the same content, probe, settings and version,
    isn't measured again; with `retry` what failed of it is, and nothing else. One unreadable
    checkpoint doesn't stop the others, unless `settings.strict`.

    Raises UsageError (no such path, an option that fits nothing), UnreadableError (no checkpoint
    could be read), NotEnoughEvidenceError (nothing was measured).
    """
    settings = settings or Settings()
    reporter = reporter or Silent()
    usable_device(settings.device)
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    seen = checkpoints.Seen(settings.out / "seen.parquet")
    runs = find_runs(paths, settings, seen)
    chosen = choose_metrics(settings)
    seen.save([str(path) for path in paths])
    analysis = Analysis(
        settings.out, tuple(_analyze_run(run, settings, chosen, reporter, retry) for run in runs)
    )
    if not any(analyzed.files for analyzed in analysis.runs):
        empty = [why for analyzed in analysis.runs for why in analyzed.empty.values()]
        if not analysis.failures:
            raise NotEnoughEvidenceError("; ".join(empty))
        raise UnreadableError("no checkpoint could be measured: " + "; ".join(analysis.failures))
    return analysis


def find_runs(
    paths: Iterable[str | Path], settings: Settings, seen: checkpoints.Seen | None = None
) -> list[Run]:
    """The runs at all paths. Raises UsageError when two of them share a name."""
    options = checkpoints.Options(
        weights=settings.weights,
        prefix=settings.prefix,
        steps=chosen_steps(settings.steps),
        every=settings.every,
        include=settings.include,
        exclude=settings.exclude,
        order=settings.order,
        base=settings.base,
        rename=_renames(settings.rename),
        trust_pickle=settings.trust_pickle,
        strict=settings.strict,
    )
    runs = [run for path in paths for run in checkpoints.discover(path, options, seen)]
    sources: dict[str, str] = {}
    for run in runs:
        if run.name in sources:
            raise UsageError(
                f"two runs are called {run.name!r} ({sources[run.name]} and {run.path}): "
                "rename one folder, or analyze them into different --out directories"
            )
        sources[run.name] = run.path
    return runs


def _renames(pairs: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """("head.=classifier.",) as pairs. Raises UsageError for an entry without "="."""
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"--rename takes OLD=NEW, not {pair!r}")
    return tuple((pair.split("=", 1)[0], pair.split("=", 1)[1]) for pair in pairs)


def chosen_steps(text: str | None) -> Container[int] | None:
    """The steps that "0,100,5000" or a range "0:1000" (end included, either may be left out)
    names; None for all. Raises UsageError for anything else."""
    if text is None:
        return None
    try:
        if ":" in text:
            first, last = (int(part) if part.strip() else None for part in text.split(":"))
            return range(first or 0, sys.maxsize if last is None else last + 1)
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--steps {text}: give steps (0,100) or a range (0:1000)") from None


def choose_metrics(settings: Settings) -> frozenset[str]:
    """The names of the metrics to measure: `only`, or the default set; and `extra`. Raises
    UsageError for a second probe that none of them would look at."""
    only, extra = _expanded(settings.only), _expanded(settings.extra)
    chosen = (only or metrics.default_metrics()) | extra
    if settings.second_probe is not None and not chosen & PAIRED:
        raise UsageError(
            f"--second-probe {settings.second_probe}: its inputs are paired for the sensitivity, "
            "which isn't measured: add --with sensitivity"
        )
    return chosen


def _expanded(names: Iterable[str]) -> frozenset[str]:
    """The metrics of these names; a family's name ("ntk") stands for all of its metrics."""
    found: set[str] = set()
    for name in names:
        found |= family(name) if name in FAMILIES else {metrics.explain(name).name}
    return frozenset(found)


def _analyze_run(
    run: Run, settings: Settings, chosen: frozenset[str], reporter: Reporter, retry: bool
) -> Analyzed:
    refuse_mixing(settings.out, run)
    session = Session(run, settings, chosen, reporter, retry)
    recorded = write_recorded(settings.out, run)
    for line in (
        *run.notes,
        *([recorded] if recorded else []),
        *(f"break at {b.checkpoint}: {b.reason}" for b in run.breaks),
    ):
        reporter.say(f"{run.name}: {line}")
    probes = {file.name for file in beside(run.path)} if settings.probe is None else set()
    for skipped in [s for s in run.skipped if s.name not in probes]:
        reporter.say(f"{run.name}: skipped {skipped.name}: {skipped.reason}")
    reporter.start(run.name, len(run.checkpoints))
    for position, checkpoint in enumerate(run.checkpoints):
        session.measure(position, checkpoint)
    write_task_results(settings.out, run, chosen)
    missing = next((n.missing for n in session.networks.values() if n.missing), None)
    assumed = tuple(dict.fromkeys(a for n in session.networks.values() for a in n.assumptions))
    return Analyzed(
        run,
        tuple(session.files),
        session.measured,
        session.failed,
        session.empty,
        assumed,
        missing,
    )


def refuse_mixing(out: Path, run: Run) -> None:
    """Raise UsageError when OUT holds rows of another run under this run's name."""
    folder = store.checkpoint_file(out, run.name, "x").parent
    files = [file for file in store.metric_files(out) if file.parent == folder]
    here = {store.checkpoint_file(out, run.name, c.name) for c in run.checkpoints}
    if not files or here & set(files):
        return
    source = store.read_facts(files[0]).get("source", "")
    if source != str(run.path):
        raise UsageError(
            f"{out} already holds a run called {run.name!r}, from {source}: "
            "choose another --out, or delete that one"
        )
