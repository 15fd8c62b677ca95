"""One run's analysis: checkpoint -> observations -> rows, one file a checkpoint, resumed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import time
from collections.abc import Hashable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from . import metrics, probe, store
from .checkpoints import Checkpoint, Run, State
from .config import Settings
from .costs import costs
from .derivatives import (
    FAMILIES,
    first_inputs,
    gradient_rows,
    jacobian_rows,
    kernel_rows,
    kernels,
    place_of,
    sensitivity_rows,
    unlabelled_rows,
    wants,
)
from .errors import NotEnoughEvidenceError, UnreadableError
from .models.live import Batch
from .network import Network, counted_entries, label, open_network, signature
from .observations import Coverage
from .observations.kernel import Kernel
from .optimizer import optimizer_rows
from .past import Past
from .probe.find import beside
from .replay import Replay, Sampling
from .reporter import Reporter
from .weigh import Earlier, Scales

ON_REQUEST = ("ntk", "jacobian", "sensitivity")
"""Families of metrics whose cost is told where they aren't measured."""
REPLAYED = {
    "Features": "feature", "Units": "unit", "Attention": "attention", "Outputs": "output",
    "Kernel": "ntk", "Jacobian": "jacobian", "RateOfChange": "sensitivity",
    "ChangeBound": "sensitivity", "UnitGradients": "gradient", "OptimizerState": "optimizer",
}  # fmt: skip
"""What only a live network shows, and the subject of its rows."""
LOST = (UnreadableError, FileNotFoundError)
"""Where the checkpoint itself, or an earlier one, can't be read."""
DRIFT = frozenset({"ntk_drift"})
DIFFERENCES = frozenset({"weight_change", "weight_drift"}) | DRIFT
"""Metrics that compare a checkpoint with an earlier one, and so depend on that one's content."""


class Session:
    """The state of one run's analysis: networks by architecture, what was written, what failed."""

    def __init__(
        self, run: Run, settings: Settings, chosen: frozenset[str], reporter: Reporter
    ) -> None:
        self.run, self.settings, self.chosen, self.reporter = run, settings, chosen, reporter
        self.networks: dict[str, Network] = {}
        self.costs: dict[int, dict[str, float]] = {}
        self.kernels: dict[tuple[str, str], dict[tuple[str, Hashable], Kernel]] = {}
        self.files: list[Path] = []
        self.failed: dict[str, str] = {}
        self.empty: dict[str, str] = {}
        self.measured = 0
        self.told = False
        self.past = Past(run)
        self.sources = sources(run.path, settings)

    def measure(self, position: int, checkpoint: Checkpoint) -> None:
        """Measure a checkpoint unless its rows are there; note a failure and go on."""
        file = store.checkpoint_file(self.settings.out, self.run.name, checkpoint.name)
        key = self._key(position, checkpoint)
        resumed = store.is_finished(file, key)
        if not resumed:
            try:
                self._write(position, checkpoint, file, key)
            except NotEnoughEvidenceError as error:
                self.empty[checkpoint.name] = str(error)
                self.reporter.say(str(error))
                return
            except FileNotFoundError:
                self._fail(checkpoint, UnreadableError("deleted while the run was analyzed"))
                return
            except UnreadableError as error:
                self._fail(checkpoint, error)
                return
            self.measured += 1
        self.files.append(file)
        self.reporter.advance(checkpoint.name, checkpoint.step, resumed)

    def _fail(self, checkpoint: Checkpoint, error: UnreadableError) -> None:
        if self.settings.strict:
            raise error
        self.failed[checkpoint.name] = str(error)
        self.reporter.say(f"{self.run.name}/{checkpoint.name}: {error}")

    def _key(self, position: int, checkpoint: Checkpoint) -> str:
        """Everything that this checkpoint's rows depend on."""
        s = self.settings
        earlier = [c.fingerprint for c in self.past.earlier(position) if c is not None]
        return store.content_key(
            schema=store.SCHEMA_VERSION,
            checkpoint=[checkpoint.name, checkpoint.fingerprint, checkpoint.step, checkpoint.task],
            breaks=[[b.checkpoint, *b.tensors] for b in self.past.before(position)],
            earlier=earlier if self.chosen & DIFFERENCES else [],
            sources=self.sources,
            metrics={n: v for n, v in metrics.metric_versions().items() if n in self.chosen},
            settings=[
                s.probe, s.model, dict(s.assume), s.probe_inputs, s.probe_rows, s.folds, s.seed,
                s.weights, s.prefix, s.base, s.rename, s.families, s.allow_partial,
                s.gradient_inputs, s.jacobian_inputs, s.kernel,
            ],
        )  # fmt: skip

    def _write(self, position: int, checkpoint: Checkpoint, file: Path, key: str) -> None:
        started = time.perf_counter()
        state = checkpoint.open()
        network = self._network(state)
        segments = self.past.segments(position, network)
        rows = [
            replace(row, segment=segments.get((row.component, row.block), segments[None, None]))
            for row in self._rows(position, state, network)
        ]
        if all(row.status == "no_model" for row in rows):
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
            "sequence": [
                *self.run.notes,
                *(f"break at {b.checkpoint}: {b.reason}" for b in self.run.breaks),
                *(f"skipped {s.name}: {s.reason}" for s in self.run.skipped),
            ],
            "step_source": checkpoint.step_source,
            "format": checkpoint.format,
            "notes": list(state.notes),
            "first": self._first(position, file),
            "settings": {k: str(v) for k, v in asdict(self.settings).items()},
            "environment": _environment(),
            "costs": self._costs(network),
            "seconds": round(time.perf_counter() - started, 3),
        }
        store.write(file, rows, common, key, facts)

    def _first(self, position: int, file: Path) -> str | None:
        """The checkpoint that drift is taken from; says so when it was another one before."""
        _, first = self.past.earlier(position)
        before = store.read_facts(file).get("first") if file.exists() else None
        now = None if first is None else first.name
        if None not in (before, now) and now != before and not self.told:
            self.told = True
            self.reporter.say(f"{self.run.name}: drift is from {now} now, and was from {before}")
        return now

    def _costs(self, network: Network) -> dict[str, float]:
        """About how long, in seconds, what wasn't asked for would take; empty where it all was."""
        missing = [name for name in ON_REQUEST if not wants(name, self.chosen)]
        if self.settings.only or not missing:
            return {}
        if id(network) not in self.costs:
            self.costs[id(network)] = costs(network, self.settings)
        return {n: s for n, s in self.costs[id(network)].items() if n in missing}

    def _network(self, state: State) -> Network:
        """The network for a state, opened once for each architecture in the run."""
        name = signature(state)
        if name not in self.networks:
            first = not self.networks
            network = open_network(state, self.run.path, self.settings, required=first)
            self.networks[name] = network
            for line in network.announcements:
                self.reporter.say(f"{self.run.name}: {line}")
        return self.networks[name]

    def _rows(self, position: int, state: State, network: Network) -> Iterator[store.Row]:
        scales = Scales(
            network.reader(state),
            lambda name: network.counted_name(state, name),
            self.chosen,
            self.past.readers(position, network) if self.chosen & DIFFERENCES else Earlier(),
        )
        yield from scales.weigh(network.anatomy)
        seen, outputs = network.observed()
        found = Coverage(scales.entries(), counted_entries(state), seen, outputs)
        place = metrics.Place("network", None, "network")
        yield from metrics.measure(found, place, self.chosen)
        if network.live is None:
            yield from _unreplayed(self.chosen)
            return
        network.fill(state)
        for each in network.probes:
            yield from self._replayed(network, each)
            for row in self._derived(position, network, each):
                yield replace(row, probe=label(each))
        if wants("optimizer", self.chosen):
            yield from optimizer_rows(network, state, self.chosen)

    def _replayed(self, network: Network, each: probe.Probe) -> list[store.Row]:
        assert network.live is not None
        s = self.settings
        maps = s.gradient_inputs if "attention_rank" in self.chosen else 0
        sampling = Sampling(s.folds, s.probe_rows, s.batch_size, s.seed, maps)
        replay = Replay(network.anatomy, len(each.batch["inputs"]), sampling)
        replay.run(network.live, each.batch, network.device)
        rows = replay.rows(self.chosen)
        if "labels" not in each.batch:
            place = metrics.Place("head", None, "output")
            rows += metrics.absent("Outputs", place, "no_labels", self.chosen)
        return [replace(row, probe=label(each)) for row in rows]

    def _derived(self, position: int, network: Network, each: probe.Probe) -> Iterator[store.Row]:
        """What was asked for that needs gradients, on the first inputs of the probe."""
        s, chosen = self.settings, self.chosen
        batch = network.on_device(first_inputs(each.batch, s.gradient_inputs))
        few = first_inputs(batch, s.jacobian_inputs)
        families = {
            "ntk": self._kernel_rows(position, network, each, batch),
            "jacobian": jacobian_rows(network, few, chosen, s.seed),
            "gradients": gradient_rows(network, batch, chosen, s.folds),
            "sensitivity": sensitivity_rows(network, batch, chosen),
        }
        for name, rows in families.items():
            if wants(name, chosen):
                yield from self._tried(name, rows, self.run.checkpoints[position].name)

    def _tried(self, name: str, rows: Iterator[store.Row], at: str) -> Iterator[store.Row]:
        """A family's rows; where it fails, null rows and a line that says why: what else was
        measured of the checkpoint is kept."""
        try:
            yield from rows
        except LOST:
            raise
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.reporter.say(f"{self.run.name}/{at}: {name} not measured: {said}")
            for kind in sorted(FAMILIES[name]):
                place = metrics.Place("network", None, REPLAYED[kind])
                yield from metrics.absent(kind, place, "failed", self.chosen)

    def _kernel_rows(
        self, position: int, network: Network, each: probe.Probe, batch: Batch
    ) -> Iterator[store.Row]:
        found = self._kernels(position, network, each)
        yield from kernel_rows(found, self.chosen)
        yield from unlabelled_rows(batch, self.chosen)
        if position > 0 and self.past.positions(position) == (None, None):
            places = {place_of(key) for _, key in found}
            for place in sorted(places, key=str):
                yield from metrics.absent("Kernel", place, "across_break", DRIFT & self.chosen)

    def _kernels(
        self, position: int, network: Network, each: probe.Probe
    ) -> dict[tuple[str, Hashable], Kernel]:
        """The kernels of this checkpoint, with those of the previous and the first beside them."""
        own = self._kernels_at(position, network, each)
        previous, first = (
            {} if earlier is None else self._earlier_kernels(earlier, network, each)
            for earlier in self.past.positions(position)
        )
        network.fill(self.run.checkpoints[position].open())
        return {
            key: replace(
                kernel,
                first=first[key].gram if key in first else None,
                previous=previous[key].gram if key in previous else None,
                folds=self.settings.folds,
            )
            for key, kernel in own.items()
        }

    def _earlier_kernels(
        self, position: int, network: Network, each: probe.Probe
    ) -> dict[tuple[str, Hashable], Kernel]:
        """Those of an earlier checkpoint: none where they can't be measured."""
        try:
            return self._kernels_at(position, network, each)
        except LOST:
            raise
        except Exception:
            # Its own measurement has said why; here it costs the drift alone.
            return {}

    def _kernels_at(
        self, position: int, network: Network, each: probe.Probe
    ) -> dict[tuple[str, Hashable], Kernel]:
        key = (self.run.checkpoints[position].fingerprint, each.fingerprint)
        if key not in self.kernels:
            network.fill(self.run.checkpoints[position].open())
            batch = network.on_device(first_inputs(each.batch, self.settings.gradient_inputs))
            s = self.settings
            self.kernels[key] = kernels(network, batch, self.chosen, s.kernel, s.seed)
        return self.kernels[key]


def _unreplayed(chosen: frozenset[str]) -> Iterator[store.Row]:
    """A null row for each metric that needs the live network, where there is none."""
    for kind, subject in REPLAYED.items():
        yield from metrics.absent(kind, metrics.Place("network", None, subject), "no_model", chosen)


def _environment() -> dict[str, Any]:
    """What the last digits may depend on."""
    return {
        "plastiscope": importlib.metadata.version("plastiscope"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


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
