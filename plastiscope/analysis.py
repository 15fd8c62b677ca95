"""The loop: checkpoint -> observations -> rows. Resumable, one file a checkpoint."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import pandas as pd
import torch

from . import checkpoints, metrics, probe, store
from .checkpoints import Checkpoint, Run, State
from .config import Settings
from .errors import NotEnoughEvidenceError, UnreadableError, UsageError
from .network import Network, counted_entries, label, open_network, signature
from .observations import Coverage
from .probe.find import beside
from .replay import Replay, Sampling
from .weigh import Earlier, Read, Scales

DIFFERENCES = frozenset({"weight_change", "weight_drift"})
"""Metrics that compare a checkpoint with an earlier one, and so depend on that one's content."""


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


@dataclass(frozen=True)
class Analyzed:
    """What became of one run: files written or found finished, checkpoints that failed and why."""

    run: Run
    files: tuple[Path, ...]
    measured: int
    failed: Mapping[str, str]
    assumed: tuple[str, ...]
    missing: str | None


@dataclass(frozen=True)
class Analysis:
    """The tables of an analysis in OUT, and what was found on the way."""

    out: Path
    runs: tuple[Analyzed, ...]

    def table(self) -> pd.DataFrame:
        """All rows of these runs (see `plastiscope.store.read`)."""
        frame = store.read(self.out)
        ours = frame["run"].isin([a.run.name for a in self.runs])
        return cast("pd.DataFrame", frame[ours].reset_index(drop=True))

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


def analyze(
    paths: Iterable[str | Path] | str | Path,
    settings: Settings | None = None,
    reporter: Reporter | None = None,
) -> Analysis:
    """Measure every checkpoint of the runs found at `paths`; write OUT/metrics/RUN/*.parquet.

    A checkpoint whose rows are there already, for the same content, probe and settings, isn't
    measured again. One unreadable checkpoint doesn't stop the others, unless `settings.strict`.

    Raises UsageError (no such path, an option that fits nothing), UnreadableError (no checkpoint
    could be read), NotEnoughEvidenceError (nothing was measured).
    """
    settings = settings or Settings()
    reporter = reporter or Silent()
    runs = find_runs([paths] if isinstance(paths, (str, Path)) else paths, settings)
    chosen = choose_metrics(settings)
    analysis = Analysis(
        settings.out, tuple(_analyze_run(run, settings, chosen, reporter) for run in runs)
    )
    if not any(analyzed.files for analyzed in analysis.runs):
        raise UnreadableError("no checkpoint could be measured: " + "; ".join(analysis.failures))
    return analysis


def find_runs(paths: Iterable[str | Path], settings: Settings) -> list[Run]:
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
        trust_pickle=settings.trust_pickle,
        strict=settings.strict,
    )
    runs = [run for path in paths for run in checkpoints.discover(path, options)]
    seen: dict[str, str] = {}
    for run in runs:
        if run.name in seen:
            raise UsageError(
                f"two runs are called {run.name!r} ({seen[run.name]} and {run.path}): "
                "rename one folder, or analyze them into different --out directories"
            )
        seen[run.name] = run.path
    return runs


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
    """The names of the metrics to measure: `only`, or the default set and `extra`."""
    for name in (*settings.only, *settings.extra):
        metrics.explain(name)  # raises for a name that isn't known
    return frozenset(settings.only) or metrics.default_metrics() | frozenset(settings.extra)


def _analyze_run(
    run: Run, settings: Settings, chosen: frozenset[str], reporter: Reporter
) -> Analyzed:
    session = _Session(run, settings, chosen, reporter)
    refuse_mixing(settings.out, run)
    for line in (*run.notes, *(f"break at {b.checkpoint}: {b.reason}" for b in run.breaks)):
        reporter.say(f"{run.name}: {line}")
    for skipped in run.skipped:
        reporter.say(f"{run.name}: skipped {skipped.name}: {skipped.reason}")
    reporter.start(run.name, len(run.checkpoints))
    for position, checkpoint in enumerate(run.checkpoints):
        session.measure(position, checkpoint)
    missing = next((n.missing for n in session.networks.values() if n.missing), None)
    assumed = tuple(dict.fromkeys(a for n in session.networks.values() for a in n.assumptions))
    return Analyzed(run, tuple(session.files), session.measured, session.failed, assumed, missing)


def sources(run_path: str | Path, settings: Settings) -> dict[str, str]:
    """A digest of every file, beside the checkpoints, that the rows depend on: the probe, the
    user's model and families; of a folder the names, sizes and times of its files."""
    named = [settings.probe, (settings.model or "").rpartition(":")[0], *settings.families]
    files = [Path(n) for n in named if n and Path(n).exists()]
    if settings.probe is None:
        files += beside(run_path)
    return {str(i): _digest(file) for i, file in enumerate(files)}


def _digest(path: Path) -> str:
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file())
        stats = [(str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns) for p in found]
        return store.content_key(folder=stats)
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


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


class _Session:
    """The state of one run's analysis: networks by architecture, what was written, what failed."""

    def __init__(
        self, run: Run, settings: Settings, chosen: frozenset[str], reporter: Reporter
    ) -> None:
        self.run, self.settings, self.chosen, self.reporter = run, settings, chosen, reporter
        self.networks: dict[str, Network] = {}
        self.files: list[Path] = []
        self.failed: dict[str, str] = {}
        self.measured = 0
        self.broken = {b.checkpoint: b for b in run.breaks}
        self.sources = sources(run.path, settings)

    def measure(self, position: int, checkpoint: Checkpoint) -> None:
        """Measure a checkpoint unless its rows are there; note a failure and go on."""
        file = store.checkpoint_file(self.settings.out, self.run.name, checkpoint.name)
        key = self._key(position, checkpoint)
        resumed = store.is_finished(file, key)
        if not resumed:
            try:
                self._write(position, checkpoint, file, key)
            except UnreadableError as error:
                if self.settings.strict:
                    raise
                self.failed[checkpoint.name] = str(error)
                self.reporter.say(f"{self.run.name}/{checkpoint.name}: {error}")
                return
            self.measured += 1
        self.files.append(file)
        self.reporter.advance(checkpoint.name, checkpoint.step, resumed)

    def _key(self, position: int, checkpoint: Checkpoint) -> str:
        """Everything that this checkpoint's rows depend on."""
        s = self.settings
        earlier = [c.fingerprint for c in self._earlier(position) if c is not None]
        return store.content_key(
            schema=store.SCHEMA_VERSION,
            checkpoint=[checkpoint.name, checkpoint.fingerprint, checkpoint.step, checkpoint.task],
            earlier=earlier if self.chosen & DIFFERENCES else [],
            sources=self.sources,
            metrics={n: v for n, v in metrics.metric_versions().items() if n in self.chosen},
            settings=[
                s.probe, s.model, dict(s.assume), s.probe_inputs, s.probe_rows, s.folds, s.seed,
                s.weights, s.prefix, s.base, s.families, s.allow_partial,
            ],
        )  # fmt: skip

    def _earlier(self, position: int) -> tuple[Checkpoint | None, Checkpoint | None]:
        """The previous and the first checkpoint that this one may be compared with: none across
        a break of the whole network."""
        first = position
        while first > 0 and not self._whole_break(self.run.checkpoints[first].name):
            first -= 1
        if first == position:
            return None, None
        return self.run.checkpoints[position - 1], self.run.checkpoints[first]

    def _whole_break(self, name: str) -> bool:
        return name in self.broken and not self.broken[name].tensors

    def _write(self, position: int, checkpoint: Checkpoint, file: Path, key: str) -> None:
        started = time.perf_counter()
        state = checkpoint.open()
        network = self._network(state)
        segments = self._segments(position, network)
        rows = [
            replace(row, segment=segments.get((row.component, row.block), segments[None, None]))
            for row in self._rows(position, state, network)
        ]
        if not rows:
            raise NotEnoughEvidenceError(
                f"{self.run.name}/{checkpoint.name}: nothing to measure: {len(state.tensors)} "
                f"tensors, none that the chosen metrics apply to"
            )
        common = {
            "run": self.run.name,
            "checkpoint": checkpoint.name,
            "step": checkpoint.step,
            "task": checkpoint.task,
            "branch": state.branch,
            "checkpoint_fingerprint": checkpoint.fingerprint,
        }
        facts = {
            **network.facts(),
            "source": str(self.run.path),
            "step_source": checkpoint.step_source,
            "format": checkpoint.format,
            "notes": list(state.notes),
            "settings": {k: str(v) for k, v in asdict(self.settings).items()},
            "environment": _environment(),
            "seconds": round(time.perf_counter() - started, 3),
        }
        store.write(file, rows, common, key, facts)

    def _segments(
        self, position: int, network: Network
    ) -> dict[tuple[str | None, int | None], int]:
        """How many breaks lie before each component's values; (None, None) for all others."""
        before = [
            self.broken[c.name]
            for c in self.run.checkpoints[: position + 1]
            if c.name in self.broken
        ]
        whole = sum(not b.tensors for b in before)
        segments: dict[tuple[str | None, int | None], int] = {(None, None): whole}
        for component in network.anatomy.components:
            tensors = {network.stored_name(m.tensor) for m in component.weights}
            own = sum(bool(tensors & set(b.tensors)) for b in before)
            segments[component.name, component.block] = whole + own
        return segments

    def _network(self, state: State) -> Network:
        """The network for a state, opened once for each architecture in the run."""
        name = signature(state)
        if name not in self.networks:
            network = open_network(state, self.run.path, self.settings)
            self.networks[name] = network
            for line in network.announcements:
                self.reporter.say(f"{self.run.name}: {line}")
        return self.networks[name]

    def _rows(self, position: int, state: State, network: Network) -> Iterator[store.Row]:
        scales = Scales(
            network.reader(state),
            lambda name: network.counted_name(state, name),
            self.chosen,
            self._readers(position, network),
        )
        yield from scales.weigh(network.anatomy)
        seen, outputs = network.observed()
        found = Coverage(scales.entries(), counted_entries(state), seen, outputs)
        place = metrics.Place("network", None, "network")
        yield from metrics.measure(found, place, self.chosen)
        if network.live is None:
            return
        network.fill(state)
        for each in network.probes:
            yield from self._replayed(network, each)

    def _readers(self, position: int, network: Network) -> Earlier:
        if not self.chosen & DIFFERENCES:
            return Earlier()
        readers: list[Read | None] = [
            None if checkpoint is None else network.reader(checkpoint.open())
            for checkpoint in self._earlier(position)
        ]
        return Earlier(*readers)

    def _replayed(self, network: Network, each: probe.Probe) -> list[store.Row]:
        assert network.live is not None
        s = self.settings
        sampling = Sampling(s.folds, s.probe_rows, s.batch_size, s.seed)
        replay = Replay(network.anatomy, len(each.batch["inputs"]), sampling)
        replay.run(network.live, each.batch, network.device)
        return [replace(row, probe=label(each)) for row in replay.rows(self.chosen)]


def _environment() -> dict[str, Any]:
    """What the last digits may depend on."""
    return {
        "plastiscope": importlib.metadata.version("plastiscope"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
